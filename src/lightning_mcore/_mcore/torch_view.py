"""What megatron-core sees of torch on a machine without a GPU.

Engine modules get a view of the module ``torch`` in which "cuda" means the CPU; methods of tensors,
which a view cannot replace, look at who calls them. Everyone else keeps the real ones.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import time
import types
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_mcore._mcore.patching import Patches

CPU = torch.device("cpu")
ENGINE = "megatron"
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
"""Functions of torch that create a tensor on the ``device`` they are given."""


class _Stream:
    """A stream on a device that has none: everything was done when the call returned."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that happens when it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._time_s - self._time_s) * 1e3


class _View(types.ModuleType):
    """A module seen with some names replaced; reads of others and all writes reach the module."""

    def __init__(self, module: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_module"], name)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for calls that have no meaning without a GPU."""


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(*_: Any, **__: Any) -> Tensor:
    """State of the CPU generator, whatever device it is asked of."""
    return torch.get_rng_state()


def set_rng_state(new_state: Tensor, *_: Any, **__: Any) -> None:
    """Sets the CPU generator, whatever device it is meant for."""
    torch.set_rng_state(new_state)


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return redirected


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _view_of_torch() -> _View:
    stream = _Stream()
    rng = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state, "manual_seed": _seed}
    cuda = {
        # A device instead of a number, so that it serves in `device=` and in `.to()`.
        "current_device": lambda: CPU,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Event,
        **dict.fromkeys(("empty_cache", "set_device", "set_stream", "synchronize"), _nothing),
        **rng,
        "manual_seed_all": _seed,
        "random": _View(torch.cuda.random, rng),
        "nvtx": _View(
            torch.cuda.nvtx,
            {
                **dict.fromkeys(("mark", "range_pop", "range_push"), _nothing),
                "range": lambda *_, **__: contextlib.nullcontext(),
            },
        ),
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _View(torch, {**factories, "autocast": _autocast, "cuda": _View(torch.cuda, cuda)})


def _is_engine_module(name: str) -> bool:
    return name == ENGINE or name.startswith(f"{ENGINE}.")


def redirect_torch(patches: Patches) -> None:
    """Why: ``device="cuda"``, ``torch.cuda.*``. Where: the name ``torch`` in engine modules."""
    view = _view_of_torch()

    def adapt(module: types.ModuleType | None) -> None:
        if isinstance(module, types.ModuleType) and vars(module).get("torch") is torch:
            patches.set(module, "torch", view)

    for name, module in list(sys.modules.items()):
        if _is_engine_module(name):
            adapt(module)
    hook = _ImportHook(adapt)
    sys.meta_path.insert(0, hook)
    patches.on_exit(sys.meta_path.remove, hook)
    # A module whose import outlasts the context must stay as it is.
    patches.on_exit(hook.stop)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Shows the view to engine modules that are imported later, right after they ran.

    The engine imports some lazily, for example ``dist_checkpointing.strategies``.
    """

    def __init__(self, adapt: Callable[[types.ModuleType], None]) -> None:
        self.adapt = adapt
        self._in_search: set[str] = set()

    def stop(self) -> None:
        """Leaves modules alone from now on."""
        self.adapt = _nothing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds what the other finders find, and notes to adapt it."""
        if not _is_engine_module(fullname) or fullname in self._in_search:
            return None
        self._in_search.add(fullname)
        try:
            finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
            specs = (finder.find_spec(fullname, path, target) for finder in finders)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._in_search.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader, self)
        return spec


class _AdaptingLoader(importlib.abc.Loader):
    """Runs a module by its own loader, which it gives back to it, then adapts it."""

    def __init__(self, loader: Any, hook: _ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Creates the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the module's code with the real torch in it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook.adapt(module)


# ------------------------------------------------------------------------- tensor methods


def _called_by_engine() -> bool:
    """Whether the caller of the function that asks is a function of the engine."""
    return _is_engine_module(sys._getframe(2).f_globals.get("__name__", ""))


def redirect_tensor_cuda(patches: Patches) -> None:
    """Why: a view cannot replace methods. Where: ``.cuda()`` in engine modules."""
    real: Callable[..., Any] = torch.Tensor.cuda

    @wraps(real)
    def cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if _called_by_engine() else real(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "cuda", cuda)


def ignore_record_stream(patches: Patches) -> None:
    """Why: it takes a CUDA stream only. Where: the combined 1F1B schedule, token_dispatcher.py."""
    real: Callable[..., Any] = torch.Tensor.record_stream

    @wraps(real)
    def record_stream(tensor: Tensor, stream: Any) -> None:
        if not _called_by_engine():
            real(tensor, stream)

    patches.set(torch.Tensor, "record_stream", record_stream)


class _TypeName(str):
    """The name of a CPU tensor type, which equals the name of the same type on CUDA too."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str):
            return NotImplemented
        return str.replace(other, "torch.cuda.", "torch.", 1) == str.__str__(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def rename_tensor_types(patches: Patches) -> None:
    """Why: ``param.type() == "torch.cuda.FloatTensor"``. Where: optimizer.py, clip_grads.py, ..."""
    real: Callable[..., Any] = torch.Tensor.type

    @wraps(real)
    def type_(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(tensor, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) and _called_by_engine() else result

    patches.set(torch.Tensor, "type", type_)
