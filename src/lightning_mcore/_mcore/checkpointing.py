"""Engine calls for sharded checkpoints: what a shard is, reading, optimizer internals.

A *tree* is a nested dict whose leaves are the engine's ``ShardedTensor``, ``ShardedObject`` or
``ShardedTensorFactory``. Shards are named globally, so a tree says what this rank holds and not how
many ranks there are. Files are the engine's ``torch_dist`` format; ``shard_writer`` writes them.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import (
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_mcore._mcore import adam_forms
from lightning_mcore._mcore.distopt_shards import owned_tree
from lightning_mcore._mcore.engine import gather_parameters
from lightning_mcore._mcore.expert_order import canonical_tree
from lightning_mcore.errors import CheckpointError
from lightning_mcore.index_file import data_only, read_index

__all__ = ["Stored"]

Tree = dict[str, Any]

COMMON_FILE = "common.pt"
"""Where both engine versions look for what is not sharded."""
STEP = "step"


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint holds under one key."""

    shape: tuple[int, ...] | None
    """Shape of the whole tensor; ``None`` for an object."""
    dtype: torch.dtype | None


# ------------------------------------------------------------------------------ trees


def sharding_metadata(dp_cp_group: dist.ProcessGroup) -> dict[str, Any]:
    """What the engine asks before it describes its shards.

    ``fully_reshardable`` is the only layout of distributed optimizer state that survives a change
    of tensor or pipeline parallelism; without prefixes, chained optimizers share one name space.
    """
    return {
        "dp_cp_group": dp_cp_group,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
    }


def chunk_tree(chunk: nn.Module, metadata: dict[str, Any]) -> Tree | None:
    """The shards of a Megatron chunk, or ``None`` for a module that cannot describe its own."""
    if not callable(getattr(chunk, "sharded_state_dict", None)):
        return None
    return canonical_tree(chunk, chunk.sharded_state_dict(metadata=metadata))  # type: ignore[operator]


def replicated_tensor(key: str, tensor: Tensor, replica_id: tuple[int, ...]) -> Any:
    """A tensor that every rank of a group holds whole; all-zero ``replica_id`` writes it."""
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id)


def replicated_object(key: str, value: Any, replica_id: tuple[int, ...]) -> Any:
    """Any object that every rank of a group holds alike."""
    return ShardedObject(key, value, (1,), (0,), replica_id)


def rank_object(key: str, value: Any, rank: int, world_size: int) -> Any:
    """An object of which each rank holds its own."""
    return ShardedObject(key, value, (world_size,), (rank,), 0)


def tensors_of(tree: Tree) -> Iterator[Any]:
    """Sharded tensors and factories of a tree; their ``data`` is the local tensor itself."""
    kinds = (ShardedTensor, ShardedTensorFactory)
    return (leaf for leaf in nested_values(tree) if isinstance(leaf, kinds))


def like(leaf: Any, key: str, tensor: Tensor) -> Any:
    """A tensor sharded like ``leaf``, under another key."""
    if isinstance(leaf, ShardedTensorFactory):
        return replace(leaf, key=key, data=tensor)
    return replace(leaf, key=key, data=tensor, dtype=tensor.dtype)


def number_like(leaf: Any, key: str, value: Any) -> Any:
    """An object that belongs to the whole tensor of which ``leaf`` is a shard.

    Layers that share a key are the leading axes of its tensor: each has its own object.
    """
    if isinstance(leaf, ShardedTensorFactory):
        return ShardedObject(key, value, (1,), (0,), leaf.replica_id)
    layers = leaf.prepend_axis_num
    replica_id = leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,)
    return ShardedObject(
        key,
        value,
        tuple(leaf.global_shape[:layers]) or (1,),
        tuple(leaf.global_offset[:layers]) or (0,),
        (*replica_id, *leaf.global_offset[layers:]),
    )


def object_like(leaf: Any, key: str, value: Any) -> Any:
    """An object for each shard of ``leaf``; it can be loaded only where the shards are the same."""
    if isinstance(leaf, ShardedTensorFactory) or not leaf.has_regular_grid:
        return ShardedObject(key, value, (1,), (0,), leaf.replica_id)
    offset = leaf.local_chunk_offset_in_global()
    return ShardedObject(key, value, leaf.axis_fragmentations, offset, leaf.replica_id)


def stored_key(leaf: Any) -> str:
    """The key under which a built leaf is listed in a checkpoint."""
    return leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key


def describe(tree: Tree) -> dict[str, tuple[int, ...] | None]:
    """Keys that a tree asks for, with shapes of whole tensors where they must match."""
    built, _, _ = load_preprocess(tree)
    wanted: dict[str, tuple[int, ...] | None] = {}
    for leaf in nested_values(built):
        if isinstance(leaf, ShardedTensor):
            # Padded vocabularies may differ: the engine trims or fills up with zeros.
            wanted[leaf.key] = None if leaf.allow_shape_mismatch else tuple(leaf.global_shape)
        elif isinstance(leaf, ShardedObject):
            wanted[leaf.unique_key] = None
    return wanted


def without_keys(tree: Tree, keys: set[str]) -> Tree:
    """The tree without the leaves that read any of ``keys``."""

    def reads(leaf: Any) -> bool:
        if isinstance(leaf, ShardedTensorFactory):
            return any(stored_key(part) in keys for part in nested_values([leaf.build()]))
        return isinstance(leaf, ShardedTensor | ShardedObject) and stored_key(leaf) in keys

    return extract_matching_values(tree, lambda leaf: not reads(leaf))[0]


# ------------------------------------------------------------------------------ files


def build(tree: Tree) -> Tree:
    """The tree with every leaf ready to be written."""
    return save_preprocess(tree, validate_access_integrity=False)[0]


def write_common(directory: Path, common: dict[str, Any]) -> None:
    """Writes what is not sharded, and what tells the engine of what format the shards are."""
    with open(directory / COMMON_FILE, "wb") as file:
        torch.save(common, file)
        file.flush()
        os.fsync(file.fileno())
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def contents(directory: Path) -> dict[str, Stored]:
    """Everything sharded that a checkpoint holds, from its metadata file."""
    # Torch's own reader would run what the file names (checkpoint/filesystem.py, read_metadata).
    metadata = read_index(directory)
    return {
        key: Stored(tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else Stored(None, None)
        for key, entry in metadata.state_dict_metadata.items()
    }


def read(directory: Path, tree: Tree) -> Tree:
    """Reads what a tree asks for into its tensors. Collective over the world (engine 0.16).

    Returns:
        A tree of the same structure with tensors and objects as leaves.

    Raises:
        CheckpointError: On every rank alike, with what failed on which.
    """
    force_all_tensors_to_non_fp8(tree)
    sharded, result, factories = load_preprocess(tree)
    try:
        with _without_torch_notices(), data_only():
            merge(result, TorchDistLoadShardedStrategy().load(sharded, directory))
    except CheckpointException as error:  # A BaseException, which carries those of all ranks.
        failed = {
            rank: f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
            for rank, (cause, _) in error.failures.items()
        }
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(listed) from error
    return apply_factory_merges(result, factories)


@contextlib.contextmanager
def _without_torch_notices() -> Iterator[None]:
    """Hides torch's notices to the engine about names that will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


# ------------------------------------------------------------------------------ optimizers


def parts_of(optimizer: Any) -> list[Any]:
    """The engine optimizers in a chain that hold parameters on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chain if not getattr(part, "is_stub_optimizer", False)]


def is_distributed(part: Any) -> bool:
    """Whether an engine optimizer shards its state over data parallel."""
    return isinstance(part, DistributedOptimizer)


def materialize(part: Any) -> None:
    """Gives an optimizer that has not stepped its state of zeros, so that it can be saved or set.

    Torch's Adam counts steps per parameter; an entry without a counter would fail in its next step.
    """
    if adam_forms.initialize(part) or part.init_state_fn is None:
        return
    part.init_state_fn(part.optimizer, part.config)
    if counts_in_state(part):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                part.optimizer.state[param].setdefault(STEP, new_step(0, param, group))


def counts_in_state(part: Any) -> bool:
    """Whether steps are counted per parameter (torch) rather than per group (fused optimizers)."""
    inner = part.optimizer
    return isinstance(inner, HybridDeviceOptimizer) or _is_of_torch(inner)


def _is_of_torch(inner: Any) -> bool:
    """Whether an optimizer is one of torch's own, or a subclass of one."""
    modules = (kind.__module__ for kind in type(inner).__mro__)
    # The last is that of the base class of all optimizers.
    return any(m.startswith("torch.optim.") and m != "torch.optim.optimizer" for m in modules)


def moment_dtype(part: Any, entry: str, param: Tensor) -> torch.dtype | None:
    """Dtype in which an optimizer keeps a moment of a parameter; ``None`` if it is not known.

    They differ for parameters in bf16: torch's moments are bf16 too, the fused Adam's fp32.
    """
    inner = part.optimizer
    if not entry.startswith("exp_avg"):
        return None
    if hasattr(inner, f"{entry}_dtype"):
        dtype: torch.dtype = getattr(inner, f"{entry}_dtype")
        return dtype
    # A subclass may keep them as it likes.
    return param.dtype if type(inner).__module__.startswith("torch.optim.") else None


def new_step(value: float, param: Tensor, group: dict[str, Any]) -> Tensor:
    """A step counter of torch's kind, on the device where torch's optimizers want it."""
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(float(value), device=param.device if on_device else "cpu")


def distributed_tree(part: Any, model: Tree) -> Tree:
    """The part of a distributed optimizer's state that this rank owns, to be saved."""
    return owned_tree(part, {id(leaf.data): leaf for leaf in tensors_of(model)})


def distributed_request(part: Any, model: Tree, metadata: dict[str, Any]) -> dict[int, Tree]:
    """What to read into a distributed optimizer: tensors shaped and sharded like parameters."""
    return part.sharded_param_state_fully_reshardable(model, True, metadata)


def set_distributed_state(part: Any, state: dict[int, Tree], step: float) -> None:
    """Takes this rank's part of a distributed optimizer's whole state, and the step.

    Collective over its data-parallel group.

    Where ``state`` has no main parameter, the model's takes its place, which is loaded before.
    The engine copies every entry of torch's state from the checkpoint, where counters are not; so
    they are away while it does. Each parameter gets its own counter, since a shared one would be
    counted up once for every parameter (``DistributedOptimizer.load_state_dict`` shares one).
    """
    materialize(part)
    inner = part.optimizer
    for entry in inner.state.values():
        entry.pop(STEP, None)
    # In the order in which the engine numbered them when it described the state.
    params = (param for buffer in part.buffers for param in buffer.param_index_map)
    for index, param in enumerate(params):
        state.setdefault(index, {}).setdefault("param", param.detach())
    with adam_forms.takes_whole_values(part) as sets_parameters:
        part.load_parameter_state_from_fully_reshardable(state)
    if sets_parameters:
        gather_parameters(part.model_chunks)
    if isinstance(inner, HybridDeviceOptimizer):
        adam_forms.settle(inner, step)
    elif counts_in_state(part):
        for group in inner.param_groups:
            for param in group["params"]:
                inner.state[param][STEP] = new_step(step, param, group)


def reload_main_parameters(optimizer: Any) -> None:
    """Sets main parameters to the model's parameters, which have changed, in every kind of Adam."""
    optimizer.reload_model_params()
    for part in parts_of(optimizer):
        adam_forms.take_parameters(part)


def main_parameter(part: Any, param: Tensor) -> Tensor:
    """The fp32 copy that an optimizer updates in place of a half-precision parameter."""
    return getattr(param, "main_param", param) if hasattr(part, "float16_groups") else param


# ------------------------------------------------------------------------------ random state


def tracker_states() -> dict[str, Tensor]:
    """States of the engine's RNG tracker by stream name."""
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in states.items()
    }


def set_tracker_states(states: dict[str, Tensor]) -> None:
    """Restores the streams of the engine's RNG tracker."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    current = tracker.get_states()
    for name, state in current.items():
        if isinstance(state, torch.Generator):
            state.set_state(states[name])
    if not any(isinstance(state, torch.Generator) for state in current.values()):
        tracker.set_states({name: state.clone() for name, state in states.items()})
