"""What is computed while tokens travel."""

from __future__ import annotations

from lightning_mcore.experts.values import (
    ExpertFacts,
    ExpertRequest,
    Obstacle,
    place_of,
    version_text,
)
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Switch

__all__ = ["choose_delay_wgrad", "choose_overlap"]


def choose_overlap(
    request: ExpertRequest,
    layout: Layout,
    facts: ExpertFacts,
    findings: Findings,
    dispatcher: str | None,
) -> Switch[str | bool]:
    """``"1f1b"``, ``"shared_experts"`` or ``False``."""
    name, asked = "overlap_moe", request.overlap_moe
    if asked == "1f1b":
        for o in _obstacles_1f1b(layout, facts, dispatcher):
            findings.error(o.code, f"`overlap_moe` ('1f1b') {o.relation}", o.fix, overlap_moe=asked)
        reason = "requested; what a step does before its model call runs twice"
        return Switch(name, asked, "1f1b", reason)
    if asked == "shared_experts":
        if layout.ep == 1 and dispatcher is None:
            findings.error(
                "overlap-moe-needs-ep",
                "`overlap_moe` ('shared_experts') needs `ep` (1) of at least 2: nothing is sent"
                " that could be hidden",
                "use ep=2 or more, or overlap_moe=False",
                overlap_moe=asked,
                ep=layout.ep,
            )
        # 0.16.1, transformer_config.py:1090 takes alltoall alone, 0.19.2 flex too.
        flex = dispatcher in ("deepep", "hybridep")
        if dispatcher == "allgather" or (flex and facts.engine_version < (0, 19)):
            findings.error(
                "overlap-shared-experts-dispatcher",
                f"`overlap_moe` ('shared_experts') cannot work with `moe_dispatcher`"
                f" ({dispatcher!r}) on megatron-core {version_text(facts.engine_version)}",
                "use moe_dispatcher='alltoall', or overlap_moe=False",
                overlap_moe=asked,
                moe_dispatcher=dispatcher,
            )
        return Switch(name, asked, "shared_experts", "requested")
    if asked is False:
        return Switch(name, asked, False, "requested")
    if layout.ep == 1:
        return Switch(name, asked, False, "ep = 1: nothing is sent")
    place = place_of(layout, facts.topology)
    if place is not None and place.reach == "network" and layout.ep > 4:
        if not _obstacles_1f1b(layout, facts, dispatcher):
            reason = f"ep group {place.text}: measure overlap_moe='1f1b' on and off"
            return Switch(name, asked, False, reason)
        return Switch(name, asked, False, f"ep group {place.text}, but '1f1b' needs other settings")
    if place is not None and place.reach == "nvlink":
        return Switch(name, asked, False, f"ep group {place.text}: little to hide")
    return Switch(name, asked, False, "off unless asked for")


def _obstacles_1f1b(layout: Layout, facts: ExpertFacts, dispatcher: str | None) -> list[Obstacle]:
    """What keeps the combined 1F1B schedule from working (transformer_config.py, both engines)."""
    found: list[Obstacle] = []
    if layout.ep == 1:
        found.append(
            Obstacle(
                "overlap-moe-needs-ep",
                "needs `ep` (1) of at least 2: nothing is sent that could be hidden",
                "use ep=2 or more, or overlap_moe=False",
            )
        )
    if layout.pp > 1 and layout.vpp is None:
        found.append(
            Obstacle(
                "overlap-1f1b-needs-vpp",
                f"with `pp` ({layout.pp}) needs `vpp` (None or 1) of at least 2: only the"
                " interleaved schedule runs a forward and a backward pass side by side",
                "use vpp=2, or pp=1, or overlap_moe=False",
            )
        )
    if facts.precision == "32-true":
        found.append(
            Obstacle(
                "overlap-1f1b-needs-half",
                "needs bf16 or fp16, and `precision` is '32-true'",
                "use Trainer(precision='bf16-mixed'), or overlap_moe=False",
            )
        )
    if dispatcher == "allgather":
        found.append(
            Obstacle(
                "overlap-1f1b-dispatcher",
                "cannot work with `moe_dispatcher` ('allgather')",
                "use moe_dispatcher='alltoall', or overlap_moe=False",
            )
        )
    if facts.native_model:
        found.append(
            Obstacle(
                "overlap-1f1b-needs-megatron",
                "needs Megatron layers, and the model has only plain torch modules",
                "use overlap_moe=False",
            )
        )
    if facts.on_gpu and facts.max_connections == "1":
        found.append(
            Obstacle(
                "overlap-1f1b-connections",
                "needs more than one hardware queue, and CUDA_DEVICE_MAX_CONNECTIONS is 1",
                "start with CUDA_DEVICE_MAX_CONNECTIONS=32, or use overlap_moe=False",
            )
        )
    return found


def choose_delay_wgrad(
    request: ExpertRequest, facts: ExpertFacts, findings: Findings, overlap: str | bool
) -> Switch[bool]:
    """Whether weight gradients are computed apart from the backward pass."""
    name, asked = "delay_wgrad_compute", request.delay_wgrad_compute
    if not asked:
        return Switch(name, asked, False, "off unless asked for")
    if overlap != "1f1b":
        findings.error(
            "delay-wgrad-needs-1f1b",
            f"`delay_wgrad_compute` (True) needs `overlap_moe` ({overlap!r}) to be '1f1b'",
            "use overlap_moe='1f1b', or delay_wgrad_compute=False",
            delay_wgrad_compute=True,
            overlap_moe=overlap,
        )
    # extensions/transformer_engine.py; with gradient hooks TE marks what they shall leave to it
    # from 2.8 on.
    if facts.te_version is None or facts.te_version < (2, 8):
        found = (
            "is not installed"
            if facts.te_version is None
            else f"is {version_text(facts.te_version)}"
        )
        findings.error(
            "delay-wgrad-needs-te",
            f"`delay_wgrad_compute` (True) needs layers of TransformerEngine 2.8 or newer, which"
            f" {found}",
            "install lightning-mcore[te], or use delay_wgrad_compute=False",
            delay_wgrad_compute=True,
        )
    return Switch(name, True, True, "requested")
