"""An optimizer's part of a checkpoint: the same keys and settings from every kind of optimizer.

State that a distributed optimizer saved can be loaded by a plain one, and the other way round:
tensors are shaped and sharded like their parameters; the step count and the settings of parameter
groups are kept once for all ranks. Every rank calls every function here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore._mcore.chained import loss_scalers
from lightning_mcore._mcore.checkpointing import STEP, Stored, Tree
from lightning_mcore.errors import CheckpointError
from lightning_mcore.state_dict import OPTIMIZER_PREFIX

MAIN_PARAM = "fp32_param"
"""Entry that is a main parameter, in state that is not distributed."""
DISTRIBUTED_MAIN_PARAM = "param"
"""The same in distributed state, where the engine gives it this name."""

_ON_DEVICE = "on device"
"""Key around an object that was a tensor on a GPU."""

_GROUP_IDENTITY = ("lightning_group", "wd_mult", "lr_mult")
"""Settings that tell parameter groups apart, whatever their order on a rank."""
_NOT_SAVED = {
    *("params", STEP),
    *("foreach", "fused", "capturable", "differentiable"),
    # Of an offloaded optimizer; the classes among them could not be loaded either.
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
    *("is_expert_parallel", "is_decoupled_lr", *_GROUP_IDENTITY),
}
"""What is stored elsewhere, and settings of a machine or a layout rather than of the training."""


# ------------------------------------------------------------------------------ saving


def optimizer_tree(optimizer: Any, model: Tree, group: Any) -> Tree:
    """Tensors and objects of an optimizer's state. Collective over ``group``, all ranks."""
    tree: Tree = {}
    shared_step = len(_all_steps(optimizer, group)) <= 1
    for index, part in enumerate(engine.parts_of(optimizer)):
        engine.materialize(part)
        if engine.is_distributed(part):
            tree[f"part{index}"] = engine.distributed_tree(part, model)
        else:
            tree[f"part{index}"] = _plain_optimizer_tree(part, model, shared_step)
    return tree


def _plain_optimizer_tree(part: Any, model: Tree, shared_step: bool) -> Tree:
    tree: Tree = {}
    for index, (leaf, param, main) in enumerate(_optimized(part, model)):
        entries: Tree = {}
        if main is not param:
            key = f"{OPTIMIZER_PREFIX}{MAIN_PARAM}.{leaf.key}"
            entries[MAIN_PARAM] = engine.like(leaf, key, main.detach())
        for entry, value in part.optimizer.state.get(main, {}).items():
            key = f"{OPTIMIZER_PREFIX}{entry}.{leaf.key}"
            counted = entry == STEP and isinstance(value, Tensor) and engine.counts_in_state(part)
            if value is None or (counted and shared_step):
                continue
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
                entries[entry] = engine.like(leaf, key, value)
            elif isinstance(value, Tensor) and value.dim() > 0:
                entries[entry] = engine.object_like(leaf, key, _without_place(value))
            else:
                entries[entry] = engine.number_like(leaf, key, _without_place(value))
        tree[str(index)] = entries
    return tree


def _without_place(value: Any) -> Any:
    """An object to be saved: torch would load it onto the very device that it was saved from."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return {_ON_DEVICE: value.detach().cpu()}
    return value


def _in_place(value: Any, device: torch.device) -> Any:
    """What ``_without_place`` was given, on this rank's device if it was on one."""
    if isinstance(value, Mapping) and value.keys() == {_ON_DEVICE}:
        return value[_ON_DEVICE].to(device)
    return value


def _optimized(part: Any, model: Tree) -> list[tuple[Any, Tensor, Tensor]]:
    """Shard, parameter and main parameter of what an optimizer updates on this rank.

    Their place in the list identifies them: all layers of a Megatron model share one key, of which
    each is a slice.
    """
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
    scalers = [scaler.state_dict() for scaler in loss_scalers(optimizer)]
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


# ------------------------------------------------------------------------------ loading


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
            state = engine.distributed_request(part, model, metadata)
            for tensors in state.values():
                _name_main_param(tensors, stored)
            tree[f"part{index}"] = state
        else:
            tree[f"part{index}"] = _plain_request(part, model, entries, stored)
    return tree


def _name_main_param(entries: Tree, stored: Mapping[str, Stored]) -> None:
    """Asks for a main parameter by the name it was saved under.

    Optimizers in fp32 that are not distributed save none: then it is not asked for, and the model's
    parameter takes its place.
    """
    for name in (DISTRIBUTED_MAIN_PARAM, MAIN_PARAM):
        leaf = entries.get(name)
        if leaf is None:
            continue
        own = leaf.key.removeprefix(f"{OPTIMIZER_PREFIX}{name}.")
        names = (DISTRIBUTED_MAIN_PARAM, MAIN_PARAM)
        keys = [key for other in names if (key := f"{OPTIMIZER_PREFIX}{other}.{own}") in stored]
        if keys:
            leaf.key = keys[0]
        else:
            del entries[name]


def _plain_request(
    part: Any, model: Tree, entries: Mapping[str, list[str]], stored: Mapping[str, Stored]
) -> Tree:
    tree: Tree = {}
    for index, (leaf, param, main) in enumerate(_optimized(part, model)):
        wanted: Tree = {}
        if main is not param:
            key = f"{OPTIMIZER_PREFIX}{MAIN_PARAM}.{leaf.key}"
            wanted[MAIN_PARAM] = engine.like(leaf, key, torch.empty_like(main))
            _name_main_param(wanted, stored)
        for entry in sorted(set(entries.get(leaf.key, ()))):
            if entry in (DISTRIBUTED_MAIN_PARAM, MAIN_PARAM):
                continue
            key = f"{OPTIMIZER_PREFIX}{entry}.{leaf.key}"
            kept = stored.get(key)
            if kept is None or kept.dtype is None:
                number = engine.number_like(leaf, key, None)
                found = engine.stored_key(number) in stored
                wanted[entry] = number if found else engine.object_like(leaf, key, None)
            else:
                empty = torch.empty(param.shape, dtype=kept.dtype, device=main.device)
                wanted[entry] = engine.like(leaf, key, empty)
        tree[str(index)] = wanted
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
    if settings["grad_scaler"] is not None:
        for scaler in loss_scalers(optimizer):
            scaler.load_state_dict(settings["grad_scaler"])


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
    for index, (_, param, main) in enumerate(_optimized(part, model)):
        entries = dict(state.get(str(index), {}))
        if main is not param:
            main.copy_(entries.pop(MAIN_PARAM, param))
        if entries and step is not None and engine.counts_in_state(part):
            entries.setdefault(STEP, engine.new_step(step, main, group_of[id(main)]))
        for entry, kept in entries.items():
            value = _in_place(kept, main.device)
            dtype = engine.moment_dtype(part, entry, main)
            known = dtype is not None and isinstance(value, Tensor)
            entries[entry] = value.to(dtype) if known else value
        if entries:
            inner.state[main] = entries
        else:
            inner.state.pop(main, None)
