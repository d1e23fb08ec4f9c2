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
from multigpu.cases import ONE_ORDER, Case
from multigpu.compare import Bench, run_once
from multigpu.items import RING_AND_DGRAD
from multigpu.training import make_module


def run(bench: Bench, *, tiny: bool) -> None:
    """Tunes twice: a process can set up userbuffers once, so each setting needs its own ranks."""
    case = Case(
        name="tune",
        model="llama-8b-slice",
        # Each trial loads the weights it starts from: fewer layers, less to load.
        changes={"layers": 4},
        strategy={"tp": bench.world},
        micro_batch=2,
    )
    if tiny:
        case = dataclasses.replace(case, model="tiny", changes={})
    for name, extra, only in (
        ("tune", {}, ["sequence_parallel", "tp_comm_overlap", "comm=auto", "comm=max"]),
        (
            "tune, all ring + dgrad",
            {"all ring + dgrad": {"sequence_parallel": True, "tp_comm_overlap": RING_AND_DGRAD}},
            ["sequence_parallel", "all ring + dgrad"],
        ),
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
            environment=ONE_ORDER,
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
