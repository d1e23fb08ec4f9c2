"""A gradient norm that reaches the host while it makes ready to step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore._mcore.checkpointing import parts_of

__all__ = ["LateNorm"]


class LateNorm:
    """Reads a gradient norm just before the first kernel of Adam that changes a parameter.

    Reading it at once would leave the GPU idle for what the host does from there to that kernel:
    clipping, and lists of hundreds of tensors for TransformerEngine's Adam, milliseconds in all.

    Args:
        adams: TransformerEngine's, in the order of their steps.
    """

    def __init__(self, adams: Sequence[Any]) -> None:
        self._adams = [weakref.ref(adam) for adam in adams]
        self._act: Callable[[float], None] | None = None
        self._norm: Tensor | None = None
        self._arrival: Any = None
        self._counts: list[tuple[dict[str, Any], Any]] = []
        for adam in adams:
            for name, kernel in list(vars(adam).items()):
                if name.startswith("multi_tensor_adam"):
                    setattr(adam, name, partial(self._settle_before, kernel))

    @classmethod
    def of(cls, optimizer: Any, device: torch.device) -> LateNorm | None:
        """For an engine optimizer that TransformerEngine's Adam steps on every rank, else ``None``.

        Collective over the world. Ranks must all read the norm early or all late: the engine has
        collectives between, on the groups of norms (optimizer.py, has_grad_norm_group), and after
        the step of a part. So each needs a kernel in its first part, before any of the latter.
        """
        te = sys.modules.get("transformer_engine.pytorch.optimizers")
        if te is None:
            return None
        first = getattr(optimizer, "chained_optimizers", [optimizer])[:1]
        stepped = parts_of(optimizer)
        adams: list[Any] = [getattr(part, "optimizer", None) for part in stepped]
        fits = (
            bool(stepped)
            and stepped[:1] == first
            and all(type(adam) is te.FusedAdam and not adam.capturable for adam in adams)
            and any(p.numel() for group in adams[0].param_groups for p in group["params"])
        )
        on_all = torch.tensor(int(fits), device=device)
        dist.all_reduce(on_all, op=dist.ReduceOp.MIN)
        return cls(adams) if on_all.item() else None

    def expect(self, norm: Tensor, act: Callable[[float], None]) -> Tensor:
        """Starts the norm on its way to the host.

        Args:
            norm: Of one element.
            act: Called with it before a parameter changes. An exception of its ends the step; the
                optimizers have then counted none.

        Returns:
            The norm to clip by. For one that is not finite 0, which leaves gradients as they are.
        """
        self._act = act
        self._counts = [
            (group, group.get("step"))
            for adam in (reference() for reference in self._adams)
            if adam is not None
            for group in adam.param_groups
        ]
        if norm.is_cuda:
            self._norm = torch.empty(norm.shape, dtype=norm.dtype, device="cpu", pin_memory=True)
            self._norm.copy_(norm, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()
        else:
            self._norm = norm.detach().clone()
        return torch.where(norm.isfinite(), norm, 0.0)

    def settle(self) -> float | None:
        """Waits for the norm that was expected and returns it; acts on it, unless a kernel did."""
        if self._norm is None:
            return None
        if self._arrival is not None:
            self._arrival.synchronize()
        norm = float(self._norm)
        act, self._act = self._act, None
        if act is not None:
            try:
                act(norm)
            except BaseException:
                self._take_back_counts()
                raise
        return norm

    def forget(self) -> None:
        """Expects nothing any more."""
        self._act = self._norm = self._arrival = None
        self._counts = []

    def _settle_before(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._act is not None:
            self.settle()
        return kernel(*args, **kwargs)

    def _take_back_counts(self) -> None:
        for group, count in self._counts:
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = count
