"""Context parallelism in a Trainer: evaluation, predictions, metrics, checkpoints and mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from lightning_mcore.userbuffers import TPCommOverlap
from lightning_mcore.userbuffers_plan import UserbuffersPlan, plan_userbuffers
from tests.context_gpt import context_chunk, masked_dataset, token_mean
from tests.gpt import GPT, SEQ
from tests.parity.weights import fill
from tests.ranks.trainers import Recorder, as_floats, loader, make_trainer

SAMPLES, BATCH, STEPS = 24, 4, 4


class Tokens(Recorder):
    """Also the tokens that the outputs of a step tell."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[int, int]] = []
        """With those of the mask."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if "num_tokens" in outputs:
            self.tokens.append((int(outputs["num_tokens"]), int(batch["mask"].sum())))


class Masked(GPT):
    """Counts only the tokens of its mask, and measures them with a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torchmetrics.MeanMetric()

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        where = {"is_first": stage.is_first, "is_last": stage.is_last, "vp_stage": stage.vp_stage}
        chunk = context_chunk(**where, **fields)
        fill(chunk)
        return chunk

    def losses(self, batch: Any) -> Tensor:
        positions = self.trainer.strategy.position_ids(batch["tokens"])
        return self.model(batch["tokens"], positions, None, labels=batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        loss, count = token_mean(losses, batch["mask"])
        self.log("train_loss", loss)
        self.log("kept_tokens", count, reduce_fx="sum")
        self.log("worst", (losses * batch["mask"]).max(), reduce_fx="max")
        return {"loss": loss, "num_tokens": count}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        loss, count = token_mean(losses, batch["mask"])
        self.log("val_loss", loss)
        self.kept.update(losses, batch["mask"])
        self.log("val_kept", self.kept)
        return {"num_tokens": count}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        return {"losses": losses, "tokens": batch["tokens"], "id": batch["id"]}


def numbered() -> list[dict[str, Tensor]]:
    """The samples with their place in the data set."""
    return [
        {"id": torch.tensor(index), "tokens": tokens, "labels": labels, "mask": mask}
        for index, (tokens, labels, mask) in enumerate(masked_dataset(SAMPLES))
    ]


def run_through(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Fits with a checkpoint on the way, then validates and predicts."""
    strategy = {**sizes, "per_token_loss": True}
    data, batch = numbered(), BATCH
    recorder = Tokens()
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    module = Masked()
    # In order: Lightning's own sampler would shuffle, and with one copy none is needed.
    trainer = make_trainer(
        strategy,
        callbacks=[recorder, keep],
        max_steps=STEPS,
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader(data, batch, shuffle=False), loader(data[:14], batch))
    after = _evaluate(strategy, module, data, batch)
    return {
        "metrics": recorder.metrics,
        "losses": recorder.losses,
        "norms": recorder.grad_norms,
        "validation": recorder.validation,
        "ids": recorder.ids,
        "tokens": recorder.tokens,
        **after,
    }


def _evaluate(strategy: dict[str, Any], module: Any, data: Any, batch: int) -> dict[str, Any]:
    trainer = make_trainer(strategy)
    # 14 samples: the last batch is short.
    trainer.validate(module, loader(data[:14], batch), verbose=False)
    values = as_floats(trainer.callback_metrics)
    predictions = make_trainer(strategy).predict(module, loader(data[:8], batch))
    return {"val": values, "predictions": predictions}


def resume(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Goes on from the checkpoint at step 2."""
    recorder = Recorder()
    trainer = make_trainer({**sizes, "per_token_loss": True}, callbacks=[recorder], max_steps=STEPS)
    path = str(Path(folder, "step=2.ckpt"))
    trainer.fit(Masked(), loader(numbered(), BATCH, shuffle=False), ckpt_path=path)
    return {"losses": recorder.losses, "norms": recorder.grad_norms}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process."""
    return run_ranks(run_through, 1, str(tmp_path_factory.mktemp("one")), {})[0]


LAYOUTS = {
    "cp2": (2, {"cp": 2, "micro_batch_size": 2}),
    "cp2pp2": (4, {"cp": 2, "pp": 2, "micro_batch_size": 2}),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request, tmp_path_factory):
    """What every rank of a layout saw, and where its checkpoints are."""
    world_size, sizes = LAYOUTS[request.param]
    folder = str(tmp_path_factory.mktemp(request.param))
    return run_ranks(run_through, world_size, folder, sizes, timeout_s=180), folder


def test_as_in_one_process(trained, whole):
    assert len(whole["losses"]) == STEPS
    for seen in trained[0]:
        assert seen["ids"] == whole["ids"]
        assert seen["losses"] == pytest.approx(whole["losses"], abs=1e-5)
        assert seen["norms"] == pytest.approx(whole["norms"], rel=1e-4)
        assert len(seen["metrics"]) == len(whole["metrics"])
        for mine, expected in zip(seen["metrics"], whole["metrics"], strict=True):
            assert mine == pytest.approx(expected, abs=2e-5)
        assert seen["val"] == pytest.approx(whole["val"], abs=2e-5)
        # The metric and the log are two ways to the mean over tokens, not over batches.
        assert seen["val"]["val_loss"] == pytest.approx(seen["val"]["val_kept"], abs=1e-5)
        assert len(seen["predictions"]) == len(whole["predictions"]) == 2
        for mine, expected in zip(seen["predictions"], whole["predictions"], strict=True):
            assert mine["losses"].shape == (BATCH, SEQ)
            torch.testing.assert_close(mine["losses"], expected["losses"], rtol=0, atol=1e-4)
            assert torch.equal(mine["tokens"], expected["tokens"])
            assert torch.equal(mine["id"], expected["id"])


def test_outputs_tell_the_tokens_of_their_rank(trained):
    """On the last stage, where the step returned."""
    told = [seen["tokens"] for seen in trained[0] if seen["tokens"]]
    assert len(told) == 2
    for first, second in zip(*told, strict=True):
        assert first[1] == second[1] == first[0] + second[0]


def test_its_checkpoint_goes_on_in_one_process(trained, whole):
    seen = run_ranks(resume, 1, trained[1], {})[0]
    assert seen["losses"] == pytest.approx(whole["losses"][2:], abs=1e-5)
    assert seen["norms"] == pytest.approx(whole["norms"][2:], rel=1e-4)


class OwnPositions(Masked):
    def losses(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return self.model(tokens, positions, None, labels=batch["labels"])


class Shifts(Masked):
    def losses(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        positions = self.trainer.strategy.position_ids(tokens)[:, :-1]
        return self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])


class NoTokens(Masked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]


class OddLength(Masked):
    def train_dataloader(self) -> Any:
        return loader([{k: v[:15] if v.dim() else v for k, v in row.items()} for row in numbered()],
                      BATCH)  # fmt: skip


class OtherPeers(Masked):
    """Its peers draw different samples."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.strategy.layout.cp_rank
        return loader(numbered()[rank * 8 :][:8], BATCH)


MISTAKES = {
    "positions": (OwnPositions, {}, r"position ids 0 to 7.*strategy\.position_ids\(tokens\)"),
    "shift": (Shifts, {}, "shift them in the dataset"),
    "flag without tokens": (NoTokens, {}, r"`per_token_loss` \(True\) needs steps that return"),
    "tokens without flag": (
        Masked,
        {"per_token_loss": False},
        r"returned 'num_tokens', but `per_token_loss` \(False\)",
    ),
    "length": (OddLength, {}, r"length of the batch \(15\) must be a multiple of 2 x `cp` \(2\)"),
    "peers": (OtherPeers, {}, "Ranks 0 and 1 are tensor-, context- or pipeline-parallel peers"),
}


def refusals() -> dict[str, str]:
    """The message of each mistake on this rank; all in the same processes."""
    messages = {}
    for name, (module_class, options, _) in MISTAKES.items():
        strategy = {"cp": 2, "per_token_loss": True, **options}
        trainer = make_trainer(strategy, use_distributed_sampler=name != "peers", max_steps=1)
        has_data = "train_dataloader" in vars(module_class)
        try:
            trainer.fit(module_class(), None if has_data else loader(numbered(), BATCH))
            messages[name] = "no error"
        except ConfigurationError as error:
            messages[name] = str(error)
    return messages


def test_mistakes_are_refused_on_every_rank():
    for messages in run_ranks(refusals, 2):
        for name, (_, _, pattern) in MISTAKES.items():
            assert re.search(pattern, messages[name]), messages[name]


class Fixed(L.Callback):
    """Gives the run the shape that userbuffers would have, which needs no GPU to check."""

    def __init__(self, plan: UserbuffersPlan) -> None:
        self.plan = plan

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy._run._runner._shape_of._check = self.plan.check_microbatch


def validate_another_shape() -> str:
    plan = plan_userbuffers(
        TPCommOverlap(),
        tp=2,
        cp=2,
        sequence_parallel=True,
        precision="bf16-mixed",
        on_gpu=True,
        te_version=(2, 20),
        gpus_per_nvlink_domain=8,
        seq_length=SEQ,
        hidden_size=32,
        micro_batch_size=BATCH,
    )
    trainer = make_trainer(
        {"cp": 2, "per_token_loss": True, "micro_batch_size": BATCH}, callbacks=[Fixed(plan)]
    )
    data = numbered()
    try:
        trainer.fit(Masked(), loader(data, BATCH), loader(data[: BATCH + 2], BATCH))
    except ConfigurationError as error:
        return f"{trainer.global_step} {error}"
    return "no error"


def test_a_validation_batch_of_another_shape_is_caught():
    """All training batches fit, and so does the first of validation."""
    for message in run_ranks(validate_another_shape, 2):
        assert re.match(r"6 A microbatch of 2 x 16 tokens does not fit `tp_comm_overlap`", message)
