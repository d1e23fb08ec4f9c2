"""Ranks whose loaders differ in length stop together or refuse; they never hang."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_mcore.testing import RankError, run_ranks
from tests.ranks.trainers import Blocks, Recorder, loader, make_trainer, numbered_rows


class Stream(IterableDataset):
    """As many rows as asked for, one after the other, without a length."""

    def __init__(self, rows: int) -> None:
        self.rows = numbered_rows(rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def train_on_streams(rows: list[int], strategy: dict[str, int]) -> tuple[int, list[str]]:
    rank = int(os.environ["RANK"])
    seen = Recorder()
    trainer = make_trainer(strategy, callbacks=[seen])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Blocks(), DataLoader(Stream(rows[rank]), batch_size=4))
    return len(seen.losses), [str(item.message) for item in caught]


def test_streams_of_different_lengths_stop_together():
    results = run_ranks(train_on_streams, 2, [20, 12], {})
    assert [steps for steps, _ in results] == [3, 3]
    said = [text for text in results[0][1] if "had no data left" in text]
    assert said
    assert "After 3 batches, 1 of 2 ranks" in said[0]


def test_equal_streams_are_used_up_in_silence():
    results = run_ranks(train_on_streams, 2, [16, 16], {"pp": 2})
    assert [steps for steps, _ in results] == [4, 4]
    assert not [text for text in results[0][1] if "had no data left" in text]


def train_on_lists(rows: list[int]) -> None:
    trainer = make_trainer({}, use_distributed_sampler=False)
    trainer.fit(Blocks(), loader(numbered_rows(rows[int(os.environ["RANK"])]), 4))


def test_lengths_that_differ_are_refused_on_every_rank():
    with pytest.raises(RankError, match=r"\[5, 3\] by rank"):
        run_ranks(train_on_lists, 2, [20, 12])


class Terminate(L.Callback):
    """One rank gets a SIGTERM in its third step, as from a scheduler that preempts the job."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_terminated() -> int:
    seen = Recorder()
    trainer = make_trainer({"pp": 2}, max_epochs=50, callbacks=[seen, Terminate()])
    try:
        trainer.fit(Blocks(), loader(numbered_rows(40), 4))
    except BaseException as error:
        return -1 if len(seen.losses) > 5 or isinstance(error, TimeoutError) else len(seen.losses)
    return len(seen.losses)


def test_a_sigterm_of_any_rank_stops_all():
    steps = run_ranks(train_until_terminated, 2, timeout_s=90)
    assert steps[0] == steps[1]
    assert 3 <= steps[0] <= 5


def plain_loss() -> list[float]:
    """A step that returns no loss for every other batch, which Lightning skips."""

    class Sometimes(Blocks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx % 2 == 0 else None

    module = Sometimes()
    before: list[torch.Tensor] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            before.append(torch.cat([p.detach().flatten() for p in module.parameters()]))

    make_trainer({}, callbacks=[Watch()], max_steps=4).fit(module, loader(numbered_rows(16), 4))
    return [float((a - b).abs().max()) for a, b in pairwise(before)]


def test_a_step_without_a_loss_changes_nothing_in_one_process():
    (moved,) = run_ranks(plain_loss, 1)
    assert moved[0] > 0
    assert moved[1] == 0
    assert moved[2] > 0
