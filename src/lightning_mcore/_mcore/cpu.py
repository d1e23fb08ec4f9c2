"""Runs megatron-core on a machine without a GPU: for tests and small demonstrations.

The engine says "cuda" in many places: as a device literal, through ``torch.cuda``, in the names of
tensor types. :class:`CpuAdapter` gives the engine's own modules, and only those, another view of
torch, in which these words mean the CPU. Lightning, torch itself and user code keep the real
``torch`` and ``torch.cuda``. This is the only code of the package that patches anything; each seam
is one function that says why it exists and where in the engine it acts.

Two effects reach beyond the engine while an adapter is active: ``torch.compile`` runs eagerly, and
the engine's synchronous checkpoint writer is the only one that works (see
:func:`_write_in_this_process`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import queue
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_mcore._mcore import torch_view
from lightning_mcore._mcore.distopt_fixes import fix_distributed_optimizer
from lightning_mcore._mcore.patching import Patches
from lightning_mcore.errors import ConfigurationError

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer ?Engine)")
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as engine_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

__all__ = ["CpuAdapter"]

FALLBACK_WARNINGS = ".*(Transformer Engine and Apex are|Apex is) not installed. Falling back"
"""The engine says in every second module which GPU extensions are missing."""

_log = logging.getLogger(__name__)


class CpuAdapter(contextlib.AbstractContextManager["CpuAdapter"]):
    """Context in which megatron-core runs on the CPU.

    The engine may have been imported before; modules that it imports later are covered as well.
    Contexts nest and may end in any order: the first installs the adapter, the last to leave
    restores everything exactly, also after an exception. Not thread-safe.

    Raises:
        ConfigurationError: On entering, when torch sees a GPU.
    """

    _users = 0
    _installed = contextlib.ExitStack()
    _announced = False

    @classmethod
    def is_active(cls) -> bool:
        """Whether any adapter is entered in this process."""
        return cls._users > 0

    def __enter__(self) -> CpuAdapter:
        _refuse_gpu()
        if CpuAdapter._users == 0:
            # Not moved to another stack when complete: modules imported later add to this one.
            CpuAdapter._installed = contextlib.ExitStack()
            try:
                _install(Patches(CpuAdapter._installed))
            except BaseException:
                CpuAdapter._installed.close()
                raise
            if not CpuAdapter._announced and _is_rank_zero():
                CpuAdapter._announced = True
                _log.warning(
                    "megatron-core runs on CPU through an adapter: for tests and small demos."
                )
        CpuAdapter._users += 1
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        CpuAdapter._users -= 1
        if CpuAdapter._users == 0:
            CpuAdapter._installed.close()
        return False


def _refuse_gpu() -> None:
    if torch.cuda.is_available():
        raise ConfigurationError(
            "The CPU adapter needs a process that sees no GPU, but `torch.cuda.device_count()` is"
            f' {torch.cuda.device_count()}; hide the GPUs with CUDA_VISIBLE_DEVICES="" or train'
            ' with accelerator="gpu".'
        )


def _is_rank_zero() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name]) == 0
    return all(int(os.environ.get(name, "0")) == 0 for name in ("NODE_RANK", "LOCAL_RANK"))


def _install(patches: Patches) -> None:
    """Applies every seam; what was applied is undone if a later one fails."""
    _redirect_rng(patches)
    _silence_rng_warning(patches)
    _silence_fallback_warnings(patches)
    _convert_split_sizes(patches)
    _bind_te_general_gemm(patches)
    _allow_torch_norm_with_sequence_parallel(patches)
    _write_in_this_process(patches)
    fix_distributed_optimizer(patches)
    _compile_nothing(patches)
    torch_view.redirect_tensor_cuda(patches)
    torch_view.ignore_record_stream(patches)
    torch_view.rename_tensor_types(patches)
    torch_view.redirect_torch(patches)


# ------------------------------------------------------------------------- seams in the engine


def _redirect_rng(patches: Patches) -> None:
    """Where: tensor_parallel/random.py: ``_get_cuda_rng_state``, ``_set_cuda_rng_state``.

    Why: they reach for CUDA through ``_lazy_call``, imported by name. Without a GPU it queues the
    call for ever, so a state would never be set.
    """
    patches.replace(engine_random, "_get_cuda_rng_state", torch_view.get_rng_state)
    patches.replace(engine_random, "_set_cuda_rng_state", torch_view.set_rng_state)


def _is_not_about_rng(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _silence_rng_warning(patches: Patches) -> None:
    """Where: tensor_parallel/random.py: ``CudaRNGStatesTracker.fork``.

    Why: it warns when the CPU generator moves within a fork. Here that is the forked generator.
    """
    logger = logging.getLogger(engine_random.__name__)
    logger.addFilter(_is_not_about_rng)
    patches.on_exit(logger.removeFilter, _is_not_about_rng)


def _silence_fallback_warnings(patches: Patches) -> None:
    """Where: optimizer/*, models/backends.py and others, when they are imported.

    Why: they announce the lack of GPU extensions, of which a CPU user has no use.
    """
    warnings.filterwarnings("ignore", message=FALLBACK_WARNINGS)
    entry = warnings.filters[0]

    def remove() -> None:
        # Whoever restored older filters in between, as pytest does, has removed it already.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            pass  # Invalidates what modules remember about the filters.

    patches.on_exit(remove)


def _host_split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _convert_split_sizes(patches: Patches) -> None:
    """Where: transformer/moe/token_dispatcher.py: ``maybe_move_tensor_to_cpu``.

    Why: split sizes of an all-to-all become numpy arrays only on their way from a GPU; as tensors
    they are refused by the collective.
    """
    patches.replace(token_dispatcher, "maybe_move_tensor_to_cpu", _host_split_sizes)


def _bind_te_general_gemm(patches: Patches) -> None:
    """Where: transformer/moe/moe_utils.py: ``RouterGatingLinearFunction``, engine 0.16.

    Why: without TransformerEngine the name is unbound there, but tested with ``is not None``.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        patches.set(moe_utils, "te_general_gemm", None)


def _allow_torch_norm_with_sequence_parallel(patches: Patches) -> None:
    """Where: transformer/torch_norm.py: ``WrappedTorchNorm.__new__``.

    Why: it refuses sequence parallelism, where the norms of Apex and TransformerEngine do no more
    than mark their parameters, whose gradients are then summed over tensor parallel.
    """
    create = WrappedTorchNorm.__new__

    def create_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return create(cls, config, *args, **kwargs)
        unsharded = copy.copy(config)
        unsharded.sequence_parallel = False
        norm = create(cls, unsharded, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True
        return norm

    patches.replace(WrappedTorchNorm, "__new__", staticmethod(create_marked))


def _write_in_this_process(patches: Patches) -> None:
    """Where: dist_checkpointing/strategies/filesystem_async.py: ``_results_queue``.

    Why: even a synchronous save starts a manager process for its queue, which takes seconds and
    imports the user's script again. A save in this process needs a plain queue only. The engine's
    asynchronous saves, which write in another process, do not work with it.
    """
    patches.replace(filesystem_async, "_results_queue", queue.Queue())


def _compile_nothing(patches: Patches) -> None:
    """Where: jit.py: ``jit_fuser``, which is ``torch.compile``.

    Why: compiling needs a C++ compiler and takes longer than a whole test.
    """
    patches.enter(torch.compiler.set_stance("force_eager"))
