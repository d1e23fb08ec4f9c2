"""Several instances of the distributed optimizer: each has all of its state, on fewer ranks.

Gradients are first reduced within an instance, then between the ranks that hold the same part in
other instances (megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import ConfigurationError
from lightning_mcore._mcore.engine import engine_version
from lightning_mcore.testing import run_ranks
from tests.gpt import token_dataset
from tests.parity.layouts import InOrder, ParityGPT
from tests.parity.recipes import GLOBAL_BATCH, Training
from tests.parity.weights import Shard, full_tensors
from tests.ranks.trainers import Recorder, make_trainer

pytest.importorskip("einops")  # parallel_state.py imports it for groups of several instances

TWO = {"num_distributed_optimizer_instances": 2}
OFF = {"use_distributed_optimizer": True, "overlap_grad_reduce": False}
ON = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 4000}
CAN_OVERLAP = engine_version() >= (0, 17)
CASES: dict[str, tuple[dict[str, Any], Training]] = {
    "off": ({**OFF, "ep": 2}, Training(experts=4, accumulate=2, clip=0.5)),
}
if CAN_OVERLAP:
    CASES |= {
        "on": ({**ON, "ep": 2, "micro_batch_size": 1}, Training(experts=4, accumulate=2, clip=0.5)),
        "gather": ({**ON, "overlap_param_gather": True}, Training(precision="bf16-mixed")),
    }
STEPS = 4
SAVED_AT = 2


@dataclass
class Seen:
    losses: list[float]
    norms: list[float]
    shards: list[Shard]
    sizes: set[int] = field(default_factory=set)
    """Ranks that the state of each optimizer is spread over."""


def fit(
    strategy: dict[str, Any],
    training: Training,
    *callbacks: L.Callback,
    load: str | None = None,
) -> Seen:
    recorder, module = Recorder(), ParityGPT(training)
    trainer = make_trainer(
        strategy,
        callbacks=[recorder, *callbacks],
        enable_checkpointing=bool(callbacks),
        max_steps=STEPS,
        precision=training.precision,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
    )
    dp = 4 // strategy.get("tp", 1)
    data = InOrder(token_dataset(training.samples), GLOBAL_BATCH // dp)
    trainer.fit(module, datamodule=data, ckpt_path=load)
    trainer.strategy.sync_parameters()
    optimizer = trainer.strategy._model_run.optimizer.engine
    sizes = {part.data_parallel_group.size() for part in optimizer.chained_optimizers}
    norms = [norm for norm in recorder.grad_norms if norm is not None]
    shards = [shard.copied() for shard in module.shards]
    return Seen(recorder.losses, norms, shards, sizes)


def train(folder: Path) -> tuple[dict[str, tuple[Seen, Seen]], dict[str, Seen], str]:
    compared = {
        name: (
            fit({**strategy, "num_distributed_optimizer_instances": 1}, training),
            fit({**strategy, **TWO}, training),
        )
        for name, (strategy, training) in CASES.items()
    }
    torch.serialization.add_safe_globals([Training])  # among the module's hyperparameters
    keep = ModelCheckpoint(folder, every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}")
    saved = str(folder / f"step={SAVED_AT}.ckpt")
    resumed = {
        "uninterrupted": fit({**OFF, **TWO}, Training(), keep),
        "two": fit({**OFF, **TWO}, Training(), load=saved),
        "one": fit(OFF, Training(), load=saved),
    }
    refusal = ""
    if not CAN_OVERLAP:
        try:
            fit({**ON, **TWO}, Training())
        except ConfigurationError as error:
            refusal = str(error)
    return compared, resumed, refusal


def test_two_instances_train_as_one_and_resume_as_either(tmp_path):
    ranks = run_ranks(train, 4, tmp_path)
    for name in CASES:
        for one, two in (compared[name] for compared, *_ in ranks):
            assert len(set(one.losses)) == len(one.losses) >= STEPS
            tolerance = 1e-2 if name == "gather" else 1e-5
            assert two.losses == pytest.approx(one.losses, abs=tolerance), name
            assert two.norms == pytest.approx(one.norms, rel=10 * tolerance), name
            assert {2 * size for size in two.sizes} == one.sizes, name
        whole = [full_tensors(s for c, *_ in ranks for s in c[name][i].shards) for i in (0, 1)]
        assert whole[0].keys() == whole[1].keys()
        for key, value in whole[0].items():
            tolerance = 1e-2 if name == "gather" else 1e-5
            assert (value - whole[1][key]).abs().max() <= tolerance, (name, key)
    for _, resumed, refusal in ranks:
        expected = resumed["uninterrupted"]
        for name in ("two", "one"):
            # Adam's moments decide: they come from the instances' shards.
            assert resumed[name].losses == pytest.approx(expected.losses[SAVED_AT:], abs=1e-5), name
            assert resumed[name].norms == pytest.approx(expected.norms[SAVED_AT:], rel=1e-4), name
        assert CAN_OVERLAP or "gives wrong gradients on megatron-core" in refusal
