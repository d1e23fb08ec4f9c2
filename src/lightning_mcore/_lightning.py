"""Private or delicate Lightning names, one function each, with the test that watches it.

Everything else in this package uses Lightning's public surface.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import (
    DistributedSamplerWrapper,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only
from torchmetrics import Metric

ENTRY_POINT = "_call_and_handle_interrupt"
"""Function of trainer/call.py that is around everything a Trainer does, clean-up included."""


def limit_threads(num_processes: int) -> None:
    """Shares the host's cores among its ranks, unless the user has set OMP_NUM_THREADS.

    Lightning's launcher does so in the main process only, not in the ranks that it starts.
    """
    _set_num_threads_if_needed(num_processes)


def world_is_initialized() -> bool:
    """Whether the default process group exists."""
    return bool(_distributed_is_initialized())


def init_world(
    environment: Any, device: torch.device, backend: str | None, timeout_s: float
) -> str:
    """Creates the default process group; returns its backend.

    Without a ``device_id``, which Lightning's strategies give it. Torch would split a communicator
    of all ranks for each further group on every rank, members or not (distributed_c10d.py,
    _new_process_group_helper), and the engine makes 20 groups on one rank, 83 on 8 and 2729 on 512
    (tp=8, pp=8), most of which are never used. It would also run all unbatched transfers of a
    group on one communicator, in a row (ProcessGroupNCCL.cpp, pointToPoint).
    """
    # Torch advises to bind one whenever somebody calls a barrier, torchmetrics for one.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    chosen = backend or _get_default_process_group_backend_for_device(device)
    _init_dist_connection(environment, chosen, timeout=timedelta(seconds=timeout_s))
    return str(chosen)


def wrapped_sampler(sampler: Any) -> Any:
    """What is inside a ``DistributedSamplerWrapper``; ``None`` for other samplers."""
    # fabric/utilities/distributed.py, _DatasetSamplerWrapper.
    inside = sampler.dataset if isinstance(sampler, DistributedSamplerWrapper) else None
    return getattr(inside, "_sampler", None)


def set_rank_zero(global_rank: int) -> None:
    """Tells Lightning's ``rank_zero_*`` functions which rank this is, as its strategies do."""
    # One function object under both names; `rank` is an attribute that its type does not declare.
    vars(rank_zero_only)["rank"] = global_rank


_signature = lru_cache(maxsize=32)(inspect.signature)
"""Reading a signature takes longer than many a ``self.log``."""


@contextmanager
def capture_logs(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Sends ``self.log`` of this one module to ``log(**arguments)`` for the duration of a step.

    The instance attribute hides the method and is removed again; neither the class nor Lightning is
    changed. ``self.log_dict`` arrives here too, since it calls ``self.log``.
    """
    signature = _signature(type(module).log)
    original = module.log

    def captured(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(module, *args, **kwargs).arguments
        del arguments[next(iter(signature.parameters))]
        if not _can_be_logged(module, arguments["value"]):
            # Lightning's own checks say what is wrong with it.
            original(**arguments)
            return
        log(**arguments)

    object.__setattr__(module, "log", captured)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


def _can_be_logged(module: pl.LightningModule, value: Any) -> bool:
    if isinstance(value, Metric):
        return any(candidate is value for candidate in module.modules())
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Number)


def run_closure(precision: Precision, module: Any, optimizer: Any, closure: Any) -> Any:
    """Runs the step's closure and the hooks before the optimizer step, without stepping."""
    return precision._wrap_closure(module, optimizer, closure)


_log = logging.getLogger(__name__)
STOP, REQUEUE = 1, 2
"""Votes of ``AgreedSignals``."""


class AgreedSignals:
    """Lets ranks stop for a SIGTERM together: what Lightning sees is what they agreed on.

    Lightning stops a rank as soon as that rank has the signal, while others wait for it in a
    collective; and it broadcasts a flag on the device, read with ``.item()`` before every batch
    (loops/training_epoch_loop.py, on_advance_end and _broadcast_sigterm_tensor), which waits for
    all queued work (Lightning-AI/pytorch-lightning#21487). Here ranks vote together with what they
    logged, so the agreement takes no collective of its own. Stands in for the Trainer's signal
    connector for the time of a run.
    """

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.received_sigterm = False
        """Whether all ranks know that one of them shall stop, and stand between two steps."""
        self.pending = 0
        """This rank's vote: 0 to go on, ``STOP``, or ``REQUEUE`` to stop and be queued again."""

    def register_signal_handlers(self) -> None:
        """Installs Lightning's handlers, and one for SIGUSR1 where nobody else has one."""
        self.pending = 0
        self._connector.register_signal_handlers()
        # None would be a handler from outside of Python, such as faulthandler's.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            self._connector._register_signal(
                signal.SIGUSR1, lambda signum, frame: self.note(signum, STOP)
            )

    def note(self, signum: int, vote: int) -> None:
        """Remembers a signal for the next vote."""
        _log.info("Received %s; stopping after this step.", signal.Signals(signum).name)
        self.pending = max(self.pending, vote)

    def teardown(self) -> None:
        """Restores the handlers from before."""
        self._connector.teardown()


@contextmanager
def agreed_signals(trainer: pl.Trainer) -> Iterator[AgreedSignals]:
    """Replaces the signal connector of this Trainer, and the vote of its training loop."""
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    signals = AgreedSignals(connector)
    # Lightning's own handlers broadcast, or save a checkpoint, inside the signal handler
    # (signal_connector.py, _sigterm_notifier_fn and _slurm_sigusr_handler_fn), where the other
    # ranks are in another collective. The vote tells those, so it is not passed on to them either.
    connector._sigterm_notifier_fn = (  # type: ignore[method-assign]
        lambda signum, _: signals.note(int(signum), STOP)
    )
    connector._slurm_sigusr_handler_fn = (  # type: ignore[method-assign]
        lambda signum, _: signals.note(int(signum), REQUEUE)
    )
    trainer._signal_connector = signals  # type: ignore[assignment]
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    try:
        yield signals
    finally:
        trainer._signal_connector = connector
        connector.__dict__.pop("_sigterm_notifier_fn", None)
        connector.__dict__.pop("_slurm_sigusr_handler_fn", None)
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)


@contextmanager
def checkpoints_that_wait(
    trainer: pl.Trainer,
    after_save: Callable[[Callable[[], Any]], None],
    is_pending: Callable[[Any], bool],
) -> Iterator[None]:
    """Lets ``ModelCheckpoint`` know of a save that has no name on disk yet.

    It would link ``last.ckpt`` to it at once (``_link_checkpoint``), which leaves a link to nothing
    if the save fails; and it would give its name to another one (``file_exists``).

    Args:
        trainer: Whose callbacks to change for the duration.
        after_save: Runs what it is given when no save is pending.
        is_pending: Whether a path is that of a pending save.
    """
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]

    def link(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        main: Any = SimpleNamespace(
            is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None)
        )
        if trainer.is_global_zero:
            after_save(lambda: ModelCheckpoint._link_checkpoint(main, filepath, linkpath))
        trainer.strategy.barrier()

    def exists_in(callback: ModelCheckpoint) -> Callable[[Any, pl.Trainer], bool]:
        original = callback.file_exists
        return lambda path, trainer: is_pending(path) or original(path, trainer)

    for callback in callbacks:
        vars(callback).update(_link_checkpoint=link, file_exists=exists_in(callback))
    try:
        yield
    finally:
        for callback in callbacks:
            for name in ("_link_checkpoint", "file_exists"):
                vars(callback).pop(name, None)


def preemption_path(trainer: pl.Trainer) -> str:
    """Where Lightning looks for the checkpoint of an interrupted job.

    ``ckpt_path="hpc"`` loads it, which under SLURM is the default.
    """
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def requeue_slurm_job() -> None:
    """Asks SLURM to queue this job again, as Lightning's handler does. One rank calls it."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
    except OSError:
        done = False
    if not done:
        _log.warning("`scontrol requeue %s` failed; submit the job again.", job)


def hold_step_schedulers(configs: Sequence[LRSchedulerConfig]) -> Callable[[], None]:
    """Keeps schedulers that step every batch from stepping once; returns what undoes it.

    Lightning steps a scheduler when the batch index is a multiple of its ``frequency``
    (loops/training_epoch_loop.py, _update_learning_rates), which has no other way to be told.
    """
    held = [(config, config.frequency) for config in configs if config.interval == "step"]
    for config, _ in held:
        config.frequency = sys.maxsize

    def release() -> None:
        for config, frequency in held:
            config.frequency = frequency

    return release


def register_strategies(strategy: type[pl.strategies.Strategy]) -> None:
    """Makes ``Trainer(strategy="mcore")`` and ``"mcore_cpu"`` work after importing this package."""
    StrategyRegistry.register("mcore", strategy, "Megatron-Core, data parallel")
    StrategyRegistry.register(
        "mcore_cpu",
        strategy,
        "Megatron-Core, data parallel, over gloo",
        process_group_backend="gloo",
    )
