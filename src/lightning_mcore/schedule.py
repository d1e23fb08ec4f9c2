"""Runs the user's step under the engine's schedules.

Enters: a step function, a plan of microbatches and the wrapped chunks. Leaves: what the step
returned per microbatch on the last stage, with its log. All ranks of a model-parallel group call
``StepRunner`` together, in training all ranks of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_mcore._mcore import engine
from lightning_mcore.batch import Microbatch, Run
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.randomness import StepRandomness
from lightning_mcore.stage import ModelCall, Pipeline, StageEnd, observe_call, run_chunk
from lightning_mcore.step_log import StepLog
from lightning_mcore.watch.progress import Progress

StepFunction = Callable[[Any], Any]
"""Runs the user's step on one microbatch."""


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """What the user's step returned for one microbatch, on the last stage."""

    value: Any
    samples: int


class StepRunner:
    """Runs steps under the schedule that fits the layout.

    Args:
        pipeline: The model that the user's step calls, or ``None`` for a plain LightningModule,
            which is its own single chunk and need not call anything.
        chunks: Wrapped chunks of this rank, in pipeline order.
        device: Of this rank.
        step_context: Opens the context in which a step runs (autocast).
        seq_length: Tokens, where the model call does not show them.
        randomness: Random streams, where the model has several stages.
        progress: Where each microbatch is noted.
    """

    def __init__(
        self,
        pipeline: Pipeline | None,
        chunks: Sequence[nn.Module],
        *,
        device: torch.device,
        step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        seq_length: int | None = None,
        randomness: StepRandomness | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress or Progress()
        self._randomness = randomness
        self._pipeline = pipeline
        self._chunks = list(chunks)
        self._device = device
        self._step_context = step_context
        self._seq_length = seq_length
        self._shapes: dict[Any, tuple[int, int]] = {}

    def train(
        self,
        step: StepFunction,
        run: Run,
        log: StepLog,
        *,
        loss_scale: float,
        sync: bool,
        may_skip: bool = False,
    ) -> list[MicrobatchOutput]:
        """Forward and backward of one batch; gradients end up in the engine's buffers.

        Args:
            step: The user's training step.
            run: Microbatches of the batch.
            log: Where its log calls go.
            loss_scale: Factor on the loss before the backward pass (1 / accumulated batches).
            sync: Whether to reduce gradients over data parallel at the end; not in the earlier
                batches of an accumulation.
            may_skip: Whether the step may return ``None`` for no loss: in one process only.
        """

        def on_last(output: Any, microbatch: Microbatch) -> tuple[Tensor, Callable[..., Any]]:
            if output is None and may_skip:
                nothing = torch.zeros((), device=self._device, requires_grad=True)
                return nothing * 1.0, lambda scaled: (scaled, None)
            loss = loss_of(output)
            log.add_loss(loss, microbatch.size)
            # Without its graph, which would otherwise live until the last microbatch is done.
            kept = apply_to_collection(output, Tensor, Tensor.detach)
            record = MicrobatchOutput(kept, microbatch.size)
            # A new tensor: the schedule scales it in place.
            return loss * 1.0, lambda scaled: (scaled, record)

        changes: dict[str, Any] = {}
        if loss_scale != 1.0:
            # Through the engine's hook rather than on the loss, so that it reaches the auxiliary
            # losses of expert layers as well.
            config: Any = self._chunks[0].config
            engine_scale = config.grad_scale_func
            changes["grad_scale_func"] = lambda value: engine_scale(value) * loss_scale
        if not sync:
            changes |= dict.fromkeys(
                ("finalize_model_grads_func", "grad_sync_func", "no_sync_func")
            )
        with ExitStack() as stack:
            if not sync:
                for context in engine.without_sync(self._chunks):
                    stack.enter_context(context)
            stack.enter_context(self._config_changed(changes))
            return self._run(step, run, log, on_last, forward_only=False)

    def evaluate(
        self, step: StepFunction, runs: Sequence[Run], log: StepLog
    ) -> list[MicrobatchOutput]:
        """Forward of one batch, without gradients."""

        def on_last(output: Any, microbatch: Microbatch) -> tuple[Tensor, Callable[..., Any]]:
            record = MicrobatchOutput(output, microbatch.size)
            # The engine wants a tensor here; the step's own output can be anything.
            return torch.zeros((), device=self._device), lambda _, non_loss_data: record

        outputs: list[MicrobatchOutput] = []
        # Lightning evaluates in inference mode, whose tensors may be cached inside the model
        # (rotary embeddings, masks) and then fail in the next backward pass.
        with torch.inference_mode(False), torch.no_grad():
            for run in runs:
                outputs += self._run(step, run, log, on_last, forward_only=True)
        return outputs

    def _run(
        self,
        step: StepFunction,
        run: Run,
        log: StepLog,
        on_last: Callable[[Any, Microbatch], tuple[Tensor, Callable[..., Any]]],
        *,
        forward_only: bool,
    ) -> list[MicrobatchOutput]:
        def forward_step(iterator: Any, chunk: nn.Module) -> tuple[Any, Any]:
            index, microbatch = next(iterator)
            self._progress.enter(self._progress.phase, index)
            if self._randomness is not None:
                self._randomness.begin_step(index)
            output, ended = self._call(step, chunk, microbatch, log)
            if not ended:
                return on_last(output, microbatch)
            if microbatch.is_filler and output is not None and self._is_last(chunk):
                return torch.zeros((), device=self._device), lambda *_, **__: None
            return output, None

        with self._randomness.schedule() if self._randomness is not None else nullcontext():
            seq_length, micro_batch_size = self._activation_shape(step, run)
            records = engine.run_schedule(
                forward_step,
                self._chunks,
                [iter(enumerate(run.microbatches)) for _ in self._chunks],
                num_microbatches=len(run.microbatches),
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
            )
        return [record for record in records if record is not None]

    def _call(
        self, step: StepFunction, chunk: nn.Module, microbatch: Microbatch, log: StepLog
    ) -> tuple[Any, bool]:
        """Runs the step on one chunk; tells whether it ended at the model call."""
        if self._pipeline is None:
            with self._step_context(), log.microbatch(microbatch.size):
                return step(microbatch.data), False
        is_last = self._is_last(chunk)
        counts = is_last and not microbatch.is_filler
        handler, was_called = run_chunk(
            chunk,
            is_last=is_last,
            is_whole=self._pipeline.stages[0].count == 1,
            drop_output=microbatch.is_filler,
            around=self._randomness.chunk if self._randomness is not None else nullcontext,
        )
        with (
            self._pipeline.handling(handler),
            self._step_context(),
            log.microbatch(microbatch.size if counts else None),
        ):
            try:
                output = step(microbatch.data)
            except StageEnd as end:
                return end.output, True
        if not was_called():
            raise ConfigurationError(
                "The step returned without calling the model that strategy.build gave; call it once"
                " on every rank, before any code that is to run on the last stage only."
            )
        return output, False

    def _is_last(self, chunk: nn.Module) -> bool:
        assert self._pipeline is not None
        return self._pipeline.stages[self._chunks.index(chunk)].is_last

    def _activation_shape(self, step: StepFunction, run: Run) -> tuple[int, int]:
        """Sequence length and micro-batch size for the engine, seen in the model call.

        The step is run up to its model call once per new shape of the batch; every rank sees the
        same, since the code before the call runs on every stage.
        """
        size = run.micro_batch_size
        if self._pipeline is None or self._pipeline.stages[0].count == 1:
            return self._seq_length or 1, size
        if self._seq_length is not None:
            return self._seq_length, size
        signature = _shape_signature(run.microbatches[0].data)
        if signature not in self._shapes:
            self._shapes[signature] = self._observe(step, run.microbatches[0].data)
        return self._shapes[signature]

    def _observe(self, step: StepFunction, data: Any) -> tuple[int, int]:
        assert self._pipeline is not None
        with (
            torch.random.fork_rng(devices=[] if self._device.type == "cpu" else [self._device]),
            self._pipeline.handling(observe_call),
            self._step_context(),
        ):
            try:
                step(data)
            except ModelCall as call:
                return self._pipeline.activation_shape(call.args_of_call, call.kwargs_of_call)
        raise ConfigurationError(
            "The step returned without calling the model that strategy.build gave; call it once."
        )

    @contextmanager
    def _config_changed(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Changes the schedule's own config (a copy of the chunks') for one call."""
        configs = list({id(chunk.config): chunk.config for chunk in self._chunks}.values())
        saved = [{name: getattr(config, name) for name in changes} for config in configs]
        for config in configs:
            for name, value in changes.items():
                setattr(config, name, value)
        try:
            yield
        finally:
            for config, values in zip(configs, saved, strict=True):
                for name, value in values.items():
                    setattr(config, name, value)


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        ConfigurationError: If there is none, or it is not a scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            "training_step must return the loss as a tensor, or a dict with key 'loss', for every"
            f" microbatch, but returned {type(output).__name__}; a step cannot be skipped under"
            " this strategy, since other ranks wait for its gradients."
        )
    if loss.numel() != 1:
        raise ConfigurationError(
            f"The loss must be a scalar, but has shape {tuple(loss.shape)}; return its mean."
        )
    return loss


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
