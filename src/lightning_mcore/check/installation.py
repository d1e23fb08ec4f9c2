"""Versions of the packages that a run rests on, without trusting them.

TransformerEngine, Apex, DeepEP and flash-attention load GPU libraries when they are imported, which
can fail, abort the process or hang. Each is imported in a process of its own, with a time limit.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, TypeAlias

import torch

from lightning_mcore.version import package_versions

__all__ = ["PROBED", "Package", "State", "nccl_version", "probe_packages", "versions"]

State: TypeAlias = Literal["works", "missing", "broken"]

PROBED: Mapping[str, str] = {
    "TransformerEngine": "transformer_engine.pytorch",
    "Apex": "amp_C",  # the extension without which the engine does not use Apex
    "DeepEP": "deep_ep",
    "flash-attn": "flash_attn",
}
"""Module that is imported, by the name that is shown."""

_DISTRIBUTIONS = {
    "transformer_engine.pytorch": ("transformer-engine", "transformer_engine"),
    "amp_C": ("apex",),
    "deep_ep": ("deep-ep", "deep_ep"),
    "flash_attn": ("flash-attn",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """An optional package."""

    name: str
    """As it is shown."""
    state: State
    """``"works"``: it can be imported; ``"missing"``: it is not installed; ``"broken"``: it is,
    but importing it fails or takes too long."""
    version: str | None = None
    """Installed version, if it is known."""
    detail: str = ""
    """What went wrong."""


def versions() -> dict[str, str]:
    """Versions of Python and of what every run needs, in the order to print them."""
    found = {"python": platform.python_version(), **package_versions()}
    nccl = nccl_version()
    return {**found, "NCCL": nccl} if nccl else found


def nccl_version() -> str | None:
    """The NCCL that torch was built with; ``None`` in a build without CUDA."""
    try:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return ".".join(str(number) for number in numbers)
    except (AttributeError, RuntimeError):
        return None


def probe_packages(
    modules: Mapping[str, str] = PROBED, *, timeout_s: float = 60.0
) -> tuple[Package, ...]:
    """Imports each module in a process of its own, all at the same time.

    Args:
        modules: Module by shown name.
        timeout_s: Seconds after which an import counts as hanging.
    """
    running = {name: _start(module) for name, module in modules.items() if _is_installed(module)}
    deadline = time.monotonic() + timeout_s
    return tuple(
        _outcome(name, module, running.get(name), deadline, timeout_s)
        for name, module in modules.items()
    )


def _is_installed(module: str) -> bool:
    # Only the top-level name: looking for a submodule would import its package here.
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _start(module: str) -> subprocess.Popen[str]:
    # A group of its own, so that what the import starts can be ended with it.
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )


def _outcome(
    name: str,
    module: str,
    process: subprocess.Popen[str] | None,
    deadline: float,
    timeout_s: float,
) -> Package:
    if process is None:
        return Package(name=name, state="missing")
    version = _version(_DISTRIBUTIONS.get(module, (module,)))
    try:
        _, told = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        detail = f"`import {module}` takes more than {timeout_s:g} s"
        return Package(name=name, state="broken", version=version, detail=detail)
    if process.returncode == 0:
        return Package(name=name, state="works", version=version)
    lines = told.strip().splitlines()
    code = process.returncode
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else "failed"
    detail = f"`import {module}`: {how}"
    return Package(name=name, state="broken", version=version, detail=detail)


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
