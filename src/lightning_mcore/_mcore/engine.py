"""Engine calls that wrap chunks, and run schedules and optimizers.

What enters and leaves are plain values and torch modules; which ranks must call is
said per function. Everything here exists on megatron-core 0.16.1 and 0.19.2 unless noted.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    # Missing Apex/TransformerEngine is announced at import, once per module; the run header
    # states it once instead.
    warnings.simplefilter("ignore")
    from megatron.core import __version__ as _engine_version
    from megatron.core import optimizer as engine_optimizer
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MegatronOptimizer,
    )
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.schedules import get_schedule_table
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore._mcore.chained import is_expert, measure_experts_apart, share_loss_scale
from lightning_mcore._mcore.cuda_graphs import side_stream
from lightning_mcore._mcore.patching import Patches
from lightning_mcore.errors import ConfigurationError

ENGINE_VERSION: str = _engine_version.split("+")[0]
"""Version of megatron-core. The engine appends the git commit of whatever repository encloses its
folder (package_info.py), such as a project whose virtual environment lies inside it."""
MODEL_TYPE = ModelType.encoder_or_decoder
GROUP_LABEL = "lightning_group"
"""Key of an engine parameter group that holds the index of the user's parameter group."""


class ForwardStep(Protocol):
    """What a schedule calls for each microbatch on each chunk."""

    def __call__(self, iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        """Returns the chunk's output and the function that makes a loss of it."""


def engine_version() -> tuple[int, ...]:
    """Release numbers of the installed megatron-core, for example ``(0, 16, 1)``."""
    return tuple(int(part) for part in ENGINE_VERSION.split(".")[:3] if part.isdigit())


def has_te_or_apex() -> bool:
    """Whether the engine found fused optimizers (TransformerEngine or Apex)."""
    return not engine_optimizer.USING_PYTORCH_OPTIMIZER


# ------------------------------------------------------------------------------ configs


def native_config(num_layers: int, fields: Mapping[str, Any]) -> TransformerConfig:
    """A config for chunks without Megatron layers: the schedule only reads its switches.

    Hidden size 1 makes the engine's pipeline tensor shape ``[s, b, h]`` equal ``[s, b, 1]``, so a
    stage's output can travel as a flat vector whatever its own shape is.
    """
    with without_notice_of_defaults():
        return TransformerConfig(
            num_layers=num_layers, hidden_size=1, num_attention_heads=1, ffn_hidden_size=1, **fields
        )


@contextmanager
def without_notice_of_defaults() -> Iterator[None]:
    """Around the making of configs: hides that the default of ``cuda_graph_modules`` is deprecated.

    Megatron-core 0.19 warns of it in every run, whatever the user set (transformer_config.py).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        yield


def check_field_names(*, ddp: Iterable[str] = (), optimizer: Iterable[str] = ()) -> None:
    """Refuses names that the engine's DDP or optimizer config does not have.

    Raises:
        ConfigurationError: Naming them.
    """
    for names, config_class, argument in (
        (ddp, DistributedDataParallelConfig, "ddp"),
        (optimizer, OptimizerConfig, "optimizer"),
    ):
        _check_names(config_class, names, argument)


def _check_names(config_class: type, names: Iterable[str], argument: str) -> None:
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigurationError(
            f"`{argument}` has fields {unknown} that {config_class.__name__} of megatron-core"
            f" {ENGINE_VERSION} does not know; remove them or install a version that has them."
        )


def ddp_config(fields: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """The engine's DDP config."""
    return DistributedDataParallelConfig(**fields)


def optimizer_config(fields: Mapping[str, Any]) -> OptimizerConfig:
    """The engine's optimizer config."""
    return OptimizerConfig(**fields)


# ------------------------------------------------------------------------------ chunks


def to_model_precision(chunk: nn.Module, config: Any) -> nn.Module:
    """Converts a Megatron chunk to bf16/fp16 where the config asks for it (parameters in place)."""
    return Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk


def wrap_ddp(
    chunks: Sequence[nn.Module], config: Any, ddp_fields: Mapping[str, Any]
) -> list[nn.Module]:
    """Wraps chunks in the engine's DDP with contiguous gradient buffers.

    Forward pre-hooks are removed at once: they are wanted from the second iteration on. Only the
    first chunk is split into buckets (the engine's own rule for interleaved schedules).
    Collective over the data-parallel groups: parameters are broadcast from data-parallel rank 0.
    """
    wrapped: list[nn.Module] = []
    graphed = getattr(config, "cuda_graph_impl", "none") != "none"
    for index, chunk in enumerate(chunks):
        with side_stream() if graphed else nullcontext():
            ddp: Any = DistributedDataParallel(
                config, ddp_config(ddp_fields), chunk, disable_bucketing=index > 0
            )
        if ddp.use_forward_hook:
            ddp.disable_forward_pre_hook(param_sync=False)
        ddp.broadcast_params()
        wrapped.append(ddp)
    return wrapped


def set_forward_pre_hooks(chunks: Sequence[Any], enabled: bool, *, sync: bool = True) -> None:
    """Switches the hooks that wait for gathered parameters; off forces a full gather if ``sync``.

    Collective over the data-parallel groups when switching off with ``sync``.
    """
    for chunk in chunks:
        if enabled:
            chunk.enable_forward_pre_hook()
        else:
            chunk.disable_forward_pre_hook(param_sync=sync)


def set_param_sync(chunks: Sequence[Any], enabled: bool) -> None:
    """Lets the interleaved schedule start gathers of parameters, on all stages at the same time.

    Goes with the hooks: both are off until gradient hooks have fired once (as in Megatron-LM,
    training.py). The engine starts those of the first two chunks at once (schedules.py).
    """
    functions = [chunk.start_param_sync for chunk in chunks] if enabled else None
    for chunk in chunks:
        chunk.config.param_sync_func = functions


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Gathers every parameter shard now. Collective over the data-parallel groups."""
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


# ------------------------------------------------------------------------------ schedule


def set_schedule_hooks(
    config: Any, chunks: Sequence[Any], optimizer: Any, *, overlap: bool
) -> None:
    """Sets, on our copy of the chunks' config, the hooks through which a schedule reaches DDP.

    The engine wants bare callables for one chunk and lists for several. ``no_sync_func`` is only
    needed where gradients are reduced during the backward pass.
    """
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = None
    config.grad_sync_func = None
    config.param_sync_func = None
    if overlap:
        if len(chunks) > 1:
            config.no_sync_func = [chunk.no_sync for chunk in chunks]
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        else:
            config.no_sync_func = chunks[0].no_sync


def clear_schedule_hooks(chunks: Sequence[Any]) -> None:
    """Undoes ``set_schedule_hooks``, so that Python can free a run of which nobody has a use.

    DDP hangs a hook with a reference to itself on the autograd node of each parameter
    (distributed_data_parallel.py, __init__), and the config of DDP, by ``scale_loss``, leads to the
    optimizer and the whole run. Any tensor there that has a graph, such as a loss that the user
    keeps, holds these nodes through C++, where Python's collector does not look: a cycle for ever.
    """
    for chunk in chunks:
        for name in ("finalize_model_grads", "grad_scale", "no_sync", "grad_sync", "param_sync"):
            setattr(chunk.config, f"{name}_func", None)


def drop_training_buffers(chunks: Sequence[nn.Module]) -> None:
    """Takes the engine's gradients and main parameters from parameters, which the user may keep.

    The next DDP and optimizer of the same parameters give them new ones.
    """
    for chunk in chunks:
        for param in chunk.parameters():
            for name in ("main_grad", "main_param"):
                vars(param).pop(name, None)


def run_schedule(
    forward_step: ForwardStep,
    chunks: Sequence[nn.Module],
    iterators: Sequence[Any],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Runs the schedule that fits the parallel state: no pipelining, 1F1B or interleaved 1F1B.

    Collective over the pipeline group (and, in training, the data-parallel groups).

    Returns:
        What the loss functions gave, in microbatch order on the last stage; empty elsewhere.
    """
    one = len(chunks) == 1
    schedule = get_forward_backward_func()
    records: list[Any]
    try:
        records = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if one else list(iterators),
            model=chunks[0] if one else list(chunks),
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    except AssertionError as error:
        # distributed/param_and_grad_buffer.py, finish_grad_sync.
        if "Communication call has not been issued" not in str(error):
            raise
        raise ConfigurationError(
            "`overlap_grad_reduce` (True) reduces a bucket of gradients once all its parameters"
            " have one, but some parameter got none in this step; set overlap_grad_reduce=False, or"
            " use every trainable parameter in every step."
        ) from error
    return records


def backward_order(config: Any, *, chunks: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Chunk and microbatch of each backward pass of this rank, in the order of the schedule."""
    if chunks == 1:
        return [(0, microbatch) for microbatch in range(num_microbatches)]
    # schedules.py, get_model_chunk_id: the last chunk goes first.
    group = config.microbatch_group_size_per_vp_stage
    table = get_schedule_table(num_microbatches, chunks, group)
    return [(chunks - 1 - chunk, microbatch) for microbatch, chunk in table]


def without_sync(chunks: Iterable[Any]) -> list[AbstractContextManager[None]]:
    """Contexts that keep gradients local, for the earlier batches of an accumulation."""
    return [chunk.no_sync() for chunk in chunks]


# ------------------------------------------------------------------------------ optimizer


def build_optimizer(
    config: OptimizerConfig, chunks: Sequence[nn.Module], groups: Sequence[Sequence[Tensor]]
) -> MegatronOptimizer:
    """The engine's Adam or SGD over ``chunks``, its parameter groups kept apart as in ``groups``.

    Each engine group carries the index of the user's group under ``GROUP_LABEL``. ``lr_mult`` is
    set too, because the engine tells groups apart by it when it loads a checkpoint; nothing else
    reads it, since the learning rate comes from the user's scheduler.
    Collective over the world (the engine aligns the groups of all ranks).
    """
    overrides = {}
    for index, params in enumerate(groups):
        members = {id(param) for param in params}
        predicate = ParamPredicate(
            name=f"{GROUP_LABEL}_{index}", fn=lambda param, members=members: id(param) in members
        )
        overrides[ParamKey(predicate=predicate)] = {
            GROUP_LABEL: index,
            "lr_mult": float(index + 1),
        }
    # DistributedOptimizer makes shards of fp32 parameters as views of them, without a `detach`
    # (distrib_optimizer.py, _build_model_and_main_param_groups). With a graph they would be tensors
    # of the kind that `clear_schedule_hooks` speaks of, and DDP would outlast a first collection.
    with torch.no_grad(), ExitStack() as stack:
        if not (config.bf16 or config.fp16):
            # The fused SGD steps parameters in fp32 and fp16, and leaves those in bf16 as they are
            # without a word (TransformerEngine, fused_sgd.py, step).
            Patches(stack).replace(engine_optimizer, "SGD", torch.optim.SGD)
        optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    share_loss_scale(optimizer)
    return optimizer


def wrap_torch_optimizer(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig
) -> MegatronOptimizer:
    """Lets the engine drive a torch optimizer of any class, without sharding its state.

    Every rank calls it.
    """
    # Before main parameters take the place of the model's.
    experts = [is_expert(param) for group in optimizer.param_groups for param in group["params"]]
    if config.bf16 or config.fp16:
        scaler = None
        if config.fp16:
            from megatron.core.optimizer.grad_scaler import DynamicGradScaler

            scaler = DynamicGradScaler(
                initial_scale=config.initial_loss_scale,
                min_scale=config.min_loss_scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=config.loss_scale_window,
                hysteresis=config.hysteresis,
            )
        inner: MegatronOptimizer = Float16OptimizerWithFloat16Params(
            optimizer, config, scaler, None
        )
    else:
        inner = FP32Optimizer(optimizer, config, None)
    inner.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    inner.tp_group = parallel_state.get_tensor_model_parallel_group()
    # Chained even when alone, as get_megatron_optimizer does: its step reports the gradient norm
    # whether or not it clips.
    chain = ChainedOptimizer([inner])
    measure_experts_apart(chain, experts)
    return chain


@torch.no_grad()
def clamp_gradients(optimizer: MegatronOptimizer, limit: float) -> None:
    """Limits every entry of the gradients to ``[-limit, limit]``, in place.

    Those that the optimizer is about to use: reduced, without the loss scale.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        # The second belongs to fused optimizers with main parameters of their own.
        for grad in (param.grad, getattr(param, "decoupled_grad", None)):
            if grad is not None:
                grad.clamp_(-limit, limit)
