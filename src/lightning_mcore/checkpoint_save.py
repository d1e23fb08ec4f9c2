"""Saving: a snapshot of all ranks, files that each writes alone, and a name when all are there.

::

    start_save        collective: describe, plan, and for a save in the background copy to the host
    PendingSave       each rank writes its files; beside the training, or at once
        .settled      collective and short: whether all ranks have written, or one has failed
        .commit       collective: waits for all ranks, then rank 0 writes the index and renames
        .salvage      not collective: the same after an error, when ranks can no longer be asked

What a rank has written it notes in a file of the unfinished directory, so rank 0 needs no other
rank to complete a save: only their files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_mcore import optimizer_state, state_dict
from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore._mcore.shard_writer import PlannedWrite, plan_write
from lightning_mcore.agreement import CheckpointGroups, Steps
from lightning_mcore.checkpoint_files import (
    LIGHTNING_FILE,
    cause,
    check_visible,
    commit,
    pass_point,
    prepare,
    write_manifest,
    write_synced,
)
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""For how long no file may grow before a save whose ranks cannot be asked is given up."""
_RECHECK_S = 0.05
_NOTE = ".written.{}"


@dataclass(frozen=True)
class TrainState:
    """What is saved, or loaded in place."""

    chunks: Sequence[nn.Module]
    """This rank's chunks as the user built them, in the order of their stages."""
    optimizer: Any = None
    """The engine's optimizer; ``None`` saves weights only."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Objects of this rank alone by name. Loading at the same layout puts the saved ones here."""


def check_model(chunks: Sequence[nn.Module], *, layout: Layout, groups: CheckpointGroups) -> None:
    """Describes a model as a save does, and drops the description. Collective over the world.

    Raises:
        CheckpointError: On every rank, naming each rank that failed and the cause.
    """
    step = Steps(
        "The model cannot be saved, so training was not started"
        " (Trainer(enable_checkpointing=False) trains without checkpoints)",
        groups.world_cpu,
    )
    metadata = engine.sharding_metadata(groups.dp_cp)
    step("describing the model", lambda: state_dict.model_tree(chunks, layout, metadata))


def save_checkpoint(
    path: str | os.PathLike[str],
    state: TrainState,
    lightning_state: Mapping[str, Any],
    *,
    layout: Layout,
    groups: CheckpointGroups,
    info: Mapping[str, Any],
) -> None:
    """Saves atomically and waits for it; arguments are those of ``start_save``."""
    start_save(
        path,
        state,
        lightning_state,
        layout=layout,
        groups=groups,
        info=info,
        background=False,
    ).commit()


def start_save(
    path: str | os.PathLike[str],
    state: TrainState,
    lightning_state: Mapping[str, Any],
    *,
    layout: Layout,
    groups: CheckpointGroups,
    info: Mapping[str, Any],
    background: bool,
) -> PendingSave:
    """Takes a snapshot and starts to write it. Collective over the world.

    Args:
        path: Directory to create, the same on every rank, on a file system that all ranks share. An
            existing checkpoint is replaced when the new one is complete.
        state: Model, optimizer and objects of each rank. Random states go with the optimizer.
        lightning_state: Lightning's dict without ``state_dict`` and ``optimizer_states``; rank 0's
            is written.
        layout: Sizes and this rank's place.
        groups: For agreement between ranks and for sharing the writing.
        info: Further entries of the manifest, such as precision and step.
        background: Whether to write in a thread, from copies of what this rank is to write. If not,
            ``commit`` writes, from the state itself.

    Raises:
        CheckpointError: On every rank, naming each rank that failed and the cause.
    """
    target = Path(path)
    box = [secrets.token_hex(4)]
    dist.broadcast_object_list(box, 0, group=groups.world_cpu)
    aside = target.with_name(f".{target.name}.{box[0]}.tmp")
    main = layout.rank == 0
    step = Steps(f"`{target}` was not saved", groups.world_cpu)
    metadata = engine.sharding_metadata(groups.dp_cp)

    def with_optimizer(tree: engine.Tree) -> dict[str, Any]:
        tree["optimizer"] = optimizer_state.optimizer_tree(
            state.optimizer, {**tree}, groups.world_cpu
        )
        return optimizer_state.optimizer_settings(state.optimizer, groups.world_cpu)

    def with_rank_objects(tree: engine.Tree) -> engine.Tree:
        tree["extra"] = state_dict.rank_tree(state.extra, state_dict.EXTRA_PREFIX, layout)
        if state.optimizer is not None:
            rng = state_dict.rng_states()
            tree["rng"] = state_dict.rank_tree(rng, state_dict.RNG_PREFIX, layout)
        return engine.build(tree)

    def lightning_writer() -> Callable[[Any], Any]:
        """Callbacks and loops go on changing too, so a save in the background takes their bytes."""
        if not background:
            return lambda file: torch.save(dict(lightning_state), file)
        buffer = BytesIO()
        torch.save(dict(lightning_state), buffer)
        return lambda file: file.write(buffer.getbuffer())

    try:
        step("preparing the directory", lambda: prepare(target, aside) if main else None)
        step("finding the directory", lambda: check_visible(aside))
        tree = step(
            "describing the model", lambda: state_dict.model_tree(state.chunks, layout, metadata)
        )
        common: dict[str, Any] = {}
        if state.optimizer is not None:
            common["optimizer"] = step(
                "describing the optimizer", lambda: with_optimizer(tree), collective=True
            )
        shards = step("describing shards", lambda: with_rank_objects(tree))
        planned = step(
            "planning",
            lambda: plan_write(
                aside, shards, copy=background, dp_cp=groups.dp_cp, world_cpu=groups.world_cpu
            ),
            collective=True,
        )
        writer = step("taking Lightning's state", lambda: lightning_writer() if main else None)
    except CheckpointError:
        if main:
            shutil.rmtree(aside, ignore_errors=True)
        raise

    def finish(results: list[Any]) -> None:
        planned.finish(results)
        pass_point("index written")
        engine.write_common(aside, common)
        pass_point("common.pt written")
        assert writer is not None, "rank 0 has Lightning's state"
        write_synced(aside / LIGHTNING_FILE, writer)
        pass_point("lightning.pt written")
        write_manifest(aside, layout, {**info, "optimizer": state.optimizer is not None})

    pending = PendingSave(target, aside, planned, finish, step, layout, groups)
    if background:
        pending.start()
    return pending


class PendingSave:
    """A save whose snapshot is taken; its directory has no name yet.

    Use ``start_save``.
    """

    def __init__(
        self,
        target: Path,
        aside: Path,
        planned: PlannedWrite,
        finish: Callable[[list[Any]], None],
        step: Steps,
        layout: Layout,
        groups: CheckpointGroups,
    ) -> None:
        self.target = target
        self._aside = aside
        self._planned = planned
        self._finish = finish
        self._step = step
        self._rank, self._world_size = layout.rank, layout.world_size
        self._world_cpu = groups.world_cpu
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._then: list[Callable[[], Any]] = []

    def start(self) -> None:
        """Starts to write this rank's files in a thread, which uses no process group."""
        pass_point("snapshot taken")
        self._thread = threading.Thread(target=self._try_to_write, name="checkpoint writer")
        self._thread.start()

    def then(self, action: Callable[[], Any]) -> None:
        """Adds what rank 0 does once the checkpoint has its name, and not at all if it fails."""
        self._then.append(action)

    def settled(self) -> bool:
        """Whether ``commit`` would not wait. Collective over the world, on the host."""
        running = self._thread is not None and self._thread.is_alive()
        votes = torch.tensor([int(running), int(self._error is not None)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._world_cpu)
        any_running, any_failed = votes.tolist()
        return bool(any_failed or not any_running)

    def commit(self) -> None:
        """Waits until all ranks have written, completes the checkpoint and gives it its name.

        Collective over the world.

        Raises:
            CheckpointError: On every rank, naming each rank that failed and the cause; then nothing
                is left of it, and a checkpoint that had the name before still has it.
        """
        main = self._rank == 0
        if self._thread is not None:
            # Before any rank can fail: what is removed then must not be written to any more.
            self._thread.join()
        try:
            self._step("writing shards", self._written)
            self._step("writing the manifest", lambda: self._complete() if main else None)
            self._step("renaming", lambda: self._rename() if main else None)
        except CheckpointError:
            if main:
                shutil.rmtree(self._aside, ignore_errors=True)
            raise

    def salvage(self) -> None:
        """Completes the save after an error, when other ranks cannot be asked any more.

        Every rank that still can finishes its files; rank 0 waits for those of all ranks as long as
        they grow, then completes the checkpoint, or removes what there is of it. What happened is
        logged: there is an error already.
        """
        try:
            self._written()
            if self._rank == 0:
                self._wait_for_notes()
                self._complete()
                self._rename()
                log.warning("`%s` was saved before the run ended.", self.target)
        except Exception as error:
            log.error("`%s` was not saved: %s", self.target, cause(error))
            if self._rank == 0:
                shutil.rmtree(self._aside, ignore_errors=True)

    def _try_to_write(self) -> None:
        try:
            pass_point("writing in the background")
            self._write()
        except Exception as error:
            self._error = error
            with contextlib.suppress(OSError):
                self._note(cause(error))

    def _write(self) -> None:
        results = self._planned.run()
        pass_point("shards written")
        self._note(results)
        pass_point("noted what was written")

    def _note(self, written: list[Any] | str) -> None:
        """Tells rank 0 what this rank has written, or why it could not."""
        note = self._aside / _NOTE.format(self._rank)
        new = note.with_name(f"{note.name}.new")
        new.write_bytes(pickle.dumps(written))
        new.replace(note)

    def _written(self) -> None:
        if self._thread is None:
            self._write()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _complete(self) -> None:
        notes = [self._aside / _NOTE.format(rank) for rank in range(self._world_size)]
        results = [pickle.loads(note.read_bytes()) for note in notes]
        failed = [f"rank {i}: {text}" for i, text in enumerate(results) if isinstance(text, str)]
        if failed:
            raise CheckpointError("; ".join(failed))
        for note in notes:
            note.unlink()
        self._finish(results)

    def _rename(self) -> None:
        commit(self._aside, self.target)
        for action in self._then:
            action()

    def _wait_for_notes(self) -> None:
        missing = [self._aside / _NOTE.format(rank) for rank in range(self._world_size)]
        size, since = -1, time.monotonic()
        while missing := [note for note in missing if not note.exists()]:
            now = _size_of(self._aside)
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                ranks = ", ".join(note.name.rpartition(".")[2] for note in missing[:8])
                raise CheckpointError(f"ranks {ranks} have not written their files")
            time.sleep(_RECHECK_S)


def _size_of(directory: Path) -> int:
    """Bytes in the files of a directory in which other ranks still write."""
    total = 0
    for file in directory.iterdir():
        # A note takes its final name.
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
