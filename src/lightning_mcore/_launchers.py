"""How Lightning's launchers are used and changed: how ranks start, and who ends them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mcore._lightning import limit_threads
from lightning_mcore.errors import ConfigurationError

Around = Callable[..., Any]
"""Called with a Trainer's entry point and its arguments, to call it."""

_READ_AT_CUDA_START = {"CUDA_DEVICE_MAX_CONNECTIONS"}
OBSERVE_S = 1.0
"""How often the launching process looks at the ranks that it started."""


class _PatientObserver(_ChildProcessObserver):
    """Kills this process after a rank that it started has failed, but not before its last words.

    Lightning's own kills at once, whatever this process does: say which rank failed and why, or
    complete a checkpoint.
    """

    def __init__(self, processes: list[Any], patience_s: Callable[[], float]) -> None:
        super().__init__(os.getpid(), processes, sleep_period=OBSERVE_S)  # type: ignore[arg-type]
        self._patience_s = patience_s

    def _terminate_all(self) -> None:
        start_s = time.monotonic()
        while time.monotonic() - start_s < self._patience_s():
            time.sleep(0.05)
        super()._terminate_all()


class _StartingLauncher(_SubprocessScriptLauncher):
    """Re-runs the script once per local rank, with variables and around the Trainer's work."""

    def __init__(
        self,
        around: Around,
        variables: Callable[[], Mapping[str, str]],
        patience_s: Callable[[], float],
        *args: Any,
    ) -> None:
        super().__init__(*args)
        self._around = around
        self._variables = variables
        self._patience_s = patience_s

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """As Lightning's, with an observer of our own.

        A Trainer's later entry points (``test`` after ``fit``) find the ranks that its first one
        started: that left LOCAL_RANK, by which the environment tells.

        Raises:
            ConfigurationError: If other nodes could never find this one, before anything starts.
        """
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            _check_nodes_can_meet(self.cluster_environment, self.num_nodes)
            self._call_children_scripts()
            _PatientObserver(self.procs, self._patience_s).start()
        limit_threads(self.num_processes)
        return self._around(function, *args, **kwargs)

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


def _check_nodes_can_meet(environment: Any, num_nodes: int) -> None:
    """Without MASTER_PORT each node waits at a free port of its own, which no other one knows."""
    if num_nodes == 1 or not isinstance(environment, LightningEnvironment):
        return
    if "MASTER_PORT" not in os.environ:
        raise ConfigurationError(
            f"`num_nodes` ({num_nodes}) needs variables that tell the nodes of each other, and"
            " MASTER_PORT is not set; start the script with torchrun or srun, or on each node with"
            " MASTER_ADDR, MASTER_PORT and NODE_RANK set, or use num_nodes=1."
        )


class _PresentLauncher(_Launcher):
    """Starts nothing, for processes that something else has started."""

    is_interactive_compatible = True

    def __init__(self, around: Around) -> None:
        self._around = around

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return self._around(function, *args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Others look after the processes that they started."""


def subprocess_launcher(
    environment: Any,
    num_processes: int,
    num_nodes: int,
    *,
    around: Around,
    variables: Callable[[], Mapping[str, str]] = dict,
    patience_s: Callable[[], float] = float,
) -> Any:
    """The launcher that re-runs the script once per local rank, as DDPStrategy uses it.

    Args:
        environment: Lightning's cluster environment.
        num_processes: Ranks on this node.
        num_nodes: Nodes.
        around: Called in every rank with the Trainer's entry point and its arguments.
        variables: What to add to the ranks' environment where it is unset; asked when processes are
            about to start.
        patience_s: For how long since a rank's failure this process may go on; asked again and
            again, until that time is over.
    """
    return _StartingLauncher(around, variables, patience_s, environment, num_processes, num_nodes)


def present_launcher(around: Around) -> Any:
    """A launcher for processes that exist.

    Without one, nothing of ours is around an entry point (trainer/call.py,
    _call_and_handle_interrupt).
    """
    return _PresentLauncher(around)


def has_children(launcher: Any) -> bool:
    """Whether this process started others, one of whose ends has it killed (_PatientObserver)."""
    return bool(getattr(launcher, "procs", ()))
