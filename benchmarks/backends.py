"""What train_gpt.py compares: each backend built, started and freed again, and which fit together.

The engine has room for one parallel state per process, and a Trainer with MCoreStrategy makes its
own. So one such Trainer lives at a time, and it starts before any direct loop, which uses its
state.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from loops import DirectLoop, TrainerLoop
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import layers
from models import Model, call_gpt, mcore_chunk, parameter_count, uses_te
from modules import ddp_strategy, engine_module, fsdp_strategy, torch_module

from gpt import batches
from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.cuda_graphs import forget_graphs, pool_given_back
from lightning_mcore._mcore.te_bindings import te_stands_in_for_apex
from lightning_mcore.config import ParallelSizes
from lightning_mcore.layout import resolve_layout
from lightning_mcore.stage import stages_of

BACKENDS = ("lightning-mcore", "mcore-raw", "lightning-ddp", "lightning-fsdp")
OURS, RAW, DDP, FSDP = BACKENDS
SEED = 1234
GIB = 2**30
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_GIVEN_ATTENTION = {name: os.environ[name] for name in _ATTENTION if name in os.environ}
_DIRECT = {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"}
_DIRECT |= {"bucket_size", "grad_reduce_in_fp32", "average_in_collective"}
_OF_MODEL = {
    "cuda_graphs": "cuda_graph_impl",
    "gradient_accumulation_fusion": "gradient_accumulation_fusion",
}
"""Arguments of the strategy that are fields of the engine's TransformerConfig."""
_UNREAD = {"pipeline_dtype", "deallocate_pipeline_outputs", "batch_p2p_comm", "initial_loss_scale"}
"""Fields that nothing reads without a pipeline, and without fp16."""


@dataclass(frozen=True)
class Entry:
    """A backend with its settings."""

    backend: str
    variant: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of the strategy; of mcore-raw those of them that it knows."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the engine's TransformerConfig."""
    precision: str = "bf16-mixed"
    compile: str = "blocks"
    """What torch compiles of the plain model, on GPUs."""
    microbatches: int = 1
    """Parts of a step's batch; Lightning's own strategies accumulate over as many batches."""

    @property
    def name(self) -> str:
        """Unique among the entries of a run."""
        return f"{self.backend}:{self.variant}" if self.variant else self.backend


# ------------------------------------------------------------------------------ planning


def idle_gib(entry: Entry, model: Model, replicas: int) -> float:
    """Estimate of what a backend holds between steps."""
    mixed = entry.precision.endswith("mixed")
    if entry.backend in (OURS, RAW):
        # Parameters and fp32 gradients, and main parameters with two moments; in fp32, no copy.
        shards = replicas if replicas > 1 else 1
        per_parameter = 2 + 4 + 12 / shards if mixed else 4 + 4 + 8 / shards
    else:
        per_parameter = 16 / (replicas if entry.backend == FSDP else 1)
    return parameter_count(model) * per_parameter / GIB


def working_gib(entry: Entry, model: Model) -> float:
    """Estimate of what a step takes beyond that: activations, logits, casts of weights."""
    q, kv = model.heads * model.head_dim, 2 * model.query_groups * model.head_dim
    width = model.ffn * (model.experts_per_token or 1) * (4 if model.llama else 2)
    layer = 2 * (6 * model.hidden + 2 * (q + kv) + q + width)
    tokens = model.tokens / entry.microbatches
    activations = tokens * (model.layers * layer + 10 * model.vocab)
    casts = 0 if entry.backend in (OURS, RAW) else 2 * parameter_count(model)
    return (activations + casts) / GIB


def plan_groups(
    entries: Sequence[Entry],
    *,
    mode: str,
    reference: Entry,
    total_gib: float | None,
    model: Model,
    replicas: int,
) -> list[list[Entry]]:
    """Which backends live at the same time and take turns.

    Args:
        entries: All of them.
        mode: ``together``, ``pairs`` (the reference and another one), ``solo``, or ``auto`` for the
            first of these that fits.
        reference: What the others are compared with.
        total_gib: Memory of a device; ``None`` without one, where everything fits.
        model: Dimensions.
        replicas: Data-parallel size.
    """

    def fits(group: Sequence[Entry]) -> bool:
        idle = sum(idle_gib(entry, model, replicas) for entry in group)
        working = max(working_gib(entry, model) for entry in group)
        return total_gib is None or idle + working < 0.95 * total_gib

    def pair(entry: Entry) -> list[Entry]:
        both = sorted([entry, reference], key=lambda member: member.backend != OURS)
        return both if _can_live_together(both) else [entry]

    together: list[Entry] = []
    rest = []
    for entry in sorted(entries, key=lambda entry: entry.backend != OURS):
        (together if _can_live_together([*together, entry]) else rest).append(entry)
    all_at_once = [together, *map(pair, rest)]
    if mode == "together" or (mode == "auto" and all(map(fits, all_at_once))):
        return all_at_once
    solo = [[entry] for entry in entries]
    pairs = [pair(entry) for entry in entries if entry is not reference]
    if mode == "solo" or not pairs or (mode == "auto" and not all(map(fits, pairs))):
        return solo
    return pairs if any(reference in group for group in pairs) else [[reference], *pairs]


def _can_live_together(group: Sequence[Entry]) -> bool:
    """The engine's parallel state, and its record of captured graphs, are one per process."""
    ours = sum(entry.backend == OURS for entry in group)
    return ours <= 1 and sum(map(_captures, group)) <= 1


def _captures(entry: Entry) -> bool:
    return any(
        name.startswith("cuda_graph") and value not in ("none", "auto", None, False)
        for name, value in {**entry.strategy, **entry.model}.items()
    )


def refusal(entry: Entry, model: Model, *, devices: int, on_gpu: bool) -> str | None:
    """Why a backend cannot run here, as far as it is known before anything starts."""
    if entry.backend == FSDP and devices == 1:
        return "shards over ranks; use --devices 2 or more"
    if entry.backend == FSDP and not on_gpu:
        return "needs GPUs"
    if entry.backend in (DDP, FSDP) and model.experts:
        return f"there is no plain torch twin of {model.name}, which has experts"
    return None


def choose_reference(entries: Sequence[Entry], name: str | None) -> Entry:
    """What the others are compared with: something that can live beside the most of them."""
    if name is not None:
        return next(entry for entry in entries if entry.name == name)
    ours = [entry for entry in entries if entry.backend == OURS]
    others = [entry for entry in entries if entry.backend != OURS]
    if len(ours) == 1 or not others:
        return ours[0]
    return next((entry for entry in others if entry.backend == RAW), others[0])


# ------------------------------------------------------------------------------ running


@dataclass
class Live:
    """A backend that is ready to run steps."""

    entry: Entry
    loop: Any
    settings: dict[str, dict[str, Any]]
    """What its engine was configured with, to be compared."""
    attention: dict[str, str]
    """Environment by which TransformerEngine selects its attention."""
    exits: ExitStack
    """Undoes what the backend changed outside itself."""

    def run(self, steps: int, **kwargs: Any) -> None:
        """Runs steps in this backend's environment."""
        with _environment(self.attention):
            self.loop.run(steps, **kwargs)

    def free(self) -> None:
        """Ends the backend and gives its memory back."""
        if isinstance(self.loop, TrainerLoop):
            if self.entry.backend == DDP:
                self.loop.release()
            self.loop.stop()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of a backend that failed, or has ended."""
        loop, self.loop = self.loop, None
        if isinstance(loop, DirectLoop):
            # A Trainer's strategy does it itself.
            loop.end()
        del loop
        if _captures(self.entry) and torch.cuda.is_available():
            _forget_graphs()
        self.exits.close()
        collect()


def _forget_graphs() -> None:
    """Gives back captured graphs, which the engine holds in its classes, and ends a failed capture.

    Else DDP would drop all gradients of the backends that follow.
    """
    from megatron.core import full_cuda_graph

    forget_graphs()
    full_cuda_graph.FullCudaGraphWrapper(None).reset_cuda_graph()
    for buffers in full_cuda_graph.StaticBufferLoader.static_buffers.values():
        buffers.clear()


def collect(*, compiled: bool = False) -> None:
    """Gives back what nothing refers to any more; ``compiled`` code too, which lives again then."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def forget(error: BaseException | None) -> str:
    """Text of an error, whose frames no longer hold tensors."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return " <- ".join(text.strip()[:1500] for text in texts[:3])


def build(entry: Entry, model: Model, device: torch.device) -> Live:
    """Builds a backend up to its first step. Collective over the world."""
    # A Trainer takes it away when it ends (LightningEnvironment.teardown).
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    pl.seed_everything(SEED)
    with ExitStack() as exits, _environment(_GIVEN_ATTENTION):
        if entry.backend == RAW:
            loop: Any = _direct(entry, model, device, exits)
            settings = {
                "model": _values(loop.config),
                "ddp": _values(loop.ddp_config),
                "optimizer": _values(loop.optimizer_config),
            }
        else:
            loop = trainer_loop(entry, model, device)
            loop.start()
            settings = _of_strategy(loop) if entry.backend == OURS else {}
        attention = {name: os.environ[name] for name in _ATTENTION if name in os.environ}
        kept = exits.pop_all()
    return Live(entry, loop, settings, attention, kept)


def trainer_loop(entry: Entry, model: Model, device: torch.device) -> TrainerLoop:
    """The Trainer of a backend of Lightning's, not started yet."""
    world = dist.get_world_size()
    options = {}
    if entry.backend == OURS:
        strategy: Any = MCoreStrategy(**entry.strategy)
        module = engine_module(model, entry.model)
        sizes = {k: v for k, v in entry.strategy.items() if k in ("tp", "pp", "vpp", "cp", "ep")}
        layout = resolve_layout(ParallelSizes(**sizes), world, dist.get_rank())
        replicas, replica = layout.dp, layout.dp_rank
    else:
        strategy = _lightning_strategy(entry)
        module = torch_module(model, entry.compile)
        replicas, replica = world, dist.get_rank()
        model = dataclasses.replace(model, batch=model.batch // entry.microbatches)
        options = {"accumulate_grad_batches": entry.microbatches}
    loader = batches(model, replicas=replicas, replica=replica)
    return TrainerLoop(strategy, module, loader, device, entry.precision, **options)


def _lightning_strategy(entry: Entry) -> Any:
    if entry.backend == DDP:
        if dist.get_world_size() == 1:
            # DDP would copy gradients into its buckets for nobody.
            return "auto"
        return ddp_strategy({"bucket_cap_mb": 100, **entry.strategy})
    return fsdp_strategy(entry.precision, entry.strategy)


def _direct(entry: Entry, model: Model, device: torch.device, exits: ExitStack) -> DirectLoop:
    known = {*_DIRECT, *_OF_MODEL, "micro_batch_size", "ddp", "optimizer"}
    unknown = sorted(set(entry.strategy) - known)
    if unknown:
        raise ValueError(f"mcore-raw knows {sorted(known)} of the strategy, but got {unknown}")
    micro_batch_size = entry.strategy.get("micro_batch_size")
    if model.batch % (micro_batch_size or 1):
        raise ValueError(f"the batch of {model.batch} is no multiple of {micro_batch_size}")
    _start_engine()
    world = dist.get_world_size()
    mixed = entry.precision == "bf16-mixed"
    if not mixed and entry.precision != "32-true":
        raise ValueError(f"mcore-raw runs bf16-mixed and 32-true, but got {entry.precision}")
    dtype = torch.bfloat16 if mixed else torch.float32
    fields: dict[str, Any] = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": mixed}
    if device.type == "cpu":
        fields |= {"use_cpu_initialization": True, "bias_dropout_fusion": False}
        fields |= {"masked_softmax_fusion": False, "persist_layer_norm": False}
        fields |= {"gradient_accumulation_fusion": False}
    for name in sorted(_OF_MODEL.keys() & entry.strategy.keys()):
        if entry.strategy[name] not in ("auto", False):
            fields[_OF_MODEL[name]] = entry.strategy[name]
    if fields.get("gradient_accumulation_fusion") and not layers._grad_accum_fusion_available:
        exits.enter_context(te_stands_in_for_apex())
    if _captures(entry):
        exits.enter_context(pool_given_back())
    shards = world > 1
    switches = {
        "use_distributed_optimizer": shards,
        "overlap_grad_reduce": shards,
        "overlap_param_gather": shards,
        "grad_reduce_in_fp32": mixed,
        **{name: entry.strategy[name] for name in sorted(_DIRECT & entry.strategy.keys())},
        **entry.strategy.get("ddp", {}),
    }
    return DirectLoop(
        model,
        stages_of(resolve_layout(ParallelSizes(), world, dist.get_rank())),
        fields,
        switches,
        None,
        device,
        optimizer=entry.strategy.get("optimizer", {}),
        micro_batch_size=micro_batch_size,
        chunk=partial(mcore_chunk, options=entry.model),
        call=call_gpt,
        seed=partial(_seed_stage, graphs=_captures(entry)),
    )


def _start_engine() -> None:
    """Gives direct loops a parallel state, where no Trainer has made one of these sizes."""
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_data_parallel_world_size() == dist.get_world_size():
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()


def _seed_stage(stage: Any, *, graphs: bool) -> None:
    """The strategy's seeds (lightning_mcore/parallel_state.py), for equal first weights.

    Layers that are captured want generators that a graph can hold (cuda_graphs.py).
    """
    tensor_parallel.model_parallel_cuda_manual_seed(
        SEED + 100 * (1 + stage.index),
        te_rng_tracker=graphs,
        use_cudagraphable_rng=graphs,
        force_reset_rng=True,
    )
    torch.manual_seed(SEED + stage.index)


def _of_strategy(loop: TrainerLoop) -> dict[str, dict[str, Any]]:
    strategy: Any = loop.trainer.strategy
    run = strategy._model_run
    return {
        "model": _values(run.chunks[0].config),
        "ddp": _values(run.chunks[0].ddp_config),
        "optimizer": _values(run.optimizer._config),
    }


def _values(config: Any) -> dict[str, Any]:
    """The plain values of a config, without hooks."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    return {
        item.name: str(value) if isinstance(value, torch.dtype) else value
        for item in dataclasses.fields(config)
        if isinstance(value := getattr(config, item.name, None), plain)
        and not item.name.endswith("_func")
        and item.name not in _UNREAD
    }


def differences(mine: Live, other: dict[str, dict[str, Any]]) -> list[str]:
    """Settings in which two engines differ, so that they do not do the same work."""
    return [
        f"{kind}.{name}: {value!r} and {other[kind].get(name)!r}"
        for kind, values in mine.settings.items()
        for name, value in values.items()
        if kind in other and value != other[kind].get(name)
    ]


@contextmanager
def _environment(attention: dict[str, str]) -> Iterator[None]:
    """Makes TransformerEngine select attention anew, for this backend alone.

    The engine asserts that its variables are unset or as its config wants them
    (language_module.py, _set_attention_backend), and TransformerEngine keeps its last selection.
    """
    if not uses_te():
        yield
        return
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    with ExitStack() as stack:
        before = {name: os.environ.pop(name, None) for name in _ATTENTION}
        stack.callback(_restore, before)
        os.environ.update(attention)
        _attention_backends["backend_selection_requires_update"] = True
        yield


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def selected_attention() -> str | None:
    """The attention that TransformerEngine ran last; ``None`` without it."""
    if not uses_te():
        return None
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    for kind in ("flash", "fused", "unfused"):
        if _attention_backends[f"use_{kind}_attention"]:
            return f"{kind} {_attention_backends.get(f'{kind}_attention_backend', '')}".strip()
    return None


@dataclass
class Memory:
    """Device memory of one backend, measured while it runs and others hold theirs."""

    device: torch.device
    before: int = 0

    def start(self) -> None:
        """Before the backend is built."""
        if self.device.type != "cpu":
            collect()
            self.before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, float] | None:
        """GiB of this backend alone: at its peak, and between steps."""
        if self.device.type == "cpu":
            return None
        return {
            "peak": (torch.cuda.max_memory_allocated() - self.before) / GIB,
            "held": (torch.cuda.memory_allocated() - self.before) / GIB,
            "others": self.before / GIB,
        }


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()
