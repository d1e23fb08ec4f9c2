"""Random streams: different where weights and masks must differ, the same where they must agree."""

import lightning as L
import pytest
import torch
from megatron.core import tensor_parallel

from lightning_mcore.testing import run_ranks
from tests.gpt import GPT
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    numbered_tokens,
    ranks_of,
    weights_of,
)


class Dropping(GPT):
    """Draws dropout masks inside and outside tensor-parallel regions."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def training_step(self, batch, batch_idx):
        outside = torch.rand(4)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(4)
        self.masks.append((outside.tolist(), inside.tolist()))
        return super().training_step((batch["tokens"], batch["labels"]), batch_idx)


def start(layout, seed=None):
    """Initial weights and the first masks of this rank."""
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    module = Dropping()
    weights = {}

    class Start(L.Callback):
        def on_train_start(self, trainer, module):
            weights.update(weights_of(module))

    trainer = make_trainer(SIZES[layout], max_steps=1, callbacks=[Start()])
    trainer.fit(module, loader(numbered_tokens(8), 4))
    return {"weights": weights, "outside": module.masks[-1][0], "inside": module.masks[-1][1]}


def layers(weights):
    """Weights of each transformer layer on a rank, by a name that all layers share."""
    found = {}
    for name, value in weights.items():
        if ".layers." in name and name.endswith("weight") and "norm" not in name:
            kind = name.split(".layers.")[1].partition(".")[2]
            found.setdefault(kind, []).append(value)
    assert found
    return found


@pytest.mark.parametrize("layout", ["pp2", "pp2vpp2"])
@pytest.mark.parametrize("seed", [None, 3])
def test_no_two_layers_start_alike(layout, seed):
    by_kind = {}
    for rank in run_ranks(start, ranks_of(layout), layout, seed):
        for kind, values in layers(rank["weights"]).items():
            by_kind.setdefault(kind, []).extend(values)
    for kind, values in by_kind.items():
        assert len(values) == 4, kind
        for i, value in enumerate(values):
            assert float(value.std()) > 0
            assert not any(torch.equal(value, other) for other in values[:i]), kind


def test_tensor_parallel_shards_differ_and_whole_weights_agree():
    first, second = run_ranks(start, 2, "tp2", 3)
    for name, value in first["weights"].items():
        other = second["weights"][name]
        sharded = any(part in name for part in ("linear_", "embedding", "output_layer"))
        if "position_embeddings" in name or "norm" in name or name.endswith("proj.bias"):
            sharded = False
        if name.endswith("bias"):  # zeros everywhere
            continue
        assert torch.equal(value, other) != sharded, name


def test_replicas_start_alike():
    first, second = run_ranks(start, 2, "dp2")
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name


@pytest.mark.parametrize("layout", ["tp2", "pp2vpp2"])
def test_a_seed_reproduces_weights_and_masks(layout):
    runs = [run_ranks(start, ranks_of(layout), layout, seed) for seed in (3, 3, 4)]
    for first, again, other in zip(*runs, strict=True):
        assert first["outside"] == again["outside"] != other["outside"]
        assert first["inside"] == again["inside"] != other["inside"]
        same = [torch.equal(v, again["weights"][name]) for name, v in first["weights"].items()]
        assert all(same)
        differ = [not torch.equal(v, other["weights"][n]) for n, v in first["weights"].items()]
        assert any(differ)


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_differs_between_shards_only_inside_parallel_regions(seed):
    first, second = run_ranks(start, 2, "tp2", seed)
    assert first["outside"] == second["outside"]
    assert first["inside"] != second["inside"]


def test_dropout_differs_between_stages():
    first, second = run_ranks(start, 2, "pp2", 3)
    assert first["outside"] == second["outside"]
    assert first["inside"] != second["inside"]


def whole_weights(tp):
    """The embedding of one seed, put together over tensor-parallel ranks."""
    L.seed_everything(11, verbose=False)
    module, weights = GPT(), {}

    class Start(L.Callback):
        def on_train_start(self, trainer, module):
            shard = dict(module.named_parameters())
            (name,) = [n for n in shard if n.endswith("word_embeddings.weight")]
            parts = trainer.strategy.all_gather(
                shard[name].detach(), group=trainer.strategy.groups.tp
            )
            weights["whole"] = parts.reshape(-1, parts.shape[-1]).clone()

    trainer = make_trainer({"tp": tp}, max_steps=1, callbacks=[Start()])
    data = [(row["tokens"], row["labels"]) for row in numbered_tokens(8)]
    trainer.fit(module, loader(data, 4))
    return weights["whole"]


def test_the_same_seed_gives_the_same_weights_for_any_tp():
    one = run_ranks(whole_weights, 1, 1)[0]
    for two in run_ranks(whole_weights, 2, 2):
        torch.testing.assert_close(two, one, rtol=0, atol=0)


class Masking(Blocks):
    """Draws random numbers before the model call, and others within the model and behind it."""

    def __init__(self):
        super().__init__()
        self.draws = []

    def configure_model(self):
        if self.model is None:
            parts = []
            for block in make_blocks():
                parts.append(torch.nn.Sequential(block, torch.nn.Dropout(0.1)))
            self.model = self.trainer.strategy.build(parts)

    def training_step(self, batch, batch_idx):
        noise = torch.rand(len(batch["x"]))
        self.draws.append((self.global_step, int(batch["id"][0]), noise.tolist()))
        loss = (self.model(batch["x"] + noise[:, None]) - batch["y"]).square().mean()
        torch.rand(3)
        return loss


def draws_before_the_call(layout):
    module = Masking()
    trainer = make_trainer(SIZES[layout])
    trainer.fit(module, loader(numbered_rows(16), 4))
    return module.draws


@pytest.mark.parametrize("layout", ["pp2", "pp2vpp2"])
def test_code_before_the_model_call_draws_alike_on_all_stages(layout):
    """What the first stage masks must be what the last stage takes for masked."""
    by_microbatch = {}
    for draws in run_ranks(draws_before_the_call, ranks_of(layout), layout):
        # The very first call looks at shapes only, and draws for nobody.
        for step, sample, noise in draws[1:]:
            by_microbatch.setdefault((step, sample), []).append(tuple(noise))
    assert len(by_microbatch) == 16
    for draws in by_microbatch.values():
        assert len(draws) == 2 * SIZES[layout].get("vpp", 1)
        assert len(set(draws)) == 1
    assert len({draws[0] for draws in by_microbatch.values()}) == 16
