"""Private or delicate Lightning names, one function each, with the test that watches it.

Everything else in this package uses Lightning's public surface.
"""

from __future__ import annotations

import inspect
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    _sync_ddp_if_available,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torchmetrics import Metric


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, with variables for the processes of the run."""

    def __init__(
        self,
        environment: Any,
        num_processes: int,
        num_nodes: int,
        variables: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._variables = variables

    def _call_children_scripts(self) -> None:
        """Starts ranks with the variables, which this process, rank zero of the node, gets too.

        Children inherit ``os.environ``, where Lightning's own method leaves MASTER_ADDR and others.
        What CUDA reads at its start is not set here once it has started: it would not count, and
        whoever reads the variable later would be told otherwise.
        """
        missing = {k: v for k, v in self._variables().items() if k not in os.environ}
        os.environ.update(missing)
        try:
            super()._call_children_scripts()
        finally:
            started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            late = sorted(missing.keys() & _READ_AT_CUDA_START) if started else []
            for name in late:
                del os.environ[name]
        if late:
            rank_zero_warn(
                f"{', '.join(f'{name}={missing[name]}' for name in late)} comes too late for rank"
                " zero, where CUDA has started already, and is set for the other ranks only; export"
                " it before the start, or use CUDA only after trainer.fit has begun."
            )


_READ_AT_CUDA_START = {"CUDA_DEVICE_MAX_CONNECTIONS"}


def subprocess_launcher(
    environment: Any,
    num_processes: int,
    num_nodes: int,
    variables: Callable[[], Mapping[str, str]] = dict,
) -> Any:
    """The launcher that re-runs the script once per local rank, as DDPStrategy uses it.

    Args:
        environment: Lightning's cluster environment.
        num_processes: Ranks on this node.
        num_nodes: Nodes.
        variables: What to add to the ranks' environment where it is unset; asked when processes are
            about to start.
    """
    return _Launcher(environment, num_processes, num_nodes, variables)


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
    """Creates the default process group as Lightning's strategies do; returns its backend."""
    chosen = backend or _get_default_process_group_backend_for_device(device)
    _init_dist_connection(
        environment,
        chosen,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    return str(chosen)


def reduce_tensor(tensor: torch.Tensor, group: Any, reduce_op: Any) -> torch.Tensor:
    """Reduces over ``group``, or returns the tensor when there is no process group."""
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


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
        """Whether all ranks know that one of them has received a SIGTERM."""

    @property
    def pending(self) -> bool:
        """This rank's vote: whether it has received a SIGTERM itself."""
        return bool(self._connector.received_sigterm)

    def register_signal_handlers(self) -> None:
        """Installs Lightning's handlers."""
        self._connector.register_signal_handlers()

    def teardown(self) -> None:
        """Restores the handlers from before."""
        self._connector.teardown()


@contextmanager
def agreed_signals(trainer: pl.Trainer) -> Iterator[AgreedSignals]:
    """Replaces the signal connector of this Trainer, and the vote of its training loop."""
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop

    def note(signum: int, frame: Any) -> None:
        """Notes the signal and passes it on to launched ranks, but broadcasts nothing.

        Lightning's own handler broadcasts inside the signal handler (signal_connector.py,
        _sigterm_notifier_fn), where the other ranks are in another collective.
        """
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note  # type: ignore[method-assign,assignment]
    signals = AgreedSignals(connector)
    trainer._signal_connector = signals  # type: ignore[assignment]
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    try:
        yield signals
    finally:
        trainer._signal_connector = connector
        connector.__dict__.pop("_sigterm_notifier_fn", None)
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
