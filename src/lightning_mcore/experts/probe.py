"""Finds out whether the package ``deep_ep`` can be used, in a process that may hang or crash.

Enters: a time limit. Leaves: a ``FlexPackage``. Each rank probes for itself, since each node has
its own installation; nothing here is collective.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from lightning_mcore.experts.values import FlexPackage

__all__ = ["probe_deep_ep"]

_PROBE = """
import importlib.metadata as metadata, json
import deep_ep
names = metadata.packages_distributions().get("deep_ep", [])
found = {
    "version": metadata.version(names[0]) if names else "of unknown version",
    "has_hybridep": hasattr(deep_ep, "HybridEPBuffer"),
}
try:
    # Arithmetic only; it asserts where the extension was built without NVSHMEM.
    deep_ep.Buffer.get_dispatch_config(16).get_rdma_buffer_size_hint(2 * 7168, 16)
    found["has_nvshmem"] = True
except Exception:
    found["has_nvshmem"] = False
print("\\n" + json.dumps(found))
"""


@lru_cache
def probe_deep_ep(limit_s: float = 60.0) -> FlexPackage:
    """Imports ``deep_ep`` in another process, which ends after ``limit_s`` seconds at the latest.

    Importing it loads CUDA and NVSHMEM libraries, which have been seen to hang instead of failing.
    The result is remembered for the life of this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FlexPackage(problem=f"importing it did not end within {limit_s:g} s")
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    last = lines[-1].strip() if lines else ""
    if done.returncode < 0:
        return FlexPackage(problem=f"importing it ended with signal {-done.returncode}")
    if done.returncode:
        return FlexPackage(problem=last or f"importing it ended with status {done.returncode}")
    return FlexPackage(**json.loads(last))
