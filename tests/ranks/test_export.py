"""Out into plain files on one process, and from plain files into every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_mcore.cli import main
from lightning_mcore.plain_file import read_plain
from lightning_mcore.testing import RankError, run_ranks
from tests.gpt import GPT, VOCAB, token_dataset
from tests.parity.weights import check_shards, full_tensors, shards_of
from tests.ranks.trainers import (
    SIZES,
    WIDTH,
    Blocks,
    block_weights,
    joined,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    ranks_of,
)


class Net(L.LightningModule):
    """An ordinary module: nothing in it knows of the strategy."""

    def __init__(self, width: int = WIDTH, extra: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 1)
        if extra:
            self.more = nn.Linear(1, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.head(self.body(batch["x"])) - batch["y"]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make(kind: str, model: dict[str, Any]) -> tuple[L.LightningModule, Any]:
    """A module and eight samples for it."""
    if kind == "gpt":
        return GPT(**model), token_dataset(8)
    return (Blocks() if kind == "blocks" else Net(**model)), numbered_rows(8)


def train(path: str, kind: str, sizes: dict[str, int], model: dict[str, Any]) -> Any:
    """Two steps and a checkpoint; what this rank holds."""
    L.seed_everything(3)
    module, data = make(kind, model)
    trainer = make_trainer(sizes, max_steps=2, max_epochs=-1)
    trainer.fit(module, loader(data, 2))
    trainer.save_checkpoint(path)
    return held(module, kind)


def start(
    path: str, kind: str, sizes: dict[str, int], model: dict[str, Any], strict: bool = True
) -> Any:
    """Weights from ``path``; what this rank holds, the module's state dict, the loss."""
    L.seed_everything(99)
    module, data = make(kind, model)
    module.strict_loading = strict
    trainer = make_trainer({**sizes, "init_from": path})
    (metrics,) = trainer.validate(module, loader(data, 2), verbose=False)
    return held(module, kind), copied(module.state_dict()), metrics["val_loss"]


def held(module: L.LightningModule, kind: str) -> Any:
    if kind == "gpt":
        return [shard.copied() for chunk in module.model.chunks for shard in shards_of(chunk)]
    return block_weights(module) if kind == "blocks" else copied(module.state_dict())


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        same = torch.equal(value, other[name]) if torch.is_tensor(value) else value is other[name]
        assert same, name


def export(path: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["export", str(path), str(out), *options]) == 0
    return torch.load(out, weights_only=True) if out.suffix == ".pt" else read_plain(out)


# ------------------------------------------------------------------------------ GPT


@pytest.mark.parametrize(
    ("saved", "others", "model"),
    [
        ("tp2", ["dp2", "pp2vpp2"], {}),
        ("pp2vpp2", ["tp2"], {"tied": True}),
        ("dp2", ["tp2"], {}),
        ("dp2", ["ep2"], {"experts": 4}),
    ],
)
def test_gpt_out_and_into_another_layout(tmp_path, saved, others, model):
    sizes = {**SIZES, "ep2": {"ep": 2}}
    checkpoint, out, flat = (tmp_path / n for n in ("a.ckpt", "a.pt", "a.safetensors"))
    trained = run_ranks(train, ranks_of(saved), str(checkpoint), "gpt", sizes[saved], model)
    exported = export(checkpoint, out)

    ((shards, state, loss),) = run_ranks(start, 1, str(out), "gpt", {}, model)
    assert_equal(exported["state_dict"], state)  # names of a one-process run, to the bit
    check_shards(trained, full_tensors(shards), 0.0)
    assert exported["hyper_parameters"]["lr"] == 1e-2
    assert exported["global_step"] == 2

    tensors = export(checkpoint, flat)
    plain = {k.removeprefix("model.chunks.0."): v for k, v in state.items() if torch.is_tensor(v)}
    assert_equal(tensors, plain)
    for layout in others:
        results = run_ranks(start, 2, str(flat), "gpt", sizes[layout], model)
        check_shards([one for one, _, _ in results], full_tensors(shards), 0.0)
        assert results[0][2] == pytest.approx(loss, abs=1e-6)


def test_import_makes_a_checkpoint_that_every_layout_loads(tmp_path):
    checkpoint, out, again = (tmp_path / n for n in ("a.ckpt", "a.pt", "b.ckpt"))
    trained = run_ranks(train, 2, str(checkpoint), "gpt", {"pp": 2}, {})
    export(checkpoint, out, "--weights-only")
    assert main(["import", str(out), str(again)]) == 0
    assert main(["inspect", str(again)]) == 0
    ((shards, _, loss),) = run_ranks(start, 1, str(again), "gpt", {}, {})
    check_shards(trained, full_tensors(shards), 0.0)
    results = run_ranks(start, 2, str(again), "gpt", {"tp": 2}, {})
    check_shards([one for one, _, _ in results], full_tensors(shards), 0.0)
    assert results[0][2] == pytest.approx(loss, abs=1e-6)


def test_vocabulary_padding_and_dtype(tmp_path, capfd):
    checkpoint, out = tmp_path / "a.ckpt", tmp_path / "a.pt"
    run_ranks(train, 1, str(checkpoint), "gpt", {}, {"layers": 2})
    state = export(checkpoint, out)["state_dict"]
    name = "model.chunks.0.embedding.word_embeddings.weight"
    wide = {**state, name: torch.cat([state[name], torch.full((16, 32), 9.0)]).bfloat16()}
    torch.save(wide, out)
    results = run_ranks(start, 2, str(out), "gpt", {"tp": 2}, {"layers": 2})
    for rank, (_, here, _) in enumerate(results):
        rows = slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2)
        assert torch.equal(here[name], state[name].bfloat16().float()[rows])
    said = capfd.readouterr()
    assert f"{name}: [80, 32] becomes [64, 32]" in said.err + said.out
    assert "torch.bfloat16 becomes torch.float32" in said.err + said.out

    torch.save({**state, name: state[name][:40]}, out)
    results = run_ranks(start, 2, str(out), "gpt", {"tp": 2}, {"layers": 2})
    assert torch.equal(results[1][1][name][:8], state[name][32:40])
    assert not results[1][1][name][8:].any()


# ------------------------------------------------------------------------------ plain modules


def test_blocks_become_an_nn_sequential(tmp_path):
    checkpoint, out = tmp_path / "a.ckpt", tmp_path / "a.pt"
    trained = run_ranks(train, 2, str(checkpoint), "blocks", {"pp": 2}, {})
    exported = export(checkpoint, out)["state_dict"]
    model = make_blocks()
    model.load_state_dict({k.removeprefix("model."): v for k, v in exported.items()})
    assert_equal(block_weights(model), joined(trained))
    results = run_ranks(start, 2, str(out), "blocks", {"pp": 2, "vpp": 2}, {})
    assert_equal(joined([one for one, _, _ in results]), joined(trained))


def test_a_plain_module_out_of_a_checkpoint(tmp_path):
    checkpoint, out = tmp_path / "a.ckpt", tmp_path / "a.pt"
    trained = run_ranks(train, 2, str(checkpoint), "net", {}, {})
    export(checkpoint, out)
    module = Net.load_from_checkpoint(out, weights_only=True)
    ((state, _, _),) = run_ranks(start, 1, str(checkpoint), "net", {}, {})
    assert_equal(dict(module.state_dict()), state)
    for name, value in module.named_parameters():
        assert torch.equal(value, trained[0][name]), name


def train_with_ddp(path: str) -> dict[str, Any]:
    L.seed_everything(5)
    module = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(numbered_rows(8), 2))
    trainer.save_checkpoint(path)
    return copied(module.state_dict())


def test_a_ddp_checkpoint_is_a_start(tmp_path):
    path = tmp_path / "ddp.ckpt"
    trained = run_ranks(train_with_ddp, 2, str(path))[0]
    for _, state, _ in run_ranks(start, 2, str(path), "net", {}, {}):
        assert_equal(state, trained)

    saved = torch.load(path, weights_only=True)
    weights = saved["state_dict"]
    weights["old.bias"] = weights.pop("head.bias")
    torch.save(saved, path)
    with pytest.raises(RankError) as refused:
        run_ranks(start, 2, str(path), "net", {}, {"extra": True})
    text = str(refused.value)
    missing = "3 names of the model are missing in the file: head.bias, more.bias, more.weight"
    assert missing in text
    assert "1 names of the file are not in the model: old.bias" in text
    (_, state, _), _ = run_ranks(start, 2, str(path), "net", {}, {"extra": True}, strict=False)
    assert torch.equal(state["head.weight"], trained["head.weight"])

    weights["head.weight"] = weights["head.weight"][:, :2]
    torch.save(saved, path)
    with pytest.raises(RankError, match=r"head.weight: \[1, 2\] in the file, \[1, 6\] in the"):
        run_ranks(start, 1, str(path), "net", {}, {}, strict=False)


class Anything:
    """What a pickle may hold, and run code for."""


def test_a_pickle_that_needs_code_is_refused(tmp_path):
    path = tmp_path / "any.ckpt"
    torch.save({"state_dict": Net().state_dict(), "object": Anything()}, path)
    with pytest.raises(RankError, match=r"holds tests.ranks.test_export.Anything that torch"):
        run_ranks(start, 2, str(path), "net", {}, {})
