"""A run that is saved and resumed goes on as if it had not been interrupted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore.errors import CheckpointError
from lightning_mcore.export import export_checkpoint
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, token_dataset
from tests.ranks.trainers import Recorder, dp_of, loader, make_trainer, ranks_of

LAYOUTS = {
    "one": {},
    "dp2": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batch_size": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2, "micro_batch_size": 2},
}
SAMPLES, BATCH, STEPS = 40, 8, 8  # an epoch of 5 steps: 8 steps end in the middle of the second


def ranks(layout: str) -> int:
    return 1 if layout == "one" else ranks_of(layout)


def weighted(tokens: torch.Tensor) -> int:
    """Sum of tokens that differs between samples ``[b, s]``; of a batch, the sum of theirs."""
    return int((tokens * torch.arange(1, tokens.shape[-1] + 1)).sum())


class Tokens(Recorder):
    """Also what was trained on, and the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.batches.append(weighted(batch[0]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Scheduled(GPT):
    """With dropout, so that random streams must be restored, and a schedule per step."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        chunk = super().make_chunk(stage, **fields)
        for layer in chunk.decoder.layers:
            layer.hidden_dropout = 0.1
        return chunk

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(layout: str, folder: str, steps: int, resume: str | None, stateful: bool = False) -> Any:
    L.seed_everything(5, verbose=False)
    seen, module = Tokens(), Scheduled()
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        LAYOUTS[layout],
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[seen, keep],
    )
    dp = 1 if layout == "one" else dp_of(layout)
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = StatefulDataLoader(token_dataset(SAMPLES), batch_size=BATCH // dp, shuffle=True)
    else:
        data = loader(token_dataset(SAMPLES), BATCH // dp, shuffle=True)
    trainer.fit(module, data, ckpt_path=resume)
    weights = {
        name: value.clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    return seen.losses, seen.grad_norms, seen.batches, seen.rates, weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("saved_at", [3, 5], ids=["mid-epoch", "epoch end"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(layout, saved_at, tmp_path):
    whole = run_ranks(fit, ranks(layout), layout, str(tmp_path / "a"), STEPS, None)
    saved = Path(tmp_path / "a" / f"step={saved_at}.ckpt")
    assert saved.is_dir()
    resumed = run_ranks(fit, ranks(layout), layout, str(tmp_path / "b"), STEPS, str(saved))
    for rank, (before, after) in enumerate(zip(whole, resumed, strict=True)):
        for name, complete, rest in zip(
            ("losses", "gradient norms", "batches", "learning rates"), before, after, strict=False
        ):
            assert rest == complete[saved_at:], f"{name} of rank {rank}"
        assert len(set(before[2][:5])) == 5, "each sample once in an epoch"
        for name, value in before[4].items():
            assert torch.equal(value, after[4][name]), f"{name} of rank {rank}"


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_a_stateful_loader_keeps_its_own_position(layout, tmp_path):
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    whole = run_ranks(fit, 2, layout, str(tmp_path / "a"), STEPS, None, True)
    saved = str(tmp_path / "a" / "step=3.ckpt")
    resumed = run_ranks(fit, 2, layout, str(tmp_path / "b"), STEPS, saved, True)
    for before, after in zip(whole, resumed, strict=True):
        for complete, rest in zip(before[:4], after[:4], strict=True):
            assert rest == complete[3:]
        for name, value in before[4].items():
            assert torch.equal(value, after[4][name]), name
    # Sums over what each rank saw: every sample once in the resumed epoch, in another order next.
    of_epoch = [sum(result[2][:5]) for result in whole]
    rest = [
        sum(before[2][:3]) + sum(after[2][:2]) for before, after in zip(whole, resumed, strict=True)
    ]
    assert rest == of_epoch
    every = sum(weighted(sample) for sample, _ in token_dataset(SAMPLES))
    assert (sum(of_epoch) if layout == "dp2" else of_epoch[0]) == every
    assert whole[0][2][:3] != whole[0][2][5:]


def save_after_fit(folder: str) -> list[float]:
    seen, module = Tokens(), GPT()
    trainer = make_trainer({"pp": 2}, max_steps=2, callbacks=[seen])
    data = loader(token_dataset(SAMPLES), BATCH)
    trainer.fit(module, data)
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    other = make_trainer({"pp": 2}, max_steps=3, max_epochs=-1, callbacks=[seen])
    other.fit(GPT(), data, ckpt_path=str(Path(folder) / "after.ckpt"))
    return seen.losses


def test_a_checkpoint_can_be_saved_after_fit(tmp_path):
    results = run_ranks(save_after_fit, 2, str(tmp_path))
    assert results[0] == results[1]
    assert len(results[0]) == 3


class WithMore(GPT):
    """With state beside the model that ``strategy.build`` gave."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.frozen.data.fill_(7)


def state_beside_the_model(folder: str) -> Any:
    path = str(Path(folder) / "more.ckpt")
    data = loader(token_dataset(SAMPLES), BATCH)
    trainer = make_trainer({"pp": 2}, max_steps=2)
    trainer.fit(WithMore(), data)
    trainer.save_checkpoint(path)
    resumed = WithMore()
    make_trainer({"tp": 2}, max_steps=2).fit(resumed, data, ckpt_path=path)
    wrong = make_trainer({"tp": 2}, max_steps=2)
    with pytest.raises(CheckpointError, match=r"2 names .* \['frozen', 'seen'\]"):
        wrong.fit(GPT(), data, ckpt_path=path)
    if int(os.environ["RANK"]) == 0:
        export_checkpoint(path, f"{folder}/more.pt")
    torch.distributed.barrier()
    started = WithMore()
    trainer = make_trainer({"pp": 2, "init_from": f"{folder}/more.pt"})
    trainer.validate(started, data, verbose=False)
    return resumed.seen.tolist(), resumed.frozen.tolist(), started.seen.tolist()


def test_state_beside_the_model_is_saved_too(tmp_path):
    for seen, frozen, started in run_ranks(state_beside_the_model, 2, str(tmp_path)):
        assert seen == [2, 2, 2]
        assert frozen == [7, 7]
        assert started == [2, 2, 2]
    names = torch.load(tmp_path / "more.pt", weights_only=True)["state_dict"]
    assert names["seen"].tolist() == [2, 2, 2]
    assert "model.chunks.0.embedding.word_embeddings.weight" in names
