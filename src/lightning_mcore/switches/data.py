"""Switches of data parallelism: how gradients and parameters travel."""

from __future__ import annotations

from lightning_mcore.config import SwitchRequest
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch, copies, copies_text

__all__ = [
    "align_param_gather",
    "average_in_collective",
    "bucket_size",
    "grad_reduce_in_fp32",
    "nccl_ub",
    "optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
]

_ADAM_KINDS = ("adam", "adamw", "adam_l2")
_INSTANCES = "num_distributed_optimizer_instances"
_SAFE = "comm='safe': no overlap"


def use_distributed_optimizer(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[bool]:
    """Optimizer state and main parameters cut over the ranks that hold the same weights."""
    name, asked = "use_distributed_optimizer", request.use_distributed_optimizer
    obstacle, fix = None, ""
    if facts.optimizer is not None and facts.optimizer not in _ADAM_KINDS:
        obstacle = f"the engine shards the state of Adam and AdamW only, not of {facts.optimizer!r}"
        fix = "torch.optim.AdamW in configure_optimizers"
    elif facts.precision == "bf16-true":
        obstacle = "it keeps fp32 main parameters, which bf16-true does without"
        fix = "Trainer(precision='bf16-mixed')"
    if asked is True and obstacle:
        findings.error(
            "distributed-optimizer-cannot",
            f"`use_distributed_optimizer` (True) cannot work: {obstacle}",
            f"use {fix}, or use_distributed_optimizer='auto'",
            use_distributed_optimizer=asked,
            optimizer=facts.optimizer,
            precision=facts.precision,
        )
    if asked == "auto":
        if obstacle:
            return Switch(name, asked, False, obstacle, "assert")
        if request.overlap_param_gather is True:
            return Switch(name, asked, True, "overlap_param_gather=True needs it", "assert")
        if (count := request.num_distributed_optimizer_instances or 1) > 1:
            return Switch(name, asked, True, f"{count} optimizer instances need it", "assert")
        if request.optimizer.get("use_precision_aware_optimizer"):
            return Switch(name, asked, True, "use_precision_aware_optimizer needs it", "assert")
        if copies(layout) == 1:
            return Switch(name, asked, False, copies_text(layout, "shard"))
        if facts.native_model and facts.hooks_see_gradients:
            # As under DDP, where such modules come from; else the hook's use would be an error.
            reason = "hooks between backward pass and step may want whole gradients"
            return Switch(name, asked, False, reason)
        kind = f" with {facts.optimizer}" if facts.optimizer else ""
        return Switch(name, asked, True, copies_text(layout) + kind, "recipe")
    idle = f"; {copies_text(layout, 'shard')}" if asked and copies(layout) == 1 else ""
    return Switch(name, asked, asked is True, f"requested{idle}")


def optimizer_instances(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    sharded: Switch[bool],
) -> Switch[int]:
    """How many copies of the optimizer's shards there are: more cost memory, and gather nearby."""
    asked = request.num_distributed_optimizer_instances
    if asked is None or asked == 1:
        reason = "the shards are spread over all copies" if asked is None else "requested"
        topology = facts.topology
        if asked is None and sharded.effective and topology is not None and topology.nodes > 1:
            domains = -(-layout.world_size // topology.gpus_per_nvlink_domain)
            if layout.dp_cp >= 128 and layout.dp_cp % domains == 0:
                reason = f"{domains}, one per NVLink domain, may gather faster: measure it"
                return Switch(_INSTANCES, asked, 1, reason, "candidate")
        return Switch(_INSTANCES, asked, 1, reason)
    if not sharded.effective:
        # distributed_data_parallel.py: "partial DistOpt without DistOpt"
        findings.error(
            "optimizer-instances-need-distributed-optimizer",
            f"`{_INSTANCES}` ({asked}) needs `use_distributed_optimizer`, which is off"
            f" ({sharded.reason})",
            f"use {_INSTANCES}=1, or AdamW with the distributed optimizer",
            num_distributed_optimizer_instances=asked,
            use_distributed_optimizer=False,
        )
    if not facts.has_einops:
        # parallel_state.py imports it for groups of several instances.
        findings.error(
            "optimizer-instances-need-einops",
            f"`{_INSTANCES}` ({asked}) needs the package einops, which the engine imports for it",
            f"pip install einops, or use {_INSTANCES}=1",
            num_distributed_optimizer_instances=asked,
        )
    for axis, size in (("dp x cp", layout.dp_cp), ("expert data-parallel size", layout.edp)):
        if size % asked:
            # parallel_state.py: "Data parallel size should be divisible by partial DistOpt shard
            # factor", for experts alike.
            findings.error(
                "optimizer-instances-must-divide",
                f"{axis} ({size}) must be a multiple of `{_INSTANCES}` ({asked})",
                f"use an instance count that divides {size}",
                num_distributed_optimizer_instances=asked,
                copies=size,
            )
            break
    return Switch(_INSTANCES, asked, asked, "requested")


def overlap_grad_reduce(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[bool]:
    """Gradients reduced bucket by bucket while the backward pass goes on."""
    name, asked = "overlap_grad_reduce", request.overlap_grad_reduce
    count = request.num_distributed_optimizer_instances or 1
    broken = count > 1 and facts.engine_version < (0, 17)
    if asked is True:
        if broken:
            findings.error(
                "overlap-with-instances-wrong-before-0.17",
                f"`overlap_grad_reduce` (True) with `{_INSTANCES}` ({count})"
                f" gives wrong gradients on megatron-core {facts.version_text}, before 0.17"
                " (NVIDIA/Megatron-LM#3670)",
                "use megatron-core 0.17 or newer, one instance, or overlap_grad_reduce=False",
                overlap_grad_reduce=asked,
                num_distributed_optimizer_instances=count,
                engine_version=facts.version_text,
            )
        if copies(layout) == 1:
            return Switch(name, asked, True, f"requested; {copies_text(layout, 'reduce')}")
        # param_and_grad_buffer.py, finish_grad_sync: "Communication call has not been issued".
        caution = "; every parameter must get a gradient in every step"
        return Switch(name, asked, True, "requested" + (caution if facts.native_model else ""))
    if asked is False:
        return Switch(name, asked, False, "requested")
    if broken:
        reason = f"wrong gradients with {count} optimizer instances on megatron-core"
        return Switch(name, asked, False, f"{reason} {facts.version_text}", "assert")
    if request.overlap_param_gather is True and not facts.native_model:
        return Switch(name, asked, True, "overlap_param_gather=True needs it", "assert")
    if copies(layout) == 1:
        return Switch(name, asked, False, copies_text(layout, "reduce"))
    if request.comm == "safe":
        return Switch(name, asked, False, _SAFE)
    if facts.native_model and request.comm == "max":
        reason = "comm='max'; every parameter must get a gradient in every step"
        return Switch(name, asked, True, reason)
    if facts.native_model:
        reason = (
            "a parameter without a gradient in some step would stop the engine; set True if"
            " every parameter gets one in every step"
        )
        return Switch(name, asked, False, reason, "assert")
    return Switch(name, asked, True, copies_text(layout), "recipe")


def overlap_param_gather(
    request: SwitchRequest,
    facts: Facts,
    findings: Findings,
    sharded: Switch[bool],
    reduce: Switch[bool],
) -> Switch[bool]:
    """Updated parameters gathered while the next forward pass goes on."""
    name, asked = "overlap_param_gather", request.overlap_param_gather
    if asked is True:
        if facts.native_model:
            findings.error(
                "overlap-param-gather-needs-megatron-layers",
                "`overlap_param_gather` (True) needs Megatron layers: the gather is awaited when a"
                " submodule is called, and plain torch code may read a weight without that",
                "use overlap_param_gather='auto'",
                overlap_param_gather=asked,
                native_model=True,
            )
            return Switch(name, asked, True, "requested")
        for needed in (sharded, reduce):
            if not needed.effective:
                # Checked in Megatron-LM's arguments.py only; the core gathers nothing.
                findings.error(
                    f"overlap-param-gather-needs-{needed.name.replace('_', '-')}",
                    f"`overlap_param_gather` (True) needs `{needed.name}` (False: {needed.reason})",
                    f"use {needed.name}=True where that can work, or overlap_param_gather='auto'",
                    **{name: asked, needed.name: False},
                )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if request.comm == "safe":
        return Switch(name, asked, False, _SAFE)
    for needed in (sharded, reduce):
        if not needed.effective:
            return Switch(name, asked, False, f"{needed.name} is off")
    if facts.native_model:
        reason = "plain torch code may read a weight before it has been gathered"
        return Switch(name, asked, False, reason, "assert")
    return Switch(name, asked, True, "distributed optimizer with overlap_grad_reduce", "recipe")


def align_param_gather(
    request: SwitchRequest, layout: Layout, gather: Switch[bool]
) -> Switch[bool]:
    """Gathers of a chunk started by the schedule, on all stages at once; cannot be set.

    Without an interleaved schedule nobody would start them: every gather would be awaited as soon
    as it begins (distributed_data_parallel.py, skip_next_bucket_dispatch).
    """
    name = "align_param_gather"
    if not gather.effective:
        return Switch(name, None, False, "overlap_param_gather is off")
    if layout.vpp is None:
        return Switch(name, None, False, "only the interleaved schedule starts gathers", "assert")
    return Switch(name, None, True, f"pp = {layout.pp} with vpp = {layout.vpp}", "recipe")


def grad_reduce_in_fp32(request: SwitchRequest, facts: Facts, findings: Findings) -> Switch[bool]:
    """Gradients summed over microbatches and ranks in fp32."""
    name, asked, precision = "grad_reduce_in_fp32", request.grad_reduce_in_fp32, facts.precision
    if asked is True and precision == "bf16-true" and not facts.native_model:
        # optimizer.py, FP32Optimizer.prepare_grads: param.grad = param.main_grad.
        findings.error(
            "fp32-gradients-need-main-parameters",
            "`grad_reduce_in_fp32` (True) needs fp32 main parameters to update, which"
            " `precision` ('bf16-true') does without",
            "use Trainer(precision='bf16-mixed'), or grad_reduce_in_fp32='auto'",
            grad_reduce_in_fp32=asked,
            precision=precision,
        )
    if asked != "auto":
        return Switch(name, asked, asked is True, "requested")
    if precision.endswith("-mixed"):
        return Switch(name, asked, True, f"{precision} sums gradients in fp32", "recipe")
    same = "fp32 already" if precision == "32-true" else "bf16, as the parameters"
    return Switch(name, asked, False, f"{precision}: gradients are {same}")


def average_in_collective(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[bool]:
    """NCCL divides the sum, instead of every rank its gradients before it."""
    name, asked = "average_in_collective", request.average_in_collective
    if asked is True:
        if not facts.on_gpu and facts.torch_version < (2, 11):
            # Seen to average with torch 2.11 and 2.13; older gloo: "Cannot use ReduceOp.AVG".
            findings.error(
                "average-in-collective-needs-torch",
                "`average_in_collective` (True) needs GPUs, or torch 2.11 for gloo to average",
                "use average_in_collective=False on CPU",
                average_in_collective=asked,
                on_gpu=False,
                torch_version=".".join(str(number) for number in facts.torch_version),
            )
        if facts.per_token_loss:
            # distributed_data_parallel.py asserts it.
            findings.error(
                "average-in-collective-excludes-per-token-loss",
                "`average_in_collective` (True) excludes `per_token_loss` (True): the number of"
                " tokens, not of ranks, divides the sum",
                "use average_in_collective=False",
                average_in_collective=asked,
                per_token_loss=True,
            )
        idle = f"; {copies_text(layout, 'average')}" if copies(layout) == 1 else ""
        return Switch(name, asked, True, f"requested{idle}")
    reason = "requested" if asked is False else "ranks scale before the sum"
    return Switch(name, asked, False, reason)


def bucket_size(
    request: SwitchRequest, layout: Layout, findings: Findings, reduce: Switch[bool]
) -> Switch[int | None]:
    """Parameters per bucket of gradients: what is reduced at once."""
    name, asked = "bucket_size", request.bucket_size
    if not reduce.effective:
        if asked is not None and request.overlap_grad_reduce is False:
            # distributed_data_parallel.py sets it to None.
            findings.error(
                "bucket-size-needs-overlap",
                f"`bucket_size` ({asked}) has no effect with `overlap_grad_reduce` (False), which"
                " reduces all gradients at once",
                "use bucket_size=None, or overlap_grad_reduce='auto'",
                bucket_size=asked,
                overlap_grad_reduce=False,
            )
        return Switch(name, asked, None, "one bucket: overlap_grad_reduce is off")
    # The engine splits into buckets only where the reduction is on the critical path.
    where = " on the first stage, one bucket on the others" if layout.pp > 1 else ""
    if asked is not None:
        return Switch(name, asked, asked, f"requested{where}")
    size = max(40_000_000, 1_000_000 * layout.dp)
    return Switch(name, None, size, f"the engine's rule max(40M, 1M x dp){where}")


def nccl_ub(request: SwitchRequest, facts: Facts, findings: Findings) -> Switch[bool]:
    """Buffers of gradients and parameters registered with NCCL, which then needs fewer SMs.

    The engine sets NCCL_NVLS_ENABLE=1 in the process (nccl_allocator.py), whatever it was.
    """
    name, asked = "nccl_ub", request.nccl_ub
    obstacles = []
    if not facts.on_gpu:
        obstacles.append(
            ("needs-gpu", "needs GPUs: it registers their memory", "accelerator='gpu'")
        )
    if not facts.multicast:
        obstacles.append(
            ("needs-multicast", "would switch NVLink multicast on, which NCCL_NVLS_ENABLE=0"
             " forbids: the engine sets that variable to 1",
             "NCCL_NVLS_ENABLE=1 where the machine allows it")
        )  # fmt: skip
    allocator = (
        facts.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        + facts.environment.get("PYTORCH_ALLOC_CONF", "")
    ).lower()
    old_check = facts.engine_version < (0, 17) or facts.torch_version < (2, 11)
    if "expandable_segments:true" in allocator.replace(" ", "") and old_check:
        # distributed_data_parallel_config.py, __post_init__.
        obstacles.append(
            ("excludes-expandable-segments", "excludes expandable_segments:True of the CUDA"
             " allocator: they have no memory pool to register", "expandable_segments:False")
        )  # fmt: skip
    if asked is True:
        for code, relation, fix in obstacles:
            findings.error(
                f"nccl-ub-{code}",
                f"`nccl_ub` (True) {relation}",
                f"use {fix}, or nccl_ub=False",
                nccl_ub=asked,
                on_gpu=facts.on_gpu,
                NCCL_NVLS_ENABLE=facts.environment.get("NCCL_NVLS_ENABLE"),
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if obstacles:
        return Switch(name, asked, False, obstacles[0][1].split(": ")[0], "assert")
    reason = "frees SMs inside an NVLink domain: measure it on and off"
    return Switch(name, asked, False, reason, "candidate")
