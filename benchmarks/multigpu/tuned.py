"""``lightning-mcore tune`` on a slice of an 8B model: does it find what the tables show?"""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning.pytorch.plugins.environments import LightningEnvironment
from models import MODELS
from torch.utils.data import DataLoader

from gpt import TokenRows
from lightning_mcore import TPCommOverlap
from lightning_mcore.tuning import MCoreTuner
from lightning_mcore.tuning.report import as_dict, as_text
from multigpu.bench import Bench
from multigpu.cases import ONE_ORDER, Case, Group, Plan
from multigpu.compare import run_group, run_once
from multigpu.training import make_module

SAFE = "safe"
"""Name of a case and of a trial."""


def run(bench: Bench, *, tiny: bool) -> None:
    """Measures cases in turns, then lets the tuner choose among them."""
    case = Case(
        name=SAFE,
        model="llama-8b-slice",
        # Each trial loads the weights it starts from: fewer layers, less to load.
        changes={"layers": 4},
        strategy={"tp": bench.world},
        micro_batch=4,
        environment=ONE_ORDER,
    )
    if tiny:
        case = dataclasses.replace(case, model="tiny", changes={})
    run_group(bench, _turns(case), Plan(rounds=5 if not tiny else 2, steps=8))
    run_once(
        bench,
        "tune",
        tune,
        case,
        bench.accelerator,
        limit_s=170.0,
        environment=case.environment,
    )


def _turns(case: Case) -> Group:
    """What the tuner may choose from, trials that are not here being equal to one of these, and
    TransformerEngine's own settings.
    """
    base = {**case.strategy, "comm": "safe", "sequence_parallel": True}
    overlaps = {"tp_comm_overlap": True, "TransformerEngine's defaults": TPCommOverlap()}
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


def tune(case: Case, accelerator: str) -> dict[str, Any]:
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
        # Windows of 2 s: ratios of windows of 0.4 s were 1.5 % off either way.
        steps=16 if on_gpu else 2,
        warmup=3,
        rounds=2,
        only=["sequence_parallel", "tp_comm_overlap", "comm=auto", "comm=max"],
    )
    report = tuner.run()
    return {"report": as_dict(report), "text": as_text(report)}
