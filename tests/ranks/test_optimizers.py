"""torch optimizers, schedules and clipping give what a loop of torch alone gives."""

import math
import warnings
from itertools import chain

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import (
    SIZES,
    Blocks,
    Recorder,
    block_weights,
    dp_of,
    joined,
    loader,
    make_blocks,
    make_trainer,
    numbered_rows,
    ranks_of,
    train_plainly,
)

STEPS, SAMPLES = 5, 4


def in_groups(module, first, second):
    """Weights and biases as two groups with settings of their own."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], **first},
        {"params": [p for name, p in named if name.endswith("bias")], **second},
    ]


def adamw(module):
    first = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    second = {"lr": 0.005, "betas": (0.95, 0.99), "eps": 1e-3, "weight_decay": 0.0}
    return torch.optim.AdamW(in_groups(module, first, second))


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.02)


def adam_with_decay(module):
    first, second = {"weight_decay": 0.3}, {"weight_decay": 0.0}
    return torch.optim.Adam(in_groups(module, first, second), lr=0.02)


def sgd(module):
    first, second = {"momentum": 0.9, "weight_decay": 0.2}, {"momentum": 0.5, "lr": 0.02}
    return torch.optim.SGD(in_groups(module, first, second), lr=0.05)


def nesterov(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def amsgrad(module):
    return torch.optim.AdamW(module.parameters(), lr=0.02, amsgrad=True)


def rmsprop(module):
    return torch.optim.RMSprop(module.parameters(), lr=0.01, momentum=0.5)


def adagrad(module):
    return torch.optim.Adagrad(module.parameters(), lr=0.05)


def last_block_apart(module):
    """A group that only the last stage holds anything of."""
    named = [(f".{name}", p) for name, p in module.named_parameters()]
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if ".3." in name], "lr": 0.05},
            {"params": [p for name, p in named if ".3." not in name], "lr": 0.001},
        ],
        weight_decay=0.1,
    )


OPTIMIZERS = [
    adamw,
    adam,
    adam_with_decay,
    sgd,
    nesterov,
    plain_sgd,
    amsgrad,
    rmsprop,
    adagrad,
    last_block_apart,
]


class Rates(L.Callback):
    """Learning rates of the user's optimizer at each step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def fit(layout, make_optimizer, strategy=(), module_class=Blocks, **options):
    """Fits under a layout; returns batches, weights, norms and learning rates of this rank."""
    recorder, rates, module = Recorder(), Rates(), module_class(make_optimizer)
    trainer = make_trainer(
        {**SIZES[layout], **dict(strategy)}, callbacks=[recorder, rates], **options
    )
    data = loader(numbered_rows(STEPS * SAMPLES * dp_of(layout)), SAMPLES)
    trainer.fit(module, data, data)
    return {
        "ids": recorder.ids,
        "weights": block_weights(module),
        "norms": recorder.grad_norms,
        "rates": rates.seen,
        "validated": [values["val_loss"] for values in recorder.validation],
    }


def global_batches(ranks, layout):
    """Sample numbers of each step over all replicas: model-parallel peers hold the same."""
    replicas = {tuple(rank["ids"][0]): rank["ids"] for rank in ranks}
    assert len(replicas) == dp_of(layout)
    return [[list(chain(*parts))] for parts in zip(*replicas.values(), strict=True)]


def assert_like_torch(ranks, layout, make_optimizer, *, compare_norms=True, **options):
    """Compares weights and gradient norms with a loop of torch over the same samples."""
    weights = joined([rank["weights"] for rank in ranks])
    data = numbered_rows(STEPS * SAMPLES * dp_of(layout))
    batches = global_batches(ranks, layout)
    expected, norms = train_plainly(data, batches, make_optimizer, **options)
    assert weights.keys() == expected.keys()
    start = block_weights(make_blocks())
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=2e-6, msg=name)
        assert not torch.allclose(value, start[name], atol=1e-4), f"{name} has hardly moved"
    for rank in ranks if compare_norms else []:
        assert rank["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=lambda f: f.__name__)
def test_every_setting_of_every_group_reaches_the_engine(make_optimizer, layout):
    ranks = run_ranks(fit, ranks_of(layout), layout, make_optimizer)
    assert_like_torch(ranks, layout, make_optimizer)


@pytest.mark.parametrize("make_optimizer", [adamw, adam_with_decay, last_block_apart])
def test_the_distributed_optimizer_under_pipelining(make_optimizer):
    strategy = {"use_distributed_optimizer": True}
    ranks = run_ranks(fit, ranks_of("dp2pp2"), "dp2pp2", make_optimizer, strategy)
    assert_like_torch(ranks, "dp2pp2", make_optimizer)


# ------------------------------------------------------------------------------ schedules


def half_per_step(module):
    optimizer = adamw(module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def cosine_per_epoch(module):
    optimizer = plain_sgd(module)
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def on_plateau(module):
    """No later value is ever good enough, so that every epoch but the first lowers the rate."""
    optimizer = plain_sgd(module)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def optimizer_of(configured):
    if isinstance(configured, dict):
        return configured["optimizer"]
    return configured[0][0] if isinstance(configured, tuple) else configured


def fit_with_schedule(layout, make_optimizer, epochs):
    """Fits with a schedule; returns the fit and torch's complaints about the order of calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = fit(layout, make_optimizer, max_epochs=epochs)
    seen["warnings"] = [str(w.message) for w in caught if "lr_scheduler.step" in str(w.message)]
    return seen


SCHEDULES = {
    "lambda by step": (half_per_step, 1, [[0.02 * 0.5**n, 0.005 * 0.5**n] for n in range(STEPS)]),
    "cosine by epoch": (
        cosine_per_epoch,
        3,
        [[0.05 * (1 + math.cos(math.pi * e / 4))] for e in range(3) for _ in range(STEPS)],
    ),
    "plateau": (on_plateau, 3, [[lr] for lr in (0.1, 0.1, 0.05) for _ in range(STEPS)]),
}


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "dp2pp2"])
@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules_drive_the_engine(case, layout):
    make_optimizer, epochs, rates = SCHEDULES[case]
    ranks = run_ranks(fit_with_schedule, ranks_of(layout), layout, make_optimizer, epochs)
    for rank in ranks:
        assert rank["warnings"] == []
        assert rank["rates"] == [pytest.approx(r) for r in rates]
    if case == "plateau":
        validated = ranks[0]["validated"]
        assert len(set(validated)) == 3
        assert all(rank["validated"] == validated for rank in ranks)
    assert_like_torch(ranks, layout, lambda module: optimizer_of(make_optimizer(module)), lrs=rates)


# ------------------------------------------------------------------------------ clipping


def clip_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 0.05)


def clip_value(params):
    torch.nn.utils.clip_grad_value_(params, 0.01)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "pp2vpp2", "dp2pp2"])
@pytest.mark.parametrize(
    ("limit", "algorithm", "clip"), [(0.05, "norm", clip_norm), (0.01, "value", clip_value)]
)
def test_gradients_are_clipped_over_the_whole_model(limit, algorithm, clip, layout):
    ranks = run_ranks(
        fit,
        ranks_of(layout),
        layout,
        plain_sgd,
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    # Each norm is that of the gradient before it is clipped by norm, but after it is by value.
    assert_like_torch(ranks, layout, plain_sgd, clip=clip, compare_norms=algorithm == "norm")


class ClipsInEvenSteps(Blocks):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        if self.global_step % 2 == 0:
            self.clip_gradients(optimizer, 0.05, "norm")


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_an_override_of_gradient_clipping_decides_at_each_step(layout):
    ranks = run_ranks(fit, ranks_of(layout), layout, plain_sgd, module_class=ClipsInEvenSteps)
    steps = iter(range(STEPS))
    assert_like_torch(
        ranks, layout, plain_sgd, clip=lambda p: clip_norm(p) if next(steps) % 2 == 0 else None
    )


# ------------------------------------------------------------------------------ hooks

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
)


def with_hooks(name):
    def hook(self, *args, **kwargs):
        self.calls.append(name)
        return getattr(super(Hooked, self), name)(*args, **kwargs)

    return hook


class Hooked(Blocks):
    """Notes each hook that Lightning calls around a step."""

    def __init__(self, make_optimizer=None):
        super().__init__(make_optimizer)
        self.calls = []


for _name in HOOKS:
    setattr(Hooked, _name, with_hooks(_name))


def hooks_under_layout(layout):
    module = Hooked(half_per_step)
    trainer = make_trainer(SIZES[layout], limit_train_batches=3, gradient_clip_val=1.0)
    trainer.fit(module, loader(numbered_rows(24), SAMPLES))
    return module.calls


class HookedInOneProcess(Hooked):
    def configure_model(self):
        self.model = make_blocks()


@pytest.mark.parametrize("layout", ["dp2", "pp2vpp2"])
def test_hooks_run_once_per_step_in_lightnings_order(layout):
    module = HookedInOneProcess(half_per_step)
    trainer = L.Trainer(
        strategy=SingleDeviceStrategy("cpu"),
        limit_train_batches=3,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(numbered_rows(24), SAMPLES))
    assert module.calls.count("on_after_backward") == 3
    for calls in run_ranks(hooks_under_layout, ranks_of(layout), layout):
        assert calls == module.calls


# ------------------------------------------------------------------------------ refusals


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters())


def two_optimizers(module):
    return [plain_sgd(module), plain_sgd(module)], []


def refused(make_optimizer):
    trainer = make_trainer({})
    try:
        trainer.fit(Blocks(make_optimizer), loader(numbered_rows(16), 4))
    except (ConfigurationError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def test_an_optimizer_that_evaluates_the_loss_again_is_refused():
    for seen in run_ranks(refused, 2, lbfgs):
        assert seen is not None
        assert seen[0] == "ConfigurationError"
        assert "LBFGS" in seen[1]


def test_several_optimizers_are_refused():
    for seen in run_ranks(refused, 2, two_optimizers):
        assert seen is not None
        assert "optimizer" in seen[1]
