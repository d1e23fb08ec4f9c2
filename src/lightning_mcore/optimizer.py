"""Turns the torch optimizer of ``configure_optimizers`` into the engine's.

The user's optimizer stays what Lightning, LR schedulers and callbacks hold: its parameter groups
are the settings. The engine's optimizer, which owns gradients, main parameters and state, takes
learning rate, betas and weight decay from them before every step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mcore._mcore import checkpointing, engine
from lightning_mcore._mcore.late_norm import LateNorm
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.frames import with_room_for_frames
from lightning_mcore.precision import Clipping
from lightning_mcore.switches import Switches

_COPIED = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov")
_FLAGS_THE_ENGINE_LACKS = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True, slots=True)
class StepStats:
    """Outcome of one optimizer step, the same on every rank."""

    norm: float | Tensor | None
    """2-norm of the whole gradient before clipping, as the engine gives it: on a GPU a 0-dim tensor
    that may not be computed yet. ``None`` if fp16 gradients overflowed or there was no loss."""
    num_zeros: int | None
    """Zero gradient entries, where the engine was asked to count them."""
    skipped: bool
    """Whether no parameter changed: fp16 gradients overflowed, or ``nonfinite="skip"`` acted."""
    loss_scale: float | Tensor | None = None
    """Factor on the loss in this step's backward pass, in fp16; on a GPU a tensor there."""

    @property
    def grad_norm(self) -> float | None:
        """``norm`` as a number; reading it waits for the device."""
        return None if self.norm is None else float(self.norm)


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Which engine optimizer matches: ``adamw``, ``adam``, ``adam_l2``, ``sgd`` or ``other``.

    ``adam`` is torch's Adam without weight decay, where it equals AdamW; ``adam_l2`` adds the decay
    to the gradient. ``other`` is run by the engine as it is, without sharding its state.
    """
    groups = optimizer.param_groups
    if any(group.get(flag) for group in groups for flag in _FLAGS_THE_ENGINE_LACKS):
        return "other"
    if type(optimizer) is torch.optim.AdamW:
        return "adamw"
    if type(optimizer) is torch.optim.Adam:
        if all(group.get("decoupled_weight_decay") for group in groups):
            return "adamw"
        return "adam_l2" if any(group["weight_decay"] for group in groups) else "adam"
    return "sgd" if type(optimizer) is torch.optim.SGD else "other"


class _SkipStep(Exception):
    """Leaves the engine's step before it changes anything."""

    def __init__(self, norm: float) -> None:
        super().__init__(norm)
        self.norm = norm


class EngineOptimizer:
    """The engine's optimizer, driven by the user's torch optimizer.

    Args:
        torch_optimizer: From ``configure_optimizers``.
        chunks: Chunks wrapped in the engine's DDP.
        fields: Fields of the engine's OptimizerConfig.
        names: Parameter names by id, for messages.
        tensor_parallel: Ranks that share a parameter.

    Attributes:
        on_nonfinite: Called on all ranks with a gradient norm that is not finite, before anything
            changes; returns whether to go on with the step.
        may_go_on: Whether that can be; then it is called before gradients are clipped.

    Raises:
        ConfigurationError: If a trainable parameter is in no group of the optimizer.
    """

    def __init__(
        self,
        torch_optimizer: torch.optim.Optimizer,
        chunks: Sequence[nn.Module],
        fields: Mapping[str, Any],
        names: Mapping[int, str],
        *,
        tensor_parallel: int = 1,
    ) -> None:
        _check_steps_without_closure(torch_optimizer)
        _check_fits_shards(torch_optimizer, tensor_parallel)
        self.kind = optimizer_kind(torch_optimizer)
        self._torch = torch_optimizer
        self._steps_engine = False
        self._guard = torch_optimizer.register_step_pre_hook(self._check_steps_engine)
        self._chunks: list[Any] = list(chunks)
        groups = [group["params"] for group in torch_optimizer.param_groups]
        _check_all_optimized(groups, names)
        config = engine.optimizer_config({**_engine_fields(self.kind, torch_optimizer), **fields})
        self.engine = (
            engine.wrap_torch_optimizer(torch_optimizer, config)
            if self.kind == "other"
            else engine.build_optimizer(config, chunks, groups)
        )
        self.on_nonfinite: Callable[[float], bool] = lambda norm: True
        self.may_go_on = True
        self._measure_norm = self.engine.get_grad_norm
        # Between this call and the first change of a parameter the engine calls nothing of ours
        # (optimizer.py, ChainedOptimizer.step).
        self.engine.get_grad_norm = self._checked_norm
        self._config = config
        self._value_limit = 0.0
        self._low_precision = config.params_dtype != torch.float32 and not (
            config.bf16 or config.fp16
        )
        # The others read it, or whether it is finite, before the step in any case.
        may_be_late = not (self._low_precision or config.fp16 or self.kind == "other")
        device = next(param.device for params in groups for param in params)
        self._late_norm = LateNorm.of(self.engine, device) if may_be_late else None

    @property
    def runs_torch_optimizer(self) -> bool:
        """Whether the engine steps the user's own optimizer object."""
        return self.kind == "other"

    def close(self) -> None:
        """Lets the user's optimizer step on its own again."""
        self._guard.remove()

    def through_torch(self, step: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs ``step``, which steps the engine, as the closure of the user's optimizer.

        So the hooks of that optimizer run around the engine's step. Holding no gradients, it
        changes nothing itself; where the engine steps this very optimizer, that is not done twice.
        """

        def without_grads_after() -> Any:
            try:
                return step()
            finally:
                # Also after a step that was left out.
                self._drop_grads()

        self._steps_engine = True
        try:
            if self.runs_torch_optimizer:
                return step()
            return self._torch.step(without_grads_after, **kwargs)
        finally:
            self._steps_engine = False

    def _check_steps_engine(self, *_: Any) -> None:
        if not self._steps_engine:
            raise ConfigurationError(
                "step() was called on the torch optimizer itself, which holds no gradients, so that"
                " nothing would be trained; call step() of the optimizer that Lightning hands to"
                " `optimizer_step`, not of its `.optimizer`."
            )

    def _drop_grads(self) -> None:
        """Leaves the user's optimizer without gradients, so that its own step changes nothing."""
        for group in self._torch.param_groups:
            for param in group["params"]:
                # The engine's fp32 step leaves its buffer there (optimizer.py, FP32Optimizer).
                param.grad = None

    def reload_main_parameters(self) -> None:
        """Takes main parameters anew from the model's parameters, which have changed."""
        checkpointing.reload_main_parameters(self.engine)

    def zero_grad(self) -> None:
        """Clears the engine's gradient buffers, before the first batch of an optimizer step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.engine.zero_grad()

    @with_room_for_frames
    def step(self, clipping: Clipping) -> StepStats:
        """Clips, steps and, with the distributed optimizer, starts gathering parameters.

        Collective over the world.

        Args:
            clipping: Of this step.
        """
        try:
            read_norm = self._clip_low_precision(clipping.norm) if self._low_precision else None
        except _SkipStep as skip:
            return StepStats(norm=skip.norm, num_zeros=None, skipped=True)
        self._config.clip_grad = 0.0 if self._low_precision else clipping.norm
        self._value_limit = clipping.value
        if not self.runs_torch_optimizer:
            self._copy_settings()
        # Before the step, which changes it: a new tensor then, so this one stays as it is.
        loss_scale = self.engine.get_loss_scale() if self._config.fp16 else None
        try:
            successful, grad_norm, num_zeros = self.engine.step()
            if self._late_norm is not None:
                read_norm = self._late_norm.settle()
        except _SkipStep as skip:
            return StepStats(norm=skip.norm, num_zeros=None, skipped=True, loss_scale=loss_scale)
        finally:
            if self._late_norm is not None:
                self._late_norm.forget()
        return StepStats(
            norm=grad_norm if read_norm is None else read_norm,
            num_zeros=None if num_zeros is None else int(num_zeros),
            skipped=not successful,
            loss_scale=loss_scale,
        )

    def _checked_norm(self) -> Any:
        """The engine's gradient norm, which every rank holds alike; then clips by value.

        It is a number but for engines with TransformerEngine's tensor kernels, where it is read
        before parameters change: here, or after what the host still has to do for that.
        """
        norm = self._measure_norm()
        clips_values = self._value_limit > 0.0
        at_once = self.may_go_on or clips_values or not isinstance(norm, Tensor)
        if self._late_norm is not None and not at_once:
            return self._late_norm.expect(norm, self._check_norm)
        self._check_norm(float(norm))
        if clips_values:
            # Not before: Inf would become the limit, and pass for a gradient.
            engine.clamp_gradients(self.engine, self._value_limit)
        return norm

    def _check_norm(self, norm: float) -> None:
        if not math.isfinite(norm) and not self.on_nonfinite(norm):
            raise _SkipStep(norm)

    def _clip_low_precision(self, limit: float) -> float | None:
        """Clips bf16 gradients, which the engine's clip_grads.py refuses; returns their norm."""
        if limit <= 0.0:
            return None
        self.engine.prepare_grads()
        norm = float(self.engine.get_grad_norm())
        if norm > limit:
            for chunk in self._chunks:
                chunk.scale_gradients(limit / (norm + 1e-6))
        return norm

    def _copy_settings(self) -> None:
        for group in self.engine.param_groups:
            settings = self._torch.param_groups[group[engine.GROUP_LABEL]]
            if self.kind == "adam" and settings["weight_decay"]:
                raise ConfigurationError(
                    f"`weight_decay` ({settings['weight_decay']}) of torch's Adam must not start at"
                    " 0 and change later: the engine was built for none, and would decay weights as"
                    " AdamW does; use AdamW, or a weight decay from the start."
                )
            group.update(
                {key: settings[key] for key in _COPIED if key in settings and key in group}
            )


def _engine_fields(kind: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the engine's config says of the optimizer; per-group values follow at every step."""
    group = optimizer.param_groups[0]
    fields: dict[str, Any] = {"optimizer": "sgd" if kind == "sgd" else "adam", "lr": group["lr"]}
    if "weight_decay" in group:
        fields["weight_decay"] = group["weight_decay"]
    if kind == "sgd":
        fields["sgd_momentum"] = group["momentum"]
    elif kind != "other":
        fields["adam_beta1"], fields["adam_beta2"] = group["betas"]
        fields["adam_eps"] = group["eps"]
        fields["decoupled_weight_decay"] = kind != "adam_l2"
    return fields


def _check_fits_shards(optimizer: torch.optim.Optimizer, tensor_parallel: int) -> None:
    """Refuses optimizers that look at whole matrices, of which a rank holds a part."""
    name = type(optimizer).__name__
    if tensor_parallel > 1 and name in ("Adafactor", "Muon", "Shampoo", "SOAP"):
        raise ConfigurationError(
            f"{name} works on whole matrices, but with `tp` ({tensor_parallel}) a rank holds only"
            " its shard of them, which would change the update; use AdamW, or tp=1."
        )


def _check_steps_without_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the loss itself, through the closure that its"
            " step() requires, but the engine runs forward and backward once per step; use an"
            " optimizer whose step() needs no closure, such as AdamW or SGD."
        )


def _check_all_optimized(groups: Sequence[Sequence[Any]], names: Mapping[int, str]) -> None:
    optimized = {id(param) for params in groups for param in params}
    missing = [name for key, name in names.items() if key not in optimized]
    if missing:
        raise ConfigurationError(
            f"{len(missing)} trainable parameters are in no group of the optimizer: {missing[:8]};"
            " add them, or freeze them with requires_grad_(False), since the engine updates every"
            " parameter that requires a gradient."
        )


def build_training(
    chunks: Sequence[nn.Module],
    config: Any,
    torch_optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    switches: Switches,
    ddp_fields: Mapping[str, Any],
    optimizer_fields: Mapping[str, Any],
) -> tuple[list[nn.Module], EngineOptimizer]:
    """Wraps chunks in the engine's DDP and builds their optimizer. Collective over the world.

    Args:
        chunks: In model precision.
        config: Their config, our own copy; it receives the schedule's hooks.
        torch_optimizer: From ``configure_optimizers``.
        names: Trainable parameters by id.
        switches: Effective values.
        ddp_fields: Of the engine's DDP config.
        optimizer_fields: Of the engine's optimizer config.
    """
    wrapped = engine.wrap_ddp(chunks, config, ddp_fields)
    optimizer = EngineOptimizer(
        torch_optimizer,
        wrapped,
        optimizer_fields,
        names,
        tensor_parallel=config.tensor_model_parallel_size,
    )
    engine.set_schedule_hooks(
        config, wrapped, optimizer.engine, overlap=switches.overlap_grad_reduce.effective
    )
    return wrapped, optimizer
