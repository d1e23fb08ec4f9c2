"""Maps each Lightning hook of a run to one call into the rest of the package."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_mcore import _lightning
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore._mcore.cuda_graphs import graph_safe_process
from lightning_mcore._mcore.engine import drop_training_buffers
from lightning_mcore._mcore.moe import drop_routing_graphs
from lightning_mcore._mcore.te_bindings import te_split_of_qkv, te_stands_in_for_apex
from lightning_mcore._mcore.userbuffers import start_userbuffers, stop_userbuffers
from lightning_mcore.checkpoint_hooks import CheckpointStrategy
from lightning_mcore.checkpoint_save import check_model
from lightning_mcore.config import ModelDims
from lightning_mcore.data_check import check_same_batch
from lightning_mcore.engine_fields import group_fields
from lightning_mcore.environment.kept import kept_variables
from lightning_mcore.errors import NotInitializedError
from lightning_mcore.experts import ExpertSwitches
from lightning_mcore.hook_gradients import HookGradients, why_not_whole
from lightning_mcore.layout import Layout
from lightning_mcore.loaders import TrainLoaders, agreeing_loader
from lightning_mcore.metrics import replicated_metrics
from lightning_mcore.optimizer import StepStats
from lightning_mcore.parallel_state import destroy_parallel_state, init_parallel_state
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.prepare import (
    Request,
    Resolved,
    prepare_run,
    resolve_before_groups,
)
from lightning_mcore.processes import MARGIN_S
from lightning_mcore.run import ModelRun
from lightning_mcore.switches import Switches
from lightning_mcore.trainer_check import check_trainer
from lightning_mcore.userbuffers_plan import UserbuffersPlan


class LoopStrategy(CheckpointStrategy):
    """Starts, drives and ends runs of the engine for the loops of a Trainer."""

    def __init__(
        self,
        request: Request,
        process_group_backend: str | None,
        timeout_s: float,
        peer_timeout_s: float,
    ) -> None:
        super().__init__(
            process_group_backend, timeout_s, peer_timeout_s, async_save=request.async_save
        )
        self._request = request
        self._layout: Layout | None = None
        self._switches: Switches | None = None
        self._run: ModelRun | None = None
        self._experts: ExpertSwitches | None = None
        self._outcome: tuple[StepStats | None, int] = None, 0
        """Latest statistics and skipped steps of a run that is gone."""
        self._userbuffers: UserbuffersPlan | None = None
        self._exits = ExitStack()
        """Undoes, at teardown, what a run changed outside this object."""
        self._train_loaders = TrainLoaders()
        self._sync_gradients = True
        self._checked_batch = False
        self._told = ""
        """The header that was printed last."""
        self._failed = False
        self._release_schedulers: Callable[[], None] | None = None

    @property
    @override
    def layout(self) -> Layout:
        """Sizes and this rank's coordinates."""
        if self._layout is None:
            raise NotInitializedError("The layout exists once the Trainer has started processes.")
        return self._layout

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.lightning_module is not None
        check_trainer(self.lightning_module.trainer, self.lightning_module)
        self._train_loaders = TrainLoaders()
        resolved = self._resolve(self.global_rank)
        self._layout, self._switches = resolved.layout, resolved.switches
        self._userbuffers = resolved.userbuffers
        variables = resolved.environment.to_set_in_ranks
        self._exits.enter_context(kept_variables(variables))
        os.environ.update(variables)
        self._exits.enter_context(self._engine_context())
        _lightning.limit_threads(self.num_processes)
        self._init_world()
        graphs = self._switches.cuda_graphs.effective is not False
        if graphs:
            self._exits.enter_context(graph_safe_process())
        self._exits.enter_context(te_split_of_qkv())
        if resolved.te_wgrad:
            self._exits.enter_context(te_stands_in_for_apex())
        self._state = init_parallel_state(
            self.layout,
            device=self.root_device,
            timeout_s=self._timeout_s + MARGIN_S,
            batched_p2p=self._switches.batch_p2p.effective,
            fields=group_fields(self._switches),
            communicators=self._switches.nccl_communicators.effective,
            graph_safe_rng=graphs,
            on_end=self._let_go,
        )
        if self._userbuffers is not None:
            start_userbuffers(self._userbuffers)
        self._start_monitor(self._state)

    def _resolve(self, rank: int) -> Resolved:
        """What is known, and to be refused, before processes are started.

        Raises:
            ConfigurationError: On every rank alike.
        """
        dims = ModelDims.from_object(getattr(self.lightning_module, "model_dims", None))
        device = self.root_device
        request = self._request.on_machines(
            device, os.environ, nodes=self.num_nodes, ranks_per_node=self.num_processes
        )
        self._request = dataclasses.replace(request, dims=dims)
        return resolve_before_groups(
            self._request,
            self._request.facts(self.precision_plugin, device),
            world_size=self.num_nodes * self.num_processes,
            rank=rank,
        )

    @override
    def _launch_variables(self) -> Mapping[str, str]:
        """What the settings want set before CUDA starts; on GPUs bad settings start nothing."""
        if self.root_device.type == "cpu":
            return {}
        return self._resolve(rank=0).environment.to_set

    @override
    def _engine_context(self) -> AbstractContextManager[Any]:
        return CpuAdapter() if self.root_device.type == "cpu" else nullcontext()

    @property
    @override
    def precision_plugin(self) -> MCorePrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MCorePrecision) else MCorePrecision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = MCorePrecision.from_plugin(precision_plugin)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        self._run, facts = prepare_run(
            self._request,
            self.lightning_module,
            self._parallel_state,
            self.precision_plugin,
            self.root_device,
            self._progress,
            make_optimizer=partial(self._make_optimizer, trainer) if fits else None,
            userbuffers=self._userbuffers,
        )
        self._run.train_loaders = self._train_loaders
        self._switches, self._experts = self._run.switches, self._run.experts
        if fits and trainer.checkpoint_callbacks:
            # At the start rather than at the first save, hours later.
            check_model(self._run.inner, layout=self.layout, groups=self.groups)
        if fits and facts.hooks_see_gradients:
            sharded = bool(self._switches.use_distributed_optimizer.effective)
            why_not = why_not_whole(self.layout, self.precision_plugin, sharded=sharded)
            self._run.hook_gradients = HookGradients(self._run.chunks, why_not)
        self._exits.callback(self._run.close)
        header = self._run.header(facts, trainer.accumulate_grad_batches)
        if header != self._told:  # validate after fit would only repeat it
            rank_zero_info(header)
            self._told = header
        self._exits.enter_context(replicated_metrics(self.lightning_module, self._parallel_state))
        self._exits.enter_context(self._links_and_names(trainer))
        self._run.signals = self._exits.enter_context(_lightning.agreed_signals(trainer))

    def _make_optimizer(self, trainer: pl.Trainer) -> torch.optim.Optimizer:
        self._reset_optimizers_and_schedulers()
        self.setup_optimizers(trainer)
        return self.optimizers[0]

    @property
    @override
    def _model_run(self) -> ModelRun:
        if self._run is None:
            raise NotInitializedError(
                "The model runs on the engine from the Trainer's setup until another Trainer of"
                " this process starts; save checkpoints before that."
            )
        return self._run

    def _let_go(self) -> None:
        """Drops what is of no use without process groups, above all what the engine allocated.

        The user may well keep this object: a callback that has been in a fit holds the module by
        its ``log``, and so the Trainer.
        """
        if self._run is not None:
            drop_training_buffers(self._run.chunks)
            self._outcome = self._run.stats, self._run.skipped_steps
        self._run = self._state = None

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        loader = agreeing_loader(dataloader, self._parallel_state)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return self._train_loaders.wrap(trainer, loader) if trainer.training else loader

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._finish_settled_save()
        self._model_run.hook_gradients.hide()
        batch, *rest = args
        if self._release_schedulers is not None:
            self._release_schedulers()
        if not self._checked_batch:
            check_same_batch(batch, self._parallel_state)
            self._checked_batch = True
        step = self.lightning_module.training_step
        self._progress.step = self.lightning_module.trainer.global_step
        return self._model_run.train_step(
            lambda microbatch: step(microbatch, *rest, **kwargs),
            batch,
            accumulate=self.lightning_module.trainer.accumulate_grad_batches,
            sync=self._sync_gradients,
        )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        run = self._model_run
        return run.collect_predictions(self._evaluate("predict_step", *args, **kwargs), args[0])

    def _evaluate(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.lightning_module, name)
        self._progress.enter(name)
        return self._model_run.evaluation_step(
            lambda microbatch: step(microbatch, *args, **kwargs), batch
        )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this around batches that only accumulate gradients."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    @override
    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the hooks around the backward pass; the schedule has run the pass itself."""
        assert self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._model_run.hook_gradients.show()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        run = self._model_run
        assert run.optimizer is not None
        model = model or self.lightning_module

        def step_engine() -> Any:
            result = _lightning.run_closure(self.precision_plugin, model, optimizer, closure)
            run.hook_gradients.hide()
            with self._progress.during("the optimizer step"), torch.no_grad():
                run.optimizer_step()
            return result

        result = run.optimizer.through_torch(step_engine, **kwargs)
        self._progress.step += 1
        self._progress.enter("between steps (data, callbacks)")
        if run.stats is not None and run.stats.skipped:
            # As with torch.amp: a schedule counts steps that changed parameters.
            self._release_schedulers = _lightning.hold_step_schedulers(self.lr_scheduler_configs)
        return result

    @override
    def on_validation_start(self) -> None:
        self._model_run.start_evaluation()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        self._model_run.set_hooks(True)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._model_run.set_hooks(False)

    @override
    def _save_before_exit(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING or self._model_run.optimizer is None:
            return
        if trainer.sanity_checking or trainer.global_step == 0:
            return
        if not trainer.checkpoint_callbacks and not self._model_run.requeue_wanted:
            # Trainer(enable_checkpointing=False) wants no files; a job that is requeued needs one.
            return
        path = self.broadcast(_lightning.preemption_path(trainer))
        # There is no more training beside which to write: the checkpoint must exist when the job
        # is queued again.
        self._training = False
        trainer.save_checkpoint(path)
        rank_zero_info(
            f"Stopped for a signal after step {trainer.global_step}; resume with"
            f' ckpt_path="hpc" (under SLURM by itself) or ckpt_path={path!r}.'
        )
        if self._model_run.requeue_wanted and self.is_global_zero:
            _lightning.requeue_slurm_job()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Leaves the engine; after an error its groups go too, else they wait for the next Trainer.

        So ``trainer.save_checkpoint`` still works after ``fit``, as under other strategies.
        """
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._checked_batch = False
        if self._run is not None:
            drop_routing_graphs(self._run.chunks)
        try:
            self.finish_save()
            if self._failed and self._state is not None:
                if self._userbuffers is not None:
                    stop_userbuffers()
                destroy_parallel_state(self._state, graceful=False)
        finally:
            self._failed = False
            try:
                self._exits.close()
            finally:
                self._stop_monitor()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles what the user asked for, not the processes and models of a run."""
        fresh = dict.fromkeys(("_state", "_run", "_release_schedulers", "_pending", "_monitor"))
        new = {"_exits": ExitStack(), "_train_loaders": TrainLoaders()}
        return {**super().__getstate__(), **fresh, **new}
