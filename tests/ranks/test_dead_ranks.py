"""A rank that is killed or raises ends all ranks within seconds, with the reason and the way on."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.ranks.failing import run_failing
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    Recorder,
    dp_of,
    loader,
    make_trainer,
    numbered_rows,
)

BOUND_S = 4.0
"""Within which ranks must end after another one has; half of ``peer_timeout_s``, and clean-up."""


@dataclass(frozen=True)
class Case:
    """A rank that is killed when it calls ``target`` for the ``nth`` time."""

    layout: str
    rank: int
    target: str
    nth: int
    folder: str = ""
    action: str = "kill"
    timeout_s: float = 600.0
    peer_timeout_s: float = 6.0
    ckpt_path: str | None = None
    async_save: bool = False


KILLS = [
    Case("pp2", 1, "tests.ranks.trainers:Blocks.configure_optimizers", 1),
    Case("pp2", 1, "tests.ranks.test_dead_ranks:Points.on_train_start", 1),
    Case("pp2", 0, "tests.ranks.test_dead_ranks:Points.on_train_batch_start", 3),
    Case("pp2", 1, "tests.ranks.trainers:Blocks.training_step", 1),
    Case("pp2", 0, "tests.ranks.trainers:Blocks.training_step", 14),
    Case("pp2", 1, "tests.ranks.trainers:Blocks.training_step", 16),
    Case("pp2", 1, "torch.autograd:backward", 10),
    Case("pp2", 0, "torch.distributed:P2POp", 12),
    Case("pp2", 1, "torch.distributed:P2POp", 13),
    Case("pp2", 1, "lightning_mcore.step_log:LogExchange.__call__", 3),
    Case("pp2", 0, "lightning_mcore.optimizer:EngineOptimizer.step", 3),
    Case("pp2", 1, "lightning_mcore.optimizer:EngineOptimizer._checked_norm", 4),
    Case("pp2", 0, "torch.optim:AdamW.step", 3),
    Case("pp2", 1, "tests.ranks.test_dead_ranks:Points.on_train_batch_end", 3),
    Case("pp2", 0, "tests.ranks.test_dead_ranks:Points.on_validation_start", 1),
    Case("pp2", 1, "tests.ranks.trainers:Blocks.validation_step", 2),
    Case("pp2", 1, "tests.ranks.test_dead_ranks:Points.on_validation_end", 1),
    Case("pp2", 1, "lightning_mcore.checkpoint_hooks:start_save", 2),
    Case("pp2", 0, "lightning_mcore._mcore.shard_writer:PlannedWrite.run", 2),
    Case("pp2", 0, "lightning_mcore.checkpoint_save:commit", 2),
    Case("dp2", 1, "torch.distributed:all_reduce", 30),
    Case("dp2", 0, "megatron.core.distributed:DistributedDataParallel.finish_grad_sync", 3),
    Case("dp2", 1, "torch.utils.data:DataLoader.__iter__", 1),
    Case("pp2vpp2", 1, "torch.distributed:isend", 9),
]


class Points(L.Callback):
    """Hooks at which a rank can be made to fail."""

    def on_train_start(self, *_: Any) -> None: ...

    def on_train_batch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_validation_start(self, *_: Any) -> None: ...

    def on_validation_end(self, *_: Any) -> None: ...


class OwnError(Exception):
    """Of the user."""


def fail(action: str) -> None:
    print("FAILING", flush=True)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        subprocess.Popen(["sh", "-c", f"sleep 10; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if action in ("SIGTERM", "SIGUSR1"):
        os.kill(os.getpid(), signal.Signals[action])
        return
    if action == "collective":
        torch.distributed.all_reduce(torch.ones(1))
        return
    if action == "sleep":
        time.sleep(60)
    raise OwnError("the user's own mistake")


def arm(case: Case) -> None:
    """Makes the ``nth`` call of the target fail on this rank."""
    module, path = case.target.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == case.nth:
            if case.action == "log":
                args[2].log("mine", 1.0, sync_dist=True, on_step=True)
            else:
                fail(case.action)
        return original(*args, **kwargs)

    setattr(owner, name, failing)


def train(case: Case) -> None:
    """Six steps with validation and a checkpoint every second step."""
    if int(os.environ["RANK"]) == case.rank and case.action != "none":
        arm(case)
    stay = case.action == "raise and stay" and int(os.environ["RANK"]) == case.rank
    with contextlib.suppress(OwnError) if stay else contextlib.nullcontext():
        fit(case)
    if stay:
        time.sleep(9)


def fit(case: Case, **options: Any) -> Recorder:
    layout, folder, seen = case.layout, case.folder, Recorder()
    trainer = make_trainer(
        {
            **SIZES[layout],
            "micro_batch_size": 2,
            "peer_timeout_s": case.peer_timeout_s,
            "timeout_s": case.timeout_s,
            "async_save": case.async_save,
        },
        max_steps=6,
        enable_checkpointing=True,
        val_check_interval=3,
        default_root_dir=folder,
        callbacks=[
            Points(),
            seen,
            ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        ],
        **options,
    )
    batch = 8 // dp_of(layout)
    L.seed_everything(5, verbose=False)
    trainer.fit(
        Blocks(),
        loader(numbered_rows(48), batch, shuffle=True),
        loader(numbered_rows(16), batch),
        ckpt_path=case.ckpt_path,
    )
    print("LOSSES", [repr(loss) for loss in seen.losses], flush=True)
    return seen


def losses(outcome: Any) -> list[str]:
    assert outcome.status == 0, outcome.output[-3000:]
    return re.findall(r"'([\d.e+-]+)'", outcome.output.split("LOSSES")[1])


def with_folders(cases: list[Case], tmp_path: Path) -> list[Case]:
    return [replace(c, folder=str(tmp_path / f"run{i}")) for i, c in enumerate(cases)]


@pytest.mark.parametrize("half", [0, 1])
def test_all_ranks_end_when_one_is_killed(half, tmp_path):
    cases = with_folders(KILLS[half::2], tmp_path)
    runs = run_failing(train, 2, cases)
    for case, outcomes in zip(cases, runs, strict=True):
        dead, other = outcomes[case.rank], outcomes[1 - case.rank]
        assert dead.status == -signal.SIGKILL, (case, dead.output[-2000:])
        assert "FAILING" in dead.output
        about = f"{case}\n{other.output[-3000:]}"
        assert other.status in (1, 75), about
        assert other.ended_s - dead.ended_s < BOUND_S, about
        stage = case.rank if case.layout.startswith("pp") else 0
        dp = case.rank if case.layout == "dp2" else 0
        assert f"Rank {case.rank} (stage {stage}, tp 0, dp {dp}; host " in other.output, about
        assert "died without an exception" in other.output, about
        assert re.search(r"Last step completed: [0-6]\. ", other.output), about
        assert ("Resume with ckpt_path=" in other.output) or (
            "No checkpoint had been completed" in other.output
        ), about

    # What the messages named is enough to go on as if nothing had happened.
    named = [
        (case, re.search(r"Resume with ckpt_path='(.+)'", o[1 - case.rank].output))
        for case, o in zip(cases, runs, strict=True)
    ]
    resumed = [replace(c, ckpt_path=found[1], action="none") for c, found in named if found]
    assert len(resumed) >= 5
    resumed = [resumed[0], next(c for c in reversed(resumed) if c.layout == ("pp2", "dp2")[half])]
    whole = [replace(c, folder=f"{c.folder}-whole", ckpt_path=None) for c in resumed]
    ends = run_failing(train, 2, [*resumed, *whole])
    for after, uninterrupted in zip(ends[:2], ends[2:], strict=True):
        expected = losses(uninterrupted[0])
        assert len(expected) == 6
        rest = losses(after[0])
        assert 0 < len(rest) < 6
        assert rest == losses(after[1]) == expected[-len(rest) :]


RAISES = [
    Case("pp2", 1, "tests.ranks.trainers:Blocks.training_step", 10, action="raise"),
    Case("pp2", 0, "tests.ranks.trainers:Blocks.training_step", 10, action="raise"),
    Case("dp2", 1, "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch", 3, action="raise"),
    Case("pp2", 0, "tests.ranks.test_dead_ranks:Points.on_train_batch_end", 3, action="raise"),
    Case("pp2", 1, "tests.ranks.trainers:Blocks.configure_optimizers", 1, action="raise"),
    Case("dp2", 0, "tests.ranks.trainers:Blocks.validation_step", 2, action="raise and stay"),
    Case(
        "dp2",
        1,
        "tests.ranks.test_dead_ranks:Points.on_train_batch_start",
        3,
        action="stop",
        peer_timeout_s=3.0,
    ),
]


def test_all_ranks_end_when_one_raises_or_falls_silent(tmp_path):
    cases = with_folders(RAISES, tmp_path)
    for case, outcomes in zip(cases, run_failing(train, 2, cases), strict=True):
        bad, other = outcomes[case.rank], outcomes[1 - case.rank]
        about = f"{case}\n{bad.output[-1500:]}\n----\n{other.output[-3000:]}"
        if case.action == "stop":
            assert f"Rank {case.rank} (stage 0, tp 0, dp 1; host" in other.output, about
            assert "has not been heard of for 3 s" in other.output, about
            assert other.status == 75, about
            assert other.ended_s < bad.ended_s - 2.0, about
            continue
        # The other says what happened there: the original traceback, then who it was.
        mistake = other.output.index("OwnError: the user's own mistake")
        assert mistake < other.output.index(f"Rank {case.rank} (stage "), about
        assert "raised this in step" in other.output, about
        assert "in fail" in other.output[:mistake], about
        if case.action == "raise":
            assert bad.status == 1, about
            assert "RAISED OwnError" in bad.output, about
            assert "RankFailed" not in bad.output, about
            assert other.output.rstrip().endswith("RAISED RankFailed"), about
            assert abs(other.ended_s - bad.ended_s) < BOUND_S, about
        else:
            # Its process lives on and keeps connections open: only an exit code is left.
            assert bad.status == 0, about
            assert other.status == 75, about
            assert other.ended_s < bad.ended_s - 2.0, about


HANGS = {
    "a collective on one rank only": (
        Case(
            "pp2",
            0,
            "tests.ranks.test_dead_ranks:Points.on_train_batch_start",
            3,
            action="collective",
        ),
        r"Rank 0 \(stage 0.*step 3, between steps.*; waits in all_reduce over world"
        r" \(ranks \[0, 1\]\)",
    ),
    "sync_dist on one rank only": (
        Case("dp2", 1, "tests.ranks.test_dead_ranks:Points.on_train_batch_end", 2, action="log"),
        r"Rank 1 \(stage 0, tp 0, dp 1;.*waits in \w+ over \w+ \(ranks \[0, 1\]\)",
    ),
    "a loader that never returns": (
        Case("pp2", 1, "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch", 3, action="sleep"),
        r"Rank 1 \(stage 1.*between steps.*in no collective(?s:.*)in fail",
    ),
    "unequal microbatch counts": (
        Case("pp2", 1, "lightning_mcore.run:ModelRun.train_step", 0, action="half a batch"),
        r"Rank 0 \(stage 0.*training_step, microbatch \d.*waits in ",
    ),
}


def train_with_half_batches(case: Case) -> None:
    """Cuts the third batch of one rank in half, after the first batch was compared."""
    if case.action == "half a batch" and int(os.environ["RANK"]) == case.rank:
        from lightning_mcore.run import ModelRun

        original, calls = ModelRun.train_step, 0

        def halved(self: Any, step: Any, batch: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            cut = {k: v[:4] for k, v in batch.items()} if calls == 3 else batch
            return original(self, step, cut, **options)

        ModelRun.train_step = halved
        fit(case)
        return
    train(case)


def test_a_hang_ends_on_all_ranks_with_a_report(tmp_path):
    cases = with_folders([case for case, _ in HANGS.values()], tmp_path)
    cases = [replace(case, timeout_s=4.0) for case in cases]
    runs = run_failing(train_with_half_batches, 2, cases, limit_s=30.0)
    for case, (_, expected), outcomes in zip(cases, HANGS.values(), runs, strict=True):
        for outcome in outcomes:
            about = f"{case}\n{outcome.output[-5000:]}"
            assert outcome.status in (1, 75), about
            assert re.search(r"made no progress for [4-6] s", outcome.output), about
            assert re.search(expected, outcome.output), about
            assert "Stack of rank(s) [0]" in outcome.output, about
            assert "Stack of rank(s) [1]" in outcome.output, about
            assert "Last step completed: " in outcome.output, about
