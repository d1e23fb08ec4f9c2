"""Checkpoints: a directory ``NAME.ckpt`` that is complete or absent, and loads in any layout.

Inside::

    *.distcp, .metadata, common.pt, metadata.json   the engine's sharded files, of all ranks
    lightning.pt                                    Lightning's dict without model and optimizer
    lightning_mcore.json                            format, versions, layout, step, files with sizes

A save writes ``.NAME.ckpt.<token>.tmp`` beside the target, with ``lightning_mcore.json`` last, and
renames it when all ranks have agreed that it is complete. So a save that was killed, or that failed
on any rank, leaves the previous checkpoint of that name untouched; its remains are removed by the
next save.

Every rank of the world calls every function here but ``is_checkpoint``; all ranks return, or all
raise the same ``CheckpointError``.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mcore import optimizer_state, state_dict
from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore.agreement import CheckpointGroups, Steps
from lightning_mcore.checkpoint_files import (
    LIGHTNING_FILE,
    SIZES,
    cause,
    is_checkpoint,
    read_manifest,
)
from lightning_mcore.checkpoint_save import PendingSave, TrainState, save_checkpoint, start_save
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout

__all__ = [
    "CheckpointGroups",
    "PendingSave",
    "TrainState",
    "is_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_manifest",
    "save_checkpoint",
    "start_save",
]

log = logging.getLogger(__name__)


def load_checkpoint(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    load_optimizer: bool,
    strict: bool,
    layout: Layout,
    groups: CheckpointGroups,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Loads model and optimizer in place, whatever layout saved them. Collective over the world.

    With the optimizer, random states are restored too if the layout is the one that saved them.

    Args:
        path: Checkpoint directory.
        state: What to load into.
        load_optimizer: Whether to load optimizer and random states.
        strict: Whether keys that are missing or unexpected in the checkpoint are an error.
        layout: Sizes and this rank's place.
        groups: For agreement between ranks.
        weights_only: ``False`` lets ``lightning.pt`` run code of its own (it is a pickle); ``None``
            and ``True`` refuse types that torch does not know to be safe.

    Returns:
        Lightning's dict, as it was given to ``save_checkpoint`` on rank 0.

    Raises:
        CheckpointError: On every rank, with the cause.
    """
    target = Path(path)
    step = Steps(f"`{target}` was not loaded", groups.world_cpu)
    manifest = step("checking files", lambda: read_manifest(target))
    lightning_state = step(
        "reading Lightning's state",
        lambda: _load_pickle(target / LIGHTNING_FILE, weights_only is not False),
    )
    same_layout = manifest["layout"] == {name: getattr(layout, name) for name in SIZES}
    optimizer = state.optimizer if load_optimizer else None
    if optimizer is not None and not manifest["optimizer"]:
        raise CheckpointError(
            f"`{target}` was saved without optimizer state (save_weights_only=True); load its"
            " weights with MCoreStrategy(init_from=...)."
        )
    if optimizer is not None and not same_layout and layout.rank == 0:
        log.warning(
            "Random states of %s are not restored: it was saved at %s.", target, manifest["layout"]
        )
    wanted = ("rng" if optimizer is not None else "", "extra" if state.extra else "")
    per_rank = [name for name in wanted if name and same_layout]
    _load(step, target, state, optimizer, strict, layout, groups, per_rank)
    return lightning_state


def load_weights(
    path: str | os.PathLike[str],
    chunks: Sequence[nn.Module],
    *,
    strict: bool = True,
    layout: Layout,
    groups: CheckpointGroups,
) -> None:
    """Loads weights and buffers only, whatever layout saved them. Collective over the world.

    Raises:
        CheckpointError: On every rank, with the cause.
    """
    target = Path(path)
    step = Steps(f"`{target}` was not loaded", groups.world_cpu)
    step("checking files", lambda: read_manifest(target))
    _load(step, target, TrainState(chunks), None, strict, layout, groups, [])


# ------------------------------------------------------------------------------ loading


def _load(
    step: Steps,
    target: Path,
    state: TrainState,
    optimizer: Any,
    strict: bool,
    layout: Layout,
    groups: CheckpointGroups,
    per_rank: Sequence[str],
) -> None:
    metadata = engine.sharding_metadata(groups.dp_cp)
    settings: dict[str, Any] = {}
    if optimizer is not None:
        settings = step(
            "reading the optimizer's settings",
            lambda: _load_pickle(target / engine.COMMON_FILE, weights_only=True)["optimizer"],
        )

    def request() -> tuple[engine.Tree, dict[str, engine.Stored]]:
        stored = engine.contents(target)
        model = state_dict.model_tree(state.chunks, layout, metadata)
        tree: engine.Tree = {**model}
        if optimizer is not None:
            tree["optimizer"] = optimizer_state.optimizer_request(
                optimizer, model, stored, metadata
            )
        for name in per_rank:
            found = _rank_names(stored, f"{name}.")
            tree[name] = state_dict.rank_tree(dict.fromkeys(found), f"{name}.", layout)
        return tree, stored

    def install(loaded: engine.Tree) -> None:
        state_dict.load_model(state.chunks, loaded)
        if optimizer is not None:
            model = state_dict.model_tree(state.chunks, layout, metadata)
            optimizer_state.load_optimizer(optimizer, model, loaded.get("optimizer", {}), settings)
        elif state.optimizer is not None:
            engine.reload_main_parameters(state.optimizer)
        state.extra.update(loaded.get("extra", {}))
        if "rng" in loaded:
            state_dict.set_rng_states(loaded["rng"])

    tree, stored = step("describing the model", request)
    missing = step(
        "comparing keys",
        lambda: state_dict.check_keys(tree, stored, groups.world_cpu, strict=strict),
        collective=True,
    )
    loaded = step("reading shards", lambda: engine.read(target, engine.without_keys(tree, missing)))
    step("installing the state", lambda: install(loaded))


def _rank_names(stored: Mapping[str, Any], prefix: str) -> list[str]:
    names = {
        key.removeprefix(prefix).split("/shard_")[0] for key in stored if key.startswith(prefix)
    }
    return sorted(names)


def _load_pickle(file: Path, weights_only: bool) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckpointError(
            f"`{file.name}` holds {refused[1] if refused else 'a type'} that torch does not load"
            " without running code from the file; if you trust it, name the type to"
            " torch.serialization.add_safe_globals."
        ) from error
    except Exception as error:  # As many kinds as there are ways to damage a file.
        raise CheckpointError(f"`{file.name}` cannot be read: {cause(error)}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"`{file.name}` holds a {type(loaded).__name__}, not a dict")
    return loaded
