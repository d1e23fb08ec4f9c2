"""TransformerEngine's userbuffers: started before layers are built, once per process."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.userbuffers import TPCommOverlap
from lightning_mcore.userbuffers_plan import (
    UserbuffersPlan,
    check_quantization,
    userbuffers_environment,
)

_live: list[UserbuffersPlan] = []
"""The one set-up of this process, as TransformerEngine has room for only one."""


def start_userbuffers(plan: UserbuffersPlan) -> None:
    """Creates the buffers of ``plan``; collective over the world.

    To be called once process groups exist and before any layer is built: layers look for their
    buffers when they are made. A later run of the same process with an equal plan goes on with the
    buffers that are there: setting them up a second time fails now and then ("copy_into_buffer:
    CUDA Error: invalid argument").

    Raises:
        ConfigurationError: If this process holds buffers of another plan.
    """
    if _live:
        if _live[0] != plan:
            raise ConfigurationError(
                f"`tp_comm_overlap` needs buffers {plan.shape}, but this process holds some of"
                f" {_live[0].shape} or with other settings, and they can be set up once per process"
                " only; run the second Trainer in a process of its own, or give both the"
                " same `seq_length`, `micro_batch_size` and `tp_comm_overlap`."
            )
        return
    # Read by TransformerEngine's library through getenv when it allocates.
    os.environ.update(userbuffers_environment(os.environ))
    from transformer_engine.pytorch.module import base

    _initialize(base, plan)
    _live.append(plan)
    atexit.register(stop_userbuffers)


def _initialize(base: Any, plan: UserbuffersPlan) -> None:
    """Calls ``initialize_ub`` in the form that the installed version has."""
    arguments: dict[str, Any] = {
        "shape": list(plan.shape),
        "tp_size": plan.tp,
        "dtype": torch.bfloat16,
        "bootstrap_backend": plan.bootstrap_backend,
    }
    tables = [{name: dict(entry) for name, entry in table.items()} for table in plan.ub_cfgs]
    modes = getattr(base, "UserBufferQuantizationMode", None)
    if modes is not None:  # since 2.7
        arguments["quantization_modes"] = [modes[name] for name in plan.quantization_modes]
        arguments["ub_cfgs"] = tables if len(tables) > 1 else tables[0]
    else:
        arguments["use_fp8"] = plan.quantization_modes[0] == "FP8"
        arguments["ub_cfgs"] = tables[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        base.initialize_ub(**arguments)


def stop_userbuffers() -> None:
    """Frees the buffers, if there are any. Every rank calls it, when no layer uses them again."""
    if not _live:
        return
    from transformer_engine.pytorch.module import base

    base.destroy_ub()
    _live.clear()
    atexit.unregister(stop_userbuffers)


def check_model(asked: TPCommOverlap, chunks: Sequence[nn.Module]) -> None:
    """Checks that the chunks of this rank use the buffers, and those that were made.

    Raises:
        ConfigurationError: If no layer has buffers (the engine's local layers take
            ``tp_comm_overlap`` and do nothing with it), or they compute in another precision.
    """
    for chunk in chunks:
        config: Any = chunk.config
        fp8 = bool(getattr(config, "fp8", None))
        at_ends = bool(getattr(config, "first_last_layers_bf16", False))
        check_quantization(asked, fp8=fp8, bf16_at_ends=at_ends)
    # TransformerEngine's layers have the name of their GEMMs, or None.
    modules = (module for chunk in chunks for module in chunk.modules())
    if not any(getattr(module, "ub_name", None) is not None for module in modules):
        raise ConfigurationError(
            "`tp_comm_overlap` works in TransformerEngine's layers only, and the model has none:"
            " the engine's local layers take the switch and do nothing; build the chunks with a"
            " TransformerEngine layer spec, or use tp_comm_overlap=False."
        )
