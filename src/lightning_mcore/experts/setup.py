"""The settings of expert layers in a run that is starting."""

from __future__ import annotations

import dataclasses

from lightning_mcore.experts.dispatcher import wants_probe
from lightning_mcore.experts.probe import probe_deep_ep
from lightning_mcore.experts.resolve import resolve_experts
from lightning_mcore.experts.values import ExpertFacts, ExpertRequest, ExpertSwitches
from lightning_mcore.findings import Finding, Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Facts

__all__ = ["choose_experts"]


def choose_experts(
    request: ExpertRequest, layout: Layout, facts: Facts
) -> tuple[ExpertSwitches, list[Finding]]:
    """Decides the settings of expert layers, looking for packages where the choice needs it.

    Returns:
        The settings, of use only if no finding is an error, and the findings, errors first. The
        same on every rank, as long as all nodes have the same packages.
    """
    known = ExpertFacts(
        engine_version=facts.engine_version,
        on_gpu=facts.on_gpu,
        precision=facts.precision,
        native_model=facts.native_model,
        te_version=facts.te_version,
        topology=facts.topology,
        max_connections=facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    )
    if wants_probe(request, layout, known):
        known = dataclasses.replace(known, package=probe_deep_ep())
    findings = Findings()
    return resolve_experts(request, layout, known, findings), findings.sorted()
