"""Translates ``Trainer(precision=...)`` into dtypes of the engine.

Enters: Lightning's precision plugin. Leaves: an ``MCorePrecision`` plugin that states dtypes, and
through which Lightning's clipping reaches the engine. Nothing here is collective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_mcore.errors import ConfigurationError

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are clipped in one optimizer step; 0 does not clip."""

    norm: float = 0.0
    """Largest 2-norm of the whole gradient over all ranks."""
    value: float = 0.0
    """Largest absolute value of a gradient entry."""


class MCorePrecision(Precision):
    """Dtypes of parameters, gradients and main parameters, by Lightning's precision name.

    ================ ============ ==================== ======================
    name             parameters   gradient reduction   optimizer updates
    ================ ============ ==================== ======================
    ``32-true``      fp32         fp32                 fp32 parameters
    ``bf16-mixed``   bf16         fp32                 fp32 main parameters
    ``bf16-true``    bf16         bf16                 bf16 parameters
    ``16-mixed``     fp16         fp32                 fp32 main parameters, dynamic loss scale
    ================ ============ ==================== ======================

    Plain torch modules under a ``-mixed`` precision keep fp32 parameters and run in autocast, as
    under Lightning's own strategies.
    """

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__()
        if precision not in SUPPORTED:
            raise ConfigurationError(
                f"`precision` ({precision!r}) must be one of {list(SUPPORTED)} with MCoreStrategy;"
                " use bf16-mixed for training in bf16 with fp32 main parameters."
            )
        self.precision = precision  # type: ignore[assignment]
        self.clipping = Clipping()
        """Of the coming optimizer step."""

    @classmethod
    def from_plugin(cls, plugin: Precision | None) -> MCorePrecision | None:
        """Translates Lightning's plugin; ``None`` stays ``None``.

        Raises:
            ConfigurationError: If the plugin is not one of Lightning's own for a supported name.
        """
        if plugin is None or isinstance(plugin, cls):
            return plugin
        if not type(plugin).__module__.startswith("lightning."):
            raise ConfigurationError(
                f"Precision plugin {type(plugin).__name__} cannot run under MCoreStrategy, where"
                " the engine owns dtypes and loss scaling; use Trainer(precision=...) instead."
            )
        return cls(str(plugin.precision))

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of a Megatron model's parameters."""
        if self.precision.startswith("bf16"):
            return torch.bfloat16
        return torch.float16 if self.precision == "16-mixed" else torch.float32

    @property
    def is_mixed(self) -> bool:
        """Whether the optimizer keeps fp32 main parameters."""
        return self.precision.endswith("-mixed")

    def engine_fields(self, *, native: bool) -> dict[str, Any]:
        """Dtype fields of the engine's model config; plain torch modules stay fp32 when mixed."""
        dtype = torch.float32 if native and self.is_mixed else self.params_dtype
        return {
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
        }

    def optimizer_fields(self, *, native: bool) -> dict[str, Any]:
        """Precision fields of the engine's optimizer config."""
        dtypes = self.engine_fields(native=native)
        return {
            "params_dtype": dtypes["params_dtype"],
            "bf16": self.precision == "bf16-mixed" and not native,
            "fp16": self.precision == "16-mixed",
        }

    def convert_native(self, module: nn.Module) -> nn.Module:
        """Converts a plain torch module in place: only ``bf16-true`` changes parameters."""
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module

    def step_context(self, device: torch.device, *, native: bool) -> AbstractContextManager[Any]:
        """Autocast for plain torch modules under mixed precision, nothing for Megatron models."""
        if native and self.is_mixed:
            return torch.autocast(device.type, dtype=self.params_dtype)
        return nullcontext()

    @override
    def convert_input(self, data: Any) -> Any:
        """Casts floating-point tensors of the batch under ``bf16-true``, as Lightning does.

        Under the other precisions the batch stays as it is: autocast, or the engine's first stage,
        converts what it takes.
        """
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(
            data, Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t
        )

    @override
    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Notes the clipping of this step for the engine, whose buffers hold the gradients."""
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
        limit = float(clip_val or 0.0)
        self.clipping = Clipping(value=limit) if algorithm == "value" else Clipping(norm=limit)
