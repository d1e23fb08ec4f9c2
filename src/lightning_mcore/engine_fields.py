"""Fields of the engine's configs: what the strategy decides, and what users may add.

Pure: values in, dicts out. A field that has an argument of its own, or that the torch optimizer or
the Trainer decides, is refused among the user's, so that nothing is set in two places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Switches
from lightning_mcore.userbuffers import TPCommOverlap
from lightning_mcore.userbuffers_plan import userbuffers_fields

_DDP_SWITCHES = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "align_param_gather",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "bucket_size",
    "grad_reduce_in_fp32",
    "average_in_collective",
    "nccl_ub",
)
"""Switches that are fields of the engine's DDP config under the same name."""
_OPTIMIZER_FIELDS_OF_TORCH = (
    "optimizer",
    "lr",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "decoupled_weight_decay",
    "bf16",
    "fp16",
    "params_dtype",
    "use_distributed_optimizer",
    "overlap_param_gather",
)


def model_fields(
    layout: Layout,
    switches: Switches,
    dtypes: Mapping[str, Any],
    device: torch.device,
    *,
    per_token_loss: bool = False,
    userbuffers: TPCommOverlap | None = None,
) -> dict[str, Any]:
    """The fields of the engine's TransformerConfig that the strategy decides."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": switches.sequence_parallel.effective,
        "overlap_p2p_comm": switches.overlap_p2p.effective,
        "overlap_p2p_comm_warmup_flush": switches.overlap_p2p_warmup_flush.effective,
        "batch_p2p_comm": switches.batch_p2p.effective,
        "deallocate_pipeline_outputs": switches.deallocate_pipeline_outputs.effective,
        "gradient_accumulation_fusion": switches.gradient_accumulation_fusion.effective,
        "calculate_per_token_loss": per_token_loss,
        **userbuffers_fields(userbuffers),
        **dtypes,
    }
    if switches.batch_p2p.effective and not switches.batch_p2p_sync.effective:
        # The engine's default is to wait; left out otherwise, for factories that set it themselves.
        fields["batch_p2p_sync"] = False
    group_size = switches.microbatch_group_size_per_vp_stage.effective
    if group_size is not None:
        fields["microbatch_group_size_per_vp_stage"] = group_size
    if switches.defer_embedding_wgrad.effective:
        fields["defer_embedding_wgrad_compute"] = True
    if switches.cuda_graphs.effective:
        # Where it is off the field is left out, so that configs without it can be used.
        fields["cuda_graph_impl"] = switches.cuda_graphs.effective
    if switches.cp_comm_type.effective is not None:
        fields["cp_comm_type"] = switches.cp_comm_type.effective
    if (sizes := switches.hierarchical_context_parallel_sizes.effective) is not None:
        fields["hierarchical_context_parallel_sizes"] = list(sizes)
    if device.type == "cpu":
        # Fused kernels exist for GPUs only; weights made on the host are the same for any tp.
        fields |= {
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "bias_dropout_fusion": False,
        }
    return fields


def ddp_fields(switches: Switches, user: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the engine's DDP config: the switches, and the user's further ones.

    Raises:
        ConfigurationError: If the user's fields contain one that is an argument of the strategy.
    """
    check_ddp_fields(user)
    return {**{name: getattr(switches, name).effective for name in _DDP_SWITCHES}, **user}


def group_fields(switches: Switches) -> dict[str, Any]:
    """Arguments of the engine's ``initialize_model_parallel`` that switches decide."""
    sizes = switches.hierarchical_context_parallel_sizes.effective
    return {
        "num_distributed_optimizer_instances": (
            switches.num_distributed_optimizer_instances.effective
        ),
        "high_priority_stream_groups": list(switches.high_priority_streams.effective),
        "hierarchical_context_parallel_sizes": None if sizes is None else list(sizes),
    }


def check_ddp_fields(user: Mapping[str, Any]) -> None:
    """Refuses fields that have an argument of their own."""
    if "align_param_gather" in user:
        raise ConfigurationError(
            "`ddp` sets ['align_param_gather'], which follows from the schedule: without an"
            " interleaved one it would keep parameters from being gathered ahead; leave it out."
        )
    double = sorted(set(user) & set(_DDP_SWITCHES))
    if double:
        raise ConfigurationError(
            f"`ddp` sets {double}, which MCoreStrategy takes as arguments of the same name; set"
            " them there, where they are checked against the other switches."
        )


def check_optimizer_fields(user: Mapping[str, Any]) -> None:
    """Refuses fields that the torch optimizer, the Trainer or a switch decides."""
    double = sorted(set(user) & set(_OPTIMIZER_FIELDS_OF_TORCH))
    if double:
        raise ConfigurationError(
            f"`optimizer` sets {double}, which come from configure_optimizers, Trainer(precision=,"
            " gradient_clip_val=) and the strategy's own arguments; set them there."
        )


def optimizer_fields(
    switches: Switches, dtypes: Mapping[str, Any], user: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of the engine's optimizer config: the switches, dtypes and the user's further ones."""
    check_optimizer_fields(user)
    return {
        "use_distributed_optimizer": switches.use_distributed_optimizer.effective,
        "overlap_param_gather": switches.overlap_param_gather.effective,
        # torch.amp.GradScaler's start; the engine's 2**32 skips the first dozens of steps.
        "initial_loss_scale": 2.0**16,
        **dtypes,
        **user,
    }
