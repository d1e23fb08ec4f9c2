"""The shape of the activations between stages, seen in the model call of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.batch import Run
from lightning_mcore.context import SequenceShard, check_model_call
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.stage import ModelCall, Pipeline, observe_call

__all__ = ["ActivationShapes", "model_call_of"]


def model_call_of(
    pipeline: Pipeline,
    step: Callable[[Any], Any],
    data: Any,
    step_context: Callable[[], AbstractContextManager[Any]],
) -> ModelCall:
    """Runs the step on a microbatch up to its model call, and returns the call's arguments.

    Raises:
        ConfigurationError: If the step returns without calling the model.
    """
    with pipeline.handling(observe_call), step_context():
        try:
            step(data)
        except ModelCall as call:
            return call
    raise ConfigurationError(
        "The step returned without calling the model that strategy.build gave; call it once."
    )


class ActivationShapes:
    """Tells the engine sequence length and micro-batch size; remembers them by shape of the batch.

    Args:
        pipeline: The model that the user's step calls; ``None`` for a plain LightningModule.
        shard: Cuts each microbatch along the sequence, under context parallelism.
        device: Of this rank.
        step_context: Opens the context in which a step runs.
        seq_length: Tokens, where the model call does not show them.
        check: Called with the sequence length and size of each new shape of microbatch.
    """

    def __init__(
        self,
        pipeline: Pipeline | None,
        shard: SequenceShard,
        *,
        device: torch.device,
        step_context: Callable[[], AbstractContextManager[Any]],
        seq_length: int | None,
        check: Callable[[int, int], None] | None,
    ) -> None:
        self._pipeline = pipeline
        self._shard = shard
        self._device = device
        self._step_context = step_context
        self._seq_length = seq_length
        self._check = check
        self._shapes: dict[Any, tuple[int, int]] = {}

    def __call__(
        self, step: Callable[[Any], Any], run: Run, *, forward_only: bool
    ) -> tuple[int, int]:
        """Sequence length and micro-batch size for the engine.

        The step is run up to its model call once per new shape of the batch; every rank sees the
        same, since the code before the call runs on every stage.
        """
        size = run.micro_batch_size
        if self._pipeline is None:
            return self._seq_length or 1, size
        told = self._seq_length is not None or self._pipeline.stages[0].count == 1
        if told and self._shard.cp == 1 and self._check is None:
            return self._seq_length or 1, size
        data = run.microbatches[0].data
        # Training and validation steps are two pieces of code to check, though of one shape.
        signature = (_shape_signature(data), forward_only and self._shard.cp > 1)
        if signature not in self._shapes:
            self._shapes[signature] = self._look(self._pipeline, step, data, size, told=told)
        return self._shapes[signature]

    def _look(
        self, pipeline: Pipeline, step: Callable[[Any], Any], data: Any, size: int, *, told: bool
    ) -> tuple[int, int]:
        with torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]):
            call = model_call_of(pipeline, step, data, self._step_context)
        if self._shard.cp > 1 and self._shard.hook is None:
            check_model_call(call.args_of_call, call.kwargs_of_call, data)
        shape = (self._seq_length or 1, size)
        if not told or self._check is not None:
            shape = self._seen(pipeline, call, shape)
        if self._check is not None:
            self._check(*shape)
        return shape

    def _seen(self, pipeline: Pipeline, call: ModelCall, told: tuple[int, int]) -> tuple[int, int]:
        """Sequence length and size of the microbatch behind a model call, else what was told."""
        try:
            seen = pipeline.activation_shape(call.args_of_call, call.kwargs_of_call)
        except ConfigurationError:
            if self._seq_length is None:
                raise
            return told
        # The engine takes the length of the whole sequence (schedules.py, get_tensor_shapes), and
        # the call shows a shard.
        return seen[0] * self._shard.cp, seen[1]


def _shape_signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, Mapping):
        return tuple((key, _shape_signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_shape_signature(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return tuple(_shape_signature(getattr(value, name)) for name in value.__dataclass_fields__)
    return type(value).__name__
