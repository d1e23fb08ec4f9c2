"""Which samples each rank sees, and how its batches are cut into microbatches."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    NumberedGPT,
    Recorder,
    dp_of,
    loader,
    make_trainer,
    numbered_rows,
    numbered_tokens,
    ranks_of,
)

SAMPLES = 4


def groups_of(ranks, layout):
    """Which ranks are model-parallel peers: rank = tp_rank + tp * (dp_rank + dp * pp_rank)."""
    tp, dp = SIZES[layout].get("tp", 1), dp_of(layout)
    return [[r for i, r in enumerate(ranks) if i // tp % dp == rank] for rank in range(dp)]


def flat(batches):
    return [sample for batch in batches for sample in batch]


class Seen(Recorder):
    """Also the samples of validation batches."""

    def __init__(self):
        super().__init__()
        self.validated = []

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.validated.append(batch["id"].tolist())


def fit_two_epochs(layout):
    seen, data = Seen(), numbered_tokens(24)
    trainer = make_trainer(SIZES[layout], callbacks=[seen], max_epochs=2)
    trainer.fit(NumberedGPT(), loader(data, SAMPLES, shuffle=True), loader(data, SAMPLES))
    return seen.ids, seen.validated


@pytest.mark.parametrize("layout", SIZES)
def test_replicas_share_out_the_data_and_peers_see_the_same(layout):
    ranks = run_ranks(fit_two_epochs, ranks_of(layout), layout)
    replicas = groups_of(ranks, layout)
    for peers in replicas:
        assert all(peer == peers[0] for peer in peers)
    steps = 24 // SAMPLES // dp_of(layout)
    for epoch in range(2):
        trained = [flat(p[0][0][epoch * steps : (epoch + 1) * steps]) for p in replicas]
        assert sorted(flat(trained)) == list(range(24))
        validated = [flat(p[0][1][epoch * steps : (epoch + 1) * steps]) for p in replicas]
        assert sorted(flat(validated)) == list(range(24))
        assert trained[0] != sorted(trained[0])
    ids = replicas[0][0][0]
    assert ids[:steps] != ids[steps:], "the second epoch must be shuffled anew"


class Dropping(Blocks):
    """Draws random numbers behind the model call, which only the last stage reaches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        torch.nn.functional.dropout(torch.ones(3), 0.5)
        return loss


class RandomStream(IterableDataset):
    """Samples drawn from the global generator as they are needed."""

    def __iter__(self):
        for _ in range(24):
            index = int(torch.randint(1000, ()))
            yield {"id": torch.tensor(index), "x": torch.ones(6), "y": torch.ones(1)}


def fit_unseeded(layout, kind):
    """Data drawn from the global generator by a sampler that Lightning leaves alone."""
    recorder, data = Recorder(), numbered_rows(24)
    if kind == "sampler":
        batches = DataLoader(data, batch_size=SAMPLES, sampler=RandomSampler(data))
    else:
        batches = DataLoader(RandomStream(), batch_size=SAMPLES)
    trainer = make_trainer(
        SIZES[layout], callbacks=[recorder], use_distributed_sampler=False, max_epochs=3
    )
    trainer.fit(Dropping(), batches)
    return recorder.ids


@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "dp2pp2"])
def test_unseeded_random_data_is_the_same_for_peers_in_every_epoch(layout, kind):
    ranks = run_ranks(fit_unseeded, ranks_of(layout), layout, kind)
    replicas = groups_of(ranks, layout)
    for peers in replicas:
        for peer in peers:
            assert peer == peers[0]
    assert len(replicas[0][0]) == 3 * 24 // SAMPLES
    if len(replicas) > 1:
        assert replicas[0][0] != replicas[1][0]


def fit_with_different_data(layout, later):
    """Peers draw different samples: from the start, or from the second batch on."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None

    class PerRank(NumberedGPT):
        def train_dataloader(self):
            data = numbered_tokens(8)
            if self.trainer.global_rank == 1:
                data = data[:4] + data[:3:-1] if later else data[::-1]
            return DataLoader(data, batch_size=SAMPLES, sampler=SequentialSampler(data))

    assert rank is None
    trainer = make_trainer(SIZES[layout], use_distributed_sampler=False)
    try:
        trainer.fit(PerRank())
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_peers_with_different_first_batches_are_refused(layout):
    for message in run_ranks(fit_with_different_data, 2, layout, False):
        assert message is not None
        assert "Ranks 0 and 1" in message
        assert "use_distributed_sampler=True" in message
        assert "strategy.distributed_sampler_kwargs" in message


def test_replicas_may_differ():
    assert run_ranks(fit_with_different_data, 2, "dp2", False) == [None, None]


# ------------------------------------------------------------------------------ structures

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Example:
    pair: Pair
    names: list[str]
    scale: float


class Structured(Blocks):
    """Takes batches of several structures, and notes the microbatches that it gets."""

    def __init__(self, structure):
        super().__init__()
        self.structure, self.got = structure, []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        pair = Pair(batch["x"], batch["y"])
        names = [f"sample {i}" for i in batch["id"].tolist()]
        return {
            "tuple": (batch["id"], (batch["x"], batch["y"])),
            "list": [batch["id"], [batch["x"], batch["y"]]],
            "nested": {"in": {"pair": pair}, "names": names, "id": batch["id"], "tag": "train"},
            "dataclass": Example(pair, names, 0.5),
        }[self.structure]

    def take_apart(self, batch):
        if self.structure in ("tuple", "list"):
            ids, (x, y) = batch
            assert type(batch).__name__ == self.structure
            return x, y, [f"sample {i}" for i in ids.tolist()]
        if self.structure == "nested":
            assert batch["tag"] == "train"
            assert isinstance(batch["in"]["pair"], Pair)
            return *batch["in"]["pair"], batch["names"]
        assert isinstance(batch, Example)
        assert batch.scale == 0.5
        return batch.pair.x, batch.pair.y, batch.names

    def training_step(self, batch, batch_idx):
        x, y, names = self.take_apart(batch)
        assert len(x) == len(y) == len(names) == 2
        loss = (self.model(x) - y).square().mean()
        self.got.append(names)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, names = self.take_apart(batch)
        self.log("val_loss", (self.model(x) - y).square().mean())
        self.log("val_samples", float(len(names)), reduce_fx="sum")


def fit_structured(layout, structure):
    module, recorder = Structured(structure), Recorder()
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": 2}, callbacks=[recorder])
    data = loader(numbered_rows(8), 4)
    trainer.fit(module, data, loader(numbered_rows(7), 4))
    return module.got, recorder.losses, float(trainer.callback_metrics["val_samples"])


@pytest.mark.parametrize("structure", ["tuple", "list", "nested", "dataclass"])
def test_batches_of_any_structure_are_cut(structure):
    *_, (got, losses, samples) = run_ranks(fit_structured, 2, "pp2vpp2", structure)
    assert [len(names) for names in got] == [2] * 4
    assert sorted(flat(got)) == [f"sample {i}" for i in range(8)]
    assert len(losses) == 2
    assert samples == 7


class Packed:
    """A batch that only its own module can cut: one row after the other, and their lengths."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def to(self, *args, **kwargs):
        return self


def pack(rows):
    return Packed(torch.stack([r["x"] for r in rows]), torch.stack([r["y"] for r in rows]))


class WithHook(Blocks):
    """Cuts its batches itself."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def split_batch(self, batch, micro_batch_size):
        self.asked.append(micro_batch_size)
        return [
            Packed(batch.x[i : i + micro_batch_size], batch.y[i : i + micro_batch_size])
            for i in range(0, len(batch), micro_batch_size)
        ]

    def losses(self, batch):
        return (self.model(batch.x) - batch.y).square().mean(1)


def fit_with_hook(layout, batch_type):
    module, recorder = WithHook(), Recorder()
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": 2}, callbacks=[recorder])
    data = numbered_rows(8)
    batches = DataLoader(data, batch_size=4, collate_fn=pack, sampler=SequentialSampler(data))
    trainer.fit(module, batches)
    return recorder.losses, module.asked


def fit_without_hook(layout):
    module, recorder = Blocks(), Recorder()
    trainer = make_trainer(
        {**SIZES[layout], "micro_batch_size": 2},
        callbacks=[recorder],
    )
    trainer.fit(module, loader(numbered_rows(8), 4))
    return recorder.losses


@pytest.mark.parametrize("layout", ["pp2", "pp2vpp2"])
def test_the_users_own_cut(layout):
    expected = run_ranks(fit_without_hook, 2, layout)
    for (losses, asked), without in zip(
        run_ranks(fit_with_hook, 2, layout, None), expected, strict=True
    ):
        assert losses == pytest.approx(without)
        assert set(asked) == {2}


class TokensOnly(GPT):
    """Its batch is one tensor, without any container."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[:, :-1].contiguous(), batch[:, 1:]), batch_idx)


def fit_bare_tensors(layout):
    recorder = Recorder()
    trainer = make_trainer(SIZES[layout], callbacks=[recorder])
    rows = [torch.cat([row["tokens"], row["labels"][-1:]]) for row in numbered_tokens(8)]
    trainer.fit(TokensOnly(), loader(rows, 4))
    return recorder.losses


def test_a_batch_that_is_one_tensor():
    first, second = run_ranks(fit_bare_tensors, 2, "pp2")
    assert first == second
    assert len(first) == 2


def fit_with_short_last_batch(layout, samples):
    recorder = Recorder()
    trainer = make_trainer({**SIZES[layout], "micro_batch_size": 2}, callbacks=[recorder])
    try:
        trainer.fit(Blocks(), loader(numbered_rows(samples * dp_of(layout)), 4))
    except ConfigurationError as error:
        return recorder.losses, str(error)
    return recorder.losses, None


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "dp2pp2"])
def test_a_short_last_training_batch_is_cut_smaller(layout):
    for losses, error in run_ranks(fit_with_short_last_batch, ranks_of(layout), layout, 10):
        assert error is None
        assert len(losses) == 3


def test_a_short_last_batch_that_cannot_be_interleaved_is_refused():
    for losses, error in run_ranks(fit_with_short_last_batch, 2, "pp2vpp2", 9):
        assert len(losses) == 2
        assert "1 samples" in error
        assert "drop_last=True" in error
