"""The engine's process groups and random streams: its one set of globals per process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

from lightning_mcore._mcore import mtp
from lightning_mcore.layout import Layout


def init_parallel_state(
    layout: Layout,
    *,
    timeout_minutes: int,
    fields: Mapping[str, Any],
    communicators: Mapping[str, Mapping[str, Any]],
) -> None:
    """Creates the engine's process groups. Collective over the world.

    Args:
        layout: Sizes.
        timeout_minutes: After which a collective fails.
        fields: Further arguments of ``initialize_model_parallel``.
        communicators: NCCL settings by group; the engine reads them from a file.
    """
    with TemporaryDirectory() as folder:
        path = None
        if communicators:
            path = str(Path(folder) / "nccl.yaml")
            # JSON is YAML.
            Path(path).write_text(json.dumps({k: dict(v) for k, v in communicators.items()}))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_minutes,
            nccl_communicator_config_path=path,
            **fields,
        )


def destroy_parallel_state() -> None:
    """Forgets the engine's process groups and buffers. Every rank calls it."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    # Losses of expert layers, and of further tokens, are kept per process in tensors as long as the
    # first model was deep, with its groups: a deeper one would be out of bounds (moe_logging.py,
    # record; multi_token_prediction.py). A dict until 0.18, an object from then on.
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    mtp.forget_losses()


def parallel_state_exists() -> bool:
    """Whether the engine holds parallel state in this process, ours or another Trainer's."""
    return bool(parallel_state.model_parallel_is_initialized())


def engine_groups() -> dict[str, dist.ProcessGroup]:
    """The engine's groups of this rank by short name."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "mp": parallel_state.get_model_parallel_group(),
    }


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group that the engine holds, in the same order on all ranks.

    ``destroy_model_parallel`` destroys few of them and forgets the rest, which then live as long as
    the process.
    """
    found: dict[int, dist.ProcessGroup] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dist.ProcessGroup):
            found.setdefault(id(value), value)
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)

    for value in list(vars(parallel_state).values()):
        collect(value)
    return list(found.values())


def seed_parallel_rng(seed: int, *, graph_safe: bool = False) -> None:
    """Seeds the engine's RNG tracker: one stream per tensor-parallel rank, one shared.

    The device's default generator is set to ``seed`` as well (the engine does both at once).

    Args:
        seed: Of the shared stream.
        graph_safe: Whether CUDA graphs may draw from the streams: those of TransformerEngine, where
            it is installed, else the engine's of that kind.
    """
    kind = {"te_rng_tracker": True, "use_cudagraphable_rng": True} if graph_safe else {}
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True, **kind)
