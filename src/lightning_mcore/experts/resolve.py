"""All settings of expert layers and all their rules in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.experts.dispatcher import choose_dispatcher
from lightning_mcore.experts.overlap import choose_delay_wgrad, choose_overlap
from lightning_mcore.experts.values import (
    ExpertFacts,
    ExpertRequest,
    ExpertSwitches,
    version_text,
)
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout

__all__ = ["check_expert_config", "resolve_experts"]

_DOCS = "docs/moe.md#what-is-refused"


def resolve_experts(
    request: ExpertRequest, layout: Layout, facts: ExpertFacts, findings: Findings
) -> ExpertSwitches:
    """Decides the settings of expert layers, and notes what cannot work among ``findings``.

    The result is of use only if no finding is an error.
    """
    found = Findings()
    _check_experts(layout, facts, found)
    dispatcher = choose_dispatcher(request, layout, facts, found)
    overlap = choose_overlap(request, layout, facts, found, dispatcher.effective)
    delayed = choose_delay_wgrad(request, facts, found, overlap.effective)
    for finding in found.sorted():
        findings.add(dataclasses.replace(finding, docs=_DOCS))
    return ExpertSwitches(
        moe_dispatcher=dispatcher, overlap_moe=overlap, delay_wgrad_compute=delayed
    )


def check_expert_config(
    config: Any, layout: Layout, experts: ExpertSwitches, *, plans: bool, in_turn: bool
) -> None:
    """Checks what only the built model shows.

    Args:
        config: The engine's config of the model.
        layout: Sizes of the rank grid.
        experts: What was decided before the model was there.
        plans: Whether every chunk can plan its layers for the combined 1F1B schedule.
        in_turn: Whether the experts of a rank run one after the other.

    Raises:
        ConfigurationError: On every rank alike.
    """
    overlap = experts.overlap_moe.effective
    if overlap == "1f1b" and not plans:
        raise ConfigurationError(
            "`overlap_moe` ('1f1b') needs chunks with the engine's `build_schedule_plan`, such as"
            " GPTModel: the schedule runs their layers one by one; use overlap_moe=False."
        )
    if getattr(config, "num_moe_experts", None) is None:
        return
    if layout.tp > 1 and not config.sequence_parallel:
        # transformer/moe/moe_layer.py raises it in the first training step.
        raise ConfigurationError(
            f"`sequence_parallel` (False) must be on with `tp` ({layout.tp}) and expert layers,"
            " which would send every token `tp` times; use sequence_parallel=True, or tp=1."
        )
    if in_turn and config.moe_grouped_gemm:
        # From 0.19 on the engine's own layers ignore the field (models/backends.py).
        raise ConfigurationError(
            "`moe_grouped_gemm` (True) needs TransformerEngine's grouped layers, and the experts of"
            " this model run one after the other; build it with"
            " get_gpt_layer_with_transformer_engine_spec on GPUs, or use moe_grouped_gemm=False."
        )
    if overlap == "shared_experts" and config.moe_shared_expert_intermediate_size is None:
        raise ConfigurationError(
            "`overlap_moe` ('shared_experts') needs shared experts, and the model's"
            " `moe_shared_expert_intermediate_size` is None; set it, or use overlap_moe=False."
        )
    if layout.ep > 1 and overlap != "shared_experts" and config.moe_shared_expert_overlap:
        raise ConfigurationError(
            "`moe_shared_expert_overlap` (True) of the chunk's config needs a switch of the"
            f" strategy that is off: `overlap_moe` ({overlap!r}); leave it out of the factory, and"
            " use MCoreStrategy(overlap_moe='shared_experts')."
        )
    if experts.moe_dispatcher.requested == "deepep" and config.moe_router_dtype != "fp32":
        # transformer/moe/token_dispatcher.py, _DeepepManager: it would cast them each time.
        raise ConfigurationError(
            f"`moe_dispatcher` ('deepep') carries routing probabilities in fp32, and the model's"
            f" `moe_router_dtype` is {config.moe_router_dtype!r}; set moe_router_dtype='fp32' in"
            " the factory's TransformerConfig."
        )


def _check_experts(layout: Layout, facts: ExpertFacts, findings: Findings) -> None:
    if facts.native_model and layout.ep > 1:
        findings.error(
            "ep-needs-experts",
            f"`ep` ({layout.ep}) needs the engine's expert layers, and the model has only plain"
            " torch modules, whose experts nothing would spread over ranks",
            "use ep=1, or build the model from Megatron layers with a factory",
            ep=layout.ep,
        )
    if layout.ep > 1 and layout.etp > layout.tp and facts.engine_version < (0, 19):
        findings.error(
            "etp-above-tp",
            f"`etp` ({layout.etp}) above `tp` ({layout.tp}) with `ep` ({layout.ep}) would count"
            " some expert parameters twice in the gradient norm of megatron-core"
            f" {version_text(facts.engine_version)}, before 0.19",
            f"use etp={layout.tp} or etp=1",
            etp=layout.etp,
            tp=layout.tp,
        )
