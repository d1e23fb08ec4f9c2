"""All switches and all rules in one pass."""

from __future__ import annotations

import dataclasses

from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.findings import Finding, Findings, raise_errors
from lightning_mcore.layout import (
    Layout,
    dims_findings,
    layout_findings,
    pick_vpp,
    resolve_layout,
)
from lightning_mcore.switches import (
    communicators,
    compute,
    context,
    data,
    passed_on,
    pipeline,
    tensor,
)
from lightning_mcore.switches.values import Facts, Switch, Switches

__all__ = [
    "check_settings",
    "plan_switches",
    "resolve_switches",
    "validate",
    "with_picked_vpp",
]


def plan_switches(
    request: SwitchRequest, layout: Layout, facts: Facts
) -> tuple[Switches, list[Finding]]:
    """Decides every switch and notes everything that is to be said about the settings.

    Returns:
        The switches, of use only if no finding is an error, and the findings, errors first.
    """
    found = Findings()
    passed_on.check_precision(facts, found)
    context.check_context_parallel(layout, facts, found)
    passed_on.check_expert_tensor_parallel(layout, facts, found)
    passed_on.check_topology(layout, facts, found)
    passed_on.check_fsdp(request, found)
    sequence = tensor.sequence_parallel(request, layout, facts, found)
    sharded = data.use_distributed_optimizer(request, layout, facts, found)
    passed_on.check_optimizer_fields(request, facts, found, sharded)
    instances = data.optimizer_instances(request, layout, facts, found, sharded)
    reduce = data.overlap_grad_reduce(request, layout, facts, found)
    gather = data.overlap_param_gather(request, facts, found, sharded, reduce)
    fp32 = data.grad_reduce_in_fp32(request, facts, found)
    average = data.average_in_collective(request, layout, facts, found)
    overlap = pipeline.overlap_p2p(request, layout, facts, found)
    batched = pipeline.batch_p2p(request, layout, facts, found, overlap)
    fusion = compute.gradient_accumulation_fusion(request, facts, found)
    kind = context.cp_comm_type(request, layout, facts, found)
    passed_on.check_ddp_fields(request, facts, found, sharded=sharded, fp32=fp32, average=average)
    switches = Switches(
        sequence_parallel=sequence,
        tp_comm_overlap=tensor.tp_comm_overlap(request, layout, facts, found, sequence),
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
        align_param_gather=data.align_param_gather(request, layout, gather),
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=instances,
        bucket_size=data.bucket_size(request, layout, found, reduce),
        grad_reduce_in_fp32=fp32,
        average_in_collective=average,
        nccl_ub=data.nccl_ub(request, facts, found),
        overlap_p2p=overlap,
        overlap_p2p_warmup_flush=pipeline.overlap_p2p_warmup_flush(request, layout, found, overlap),
        batch_p2p=batched,
        batch_p2p_sync=pipeline.batch_p2p_sync(request, facts, found, batched),
        microbatch_group_size_per_vp_stage=pipeline.microbatch_group_size(request, layout, found),
        deallocate_pipeline_outputs=pipeline.deallocate_pipeline_outputs(overlap, layout, facts),
        defer_embedding_wgrad=pipeline.defer_embedding_wgrad(request, layout, facts, found, fusion),
        gradient_accumulation_fusion=fusion,
        cuda_graphs=compute.cuda_graphs(request, layout, facts, found),
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=context.hierarchical_sizes(kind, layout, facts, found),
        nccl_communicators=communicators.nccl_communicators(request, layout, facts, found, batched),
        high_priority_streams=communicators.high_priority_streams(
            request, layout, facts, found, batched
        ),
    )
    passed_on.note_opportunities(layout, facts, switches, found)
    _note_candidates(switches, found)
    return switches, found.sorted()


def resolve_switches(request: SwitchRequest, layout: Layout, facts: Facts) -> Switches:
    """Decides every switch for this layout and these facts.

    Raises:
        ConfigurationError: Telling all settings that cannot work, on every rank alike.
    """
    switches, findings = plan_switches(request, layout, facts)
    raise_errors(findings)
    return switches


def validate(request: SwitchRequest, layout: Layout, facts: Facts) -> list[Finding]:
    """Everything to be said about settings: errors, warnings and hints, in this order.

    Pure; no process group and no GPU is needed. The declared dimensions are checked too.
    """
    switches, findings = plan_switches(request, layout, facts)
    found = Findings()
    for finding in findings:
        found.add(finding)
    sequence = switches.sequence_parallel.effective
    for finding in dims_findings(facts.dims, layout, sequence_parallel=sequence):
        found.add(finding)
    return found.sorted()


def check_settings(
    sizes: ParallelSizes, request: SwitchRequest, world_size: int, facts: Facts
) -> tuple[Layout | None, Switches | None, list[Finding]]:
    """The same from sizes and a number of ranks, as before a run: what rank 0 would find.

    Returns:
        Layout and switches, ``None`` where they cannot be made, and all findings.
    """
    try:
        sizes = with_picked_vpp(sizes, request, facts.dims)
    except ConfigurationError as error:
        relation, _, fix = str(error).rpartition("; ")
        return (
            None,
            None,
            [
                Finding(
                    code="overlap-p2p-needs-vpp",
                    severity="error",
                    relation=relation,
                    values={"overlap_p2p": True, "vpp": None, "pp": sizes.pp},
                    fix=fix.removesuffix("."),
                )
            ],
        )
    findings = layout_findings(sizes, world_size, 0)
    if findings:
        return None, None, findings
    layout = resolve_layout(sizes, world_size, 0)
    findings = validate(request, layout, facts)
    if any(finding.severity == "error" for finding in findings):
        return layout, None, findings
    return layout, plan_switches(request, layout, facts)[0], findings


def with_picked_vpp(sizes: ParallelSizes, request: SwitchRequest, dims: ModelDims) -> ParallelSizes:
    """Sizes with the ``vpp`` that ``overlap_p2p=True`` asks for where none was given.

    Raises:
        ConfigurationError: If none can be chosen; on every rank alike.
    """
    if request.overlap_p2p is True and sizes.vpp is None and sizes.pp > 1:
        return dataclasses.replace(sizes, vpp=pick_vpp(dims, sizes.pp))
    return sizes


def _note_candidates(switches: Switches, found: Findings) -> None:
    """Names the switches that are as they are only because nobody has measured them here."""
    for field in dataclasses.fields(switches):
        switch: Switch[object] = getattr(switches, field.name)
        if switch.evidence == "candidate":
            now, other = ("on", "off") if switch.effective is True else ("off", "on")
            found.info(
                "candidate",
                f"`{switch.name}` is {now}, but could be {other}: {switch.reason}",
                "measure some steps with it on and off, in turns",
                **{switch.name: switch.effective},
            )
