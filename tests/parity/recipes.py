"""Models and optimizers that every layout and the one process are given alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

STEPS = 5
GLOBAL_BATCH = 8

EPS = 1e-3
"""Of Adam. Gradients that are zero but for rounding (an attention's key bias) would otherwise be
blown up to whole steps of random sign."""

Named = Iterable[tuple[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained and how, whatever the layout."""

    tied: bool = False
    experts: int | None = None
    moe: tuple[tuple[str, Any], ...] = ()
    """Further fields of the engine's config for the experts, as pairs."""
    optimizer: str = "adamw"
    clip: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1
    precision: str = "32-true"

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return STEPS * self.accumulate * GLOBAL_BATCH


def _adamw(named: Named) -> torch.optim.Optimizer:
    params = [param for _, param in named]
    return torch.optim.AdamW(params, lr=5e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=EPS)


def _adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for _, param in named], lr=5e-3, eps=EPS)


def _adam_l2(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for _, param in named], lr=5e-3, weight_decay=0.1, eps=EPS)


def _sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for _, param in named], lr=0.1, momentum=0.9, weight_decay=0.01)


def _rmsprop(named: Named) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([param for _, param in named], lr=1e-3, eps=EPS, weight_decay=0.01)


def _adagrad(named: Named) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([param for _, param in named], lr=1e-2, eps=EPS)


def _groups(named: Named) -> torch.optim.Optimizer:
    """Two groups with settings of their own, both on every stage."""
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for _, p in named if p.dim() <= 1], "lr": 2e-2, "weight_decay": 0.0},
        ],
        lr=5e-3,
        eps=EPS,
    )


def _embedding_group(named: Named) -> torch.optim.Optimizer:
    """A group that is empty on every stage but the first."""
    named = list(named)
    embedding = [p for n, p in named if "embedding" in n]
    rest = [p for n, p in named if "embedding" not in n]
    return torch.optim.AdamW(
        [{"params": embedding, "lr": 2e-2, "weight_decay": 0.0}, {"params": rest}],
        lr=5e-3,
        weight_decay=0.1,
        eps=EPS,
    )


OPTIMIZERS: Mapping[str, Callable[[Named], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "adam_l2": _adam_l2,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "groups": _groups,
    "embedding_group": _embedding_group,
}


def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """A learning rate that differs in every step."""
    return LambdaLR(optimizer, lambda step: (step + 1) / (step + 2))


def global_batch(data: Any, index: int) -> list[Any]:
    """Samples of the batch that all data-parallel ranks draw together."""
    return [data[i] for i in range(index * GLOBAL_BATCH, (index + 1) * GLOBAL_BATCH)]
