"""The model of one fit or evaluation: chunks wrapped for the engine, their optimizer and schedule.

Enters: chunks, resolved switches, precision. Leaves: the outcome of steps, the same on every rank.
Every rank of the world calls every method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_mcore import _lightning
from lightning_mcore._mcore import engine
from lightning_mcore.batch import batch_size, plan_evaluation, plan_training
from lightning_mcore.context import SequenceShard, gather_sequences, sequence_length
from lightning_mcore.environment import environment_text
from lightning_mcore.errors import NonFiniteError
from lightning_mcore.experts import ExpertSwitches
from lightning_mcore.findings import Finding
from lightning_mcore.graphs import LayerGraphs
from lightning_mcore.header import Batch, format_batch, format_header
from lightning_mcore.hook_gradients import HookGradients
from lightning_mcore.loaders import TrainLoaders
from lightning_mcore.metrics import MetricPaths, set_batch_value
from lightning_mcore.nonfinite import NonFinite, report
from lightning_mcore.optimizer import EngineOptimizer, StepStats
from lightning_mcore.outputs import from_last_stage, merge_outputs
from lightning_mcore.parallel_state import ParallelState, count_parameters
from lightning_mcore.precision import Clipping, MCorePrecision
from lightning_mcore.randomness import StepRandomness
from lightning_mcore.schedule import StepFunction, StepRunner
from lightning_mcore.stage import Pipeline
from lightning_mcore.step_log import ALREADY_REDUCED, LOSS, LogExchange, StepLog
from lightning_mcore.switches import Facts, Switches
from lightning_mcore.trained_weights import TrainedWeights
from lightning_mcore.userbuffers_plan import UserbuffersPlan
from lightning_mcore.version import package_versions
from lightning_mcore.watch.progress import Progress

_SEEDS_PER_RUN = 7919
"""Keeps the chunks' streams of stages away from each other and from those of the engine."""


@dataclass(kw_only=True)
class ModelRun:
    """What a Trainer's fit, validate, test or predict runs on."""

    module: pl.LightningModule
    pipeline: Pipeline | None
    """``None`` for a plain LightningModule, which is its own single chunk."""
    inner: list[nn.Module]
    """Chunks as the user built them: what checkpoints name."""
    chunks: list[nn.Module]
    """The same chunks in model precision and, when fitting, in the engine's DDP."""
    state: ParallelState
    switches: Switches
    experts: ExpertSwitches
    precision: MCorePrecision
    device: torch.device
    micro_batch_size: int | None
    seq_length: int | None = None
    findings: Sequence[Finding] = ()
    """Warnings and hints about the settings."""
    per_token_loss: bool = False
    """Whether the step tells the tokens behind its loss."""
    userbuffers: UserbuffersPlan | None = None
    """Whose shape every microbatch must have."""
    graphs: LayerGraphs | None = None
    optimizer: EngineOptimizer | None = None
    stats: StepStats | None = None
    randomness: StepRandomness | None = None
    """Random streams of chunks and steps, where the model has several stages."""
    signals: _lightning.AgreedSignals | None = None
    """Through which ranks stop together for a SIGTERM."""
    progress: Progress = field(default_factory=Progress)
    nonfinite: NonFinite = "error"
    skipped_steps: int = 0
    """Optimizer steps that changed no parameter."""
    hook_gradients: HookGradients = field(default_factory=HookGradients)
    """What hooks see of gradients, where there are hooks that may look."""
    requeue_wanted: bool = False
    """Whether ranks stop to be queued again."""
    train_loaders: TrainLoaders = field(default_factory=TrainLoaders)
    weights: TrainedWeights | None = None
    """When fitting, the parameters as the engine took them over."""
    _shard: SequenceShard = field(init=False)
    _runner: StepRunner = field(init=False)
    _exchange: LogExchange = field(init=False)
    _metric_paths: MetricPaths = field(init=False)
    _regular_batch_size: int | None = None
    _starts_accumulation: bool = True
    _skips_step: bool = False
    _losses: list[Tensor] = field(default_factory=list)
    _hooks_wanted: bool = False
    _hooks_on: bool = False

    def __post_init__(self) -> None:
        layout = self.state.layout
        native = self.is_native
        plans_layers = self.experts.overlap_moe.effective == "1f1b"
        several = self.pipeline is not None and self.pipeline.stages[0].count > 1
        if several or plans_layers:
            # The combined schedule calls layers without the block, which would fork the
            # tensor-parallel stream around them (transformer_block.py, forward).
            part = layout.tp_rank if plans_layers else 0
            self.randomness = StepRandomness(
                self.device, self.state.seed + _SEEDS_PER_RUN * (1 + layout.pp_rank) + part
            )
        self._metric_paths = MetricPaths(self.module)
        shard_batch = getattr(self.module, "shard_batch", None)
        self._shard = SequenceShard(layout.cp, layout.cp_rank, self.seq_length, shard_batch)
        self._runner = StepRunner(
            self.pipeline,
            self.chunks,
            device=self.device,
            step_context=lambda: self.precision.step_context(self.device, native=native),
            seq_length=self.seq_length,
            randomness=self.randomness,
            plans_layers=plans_layers,
            shard=self._shard,
            per_token_loss=self.per_token_loss,
            check_shape=self.userbuffers.check_microbatch if self.userbuffers else None,
            progress=self.progress,
            graphs=self.graphs,
        )
        if self.optimizer is not None:
            self.optimizer.on_nonfinite = self._on_nonfinite
            self.optimizer.may_go_on = self.nonfinite == "warn"
            self.weights = TrainedWeights(self.inner)
        self._exchange = LogExchange(
            self.state.groups.world_cpu,
            is_source=layout.is_last_stage and layout.tp_rank == 0,
            device=self.device,
        )

    @property
    def is_native(self) -> bool:
        """Whether the model is made of plain torch modules rather than Megatron layers."""
        return self.pipeline is None or self.pipeline.native

    def close(self) -> None:
        """Undoes what the run changed in the user's objects and left to the engine's."""
        self.hook_gradients.drop()
        if self.optimizer is not None:
            self.optimizer.close()
        if self.graphs is not None:
            self.graphs.delete()
        engine.clear_schedule_hooks(self.chunks)

    def train_step(self, step: StepFunction, batch: Any, *, accumulate: int, sync: bool) -> Any:
        """Forward and backward of one batch, and its log.

        Args:
            step: The user's training step on one microbatch.
            batch: Batch of this data-parallel rank.
            accumulate: Batches per optimizer step.
            sync: Whether this is the last batch of the accumulation.

        Returns:
            The loss, averaged over microbatches and data-parallel ranks; on the last stage in a
            dict with whatever else the step returned.
        """
        assert self.optimizer is not None, "fit builds the optimizer before the first step"
        if self._starts_accumulation:
            self._losses = []
            if self.weights is not None and self.weights.check():
                # By on_fit_start, for example: main parameters would undo it in the first step.
                self.optimizer.reload_main_parameters()
            self.optimizer.zero_grad()
            if self.graphs is not None:
                self.graphs.start_step(self.set_hooks, self._hooks_on)
        layout = self.state.layout
        split = getattr(self.module, "split_batch", None)
        run = plan_training(
            batch,
            micro_batch_size=self.micro_batch_size,
            pp=layout.pp,
            interleaved=layout.vpp is not None,
            group_size=self.switches.microbatch_group_size_per_vp_stage.effective,
            regular_batch_size=self._regular_batch_size,
            split=split,
        )
        samples = batch_size(batch)
        if self._regular_batch_size is None and split is None:  # a cut of its own has any sizes
            size = samples // len(run.microbatches)
            told = Batch(micro_batch_size=size, samples=samples, accumulate_grad_batches=accumulate)
            rank_zero_info(f"First batch: {format_batch(told, layout)}.")
        self._regular_batch_size = max(samples, self._regular_batch_size or 0)
        log = StepLog(self._metric_paths)
        self.progress.enter("training_step")
        with _lightning.capture_logs(self.module, log.log):
            outputs = self._runner.train(
                step,
                run,
                log,
                loss_scale=1.0 / accumulate,
                first=self._starts_accumulation,
                sync=sync,
                may_skip=layout.world_size == 1,
            )
        # As Lightning's closure does: what is left if the user then does not step is cleared.
        self._starts_accumulation = sync
        loss = self._emit(log, may_stop=sync)
        self._losses += log.losses()
        self._skips_step = loss is None
        if loss is None:
            return None
        if outputs and isinstance(outputs[0].value, Mapping):
            return {**merge_outputs(outputs, per_token_loss=self.per_token_loss), "loss": loss}
        return loss

    def evaluation_step(self, step: StepFunction, batch: Any) -> Any:
        """Forward of one batch and its log.

        Returns:
            What the step returned, joined over microbatches, on the last stage; ``None`` elsewhere.
        """
        layout = self.state.layout
        runs = plan_evaluation(
            batch,
            micro_batch_size=self.micro_batch_size,
            pp=layout.pp,
            interleaved=layout.vpp is not None,
            split=getattr(self.module, "split_batch", None),
        )
        log = StepLog(self._metric_paths)
        with _lightning.capture_logs(self.module, log.log):
            outputs = self._runner.evaluate(step, runs, log)
        # Validation may come in the middle of an accumulation, whose gradients a stop would lose.
        self._emit(log, may_stop=self._starts_accumulation)
        return merge_outputs(outputs, per_token_loss=self.per_token_loss)

    def collect_predictions(self, output: Any, batch: Any) -> Any:
        """Joins the shards of sequences, and hands all to earlier stages: rank 0 is a first one.

        Collective over the context-parallel and pipeline groups.

        Args:
            output: What ``evaluation_step`` returned.
            batch: What it was given.

        Returns:
            ``output`` of the last stage with its tensors ``[b, s / cp, ...]`` joined to
            ``[b, s, ...]``; with a ``shard_batch`` hook, whose cut is not known here, as it is.
        """
        layout = self.state.layout
        if layout.cp > 1 and layout.is_last_stage and self._shard.hook is None:
            length = sequence_length(batch, self.seq_length) // layout.cp
            output = gather_sequences(output, length, self.state.groups.cp)
        return from_last_stage(output, self.state, self.device)

    def optimizer_step(self) -> StepStats:
        """Steps the engine's optimizer with the gradients of the last ``train_step``."""
        assert self.optimizer is not None, "fit builds the optimizer before the first step"
        if self._skips_step:
            # Without a loss there are no gradients, and a torch optimizer would leave everything.
            self.stats = StepStats(norm=None, num_zeros=None, skipped=False)
            return self.stats
        self.stats = self.optimizer.step(self.precision.clipping)
        self.precision.clipping = Clipping()
        self.skipped_steps += self.stats.skipped
        if self.switches.overlap_param_gather.effective and not self._hooks_wanted:
            # From the second iteration on, as in Megatron-LM (training.py): until gradient hooks
            # have fired once, the order of parameters is not known.
            self._hooks_wanted = True
            self.set_hooks(True)
        return self.stats

    def set_hooks(self, on: bool) -> None:
        """Switches the forward hooks that wait for gathered parameters, where they are in use.

        Switching off gathers all parameters first: evaluation and anything that reads weights needs
        them whole. Collective over the data-parallel groups.
        """
        if self._hooks_wanted and on != self._hooks_on:
            engine.set_forward_pre_hooks(self.chunks, on)
            if self.switches.align_param_gather.effective:
                engine.set_param_sync(self.chunks, on)
            self._hooks_on = on

    def start_evaluation(self) -> None:
        """Makes weights whole and shares buffers; collective over the data-parallel groups."""
        self.set_hooks(False)
        self.share_buffers()
        if self.weights is not None:
            self.weights.look_again()

    def share_buffers(self) -> None:
        """Gives every data-parallel rank the buffers of rank zero, in plain torch modules.

        Running means of BatchNorm, for example, which follow rank zero under DDPStrategy too.
        Collective over the data-parallel groups.
        """
        if self.is_native and self.state.layout.dp > 1:
            group = self.state.groups.dp
            source = dist.get_process_group_ranks(group)[0]
            for chunk in self.inner:
                for buffer in chunk.buffers():
                    dist.broadcast(buffer, source, group=group)

    def gather_parameters(self) -> None:
        """Makes parameters whole on every rank without touching the hooks."""
        if self._hooks_on:
            engine.gather_parameters(self.chunks)

    def rank_state(self) -> dict[str, Any]:
        """What this rank alone knows and an exact resume needs."""
        return {
            "chunk streams": None if self.randomness is None else self.randomness.state_dict(),
            "epoch start": self.train_loaders.epoch_start,
        }

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restores ``rank_state`` of the same rank at the same layout."""
        self.train_loaders.resume(state.get("epoch start"))
        if self.randomness is not None and state.get("chunk streams") is not None:
            self.randomness.load_state_dict(state["chunk streams"])

    def header(self, facts: Facts, accumulate_grad_batches: int) -> str:
        """What runs, and the effective value of each switch. Collective over the world."""
        total, per_rank = count_parameters(self.inner, self.state)
        return format_header(
            versions=package_versions(),
            layout=self.state.layout,
            facts=facts,
            switches=self.switches,
            experts=self.experts if self.state.layout.ep > 1 else None,
            batch=Batch(
                micro_batch_size=self.micro_batch_size,
                accumulate_grad_batches=accumulate_grad_batches,
                per_token_loss=self.per_token_loss,
            ),
            num_parameters=total,
            num_parameters_per_rank=per_rank,
            environment=environment_text(self.state.layout, self.switches, self.experts, facts),
            findings=self.findings,
        )

    def _on_nonfinite(self, norm: float) -> bool:
        """Acts on a gradient norm that is not finite; returns whether to step all the same."""
        found = report(self.inner, self._losses, self.state, norm)
        if self.nonfinite == "error":
            raise NonFiniteError(
                f"{found} No parameter was changed; use nonfinite='skip' to leave such steps out,"
                " or look at the data, the learning rate and Trainer(detect_anomaly=True)."
            )
        done = "Step left out." if self.nonfinite == "skip" else "Going on all the same."
        rank_zero_warn(f"{found} {done}")
        return self.nonfinite == "warn"

    def _emit(self, log: StepLog, *, may_stop: bool) -> Tensor | None:
        """Logs what all ranks agreed on through Lightning; returns the loss.

        Args:
            log: Of this rank.
            may_stop: Whether a checkpoint taken after this step is complete; not in the middle of
                an accumulation.
        """
        loss = None
        with self.progress.during("the exchange of logs"):
            logs = self._exchange(
                log,
                want_stop=self.signals.pending if self.signals else 0,
                ends_training=self.module.trainer.should_stop,
            )
        if self._exchange.training_ends:
            # Set behind the model call, which one stage reaches, or on one replica.
            self.module.trainer.should_stop = True
        if self.signals is not None and self._exchange.stop_wanted and may_stop:
            self.signals.received_sigterm = True
            self.requeue_wanted = self._exchange.stop_wanted == _lightning.REQUEUE
        for logged in logs:
            if logged.key.name == LOSS:
                loss = logged.value
                continue
            settings = dict(logged.key.settings)
            if logged.key.metric is not None:
                metric = cast(Metric, self.module.get_submodule(logged.key.metric))
                set_batch_value(metric, logged.value if logged.key.reduction != "none" else None)
                self.module.log(logged.key.name, metric, **settings)
                continue
            self.module.log(
                logged.key.name,
                logged.value,
                reduce_fx=logged.key.reduction,
                # A tensor, so that the host does not wait for it; Lightning only computes with it.
                batch_size=cast(int, logged.weight),
                sync_dist=True,
                sync_dist_group=ALREADY_REDUCED,
                **settings,
            )
        return loss
