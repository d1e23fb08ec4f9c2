"""Gradients as the hooks of a step see them.

Gradients live in the engine's buffers, and hooks know ``param.grad``, which would be ``None``: read
as "no gradient", it turns clipping by hand, gradient noise and logged norms into nothing at all.
Where a rank holds whole gradients, ``param.grad`` is a view of them from the backward pass to the
optimizer step; elsewhere, using it is an error that says what to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout
from lightning_mcore.precision import MCorePrecision

__all__ = ["HookGradients", "looks_at_gradients", "why_not_whole"]

_OF_MODULE = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
_OF_CALLBACK = ("on_after_backward", "on_before_optimizer_step")


def looks_at_gradients(module: pl.LightningModule, callbacks: Iterable[object]) -> bool:
    """Whether code of the user runs between the backward pass and the optimizer step."""
    return any(is_overridden(name, module, pl.LightningModule) for name in _OF_MODULE) or any(
        is_overridden(name, callback, pl.Callback)
        for callback in callbacks
        if isinstance(callback, pl.Callback)
        for name in _OF_CALLBACK
    )


def why_not_whole(layout: Layout, precision: MCorePrecision, *, sharded: bool) -> str | None:
    """Why no hook can use ``param.grad``, and what to do; ``None`` where gradients are whole.

    Args:
        layout: Sizes.
        precision: Of the run.
        sharded: Whether the distributed optimizer is in use.
    """
    if str(precision.precision) == "16-mixed":
        return (
            "fp16 gradients are multiplied by the loss scale until the engine's step; use"
            " bf16-mixed to change gradients yourself"
        )
    if sharded and layout.dp_cp > 1:
        return (
            "the distributed optimizer reduces gradients only into the shard that a rank updates;"
            " set use_distributed_optimizer=False to change gradients yourself"
        )
    if layout.model_parallel_size > 1 or layout.ep > 1:
        return (
            f"with tp ({layout.tp}), pp ({layout.pp}), ep ({layout.ep}) a rank holds a part of the"
            " model, whose norms are not those of the whole; use `param.main_grad` for what works"
            " entry by entry"
        )
    return None


class HookGradients:
    """Shows gradients to the hooks of a step.

    Args:
        chunks: Wrapped in the engine's DDP; none where no hook looks.
        why_not: From ``why_not_whole``.
    """

    def __init__(self, chunks: Sequence[nn.Module] = (), why_not: str | None = None) -> None:
        self._params: list[tuple[str, Any]] = [
            (name, param)
            for chunk in chunks
            for name, param in chunk.named_parameters()
            if param.requires_grad and hasattr(param, "main_grad")
        ]
        self._elsewhere = {
            name: _Elsewhere(param, why_not or _OTHER_DTYPE)
            for name, param in self._params
            if why_not is not None or param.main_grad.dtype != param.dtype
        }
        self._shown = False

    def show(self) -> None:
        """Before the hooks that follow the backward pass."""
        for name, param in self._params:
            shown = self._elsewhere.get(name)
            param.grad = param.main_grad if shown is None else shown
        self._shown = True

    def hide(self) -> None:
        """Before the engine uses its gradients: takes over what hooks assigned.

        Raises:
            ConfigurationError: If a hook removed a gradient, or assigned one where it is not whole.
        """
        if not self._shown:
            return
        for name, param in self._params:
            found, stands_for = param.grad, self._elsewhere.get(name)
            if found is None:
                self.drop()
                raise ConfigurationError(
                    f"A hook removed the gradient of `{name}`, but the engine updates every"
                    " parameter; use `param.grad.zero_()`, with a learning rate of 0 where weight"
                    " decay or momentum shall not move it either."
                )
            if stands_for is not None:
                if found is not stands_for:
                    self.drop()
                    raise ConfigurationError(_text(stands_for.why))
            elif found is not param.main_grad:
                with torch.no_grad():
                    param.main_grad.copy_(found)
        self.drop()

    def drop(self) -> None:
        """Leaves parameters without ``grad``, as the engine expects them."""
        self._shown = False
        for _, param in self._params:
            param.grad = None


_OTHER_DTYPE = (
    "gradients are accumulated in another dtype than the parameters'; use `param.main_grad`"
)


def _text(why: str) -> str:
    return (
        f"A hook used `param.grad`, but {why}. Trainer(gradient_clip_val=...) clips by the norm of"
        " the whole gradient, which strategy.step_stats.grad_norm tells after each step and"
        " callbacks.OptimizerStats logs."
    )


class _Elsewhere(Tensor):
    """Stands where no gradient can be shown; any use of it is an error. Holds no memory."""

    why: str

    @staticmethod
    def __new__(cls, like: Tensor, why: str) -> _Elsewhere:
        self = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.why = why
        return self

    def __init__(self, like: Tensor, why: str) -> None: ...

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        used = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is _Elsewhere]
        raise ConfigurationError(_text(used[0].why if used else _OTHER_DTYPE))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]
