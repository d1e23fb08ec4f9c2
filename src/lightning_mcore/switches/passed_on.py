"""Rules for what is not a switch of ours: fields of ``ddp`` and ``optimizer``, sharding, versions.

Many of them are checked by Megatron-LM's training script only, so that the core would accept the
field and ignore it, or train something else.
"""

from __future__ import annotations

from lightning_mcore.config import SwitchRequest
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import PRECISIONS, Facts, Switch, Switches
from lightning_mcore.topology import place_groups

__all__ = [
    "check_ddp_fields",
    "check_expert_tensor_parallel",
    "check_fsdp",
    "check_optimizer_fields",
    "check_precision",
    "check_topology",
    "note_opportunities",
]

_FSDP_FIELDS = ("use_megatron_fsdp", "use_custom_fsdp")
_GROUPS = "parameter groups come from configure_optimizers; set lr and weight_decay of its groups"
_UNREAD_OPTIMIZER_FIELDS = {
    "min_lr": _GROUPS,
    "decoupled_lr": _GROUPS,
    "decoupled_min_lr": _GROUPS,
    "apply_wd_to_qk_layernorm": _GROUPS,
    "main_grads_dtype": "gradients have the dtype of DDP's buffers; use grad_reduce_in_fp32=False",
    "optimizer_cuda_graph": "only Megatron-LM's training script captures the optimizer's step",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters in 8 bits are not supported",
}
"""Fields of the engine's optimizer config that nothing would act on, and what does it here."""
_OF_OTHER_OPTIMIZERS = ("muon_", "lion_", "soap_", "adaptive_muon_")


def check_precision(facts: Facts, findings: Findings) -> None:
    """Dtypes that the engine can train in."""
    if facts.precision not in PRECISIONS:
        closest = "32-true" if facts.precision.startswith("64") else "bf16-mixed"
        findings.error(
            "precision-unknown",
            f"`precision` ({facts.precision!r}) must be one of {', '.join(PRECISIONS)}",
            f"use Trainer(precision={closest!r})",
            precision=facts.precision,
        )


def check_expert_tensor_parallel(layout: Layout, facts: Facts, findings: Findings) -> None:
    """What experts cut over several ranks need."""
    if not facts.on_gpu and layout.ep > 1 and layout.etp > 1:
        findings.error(
            "etp-needs-gpu",
            f"`etp` ({layout.etp}) with `ep` ({layout.ep}) needs GPUs: gloo cannot gather the"
            " unequal numbers of tokens that ranks send to experts",
            "use etp=1 on CPU",
            etp=layout.etp,
            ep=layout.ep,
        )
    between = 1 < layout.etp < layout.tp
    if layout.ep > 1 and between and not facts.native_model and facts.engine_version < (0, 19):
        # optimizer.py, get_main_grads_for_grad_norm: duplicates are looked for over tp, also among
        # experts; 0.19 looks over etp (expert_tp_group). At etp = 1 _mcore/moe.py corrects it.
        findings.warning(
            "expert-grad-norm-before-0.19",
            f"`etp` ({layout.etp}) between 1 and `tp` ({layout.tp}) with `ep` ({layout.ep}) leaves"
            " expert parameters that are not split, such as biases, out of the gradient norm on"
            " all but the first tensor-parallel rank on megatron-core"
            f" {facts.version_text}, before 0.19, and clipping follows the norm",
            "use megatron-core 0.19 or newer, or etp=1",
            etp=layout.etp,
            tp=layout.tp,
            ep=layout.ep,
            engine_version=facts.version_text,
        )


def check_topology(layout: Layout, facts: Facts, findings: Findings) -> None:
    """Whether the ranks fit the machines, and tensor parallelism its NVLink domain."""
    topology = facts.topology
    if topology is None or not facts.on_gpu:
        return
    if layout.world_size > topology.num_gpus:
        findings.error(
            "topology-too-small",
            f"`world_size` ({layout.world_size}) must be at most the {topology.num_gpus} GPUs of"
            f" `topology` ({topology.nodes} nodes x {topology.gpus_per_node})",
            f"use nodes={-(-layout.world_size // topology.gpus_per_node)} in the topology",
            world_size=layout.world_size,
            nodes=topology.nodes,
            gpus_per_node=topology.gpus_per_node,
        )
    if layout.tp > 1 and topology.reach(layout.group_ranks("tp")) != "nvlink":
        findings.warning(
            "tp-leaves-nvlink",
            f"`tp` ({layout.tp}) groups do not lie inside one NVLink domain of"
            f" {topology.gpus_per_nvlink_domain} GPUs, and every layer waits for their transfers",
            f"use tp={max(1, topology.gpus_per_nvlink_domain)} or less, and pp for the rest",
            tp=layout.tp,
            gpus_per_nvlink_domain=topology.gpus_per_nvlink_domain,
        )


def note_opportunities(
    layout: Layout, facts: Facts, switches: Switches, findings: Findings
) -> None:
    """What other sizes, or fields that have no switch, could gain."""
    layers, pp = facts.dims.num_layers, layout.pp
    if pp > 1 and layout.vpp is None and layers is not None:
        fitting = [vpp for vpp in range(2, layers // pp + 1) if layers % (pp * vpp) == 0]
        if fitting:
            findings.info(
                "vpp-would-overlap",
                f"`pp` ({pp}) without `vpp` leaves a bubble of ({pp} - 1) / num_microbatches and"
                " exposed transfers between stages",
                f"measure vpp={fitting[0]}, which divides `num_layers` ({layers}) and the bubble by"
                f" {fitting[0]}",
                pp=pp,
                vpp=None,
                num_layers=layers,
            )
    topology = facts.topology
    if (
        topology is not None
        and facts.on_gpu
        and layout.dp_cp >= 64
        and switches.use_distributed_optimizer.effective
        and place_groups(layout, topology)["dp_cp"].reach == "network"
    ):
        # distributed_data_parallel_config.py, the field's own text.
        findings.info(
            "pad-buckets",
            f"dp x cp ({layout.dp_cp}) crosses nodes, and NCCL's rings are fastest with messages"
            " that divide by a power of two",
            "measure ddp={'pad_buckets_for_high_nccl_busbw': True}",
            dp_cp=layout.dp_cp,
        )


def check_fsdp(request: SwitchRequest, findings: Findings) -> None:
    """Megatron-FSDP stays closed."""
    asked = request.fsdp
    if asked is not None:
        findings.error(
            "fsdp-not-supported",
            f"`fsdp` ({asked!r}) is not supported: Megatron-FSDP replaces the engine's gradient"
            " buffers, which checkpoints, gradient norms and parameter gathers of this strategy"
            " read, and it runs on GPUs only",
            "use fsdp=None with the distributed optimizer (ZeRO-1) and tp, pp or ep for what does"
            " not fit, or Lightning's FSDPStrategy",
            fsdp=asked,
        )
    used = [name for name in _FSDP_FIELDS if request.ddp.get(name)]
    if used:
        findings.error(
            "fsdp-not-supported",
            f"`ddp` sets {used}, and Megatron-FSDP is not supported: it replaces the engine's"
            " gradient buffers, which checkpoints, gradient norms and parameter gathers of this"
            " strategy read",
            "use the distributed optimizer (ZeRO-1) with tp, pp or ep for what does not fit",
            **dict.fromkeys(used, True),
        )


def check_ddp_fields(
    request: SwitchRequest,
    facts: Facts,
    findings: Findings,
    *,
    sharded: Switch[bool],
    fp32: Switch[bool],
    average: Switch[bool],
) -> None:
    """Fields of the engine's DDP config that exclude each other or would be ignored."""
    ddp = request.ddp
    instances = request.num_distributed_optimizer_instances or 1
    if ddp.get("num_buckets") is not None:
        # Read by Megatron-LM's training.py only.
        findings.error(
            "num-buckets-ignored",
            f"`num_buckets` ({ddp['num_buckets']}) in `ddp` would be ignored by the engine's DDP",
            "use bucket_size",
            num_buckets=ddp["num_buckets"],
        )
    if ddp.get("reduce_scatter_with_fp32_accumulation"):
        for holds, needed, fix in (
            (
                sharded.effective,
                f"needs `use_distributed_optimizer` (False: {sharded.reason})",
                "AdamW with use_distributed_optimizer=True",
            ),
            (
                instances == 1,
                f"needs one optimizer instance, not {instances}",
                "num_distributed_optimizer_instances=1",
            ),
            (
                not average.effective,
                "excludes `average_in_collective` (True)",
                "average_in_collective=False",
            ),
        ):
            if not holds:
                # param_and_grad_buffer.py and reduce_scatter_with_fp32_accumulation.py assert it.
                findings.error(
                    "fp32-accumulation-conflict",
                    f"`reduce_scatter_with_fp32_accumulation` (True) in `ddp` {needed}",
                    f"use {fix}, or leave it out",
                    reduce_scatter_with_fp32_accumulation=True,
                )
    if ddp.get("param_name_patterns_for_fp32_local_accumulation") and fp32.effective:
        # distributed_data_parallel_config.py: exclusive with grad_reduce_in_fp32.
        findings.error(
            "fp32-local-accumulation-conflict",
            "`param_name_patterns_for_fp32_local_accumulation` in `ddp` excludes"
            f" `grad_reduce_in_fp32` (True: {fp32.reason})",
            "use grad_reduce_in_fp32=False, or leave the patterns out",
            grad_reduce_in_fp32=True,
        )
    if ddp.get("check_for_nan_in_grad") and facts.precision == "16-mixed":
        # With a dynamic loss scale an overflow is part of the game; the check would stop the run.
        findings.error(
            "nan-check-excludes-fp16",
            "`check_for_nan_in_grad` (True) in `ddp` excludes `precision` ('16-mixed'), whose loss"
            " scale is found by overflowing",
            "use Trainer(precision='bf16-mixed'), or leave it out",
            check_for_nan_in_grad=True,
            precision=facts.precision,
        )
    for name in ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"):
        if ddp.get(name):
            # It must equal the model's and the optimizer's own field; nothing compares them.
            findings.error(
                "fp8-parameters-not-supported",
                f"`{name}` (True) in `ddp` needs parameters in 8 or 4 bits, which this strategy"
                " does not make yet: model, DDP and optimizer would disagree without a check",
                "leave it out",
                **{name: True},
            )


def check_optimizer_fields(
    request: SwitchRequest, facts: Facts, findings: Findings, sharded: Switch[bool]
) -> None:
    """Fields of the engine's optimizer config that would not do what they say here."""
    fields = request.optimizer
    if fields.get("use_precision_aware_optimizer"):
        # optimizer_config.py asserts them, in a rank and without the way out.
        for holds, needed, fix in (
            (
                facts.on_gpu and facts.te_version is not None,
                "TransformerEngine's fused Adam, on GPUs",
                "install transformer-engine and train on GPUs",
            ),
            (
                sharded.effective,
                f"`use_distributed_optimizer` (False: {sharded.reason})",
                "use torch.optim.AdamW with use_distributed_optimizer=True",
            ),
        ):
            if not holds:
                findings.error(
                    "precision-aware-optimizer-needs",
                    f"`use_precision_aware_optimizer` (True) in `optimizer` needs {needed}",
                    f"{fix}, or leave it out",
                    use_precision_aware_optimizer=True,
                )
    if fields.get("optimizer_cpu_offload") and not fields.get("use_precision_aware_optimizer"):
        # distrib_optimizer.py sets loaded moments in that case only; else they would be lost.
        findings.error(
            "cpu-offload-needs-precision-aware-optimizer",
            "`optimizer_cpu_offload` (True) in `optimizer` needs `use_precision_aware_optimizer`:"
            " without it the engine does not restore the moments from a checkpoint",
            "use optimizer={'optimizer_cpu_offload': True, 'use_precision_aware_optimizer': True,"
            " 'optimizer_offload_fraction': 1.0}",
            optimizer_cpu_offload=True,
        )
    elif fields.get("optimizer_cpu_offload") and not fields.get("optimizer_offload_fraction"):
        findings.error(
            "cpu-offload-fraction-missing",
            "`optimizer_cpu_offload` (True) in `optimizer` moves nothing to the host with"
            " `optimizer_offload_fraction` (0.0)",
            "use optimizer_offload_fraction=1.0, or less for less",
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.0,
        )
    if fields.get("optimizer_cpu_offload") and (
        facts.native_model or not facts.precision.endswith("-mixed")
    ):
        # hybrid_optimizer.py, _update_fp32_params_by_new_state, looks for an fp32 copy of each.
        findings.error(
            "cpu-offload-needs-16-bit-parameters",
            "`optimizer_cpu_offload` (True) in `optimizer` needs parameters in 16 bits, but"
            f" {'a plain torch model' if facts.native_model else 'a model'} under `precision`"
            f" ({facts.precision!r}) has others, with which the engine cannot resume a run",
            "use a Megatron model with Trainer(precision='bf16-mixed'), or leave it out",
            optimizer_cpu_offload=True,
            precision=facts.precision,
        )
    for name in fields:
        why = _UNREAD_OPTIMIZER_FIELDS.get(name)
        if name.startswith(_OF_OTHER_OPTIMIZERS):
            why = "it belongs to an optimizer of the engine's own, which is not used here"
        if why is not None:
            findings.error(
                "optimizer-field-ignored",
                f"`{name}` ({fields[name]!r}) in `optimizer` would be ignored: {why}",
                "leave it out",
                **{name: str(fields[name])},
            )
    if fields.get("overlap_param_gather_with_optimizer_step"):
        # Megatron-LM asserts: not with distributed checkpoints, which ours are.
        findings.error(
            "gather-with-step-not-supported",
            "`overlap_param_gather_with_optimizer_step` (True) in `optimizer` excludes distributed"
            " checkpoints, and this strategy writes no others",
            "leave it out; overlap_param_gather=True hides the gather under the forward pass",
            overlap_param_gather_with_optimizer_step=True,
        )
    if fields.get("use_layer_wise_distributed_optimizer"):
        findings.error(
            "layer-wise-optimizer-not-supported",
            "`use_layer_wise_distributed_optimizer` (True) in `optimizer` needs the engine's own"
            " Muon, but the optimizer comes from configure_optimizers here",
            "leave it out",
            use_layer_wise_distributed_optimizer=True,
        )
