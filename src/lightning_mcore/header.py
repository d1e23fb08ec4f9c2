"""The run header: one block of text that says what will really run, and why.

Enters: the values that the other modules resolved. Leaves: a string, which rank zero prints once.
Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_mcore.experts import ExpertSwitches
from lightning_mcore.findings import Finding
from lightning_mcore.layout import Layout
from lightning_mcore.switches import Facts, Switch, Switches
from lightning_mcore.topology import Topology, place_groups

__all__ = ["Batch", "Difference", "format_batch", "format_header"]

WIDTH = 100
"""Columns of the widest line."""

_LABEL = 15
"""Columns before the text of a row: indent, label and gap."""

_DTYPES = {
    "32-true": ("fp32", "fp32 parameters"),
    "bf16-mixed": ("bf16", "fp32 main parameters"),
    "bf16-true": ("bf16", "bf16 parameters"),
    "16-mixed": ("fp16", "fp32 main parameters, dynamic loss scale"),
}
"""By precision: dtype of Megatron layers, and what the optimizer updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """How samples make one optimizer step, as far as it is known."""

    micro_batch_size: int | None
    """Samples per pass of the schedule on a data-parallel rank; ``None``: the whole batch with
    ``pp = 1``, else 1."""
    samples: int | None = None
    """Samples in one Lightning batch on a data-parallel rank; ``None``: known at the first one."""
    accumulate_grad_batches: int = 1
    """Lightning batches per optimizer step."""
    per_token_loss: bool = False
    """Whether tokens, rather than microbatches and shards of sequences, count alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field of an engine config that differs from what the user passed."""

    field: str
    """Config and field, for example ``"ddp.bucket_size"``."""
    given: object
    """The user's value."""
    effective: object
    """What the engine gets."""


def format_header(
    *,
    versions: Mapping[str, str],
    layout: Layout,
    facts: Facts,
    switches: Switches,
    batch: Batch,
    experts: ExpertSwitches | None = None,
    num_parameters: int | None = None,
    num_parameters_per_rank: int | None = None,
    differences: Sequence[Difference] = (),
    environment: str | None = None,
    findings: Sequence[Finding] = (),
) -> str:
    """Formats the header, at most 100 columns wide, without a newline at the end.

    Args:
        versions: Version by package name, in the order to print.
        layout: Sizes of the rank grid.
        facts: Precision, hardware and kind of model.
        switches: What became of every switch.
        batch: How samples make one optimizer step.
        experts: Settings of expert layers, to be shown below the switches.
        num_parameters: Parameters (elements) of the whole model, each counted once.
        num_parameters_per_rank: The most parameters (elements) that any rank holds.
        differences: Where engine configs differ from the dictionaries that the user passed.
        environment: What environment variables do to the run, ``None`` where they do nothing.
        findings: What is to be said about the settings; warnings are shown, as candidates are in
            the table.
    """
    lines = [" | ".join(f"{name} {version}" for name, version in versions.items())]
    lines += _row("layout", _layout_text(layout, facts))
    if facts.topology is not None:
        lines += _topology_rows(layout, facts.topology)
    lines += _row("batch", format_batch(batch, layout))
    if batch.per_token_loss or layout.cp > 1:
        lines += _row("loss", _loss_text(batch, layout))
    lines += _row("precision", _precision_text(facts, switches))
    if num_parameters is not None:
        per_rank = (
            ""
            if num_parameters_per_rank is None
            else f", at most {num_parameters_per_rank:,} on a rank"
        )
        lines += _row("parameters", f"{num_parameters:,}{per_rank}")
    if environment is not None:
        lines += _row("environment", environment)
    lines += _switch_table(switches, experts)
    for finding in findings:
        if finding.severity == "warning":
            lines += _wrap("  warning      ", f"{finding.message} [{finding.code}]")
    if differences:
        lines.append("  your engine settings that were changed")
        width = max(len(row.field) for row in differences)
        for row in differences:
            text = f"{row.given!r} -> {row.effective!r}"
            lines += _wrap(f"    {row.field + ':':<{width + 1}} ", text)
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    return _wrap(f"  {label}".ljust(_LABEL), text)


def _wrap(start: str, text: str) -> list[str]:
    """Folds ``text`` behind ``start``; later lines are indented to where it began."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _layout_text(layout: Layout, facts: Facts) -> str:
    axes = [("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp), ("dp", layout.dp)]
    product = " x ".join(f"{name} {size}" for name, size in axes if name != "cp" or size > 1)
    parts = [f"{product} = {_plural(layout.world_size, 'rank')} on {_device(facts)}"]
    if layout.pp > 1:
        chunks = f", vpp {layout.vpp}: {layout.vpp} on each rank" if layout.vpp else ""
        parts.append(f"{layout.num_stages} stages{chunks}")
    if layout.ep > 1:
        parts.append(f"experts: ep {layout.ep} x etp {layout.etp}, {layout.edp} copies of each")
    return "; ".join(parts)


def _topology_rows(layout: Layout, topology: Topology) -> list[str]:
    """The machines, and where the groups of more than one rank lie; equal ones share a row."""
    if topology.arch == "cpu":
        return _row("machines", f"{_plural(topology.nodes, 'node')}, CPU")
    network = "" if topology.nodes == 1 else f", joined by {topology.network} network"
    lines = _row(
        "machines",
        f"{_plural(topology.nodes, 'node')} x {topology.gpus_per_node} {topology.arch}"
        f" GPUs, {topology.gpus_per_nvlink_domain} in an NVLink domain{network}"
        f" ({topology.source})",
    )
    by_text: dict[str, list[str]] = {}
    for axis, place in place_groups(layout, topology).items():
        dense = axis not in ("ep", "etp", "edp") or layout.ep > 1
        if place.size > 1 and dense and (axis != "dp_cp" or layout.cp > 1):
            by_text.setdefault(place.text, []).append(axis)
    groups = "; ".join(f"{', '.join(axes)}: {text}" for text, axes in by_text.items())
    return lines + (_row("groups", groups) if groups else [])


def format_batch(batch: Batch, layout: Layout) -> str:
    """Samples of an optimizer step, or, before the first batch, what their number follows from."""
    size = batch.micro_batch_size
    if size is None and layout.pp > 1:
        size = 1
    times = batch.accumulate_grad_batches
    factors = (f"accumulate_grad_batches {times} x " if times > 1 else "") + f"dp {layout.dp}"
    if batch.samples is None:
        if size is None:
            how = "micro_batch_size = the whole batch"
        else:
            how = f"num_microbatches = batch size / micro_batch_size ({size})"
            how += f", a multiple of pp ({layout.pp})" if layout.vpp else ""
        return f"{how}, known at the first batch; x {factors} per optimizer step"
    size = batch.samples if size is None else size
    total = _plural(batch.samples * times * layout.dp, "sample")
    count = batch.samples // size
    return (
        f"micro_batch_size {size} x num_microbatches {count} x {factors} = {total} per optimizer"
        " step"
    )


def _loss_text(batch: Batch, layout: Layout) -> str:
    if batch.per_token_loss:
        return "mean over the tokens that steps count as `num_tokens`, in the whole batch"
    return (
        f"each of the {layout.cp} parts of a sequence counts alike; if a mask leaves them unequal"
        " numbers of tokens, use per_token_loss=True"
    )


def _precision_text(facts: Facts, switches: Switches) -> str:
    params, updated = _DTYPES[facts.precision]
    if facts.native_model and facts.precision.endswith("-mixed"):
        scale = ", dynamic loss scale" if facts.precision == "16-mixed" else ""
        return (
            f"{facts.precision}: fp32 parameters, computing in {params} by autocast, gradients"
            f" reduced in fp32{scale}"
        )
    reduced = "fp32" if switches.grad_reduce_in_fp32.effective else params
    return (
        f"{facts.precision}: {params} parameters, gradients reduced in {reduced}, optimizer updates"
        f" {updated}"
    )


def _switch_table(switches: Switches, experts: ExpertSwitches | None) -> list[str]:
    """One row for each switch: its name, what the engine gets, what was asked, and why."""
    rows: list[Switch[Any]] = [getattr(switches, entry.name) for entry in fields(switches)]
    if experts is not None:
        rows += [getattr(experts, entry.name) for entry in fields(experts)]
    name = max(len(row.name) for row in rows)
    value = max(len("effective"), *(len(_shown(row.effective)) for row in rows))
    asked = max(len("requested"), *(len(_shown(row.requested)) for row in rows))
    lines = [f"  {'switch':<{name}}  {'effective':<{value}}  {'requested':<{asked}}  reason"]
    for row in rows:
        start = f"  {row.name:<{name}}  {_shown(row.effective):<{value}}"
        start += f"  {_shown(row.requested):<{asked}}  "
        lines += _wrap(start, row.reason + (f" [{row.evidence}]" if row.evidence else ""))
    return lines


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == () or value == {}:
        return "-"
    if isinstance(value, Mapping):
        return ",".join(value)
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _device(facts: Facts) -> str:
    return "GPU" if facts.on_gpu else "CPU"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
