"""What a checkpoint holds, as trees of shards named alike in every layout.

Keys::

    <parameter or buffer>                   of the model, by its name in the whole model
    optimizer.state.<entry>.<parameter>     one entry of one parameter's optimizer state
    rng.<name>, extra.<name>                one object for each rank

Every rank calls every function here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore._mcore.checkpointing import Stored, Tree
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout

OPTIMIZER_PREFIX = "optimizer.state."
RNG_PREFIX = "rng."
EXTRA_PREFIX = "extra."


# ------------------------------------------------------------------------------ model


def model_tree(chunks: Sequence[nn.Module], layout: Layout, metadata: dict[str, Any]) -> Tree:
    """Parameters and persistent buffers of this rank's chunks under ``model0``, ``model1``, ...

    A Megatron chunk describes its own shards. Of any other module, tensors are replicated over the
    tensor-parallel and data-parallel ranks; a method ``global_state_dict()`` that returns tensors
    by their name in the whole model replaces ``state_dict()`` where names there are local.
    """
    tree: Tree = {}
    for index, chunk in enumerate(chunks):
        own = engine.chunk_tree(chunk, metadata)
        tree[f"model{index}"] = _plain_tree(chunk, layout) if own is None else own
    return tree


def _plain_tree(chunk: nn.Module, layout: Layout) -> Tree:
    replica_id = (0, layout.tp_rank, layout.dp_rank * layout.cp + layout.cp_rank)
    named = _named_state(chunk)
    return {
        name: engine.replicated_tensor(name, value, replica_id)
        if isinstance(value, Tensor)
        else engine.replicated_object(name, value, replica_id)
        for name, value in named.items()
    }


def _named_state(chunk: nn.Module) -> Mapping[str, Any]:
    by_global_name: Callable[[], Mapping[str, Any]] | None
    by_global_name = getattr(chunk, "global_state_dict", None)
    return by_global_name() if by_global_name is not None else chunk.state_dict(keep_vars=True)


def load_model(chunks: Sequence[nn.Module], loaded: Tree) -> None:
    """Hands loaded tensors and extra state to the chunks, whose keys were checked before."""
    for index, chunk in enumerate(chunks):
        values = loaded.get(f"model{index}", {})
        if hasattr(chunk, "global_state_dict"):
            with torch.no_grad():
                for name, target in _named_state(chunk).items():
                    if isinstance(target, Tensor) and name in values:
                        target.copy_(values[name])
        else:
            chunk.load_state_dict(values, strict=False)


def state_beside(module: nn.Module, model: nn.Module | None) -> dict[str, Any]:
    """What a LightningModule keeps outside of the model that ``strategy.build`` gave, by name.

    Frozen parameters, buffers, metrics that keep their state: alike on every rank. Nothing for a
    module that is its own model (``None``).
    """
    held = tuple(f"{name}." for name, part in module.named_modules() if part is model)
    if not held:
        return {}
    return {name: v for name, v in module.state_dict().items() if not name.startswith(held)}


# ------------------------------------------------------------------------------ what fits


def check_keys(
    request: Tree, stored: Mapping[str, Stored], group: Any, *, strict: bool
) -> set[str]:
    """Compares what all ranks ask for with what a checkpoint holds. Collective over ``group``.

    Returns:
        Keys that are missing in the checkpoint, to be left as they are.

    Raises:
        CheckpointError: On every rank, naming keys; for shapes that differ in any case, for missing
            and unexpected keys if ``strict``.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, engine.describe(request), group=group)
    wanted = {key: shape for one in everyone for key, shape in one.items()}
    missing = {key for key in wanted if key not in stored}
    shapes = [
        f"{key}: {list(stored[key].shape or ())} in the checkpoint, {list(shape)} in the model"
        for key, shape in wanted.items()
        if shape is not None and key in stored and stored[key].shape != shape
    ]
    unexpected = [
        key
        for key in stored
        if key not in wanted and not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX, EXTRA_PREFIX))
    ]
    problems = [_listed("tensors have other shapes", shapes)]
    if strict:
        # Extra state of the engine's layers depends on the kernels that run them.
        problems += [
            _listed("keys of the model are missing in the checkpoint", _without_extra(missing)),
            _listed("keys of the checkpoint are not in the model", _without_extra(unexpected)),
        ]
    found = "; ".join(problem for problem in problems if problem)
    if found:
        raise CheckpointError(
            f"{found}; build the model as it was when it was saved, or load with"
            " strict_loading=False to skip what does not fit by name."
        )
    return missing


def _without_extra(keys: Sequence[str] | set[str]) -> list[str]:
    return [key for key in keys if "_extra_state" not in key]


def _listed(what: str, names: Sequence[str], most: int = 20) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} {what}: {', '.join(sorted(names)[:most])}{more}"


# ------------------------------------------------------------------------------ objects of a rank


def rank_tree(objects: Mapping[str, Any], prefix: str, layout: Layout) -> Tree:
    """One object per rank and name."""
    return {
        name: engine.rank_object(f"{prefix}{name}", value, layout.rank, layout.world_size)
        for name, value in objects.items()
    }


def rng_states() -> dict[str, Any]:
    """States of every random stream of this process, as tensors and plain values."""
    algorithm, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "engine": engine.tracker_states(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restores what ``rng_states`` gave, in a process of the same place."""
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    engine.set_tracker_states(states["engine"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
