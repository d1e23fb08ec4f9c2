"""Switches of pipeline parallelism."""

from __future__ import annotations

from lightning_mcore.config import SwitchRequest
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch

__all__ = [
    "batch_p2p",
    "batch_p2p_sync",
    "deallocate_pipeline_outputs",
    "defer_embedding_wgrad",
    "microbatch_group_size",
    "overlap_p2p",
    "overlap_p2p_warmup_flush",
]

_ONE_STAGE = "pp = 1: one stage sends nothing"


def overlap_p2p(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[bool]:
    """Transfers during compute; the number of microbatches must be a multiple of ``pp``."""
    name, asked, pp, vpp = "overlap_p2p", request.overlap_p2p, layout.pp, layout.vpp
    if asked is True:
        if pp == 1:
            findings.error(
                "overlap-p2p-needs-pp",
                "`overlap_p2p` (True) needs `pp` (1) of at least 2: one stage sends nothing",
                "use pp=2 or more, or overlap_p2p='auto'",
                overlap_p2p=asked,
                pp=pp,
            )
        elif vpp is None:
            # pipeline_parallel/schedules.py: "Non-interleaved pipeline parallelism does not
            # support overlapping p2p communication".
            findings.error(
                "overlap-p2p-needs-vpp",
                f"`overlap_p2p` (True) needs `vpp` (None or 1) of at least 2 with `pp` ({pp}): the"
                " engine overlaps transfers only between the chunks of an interleaved pipeline",
                "use vpp=2, or overlap_p2p='auto'",
                overlap_p2p=asked,
                pp=pp,
                vpp=vpp,
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        if vpp is not None and pp == 2 and request.batch_p2p is not False:
            findings.error(
                "batched-p2p-wrong-at-pp2",
                f"`overlap_p2p` (False) with `pp` (2) and `vpp` ({vpp}) would give wrong gradients"
                " without an error: both neighbours of a rank are the same rank, and the engine's"
                " batched transfers mix up activations and gradients",
                "use overlap_p2p=True, or vpp=None, or pp=4, or add batch_p2p=False",
                overlap_p2p=asked,
                pp=pp,
                vpp=vpp,
                batch_p2p=request.batch_p2p,
            )
        return Switch(name, asked, False, "requested")
    if pp == 1:
        return Switch(name, asked, False, _ONE_STAGE)
    if vpp is None:
        reason = "needs vpp >= 2: only an interleaved pipeline overlaps"
        return Switch(name, asked, False, reason, "assert")
    if request.comm == "safe":
        return Switch(name, asked, False, "comm='safe': no overlap")
    if request.batch_p2p is True:
        return Switch(name, asked, False, "excluded by batch_p2p=True", "assert")
    return Switch(name, asked, True, f"pp = {pp} with vpp = {vpp}", "recipe")


def batch_p2p(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    overlap: Switch[bool],
) -> Switch[bool]:
    """All transfers of a step in one batch, awaited at once; excludes ``overlap_p2p``."""
    name, asked = "batch_p2p", request.batch_p2p
    at_risk = layout.pp == 2 and layout.vpp is not None
    if asked is True:
        if layout.pp == 1:
            findings.error(
                "batch-p2p-needs-pp",
                "`batch_p2p` (True) needs `pp` (1) of at least 2: one stage sends nothing",
                "use pp=2 or more, or batch_p2p='auto'",
                batch_p2p=asked,
                pp=1,
            )
        elif overlap.effective:
            # schedules.py: "Can not use both overlap_p2p_comm and batch_p2p_comm".
            findings.error(
                "batch-p2p-excludes-overlap",
                "`batch_p2p` (True) excludes `overlap_p2p` (True): a batch is awaited as a whole",
                "use batch_p2p=False, or overlap_p2p=False",
                batch_p2p=asked,
                overlap_p2p=True,
            )
        elif at_risk:
            findings.error(
                "batched-p2p-wrong-at-pp2",
                f"`batch_p2p` (True) with `pp` (2) and `vpp` ({layout.vpp}) would give wrong"
                " gradients without an error: both neighbours of a rank are the same rank, and the"
                " engine's batched transfers mix up activations and gradients",
                "use batch_p2p=False, or overlap_p2p=True, or vpp=None, or pp=4",
                batch_p2p=asked,
                pp=2,
                vpp=layout.vpp,
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if layout.pp == 1:
        return Switch(name, asked, False, _ONE_STAGE)
    if overlap.effective:
        return Switch(name, asked, False, "excluded by overlap_p2p", "assert")
    if at_risk:
        # tests/parity/test_interleaving_refused.py: the engine alone, batched and not.
        reason = "pp = 2 with vpp: batched transfers mix up activations and gradients"
        return Switch(name, asked, False, reason, "assert")
    return Switch(name, asked, True, "overlap_p2p is off", "recipe")


def batch_p2p_sync(
    request: SwitchRequest, facts: Facts, findings: Findings, batched: Switch[bool]
) -> Switch[bool]:
    """The host's wait for the whole device after each batch of transfers.

    The engine waits by default (p2p_communication.py, ``batch_p2p_sync``), since requests of a
    batch once were complete too early: pytorch/pytorch#82450, mended in torch 1.13. The host cannot
    launch ahead then: 1F1B took 6 to 13 % longer on two H200s, with equal losses
    (benchmarks/RESULTS.md).
    """
    name, asked = "batch_p2p_sync", request.batch_p2p_sync
    if not batched.effective:
        if asked is True:
            findings.error(
                "batch-p2p-sync-needs-batch",
                f"`{name}` (True) needs `batch_p2p` (False: {batched.reason})",
                f"use {name}='auto', or batch_p2p=True where it can be",
                batch_p2p_sync=asked,
                batch_p2p=False,
            )
        return Switch(name, asked, False, "batch_p2p is off")
    if asked != "auto":
        return Switch(name, asked, asked, "requested")
    if not facts.on_gpu:
        return Switch(name, asked, False, "no device to wait for")
    if request.comm == "safe":
        return Switch(name, asked, True, "comm='safe': as the engine by default")
    return Switch(name, asked, False, "a batch's own order is enough since torch 1.13", "doc")


def overlap_p2p_warmup_flush(
    request: SwitchRequest, layout: Layout, findings: Findings, overlap: Switch[bool]
) -> Switch[bool]:
    """Overlap in the parts of the schedule where the pipeline fills and drains, too."""
    name, asked = "overlap_p2p_warmup_flush", request.overlap_p2p_warmup_flush
    if asked is True:
        if not overlap.effective:
            # model_parallel_config.py, __post_init__.
            findings.error(
                "warmup-flush-needs-overlap-p2p",
                f"`overlap_p2p_warmup_flush` (True) needs `overlap_p2p` (False: {overlap.reason})",
                "use vpp=2 or more with overlap_p2p=True, or overlap_p2p_warmup_flush=False",
                overlap_p2p_warmup_flush=asked,
                overlap_p2p=False,
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if not overlap.effective:
        return Switch(name, asked, False, "overlap_p2p is off")
    if request.comm == "max":
        return Switch(name, asked, True, "comm='max'")
    reason = "helps where warm-up and flush wait for the network: measure it on and off"
    return Switch(name, asked, False, reason, "candidate")


def microbatch_group_size(
    request: SwitchRequest, layout: Layout, findings: Findings
) -> Switch[int | None]:
    """Microbatches that a chunk runs before the next chunk's turn; at least ``pp``.

    With how many microbatches it fits is checked when the first batch is there (``batch``).
    """
    name, asked = "microbatch_group_size_per_vp_stage", request.microbatch_group_size_per_vp_stage
    if asked is not None:
        if layout.vpp is None:
            findings.error(
                "microbatch-group-needs-vpp",
                f"`{name}` ({asked}) needs `vpp` (None or 1) of at least 2: only an interleaved"
                " pipeline has groups",
                f"use vpp=2 or more with pp=2 or more, or {name}=None",
                **{name: asked, "vpp": layout.vpp},
            )
        elif asked < layout.pp:
            # schedules.py: "... should range in [PP=..., M=...]".
            findings.error(
                "microbatch-group-below-pp",
                f"`{name}` ({asked}) must be at least `pp` ({layout.pp})",
                f"use {name}={layout.pp} or more, or None",
                **{name: asked, "pp": layout.pp},
            )
        return Switch(name, asked, asked, "requested")
    if layout.vpp is None:
        return Switch(name, asked, None, "no interleaved pipeline")
    return Switch(name, asked, layout.pp, f"the engine's rule: pp = {layout.pp}")


def deallocate_pipeline_outputs(
    overlap: Switch[bool], layout: Layout, facts: Facts
) -> Switch[bool]:
    """Stage outputs freed once sent; cannot be set."""
    name = "deallocate_pipeline_outputs"
    if layout.pp == 1:
        return Switch(name, None, False, _ONE_STAGE)
    if not facts.on_gpu:
        return Switch(name, None, False, "on CPU a send may still be reading the tensor", "assert")
    if overlap.effective and facts.engine_version < (0, 18):
        # NVIDIA/Megatron-LM#4047, in 0.18.0, waits for the send before it frees the tensor.
        reason = "before megatron-core 0.18 overlap_p2p may still be sending the tensor"
        return Switch(name, None, False, reason, "assert")
    if facts.native_model:
        # The engine asserts that what it frees is not a view, which a plain module may return.
        reason = "the output of plain torch modules may be a view"
        return Switch(name, None, False, reason, "assert")
    return Switch(name, None, True, f"pp = {layout.pp} on GPU: saves memory", "recipe")


def defer_embedding_wgrad(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    fusion: Switch[bool],
) -> Switch[bool]:
    """The output layer's weight gradient, computed while the pipeline drains."""
    name, asked = "defer_embedding_wgrad", request.defer_embedding_wgrad
    # model_parallel_config.py, __post_init__, checks both; the second is Apex's kernel
    # (tensor_parallel/layers.py).
    obstacles = []
    if layout.pp == 1:
        obstacles.append(("needs-pp", "`pp` (1) of at least 2: only a pipeline drains", "pp=2"))
    if facts.native_model:
        obstacles.append(
            ("needs-megatron-layers", "the engine's GPTModel, and the model has only plain torch"
             " modules", "a factory of Megatron chunks")
        )  # fmt: skip
    if not facts.on_gpu or not facts.has_fused_wgrad:
        where = "GPUs with Apex" if not facts.on_gpu else "Apex"
        obstacles.append(
            ("needs-apex", f"{where}: the engine defers only gradients that its fused kernel"
             " (fused_weight_gradient_mlp_cuda) adds to the buffer", "Apex with --cuda_ext")
        )  # fmt: skip
    elif not fusion.effective and not facts.native_model:
        obstacles.append(
            ("needs-fusion", f"`gradient_accumulation_fusion`, now False: {fusion.reason}",
             "gradient_accumulation_fusion=True")
        )  # fmt: skip
    if asked is True:
        for code, needed, fix in obstacles:
            findings.error(
                f"defer-embedding-wgrad-{code}",
                f"`{name}` (True) needs {needed}",
                f"use {fix}, or {name}=False",
                defer_embedding_wgrad=asked,
                pp=layout.pp,
                on_gpu=facts.on_gpu,
            )
        return Switch(name, asked, True, "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if layout.pp == 1:
        return Switch(name, asked, False, "pp = 1: no pipeline drains")
    if obstacles:
        return Switch(name, asked, False, f"needs {obstacles[0][1].split(':')[0]}", "assert")
    if request.comm == "max":
        return Switch(name, asked, True, "comm='max'")
    reason = "helps with large vocabularies: measure it on and off"
    return Switch(name, asked, False, reason, "candidate")
