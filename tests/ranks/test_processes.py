"""Connections of a pipeline as a run opens them, and reductions of what users hand over."""

from contextlib import contextmanager

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import distributed as lightnings

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import Blocks, loader, make_trainer, numbered_rows


@contextmanager
def recording(*names):
    """Calls of functions of torch.distributed: name and, of transfers, the other rank."""
    calls = []

    def recorder(name):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append((name, args[1] if name in {"send", "recv"} else None))
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, recorder(name))
        yield calls


def opened(strategy):
    """What this rank sends and receives in a fit, without the engine's asynchronous transfers."""
    with recording("send", "recv") as calls:
        make_trainer(strategy, max_steps=1).fit(Blocks(), loader(numbered_rows(8), 8))
    return calls


def around(stages):
    """Per rank, one message from each stage to the next, and from the last to the first."""
    found = [[] for _ in range(stages)]
    for source in range(stages):
        target = (source + 1) % stages
        found[source].append(("send", target))
        found[target].append(("recv", source))
    return found


@pytest.mark.parametrize(
    ("stages", "strategy", "rounds"),
    [
        (2, {"pp": 2, "vpp": 2, "overlap_p2p": True}, 2),  # over the group and over the world
        (4, {"pp": 4, "batch_p2p": False}, 1),
        (4, {"pp": 4}, 0),
    ],
    ids=["two", "four", "batched"],
)
def test_connections_are_opened_in_one_order(stages, strategy, rounds):
    """A communicator for each pair is needed by transfers that run one by one only."""
    expected = [rounds * calls for calls in around(stages)]
    assert run_ranks(opened, stages, {**strategy, "micro_batch_size": 1}) == expected


REDUCTIONS = ["mean", "avg", "AVG", "sum", "max", dist.ReduceOp.MIN]
VALUES = [torch.tensor([1.5, -2.0]), torch.tensor([3, 8]), torch.tensor(0.25)]


class Reduces(L.Callback):
    """Reduces by the strategy and by Lightning's function, on ranks with other values."""

    def on_fit_start(self, trainer, module):
        strategy, self.found = trainer.strategy, []
        with recording("barrier") as self.barriers:
            for value in VALUES:
                for op in REDUCTIONS:
                    mine = value * (1 + strategy.layout.dp_rank)
                    same = strategy.reduce(mine, reduce_op=op) is mine
                    self.found.append((same, mine))
        self.expected = []
        for value in VALUES:
            for op in REDUCTIONS:
                theirs = value * (1 + strategy.layout.dp_rank)
                lightnings._sync_ddp(theirs, strategy.groups.dp_cp, op)
                self.expected.append(theirs)


def reduced(strategy):
    reduces = Reduces()
    trainer = make_trainer(strategy, max_steps=1, callbacks=[reduces])
    trainer.fit(Blocks(), loader(numbered_rows(16), 4))
    return reduces.found, reduces.expected, reduces.barriers


def test_reduces_as_lightning_does_without_its_barrier():
    for found, expected, barriers in run_ranks(reduced, 4, {"pp": 2, "micro_batch_size": 1}):
        assert barriers == []
        for (same, mine), theirs in zip(found, expected, strict=True):
            assert same
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert [float(mine) for _, mine in found[-6:]] == [0.375, 0.375, 0.375, 0.75, 0.5, 0.25]
