"""What users write in hooks does what it does in one process, or is refused with the way out."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    NumberedGPT,
    block_weights,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    numbered_tokens,
    refused,
)

EPOCHS, ROWS = 4, 32
"""One batch of all samples per epoch, so that the order in which they are drawn is no matter."""
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": EPOCHS,
}


class Plain(Blocks):
    """The same model without ``strategy.build``: as it runs under other strategies."""

    rate = 0.1

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_blocks()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


# ------------------------------------------------------------------------------ like one process


class ClipsByHand(Plain):
    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        nn.utils.clip_grad_norm_(self.parameters(), 1e-2)


class Scales(Plain):
    def on_before_optimizer_step(self, optimizer):
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.1)


class Assigns(Plain):
    def on_after_backward(self):
        for param in self.parameters():
            param.grad = torch.ones_like(param)


class LogsNorm(Plain):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.model, 2))


class LogsNormOfAdam(LogsNorm):
    """Whose state "auto" would shard, were it not for the hook."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class LooksBeforeStepping(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        if all(param.grad.abs().max() < 10.0 for param in self.parameters()):
            optimizer.step()


class ClampsInStepHook(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()

        def clamp(*_):
            with torch.no_grad():
                for param in self.parameters():
                    param.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(clamp)
        return optimizer


class OneCycle(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


LIKE_ONE_PROCESS = [
    ClipsByHand,
    Scales,
    Assigns,
    LogsNorm,
    LogsNormOfAdam,
    LooksBeforeStepping,
    ClampsInStepHook,
    OneCycle,
]


def fit_plain(model_class, trainer, batch):
    module = model_class()
    trainer.fit(module, loader(numbered_rows(ROWS), batch))
    norms = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("grad")}
    return block_weights(module), norms


def alone(model_class):
    trainer = L.Trainer(strategy=SingleDeviceStrategy("cpu"), **QUIET)
    return fit_plain(model_class, trainer, ROWS)


# ------------------------------------------------------------------------------ refused


class ClipsShards(ClipsByHand):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class AssignsShards(Assigns):
    configure_optimizers = ClipsShards.configure_optimizers


class RemovesGradient(Plain):
    def on_after_backward(self):
        next(self.parameters()).grad = None


class StepsUnwrapped(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.optimizer.step(optimizer_closure)


class DecaysLater(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["weight_decay"] = 0.1

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class AssignsData(Plain):
    def on_train_start(self):
        for param in self.parameters():
            param.data = torch.zeros_like(param)


class MovesWhenValidated(Plain):
    def on_validation_end(self):
        next(self.parameters()).data = next(self.parameters()).data.clone()


REFUSED = {
    ClipsShards: "use_distributed_optimizer=False",
    AssignsShards: "use_distributed_optimizer=False",
    RemovesGradient: r"`param.grad.zero_()`",
    StepsUnwrapped: "step() of the optimizer that Lightning hands",
    DecaysLater: "or a weight decay from the start",
    AssignsData: "left the engine's buffers",
    MovesWhenValidated: "left the engine's buffers",
}


def on_two_replicas():
    rows = numbered_rows(16)
    fits = [fit_plain(c, make_trainer({}, max_epochs=EPOCHS), ROWS // 2) for c in LIKE_ONE_PROCESS]
    errors = []
    for model_class in REFUSED:
        module = model_class()
        sharded = {"use_distributed_optimizer": True} if "Shards" in model_class.__name__ else {}
        trainer = make_trainer(sharded, val_check_interval=1)
        errors.append(
            refused(lambda m=module, t=trainer: t.fit(m, loader(rows, 4), loader(rows, 8)))
        )
        left = [name for name, param in module.named_parameters() if param.grad is not None]
        assert left == [], model_class
    trainer = make_trainer({}, plugins=[OwnIO()])
    errors.append(refused(lambda: trainer.fit(Plain(), loader(rows, 4))))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer({}).fit(KeepsGradients(), loader(rows, 4))
    return fits, errors, [str(w.message) for w in caught]


class OwnIO(TorchCheckpointIO):
    """Would compress files, for example."""


class KeepsGradients(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def test_hooks_on_two_replicas():
    for rank, (fits, errors, warned) in enumerate(run_ranks(on_two_replicas, 2, timeout_s=200)):
        for model_class, (weights, norms) in zip(LIKE_ONE_PROCESS, fits, strict=True):
            expected, expected_norms = alone(model_class)
            assert weights.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, msg=f"{model_class}: {name}")
            assert norms.keys() == expected_norms.keys()
            for name, value in expected_norms.items():
                torch.testing.assert_close(norms[name], value, rtol=1e-4, atol=1e-6)
        assert len(fits[LIKE_ONE_PROCESS.index(LogsNorm)][1]) > 1
        for model_class, text, error in zip(REFUSED, REFUSED.values(), errors, strict=False):
            assert text in error, model_class
        assert "OwnIO would not be asked" in errors[-1]
        assert any("`optimizer_zero_grad` is overridden" in w for w in warned) == (rank == 0)


# ------------------------------------------------------------------------------ parts of a model


class StopsInStep(Blocks):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == 1
        return loss


class ClipsPart(Blocks):
    configure_gradient_clipping = ClipsByHand.configure_gradient_clipping

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StartsFrom(NumberedGPT):
    """Sets weights after the engine has made fp32 main parameters of them, and gathers."""

    def on_fit_start(self):
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.125)

    def on_train_start(self):
        self.gathered = self.all_gather(torch.tensor(float(self.global_rank))).tolist()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-6, weight_decay=0.0)


class KeepsWeights(L.Callback):
    """Keeps copies of this rank's parameters, like a moving average."""

    def on_train_batch_end(self, trainer, module, *_):
        self.kept = [param.detach().clone() for param in module.parameters()]

    def state_dict(self):
        return {"kept": self.kept}


def on_parts(folder):
    trainer = make_trainer(SIZES["pp2"], max_epochs=3)
    trainer.fit(StopsInStep(), loader(numbered_rows(32), 4))
    clipped = ClipsPart()
    error = refused(lambda: make_trainer(SIZES["pp2"]).fit(clipped, loader(numbered_rows(16), 4)))
    keeper = KeepsWeights()
    module, tokens = StartsFrom(), loader(numbered_tokens(8), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = make_trainer(SIZES["tp2"], precision="bf16-mixed", callbacks=[keeper])
        other.fit(module, tokens)
        keeper.kept = [torch.tensor(float(other.global_rank))]
        other.save_checkpoint(f"{folder}/own.ckpt")
    warned = [str(w.message) for w in caught if "ranks hold different tensors" in str(w.message)]
    drift = max(float((p.float() - 0.125).abs().max()) for p in module.parameters())
    return trainer.global_step, error, module.gathered, drift, warned


def test_hooks_on_parts_of_a_model(tmp_path):
    for rank, seen in enumerate(run_ranks(on_parts, 2, str(tmp_path), timeout_s=200)):
        steps, error, gathered, drift, warned = seen
        assert steps == 2, "a stage that asks to stop stops all"
        assert "`param.main_grad`" in error
        assert gathered == [float(rank)], "over data parallel, of which there is one"
        assert drift < 0.01, "main parameters followed"
        assert len(warned) == (1 if rank == 0 else 0)
        assert rank == 1 or "KeepsWeights" in warned[0]
