"""Private or delicate Lightning names, one function each, with the test that watches it.

Everything else in this package uses Lightning's public surface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher


def subprocess_launcher(environment: Any, num_processes: int, num_nodes: int) -> Any:
    """The launcher that re-runs the script once per local rank, as DDPStrategy uses it."""
    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


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


@contextmanager
def capture_logs(module: pl.LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Sends ``self.log`` of this one module to ``log(**arguments)`` for the duration of a step.

    The instance attribute hides the method and is removed again; neither the class nor Lightning is
    changed. ``self.log_dict`` arrives here too, since it calls ``self.log``.
    """
    signature = inspect.signature(module.log)

    def captured(*args: Any, **kwargs: Any) -> None:
        log(**signature.bind(*args, **kwargs).arguments)

    object.__setattr__(module, "log", captured)
    try:
        yield
    finally:
        object.__delattr__(module, "log")


def run_closure(precision: Precision, module: Any, optimizer: Any, closure: Any) -> Any:
    """Runs the step's closure and the hooks before the optimizer step, without stepping."""
    return precision._wrap_closure(module, optimizer, closure)
