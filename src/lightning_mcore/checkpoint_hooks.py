"""The strategy's checkpoint hooks: each maps one Lightning hook to one call of ``checkpoint``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_mcore.checkpoint import TrainState, load_checkpoint, save_checkpoint
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.plain import manifest_names
from lightning_mcore.processes import LayoutStrategy
from lightning_mcore.run import ModelRun


class CheckpointStrategy(LayoutStrategy):
    """Saves and loads checkpoints that are directories of shards, on all ranks together."""

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
        """Empty: ``save_checkpoint`` writes each rank's shards itself."""
        return {}

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
        """Nothing to do: ``load_checkpoint`` has loaded the shards in place."""

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
        run = self._model_run
        with_optimizer = bool(checkpoint.get("optimizer_states"))
        checkpoint.pop("state_dict", None)
        with self._engine_context(), self._progress.during("saving a checkpoint"):
            path = self.broadcast(str(filepath))
            run.gather_parameters()
            run.share_buffers()
            save_checkpoint(
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
            )
        if with_optimizer:
            self._progress.checkpoints.append(os.path.abspath(path))

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        assert self.lightning_module is not None
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
