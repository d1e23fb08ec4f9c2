"""The strategy's checkpoint hooks: each maps one Lightning hook to one call of ``checkpoint``.

With ``async_save`` at most one save is pending. It is completed at the start of the first step
after all ranks have written, and before anything that could meet it: the next save, a load, the
end of training. What would take away older checkpoints, or name the new one, waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mcore import _lightning
from lightning_mcore.checkpoint import PendingSave, TrainState, load_checkpoint, start_save
from lightning_mcore.data_check import warn_of_own_state
from lightning_mcore.errors import CheckpointError, ConfigurationError
from lightning_mcore.plain import manifest_names
from lightning_mcore.processes import LayoutStrategy
from lightning_mcore.run import ModelRun
from lightning_mcore.state_dict import state_beside


class CheckpointStrategy(LayoutStrategy):
    """Saves and loads checkpoints that are directories of shards, on all ranks together."""

    def __init__(
        self,
        process_group_backend: str | None,
        timeout_s: float,
        peer_timeout_s: float,
        *,
        async_save: bool,
    ) -> None:
        super().__init__(process_group_backend, timeout_s, peer_timeout_s)
        self._async_save = async_save
        self._training = False
        self._pending: PendingSave | None = None
        self._can_resume = False
        """Whether the pending save holds all that training needs to go on."""
        self._compared_state = False

    def _engine_context(self) -> AbstractContextManager[Any]:
        """In which the engine can be called; re-entered for a save after ``fit``."""
        raise NotImplementedError

    @property
    def _model_run(self) -> ModelRun:
        raise NotImplementedError

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Sharded state is loaded into the wrapped model and the engine's optimizer."""
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What of the LightningModule is outside the model that ``strategy.build`` gave.

        ``save_checkpoint`` writes the model itself as each rank's shards. The rest (frozen
        parameters, buffers, metrics that keep their state) is alike on every rank, and is kept as
        Lightning does.
        """
        run = self._model_run
        return state_beside(run.module, run.pipeline)

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Settings of parameter groups: LR schedulers go on from them. State is in the shards."""
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
        }

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Loads what is outside the model; ``load_checkpoint`` has loaded the shards in place."""
        saved, own = checkpoint["state_dict"], self.lightning_module_state_dict()
        differing = sorted(saved.keys() ^ own.keys())
        if strict and differing:
            raise CheckpointError(
                f"Outside of the model that strategy.build gave, {len(differing)} names are in the"
                f" checkpoint or in the LightningModule only: {differing[:20]}; build it as it was"
                " when it was saved, or set strict_loading=False to skip them."
            )
        if saved:
            self._model_run.module.load_state_dict(saved, strict=False)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Nothing to do, for the same reason."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise ConfigurationError(
                "`storage_options` is for CheckpointIO plugins, which sharded checkpoints do not"
                " use; leave it out."
            )
        self.finish_save()
        run = self._model_run
        if not self._compared_state:
            self._compared_state = True
            warn_of_own_state(checkpoint, run.state)
        with_optimizer = bool(checkpoint.get("optimizer_states"))
        with self._engine_context(), self._progress.during("saving a checkpoint"):
            path = self.broadcast(str(filepath))
            run.gather_parameters()
            run.share_buffers()
            pending = start_save(
                Path(path),
                self._train_state(with_optimizer),
                checkpoint,
                layout=self.layout,
                groups=self.groups,
                info={
                    "precision": str(self.precision_plugin.precision),
                    "global_step": checkpoint.get("global_step"),
                    "epoch": checkpoint.get("epoch"),
                    **manifest_names(run.module, run.inner, self.layout, self.groups),
                },
                background=self._async_save and self._training,
            )
        self._pending, self._can_resume = pending, with_optimizer
        if not (self._async_save and self._training):
            self.finish_save()

    def finish_save(self) -> None:
        """Waits for a save in the background and completes it. Every rank calls it.

        Raises:
            CheckpointError: On every rank, if it failed on any.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._progress.during("saving a checkpoint"):
                pending.commit()
            if self._can_resume:
                self._progress.checkpoints.append(os.path.abspath(pending.target))

    def _finish_settled_save(self) -> None:
        if self._pending is not None and self._pending.settled():
            self.finish_save()

    @override
    def on_train_start(self) -> None:
        self._training = True

    @override
    def on_train_end(self) -> None:
        self._training = False
        self.finish_save()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Completes a pending save without asking other ranks, which may not have the exception."""
        self._training = False
        pending, self._pending = self._pending, None
        if pending is not None:
            self._progress.is_finishing = True
            try:
                pending.salvage()
            finally:
                self._progress.is_finishing = False

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._is_pending(filepath):
            self.finish_save()
        self._after_save(partial(super().remove_checkpoint, filepath))

    def _links_and_names(self, trainer: pl.Trainer) -> AbstractContextManager[None]:
        """In which ``ModelCheckpoint`` knows of a pending save."""
        if not self._async_save:
            return nullcontext()
        return _lightning.checkpoints_that_wait(trainer, self._after_save, self._is_pending)

    def _is_pending(self, path: Any) -> bool:
        pending = self._pending
        return pending is not None and pending.target.absolute() == Path(path).absolute()

    def _after_save(self, action: Callable[[], Any]) -> None:
        """Runs what rank 0 does to older checkpoints once no save is pending.

        Until then, they are what is left if the save fails.
        """
        if self._pending is None:
            action()
        else:
            self._pending.then(action)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
        self.finish_save()
        run = self._model_run
        fitting = run.optimizer is not None
        state = self._train_state(fitting)
        path = self.broadcast(str(checkpoint_path))
        with self._progress.during("loading a checkpoint"):
            loaded = load_checkpoint(
                Path(path),
                state,
                load_optimizer=fitting,
                strict=self.lightning_module.strict_loading,
                layout=self.layout,
                groups=self.groups,
                weights_only=weights_only,
            )
        if run.weights is not None:
            run.weights.remember()
        if fitting:
            self._progress.checkpoints.append(os.path.abspath(path))
            run.load_rank_state(state.extra)
            for optimizer, saved in zip(
                self.optimizers, loaded.get("optimizer_states", []), strict=False
            ):
                for group, settings in zip(
                    optimizer.param_groups, saved["param_groups"], strict=True
                ):
                    group.update(settings)
        return {"state_dict": {}, **loaded}

    def _train_state(self, with_optimizer: bool) -> TrainState:
        run = self._model_run
        optimizer = run.optimizer.engine if with_optimizer and run.optimizer else None
        return TrainState(
            chunks=run.inner,
            optimizer=optimizer,
            extra=run.rank_state() if with_optimizer else {},
        )
