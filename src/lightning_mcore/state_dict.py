"""What a checkpoint holds, as trees of shards named alike in every layout.

Keys::

    <parameter or buffer>                   of the model, by its name in the whole model
    optimizer.state.<entry>.<parameter>     one entry of one parameter's optimizer state
    rng.<name>, extra.<name>                one object for each rank

All kinds of optimizer write the same keys and the same settings, so that state saved by a
distributed optimizer can be loaded by a plain one, and the other way round. Every rank calls every
function here.
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
from lightning_mcore._mcore.checkpointing import STEP, Stored, Tree
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout

OPTIMIZER_PREFIX = "optimizer.state."
RNG_PREFIX = "rng."
EXTRA_PREFIX = "extra."

MAIN_PARAM = "fp32_param"
"""Name of a main parameter in state that is not distributed; the distributed one says ``param``."""

_GROUP_IDENTITY = ("lightning_group", "wd_mult", "lr_mult", "is_expert_parallel")
"""Settings that tell parameter groups apart, whatever their order on a rank."""
_NOT_SAVED = ("params", STEP, "foreach", "fused", "capturable", "differentiable")
"""Settings of the machine rather than of the training, and what is stored elsewhere."""


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


# ------------------------------------------------------------------------------ optimizer: saving


def optimizer_tree(optimizer: Any, model: Tree, metadata: dict[str, Any], group: Any) -> Tree:
    """Tensors and objects of an optimizer's state. Collective over the data-parallel groups."""
    tree: Tree = {}
    shared_step = len(_all_steps(optimizer, group)) <= 1
    for index, part in enumerate(engine.parts_of(optimizer)):
        engine.materialize(part)
        if engine.is_distributed(part):
            tree[f"part{index}"] = engine.distributed_tree(part, model, metadata, is_loading=False)
        else:
            tree[f"part{index}"] = _plain_optimizer_tree(part, model, shared_step)
    return tree


def _plain_optimizer_tree(part: Any, model: Tree, shared_step: bool) -> Tree:
    tree: Tree = {}
    for leaf, param, main in _optimized(part, model):
        if main is not param:
            key = f"{OPTIMIZER_PREFIX}{MAIN_PARAM}.{leaf.key}"
            tree[key] = engine.like(leaf, key, main.detach())
        for entry, value in part.optimizer.state.get(main, {}).items():
            key = f"{OPTIMIZER_PREFIX}{entry}.{leaf.key}"
            if value is None or (entry == STEP and shared_step and isinstance(value, Tensor)):
                continue
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
                tree[key] = engine.like(leaf, key, value)
            else:
                tree[key] = engine.object_like(leaf, key, value)
    return tree


def _optimized(part: Any, model: Tree) -> list[tuple[Any, Tensor, Tensor]]:
    """Shard, parameter and main parameter of what an optimizer updates on this rank."""
    own = {id(param) for group in part.optimizer.param_groups for param in group["params"]}
    found, seen = [], set()
    for leaf in engine.tensors_of(model):
        main = engine.main_parameter(part, leaf.data)
        if id(main) in own and id(main) not in seen:
            seen.add(id(main))
            found.append((leaf, leaf.data, main))
    return found


def optimizer_settings(optimizer: Any, group: Any) -> dict[str, Any]:
    """Step, loss scale and settings of every parameter group of any rank; the same on every rank.

    Collective over ``group``, all ranks.
    """
    local = {
        identity: {key: value for key, value in settings.items() if key not in _NOT_SAVED}
        for identity, settings in _groups_of(optimizer)
    }
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    groups = {
        identity: settings for found in reversed(gathered) for identity, settings in found.items()
    }
    steps = _all_steps(optimizer, group)
    scalers = [p.grad_scaler.state_dict() for p in engine.parts_of(optimizer) if _scaler(p)]
    return {
        "groups": [
            {"identity": list(identity), "settings": settings}
            for identity, settings in sorted(groups.items(), key=lambda item: str(item[0]))
        ],
        "step": max(steps, default=None),
        "grad_scaler": scalers[0] if scalers else None,
    }


def _groups_of(optimizer: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for part in engine.parts_of(optimizer):
        for index, group in enumerate(part.optimizer.param_groups):
            identity = tuple(group.get(key) for key in _GROUP_IDENTITY)
            known = any(value is not None for value in identity)
            found.append((identity if known else (index,), group))
    return found


def _all_steps(optimizer: Any, group: Any) -> set[float]:
    """Distinct step counters of all parameters on all ranks."""
    local: set[float] = set()
    for part in engine.parts_of(optimizer):
        counters = [entry.get(STEP) for entry in part.optimizer.state.values()]
        counters += [settings.get(STEP) for settings in part.optimizer.param_groups]
        local |= {float(value) for value in counters if value is not None}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return set().union(*gathered)


def _scaler(part: Any) -> Any:
    return getattr(part, "grad_scaler", None)


# ------------------------------------------------------------------------------ optimizer: loading


def optimizer_request(
    optimizer: Any, model: Tree, stored: Mapping[str, Stored], metadata: dict[str, Any]
) -> Tree:
    """What to read into an optimizer from a checkpoint with ``stored`` keys, saved by any kind."""
    entries: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(OPTIMIZER_PREFIX):
            entry, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
            entries.setdefault(name.split("/shard_")[0], []).append(entry)
    tree: Tree = {}
    for index, part in enumerate(engine.parts_of(optimizer)):
        if engine.is_distributed(part):
            state = engine.distributed_tree(part, model, metadata, is_loading=True)
            for tensors in state.values():
                for leaf in tensors.values():
                    leaf.key = _stored_name(leaf.key, stored)
            tree[f"part{index}"] = state
        else:
            tree[f"part{index}"] = _plain_request(part, model, entries, stored)
    return tree


def _stored_name(key: str, stored: Mapping[str, Stored]) -> str:
    """The key that holds a main parameter: by either name, else the model's own in fp32."""
    entry, _, name = key.removeprefix(OPTIMIZER_PREFIX).partition(".")
    if key in stored or entry not in ("param", MAIN_PARAM):
        return key
    others = (f"{OPTIMIZER_PREFIX}{MAIN_PARAM}.{name}", f"{OPTIMIZER_PREFIX}param.{name}", name)
    return next((other for other in others if other in stored), key)


def _plain_request(
    part: Any, model: Tree, entries: Mapping[str, list[str]], stored: Mapping[str, Stored]
) -> Tree:
    tree: Tree = {}
    for leaf, param, main in _optimized(part, model):
        wanted: Tree = {}
        if main is not param:
            key = _stored_name(f"{OPTIMIZER_PREFIX}{MAIN_PARAM}.{leaf.key}", stored)
            wanted[MAIN_PARAM] = engine.like(leaf, key, torch.empty_like(main))
        for entry in sorted(set(entries.get(leaf.key, ()))):
            if entry in ("param", MAIN_PARAM):
                continue
            key = f"{OPTIMIZER_PREFIX}{entry}.{leaf.key}"
            kept = stored.get(key)
            if kept is None or kept.dtype is None:
                wanted[entry] = engine.object_like(leaf, key, None)
            else:
                empty = torch.empty(param.shape, dtype=kept.dtype, device=main.device)
                wanted[entry] = engine.like(leaf, key, empty)
        tree[leaf.key] = wanted
    return tree


@torch.no_grad()
def load_optimizer(optimizer: Any, model: Tree, loaded: Tree, settings: Mapping[str, Any]) -> None:
    """Puts loaded state and settings into an optimizer.

    Raises:
        CheckpointError: If the checkpoint lacks a parameter group of this optimizer.
    """
    _load_settings(optimizer, settings)
    step = settings["step"]
    for index, part in enumerate(engine.parts_of(optimizer)):
        state = loaded.get(f"part{index}", {})
        if engine.is_distributed(part):
            engine.set_distributed_state(part, state, step or 0)
        else:
            _load_plain_state(part, model, state, step)
        if _scaler(part) and settings["grad_scaler"] is not None:
            part.grad_scaler.load_state_dict(settings["grad_scaler"])


def _load_settings(optimizer: Any, settings: Mapping[str, Any]) -> None:
    saved = {tuple(group["identity"]): group["settings"] for group in settings["groups"]}
    for identity, group in _groups_of(optimizer):
        if identity not in saved:
            raise CheckpointError(
                f"The optimizer has a parameter group {identity} that the checkpoint, with groups"
                f" {sorted(saved, key=str)}, has not; build the parameter groups as when it was"
                " saved, or load weights only with MCoreStrategy(init_from=...)."
            )
        group.update(saved[identity])
        if settings["step"] is not None and not _steps_in_state(optimizer):
            group[STEP] = int(settings["step"])


def _steps_in_state(optimizer: Any) -> bool:
    return all(engine.counts_in_state(part) for part in engine.parts_of(optimizer))


def _load_plain_state(part: Any, model: Tree, state: Tree, step: float | None) -> None:
    inner = part.optimizer
    group_of = {id(param): group for group in inner.param_groups for param in group["params"]}
    for leaf, param, main in _optimized(part, model):
        entries = dict(state.get(leaf.key, {}))
        if main is not param:
            main.copy_(entries.pop(MAIN_PARAM))
        if entries and step is not None and engine.counts_in_state(part):
            entries.setdefault(STEP, engine.new_step(step, main, group_of[id(main)]))
        if entries:
            inner.state[main] = entries
        else:
            inner.state.pop(main, None)


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
