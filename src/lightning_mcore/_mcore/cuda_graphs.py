"""CUDA graphs of the engine's layers: streams and random numbers for them, capture, and an end.

Two kinds. ``"transformer_engine"``: ``TECudaGraphHelper`` captures all layers when it is told to,
from inputs that it makes. ``"local"``: each layer records its first call, and the schedule captures
all of them at its end (pipeline_parallel/schedules.py). Either way the schedule goes on to call
layers, which replay. Everything here needs a GPU and megatron-core 0.19, but to be imported.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from lightning_mcore._mcore.patching import Patches
from lightning_mcore.errors import ConfigurationError

__all__ = [
    "check_graphed_model",
    "count_graphs",
    "delete_graphs",
    "forget_graphs",
    "graph_safe_process",
    "graphable_layers",
    "layers_themselves",
    "make_te_graphs",
    "pool_given_back",
    "side_stream",
]


def _engine() -> Any:
    """The engine's module; imported late, since it looks for TransformerEngine."""
    from megatron.core.transformer import cuda_graphs

    return cuda_graphs


# ------------------------------------------------------------------------------ the process


@contextmanager
def graph_safe_process() -> Iterator[None]:
    """Around a run: work goes to a stream of its own, as capture must not meet the default one.

    Megatron-LM does so for ``"transformer_engine"`` (training/initialize.py); ``CudaGraphManager``
    sets one too, and the default one after capture (cuda_graphs.py, _create_cudagraphs). At the end
    the stream is what it was before, and the engine's globals about graphs are as at its import,
    also where a model failed while it was built or captured.
    """
    before = torch.cuda.current_stream()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    torch.cuda.set_stream(stream)
    try:
        with pool_given_back():
            yield
    finally:
        try:
            before.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(before)
        finally:
            forget_graphs()


@contextmanager
def pool_given_back() -> Iterator[None]:
    """Around a run: at its end torch may free the memory in which graphs worked.

    The engine begins and ends allocations to that pool without the release that belongs to each
    (``alloc_tensor_from_graph_mempool``; torch/cuda/memory.py, use_mem_pool), so that the pool
    counts as used for the rest of the process: 22 GiB with GPT-2 XL, for every run anew.
    """
    engine = _engine()
    allocate = engine.alloc_tensor_from_graph_mempool
    uses: Counter[tuple[int, Any]] = Counter()

    def counted(*args: Any) -> Any:
        tensor = allocate(*args)
        uses[torch.cuda.current_device(), engine.CudaGraphManager.global_mempool] += 1
        return tensor

    def release() -> None:
        for device, pool in uses.elements():
            torch._C._cuda_releasePool(device, pool)

    with ExitStack() as stack:
        patches = Patches(stack)
        patches.replace(engine, "alloc_tensor_from_graph_mempool", counted)
        patches.on_exit(release)
        yield


def forget_graphs() -> None:
    """Resets the engine's globals: flags, records, its memory pool and its patch of autograd.

    A capture that failed leaves its flag set, and the engine's DDP would then drop every gradient
    of a later run of this process (distributed_data_parallel.py, hook). There is no public way to
    reset it: private names of cuda_graphs.py.
    """
    engine = _engine()
    if engine.is_graph_capturing() or engine.is_graph_warmup():
        engine._set_capture_end()
        engine._set_warmup_end()
        if engine.HAVE_TE_GRAPHS:
            engine.te_set_capture_end()
        # Of buffers that graphs share, asserted to be zero by the next capture.
        engine.fwd_buffer_reuse_ref_count = engine.bwd_buffer_reuse_ref_count = 0
        # Frozen around each capture.
        gc.unfreeze()
    engine.delete_cuda_graphs()


@contextmanager
def side_stream() -> Iterator[None]:
    """Around the making of DDP, which keeps the node that accumulates each parameter's gradient.

    Such a node works on the stream on which it was made. During a capture that must not be the
    default stream, which cannot be a part of any capture.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


# ------------------------------------------------------------------------------ layers


def graphable_layers(chunks: Sequence[nn.Module]) -> list[Any]:
    """Layers of ``chunks`` (wrapped or not) that the engine can capture, in order."""
    from megatron.core.transformer.module import GraphableMegatronModule

    return [
        m for chunk in chunks for m in chunk.modules() if isinstance(m, GraphableMegatronModule)
    ]


def check_graphed_model(kind: str, config: Any, inner: Sequence[nn.Module]) -> None:
    """Checks what the engine does not, and what would fail or be wrong only at capture.

    Args:
        kind: ``"transformer_engine"`` or ``"local"``.
        config: Of the chunks.
        inner: Chunks as the user built them; on every stage alike as far as errors go.

    Raises:
        ConfigurationError: On every rank alike.
    """
    # The helper looks below `decoder` only, and warns where it finds nothing (_discover_layers).
    missing = [c for c in inner if getattr(c, "decoder", None) is None]
    if missing:
        raise ConfigurationError(
            f"`cuda_graphs` ({kind!r}) needs chunks whose layers are in `decoder`, as in the"
            f" engine's GPTModel, and got {type(missing[0]).__name__}; use cuda_graphs=False."
        )
    if kind == "transformer_engine" and config.fp32_residual_connection:
        # module.py, get_layer_static_inputs: the inputs of graphs are bf16.
        raise ConfigurationError(
            "`cuda_graphs` ('transformer_engine') excludes `fp32_residual_connection` (True): the"
            " engine makes the inputs of its graphs in bf16; use cuda_graphs='local', or"
            " fp32_residual_connection=False."
        )
    experts = config.num_moe_experts
    if kind == "local" and (experts or getattr(config, "mtp_num_layers", None)):
        raise ConfigurationError(
            f"`cuda_graphs` ('local') needs dense layers, not `num_moe_experts` ({experts}) or"
            f" `mtp_num_layers` ({config.mtp_num_layers}), of which the engine would replay parts"
            " in validation too; use cuda_graphs='transformer_engine'."
        )
    # An empty list means whole layers; the engine refuses only a list that names "moe"
    # (transformer_config.py, __post_init__).
    whole = not config.cuda_graph_modules
    padded = config.moe_expert_capacity_factor is not None and (
        config.moe_pad_expert_input_to_capacity
    )
    if experts and whole and not padded:
        raise ConfigurationError(
            f"`cuda_graphs` ({kind!r}) of whole layers needs expert layers of fixed shapes, and"
            f" `num_moe_experts` ({experts}) route any number of tokens; set"
            ' cuda_graph_modules=["attn"] (or ["attn", "moe_router"]) in the factory\'s'
            " TransformerConfig, or moe_expert_capacity_factor with"
            " moe_pad_expert_input_to_capacity=True."
        )


@contextmanager
def layers_themselves(layers: Sequence[Any]) -> Iterator[None]:
    """Around evaluation: layers run, whatever was captured.

    Once there are graphs, ``CudaGraphManager.__call__`` (cuda_graphs.py) replays them in evaluation
    too, with the dropout of training, and fails for other shapes. Layers without a manager run
    themselves (transformer_layer.py, _should_call_local_cudagraph). Those that TransformerEngine
    captured look at ``training``, and need nothing.
    """
    name = "cudagraph_manager"
    held = [(layer, getattr(layer, name)) for layer in layers if hasattr(layer, name)]
    for layer, _ in held:
        delattr(layer, name)
    try:
        yield
    finally:
        for layer, manager in held:
            setattr(layer, name, manager)


# ------------------------------------------------------------------------------ capture and end


def make_te_graphs(
    chunks: Sequence[nn.Module],
    config: Any,
    optimizer: Any,
    *,
    seq_length: int,
    micro_batch_size: int,
    num_microbatches: int,
    data_parallel_size: int,
) -> Any:
    """Captures every layer by TransformerEngine; gradients are zero afterwards.

    Collective over all groups that layers communicate in. To be called between steps, with zeroed
    gradients and without forward pre-hooks.

    Args:
        chunks: Wrapped in the engine's DDP.
        config: Our copy of their config.
        optimizer: The engine's.
        seq_length: Tokens of whole sequences.
        micro_batch_size: Samples in every microbatch.
        num_microbatches: In every step.
        data_parallel_size: Ranks with other samples.

    Returns:
        The engine's helper, with its graphs.

    Raises:
        ConfigurationError: If a layer cannot be captured.
    """
    from megatron.core import num_microbatches_calculator as calculator

    helper = _engine().TECudaGraphHelper(
        model=list(chunks),
        config=config,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        optimizers=[optimizer],
    )
    # The helper asks this global of Megatron-LM for the number (_get_cuda_graph_input_data), and
    # nothing else in the engine does.
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(),
        rampup_batch_size=None,
        global_batch_size=num_microbatches * micro_batch_size * data_parallel_size,
        micro_batch_size=micro_batch_size,
        data_parallel_size=data_parallel_size,
    )
    # TransformerEngine wraps them during capture, and after a failure leaves them so (graph.py,
    # wrap_autocast): layers of a later run would be out of fp8.
    calls = {type(layer): type(layer).__call__ for layer in graphable_layers(chunks)}
    try:
        helper.create_cudagraphs()
    except BaseException as error:
        for owner, call in calls.items():
            owner.__call__ = call
        expected = isinstance(error, (AssertionError, RuntimeError, TypeError, ValueError))
        if not expected or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigurationError(
            f"`cuda_graphs` ('transformer_engine') could not capture the layers: {error}. What a"
            " layer does must not read values on the host or change shapes; set"
            ' cuda_graph_modules=["attn"] in the factory\'s TransformerConfig to capture less, or'
            " use cuda_graphs=False."
        ) from error
    finally:
        calculator.destroy_num_microbatches_calculator()
    return helper


def count_graphs(layers: Sequence[Any]) -> int:
    """Graphs of these layers: one forward and one backward graph for each layer and slot."""
    made = 0
    for layer in layers:
        made += 2 * len(getattr(layer, "cuda_graphs", ()))
        manager = getattr(layer, "cudagraph_manager", None)
        for runner in manager.cudagraph_runners if manager is not None else ():
            made += sum(graph is not None for graph in (runner.fwd_graph, runner.bwd_graph))
    return made


def delete_graphs(layers: Sequence[Any], helper: Any = None) -> None:
    """Frees the graphs of ``layers``; ``helper`` is what ``make_te_graphs`` gave, if it did."""
    if helper is not None and helper.graphs_created():
        # At its end, when graphs are gone, it asks torch for this rank, to log it. Where another
        # rank failed, NCCL was aborted and there is no group: that shall not hide the failure.
        with suppress(ValueError, AssertionError):
            helper.delete_cuda_graphs()
    for layer in layers:
        # The engine's own delete_cuda_graphs finds only those in its record, which capture empties.
        manager = getattr(layer, "cudagraph_manager", None)
        if manager is not None:
            for runner in manager.cudagraph_runners:
                # A replay (cuda_graphs.py, _CudagraphReplayNode) makes itself the `grad_fn` of the
                # outputs that the runner keeps, and holds the runner and the replay of the layer
                # before. Python's collector sees through the last of these only: each collection
                # would free one layer, and the optimizer and all else only after the first layer.
                for name in ("fwd_graph_outputs", "fwd_graph_output_surface"):
                    vars(runner).pop(name, None)
            manager.cudagraph_runners = []
            manager.custom_cudagraphs_lookup_table.clear()
        for param in layer.parameters():
            # Set by replays; without them the engine's DDP would wait for an old event.
            if hasattr(param, "_cudagraph_wgrad_ready_event"):
                del param._cudagraph_wgrad_ready_event
