"""``lightning-mcore tune`` on a slice of an 8B model: does it find what the tables show?"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning.pytorch.plugins.environments import LightningEnvironment
from models import MODELS
from torch.utils.data import DataLoader

from gpt import TokenRows
from lightning_mcore.tuning import MCoreTuner
from lightning_mcore.tuning.report import as_dict, as_text
from multigpu.bench import Bench
from multigpu.cases import ONE_ORDER, Case, Group, Plan
from multigpu.compare import run_group, run_once
from multigpu.items import RING_AND_DGRAD
from multigpu.training import make_module

SAFE, RING = "safe", "all ring + dgrad"
"""Names of cases and of trials."""


def run(bench: Bench, *, tiny: bool) -> None:
    """Measures cases in turns, then lets the tuner choose among them.

    It tunes twice: a process can set up userbuffers once, so each setting needs its own ranks.
    """
    case = Case(
        name=SAFE,
        model="llama-8b-slice",
        # Each trial loads the weights it starts from: fewer layers, less to load.
        changes={"layers": 4},
        strategy={"tp": bench.world},
        micro_batch=2,
        environment=ONE_ORDER,
    )
    if tiny:
        case = dataclasses.replace(case, model="tiny", changes={})
    run_group(bench, _turns(case), Plan(rounds=3 if not tiny else 2, steps=8))
    ring = {"sequence_parallel": True, "tp_comm_overlap": RING_AND_DGRAD}
    for name, extra, only in (
        ("tune", {}, ["sequence_parallel", "tp_comm_overlap", "comm=auto", "comm=max"]),
        (f"tune, {RING}", {RING: ring}, ["sequence_parallel", RING]),
    ):
        run_once(
            bench,
            name,
            tune,
            case,
            bench.accelerator,
            extra,
            only,
            limit_s=120.0,
            environment=case.environment,
        )


def _turns(case: Case) -> Group:
    """What the tuner may choose from: trials that are not here equal one of these."""
    base = {**case.strategy, "comm": "safe", "sequence_parallel": True}
    overlaps = {"tp_comm_overlap": True, RING: RING_AND_DGRAD}
    return Group(
        item="tune",
        name="in turns",
        baseline=dataclasses.replace(case, strategy=base),
        variants=tuple(
            dataclasses.replace(
                case,
                name=name,
                strategy=base | {"tp_comm_overlap": overlap},
                needs=("gpu", "transformer_engine"),
            )
            for name, overlap in overlaps.items()
        ),
    )


def tune(case: Case, accelerator: str, extra: dict[str, Any], only: list[str]) -> dict[str, Any]:
    """Runs the tuner; every rank of a team calls it and gets the same report."""
    dims = dataclasses.replace(MODELS[case.model], **case.changes)
    on_gpu = accelerator == "gpu"
    tuner = MCoreTuner(
        lambda: make_module(case),
        lambda: DataLoader(TokenRows(dims), batch_size=case.micro_batch),  # type: ignore[arg-type]
        strategy={
            **case.strategy,
            "micro_batch_size": case.micro_batch,
            "seq_length": dims.seq,
        },
        trainer={
            "accelerator": accelerator,
            "devices": int(case.strategy["tp"]),
            "precision": "bf16-mixed",
            "gradient_clip_val": 1.0,
            "use_distributed_sampler": False,
            "plugins": [LightningEnvironment()],
        },
        steps=6 if on_gpu else 2,
        warmup=3,
        rounds=2,
        extra=extra,
        only=only,
    )
    report = tuner.run()
    return {"report": as_dict(report), "text": as_text(report)}
