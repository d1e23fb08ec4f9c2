"""Counts where the host waits for the device in a block of steps.

On a GPU, torch itself reports synchronising calls (``torch.cuda.set_sync_debug_mode``). On CPU
there is no device to wait for; there, the reads of tensor values (``.item()``, ``bool(tensor)``,
``nonzero``...) are counted, which is what would wait. A tensor counts as a host's own if it came
from a factory call without ``device=`` or only from such tensors: on a GPU machine it would be in
host memory, and reading it waits for no device.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}
_READS_OUTSIDE_DISPATCH = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.copy_}
_SKIPPED = (
    "/torch/",
    os.path.abspath(__file__),
    "contextlib.py",
    # Where the CPU adapter passes the engine's torch calls on.
    "/lightning_mcore/_mcore/torch_view.py",
)
_HOST_SITES = {
    "/torch/optim/": "step counts of torch's optimizers live on the host, unless capturable",
    "/megatron/core/tensor_parallel/random.py": "compares states of the host's generator",
}
"""Files that read only host tensors, created before counting began."""


class Syncs:
    """Counts of one loop, by call site."""

    def __init__(self) -> None:
        self.device: Counter[str] = Counter()
        """Waits for the device; on CPU, reads of tensors that would live on it."""
        self.host: Counter[str] = Counter()
        """On CPU, reads of host tensors; a GPU does not report them."""
        self.uploads: Counter[str] = Counter()
        """On CPU, blocking copies of host values to the device, which a GPU counts as waits."""

    def counting(self, device: torch.device) -> AbstractContextManager[None]:
        """Counts within the context, in the thread that enters it."""
        return self._on_cpu() if device.type == "cpu" else self._on_gpu()

    @contextmanager
    def _on_cpu(self) -> Iterator[None]:
        origins = _Origins(self)
        with origins, _Reads(self, origins):
            yield

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        def show(message: Any, *_: Any, **__: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.device[_site()] += 1

        explicit = torch.cuda.synchronize

        def synchronize(*args: Any, **kwargs: Any) -> None:
            # Not reported by the debug mode.
            self.device[_site()] += 1
            explicit(*args, **kwargs)

        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            torch.cuda.synchronize = synchronize
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize = explicit


class _Origins(TorchFunctionMode):
    """Remembers which tensors would be in host memory."""

    def __init__(self, syncs: Syncs) -> None:
        super().__init__()
        self._host = WeakIdKeyDictionary()
        self._syncs = syncs

    def is_host(self, tensor: Tensor) -> bool:
        return tensor in self._host

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = all(self.is_host(tensor) for tensor in inputs)
        if func in _READS_OUTSIDE_DISPATCH:
            (self._syncs.host if from_host else self._syncs.device)[_site()] += 1
        to_device = kwargs.get("device") is not None or any(
            isinstance(leaf, torch.device) for leaf in tree_leaves(args)
        )
        if from_host and to_device:
            copies = func in _MOVES or func in (torch.tensor, torch.as_tensor)
            if copies and not kwargs.get("non_blocking"):
                self._syncs.uploads[_site()] += 1
        elif from_host and isinstance(output, Tensor):
            self._host[output] = True
        return output


class _Reads(TorchDispatchMode):
    """Counts operations whose result the host waits for, also inside other operations."""

    def __init__(self, syncs: Syncs, origins: _Origins) -> None:
        super().__init__()
        self._syncs = syncs
        self._origins = origins

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            on_host = self._origins.is_host(args[0]) or _reads_host_only()
            counts = self._syncs.host if on_host else self._syncs.device
            counts[_site()] += 1
        return func(*args, **(kwargs or {}))


def _reads_host_only() -> bool:
    stack = traceback.extract_stack(limit=12)
    return any(site in frame.filename for frame in stack[-6:] for site in _HOST_SITES)


def _site() -> str:
    """Innermost frame outside torch: ``package/file.py:line function``."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _SKIPPED):
            path = frame.filename
            for root in ("site-packages" + os.sep, "src" + os.sep):
                path = path.rpartition(root)[2] if root in path else path
            return f"{path}:{frame.lineno} {frame.name}"
    return "torch"
