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
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_mcore import optimizer_state, state_dict
from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore.checkpoint_files import (
    LIGHTNING_FILE,
    SIZES,
    cause,
    check_visible,
    commit,
    is_checkpoint,
    pass_point,
    prepare,
    read_manifest,
    write_manifest,
    write_synced,
)
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout

__all__ = [
    "CheckpointGroups",
    "TrainState",
    "is_checkpoint",
    "load_checkpoint",
    "load_weights",
    "read_manifest",
    "save_checkpoint",
]

log = logging.getLogger(__name__)
T = TypeVar("T")


class CheckpointGroups(Protocol):
    """The process groups that checkpoints need."""

    @property
    def world_cpu(self) -> dist.ProcessGroup:
        """All ranks, over gloo."""

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold copies of the same shards."""


@dataclass(frozen=True)
class TrainState:
    """What is saved, or loaded in place."""

    chunks: Sequence[nn.Module]
    """This rank's chunks as the user built them, in the order of their stages."""
    optimizer: Any = None
    """The engine's optimizer; ``None`` saves weights only."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Objects of this rank alone by name. Loading at the same layout puts the saved ones here."""


def save_checkpoint(
    path: str | os.PathLike[str],
    state: TrainState,
    lightning_state: Mapping[str, Any],
    *,
    layout: Layout,
    groups: CheckpointGroups,
    info: Mapping[str, Any],
) -> None:
    """Saves atomically. Collective over the world.

    Args:
        path: Directory to create, the same on every rank, on a file system that all ranks share. An
            existing checkpoint is replaced when the new one is complete.
        state: Model, optimizer and objects of each rank. Random states go with the optimizer.
        lightning_state: Lightning's dict without ``state_dict`` and ``optimizer_states``; rank 0's
            is written.
        layout: Sizes and this rank's place.
        groups: For agreement between ranks and for sharing the writing.
        info: Further entries of the manifest, such as precision and step.

    Raises:
        CheckpointError: On every rank, naming each rank that failed and the cause.
    """
    target = Path(path)
    box = [secrets.token_hex(4)]
    dist.broadcast_object_list(box, 0, group=groups.world_cpu)
    aside = target.with_name(f".{target.name}.{box[0]}.tmp")
    main = layout.rank == 0
    metadata = engine.sharding_metadata(groups.dp_cp)

    def step(what: str, action: Callable[[], T], *, collective: bool = False) -> T:
        outcome = f"`{target}` was not saved"
        return _together(outcome, what, action, groups, collective=collective)

    def gather_optimizer(model: engine.Tree) -> tuple[engine.Tree, dict[str, Any]]:
        cpu = groups.world_cpu
        tree = optimizer_state.optimizer_tree(state.optimizer, model, metadata, cpu)
        return tree, optimizer_state.optimizer_settings(state.optimizer, cpu)

    def add_rank_objects(tree: engine.Tree) -> engine.Tree:
        tree["extra"] = state_dict.rank_tree(state.extra, state_dict.EXTRA_PREFIX, layout)
        if state.optimizer is not None:
            rng = state_dict.rng_states()
            tree["rng"] = state_dict.rank_tree(rng, state_dict.RNG_PREFIX, layout)
        return engine.build(tree)

    def finish(common: dict[str, Any]) -> None:
        engine.write_common(aside, common)
        pass_point("common.pt written")
        write_synced(aside / LIGHTNING_FILE, lambda file: torch.save(dict(lightning_state), file))
        pass_point("lightning.pt written")
        write_manifest(aside, layout, {**info, "optimizer": state.optimizer is not None})

    try:
        step("preparing the directory", lambda: prepare(target, aside) if main else None)
        step("finding the directory", lambda: check_visible(aside))
        tree = step(
            "describing the model", lambda: state_dict.model_tree(state.chunks, layout, metadata)
        )
        common: dict[str, Any] = {}
        if state.optimizer is not None:
            tree["optimizer"], common["optimizer"] = step(
                "gathering optimizer state", lambda: gather_optimizer({**tree}), collective=True
            )
        shards = step("describing shards", lambda: add_rank_objects(tree))
        step(
            "writing shards",
            lambda: engine.write(aside, shards, dp_cp=groups.dp_cp, world_cpu=groups.world_cpu),
            collective=True,
        )
        step("writing the manifest", lambda: finish(common) if main else None)
        step("renaming", lambda: commit(aside, target) if main else None)
    except CheckpointError:
        if main:
            shutil.rmtree(aside, ignore_errors=True)
        raise


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
    step = _loading(target, groups)
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
    step = _loading(target, groups)
    step("checking files", lambda: read_manifest(target))
    _load(step, target, TrainState(chunks), None, strict, layout, groups, [])


# ------------------------------------------------------------------------------ loading


class _Step(Protocol):
    def __call__(self, what: str, action: Callable[[], T], *, collective: bool = False) -> T: ...


def _loading(target: Path, groups: CheckpointGroups) -> _Step:
    def step(what: str, action: Callable[[], T], *, collective: bool = False) -> T:
        outcome = f"`{target}` was not loaded"
        return _together(outcome, what, action, groups, collective=collective)

    return step


def _load(
    step: _Step,
    target: Path,
    state: TrainState,
    optimizer: Any,
    strict: bool,
    layout: Layout,
    groups: CheckpointGroups,
    per_rank: Sequence[str],
) -> None:
    metadata = engine.sharding_metadata(groups.dp_cp)

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
            settings = engine.read_common(target)["optimizer"]
            model = state_dict.model_tree(state.chunks, layout, metadata)
            optimizer_state.load_optimizer(optimizer, model, loaded.get("optimizer", {}), settings)
        elif state.optimizer is not None:
            state.optimizer.reload_model_params()
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


# ------------------------------------------------------------------------------ agreement


def _together(
    outcome: str,
    what: str,
    action: Callable[[], T],
    groups: CheckpointGroups,
    *,
    collective: bool = False,
) -> T:
    """Runs ``action`` on every rank; if it fails on any, all raise the same error.

    An action that is ``collective`` itself raises CheckpointError on all ranks alike. At any other
    error, ranks may be waiting in it, out of reach: this one raises at once, so that its end frees
    them.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        if not collective:
            pass_point(what)
        result = action()
    except engine.CheckpointException as caught:
        error = caught
    except Exception as caught:
        if collective and not isinstance(caught, CheckpointError):
            text = f"{outcome}: {what} failed on rank {dist.get_rank()}: {cause(caught)}"
            raise CheckpointError(text) from caught
        error = caught
    failures: list[Any] = [None] * dist.get_world_size(groups.world_cpu)
    try:
        dist.all_gather_object(failures, _failures(error), group=groups.world_cpu)
    except RuntimeError as lost:
        raise CheckpointError(
            f"{outcome}: while {what}, another rank was lost ({cause(error or lost)})."
        ) from (error or lost)
    by_cause: dict[str, list[int]] = {}
    for rank, text in sorted({k: v for one in failures for k, v in one.items()}.items()):
        by_cause.setdefault(text, []).append(rank)
    if by_cause:
        listed = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_cause.items())
        raise CheckpointError(f"{outcome}: {what} failed on {listed}") from error
    return result  # type: ignore[no-any-return]


def _failures(error: BaseException | None) -> dict[int, str]:
    """Causes by rank; torch's checkpoint errors carry those of other ranks."""
    if isinstance(error, engine.CheckpointException):
        return {rank: cause(pair[0]) for rank, pair in error.failures.items()}
    return {} if error is None else {dist.get_rank(): cause(error)}


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
