"""The report as text: aligned columns, at most as wide as the run header."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_mcore.check.report import Report, Run
from lightning_mcore.environment import CONNECTIONS
from lightning_mcore.header import WIDTH, Batch, format_header
from lightning_mcore.layout import Axis

__all__ = ["format_report"]

_SHOWN_AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")


def format_report(report: Report) -> str:
    """Formats a report, without a newline at the end."""
    blocks = [_versions(report), _machine(report), _topology(report)]
    if report.run is not None:
        blocks.append(_run(report, report.run))
        if report.run.switches is not None:
            blocks += [_groups(report.run), _pipeline(report.run), _experts(report.run)]
    blocks += [_environment(report), _findings(report)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _versions(report: Report) -> list[str]:
    rows = [(package.name, package.version or _state(package.state)) for package in report.packages]
    rows = [
        (name, f"{text} (does not import)" if package.state == "broken" else text)
        for (name, text), package in zip(rows, report.packages, strict=True)
    ]
    return ["versions", *_table([*report.versions.items(), *rows])]


def _state(state: str) -> str:
    return {"works": "installed", "missing": "not installed", "broken": "installed"}[state]


def _machine(report: Report) -> list[str]:
    hardware, launch = report.hardware, report.launch
    rows: list[tuple[str, ...]] = []
    for gpu in hardware.gpus:
        capability = ".".join(str(n) for n in gpu.capability) if gpu.capability else "?"
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else "? GiB"
        links = f"{gpu.nvlinks} NVLinks" if gpu.nvlinks else "no NVLink"
        hidden = "" if gpu.index in hardware.visible else "hidden by CUDA_VISIBLE_DEVICES"
        name = f"compute capability {capability}"
        rows.append((f"GPU {gpu.index}", gpu.name, memory, name, links, hidden))
    lines = ["this machine", *_table(rows)]
    if hardware.driver:
        lines.append(f"  driver {hardware.driver}, CUDA up to {hardware.cuda or '?'}")
    if launch.launcher:
        nodes = _plural(launch.nodes, "node") if launch.nodes else "? nodes"
        lines.append(f"  {launch.launcher}: {nodes} x {launch.ranks_per_node or '?'} ranks")
    for note in hardware.notes:
        lines += _wrap("  ", note)
    kinds = {kind for row in hardware.links for kind in row} - {"self"}
    if kinds == {"NVLink"}:
        lines.append("  NVLink between all GPUs")
    elif kinds:
        heads = ("links", *(f"GPU {i}" for i in range(len(hardware.gpus))))
        lines += _table([heads, *((f"GPU {i}", *row) for i, row in enumerate(hardware.links))])
    return lines


def _topology(report: Report) -> list[str]:
    """Where no run header tells it."""
    if report.run is not None and report.run.switches is not None:
        return []
    topology = report.topology
    cpu = topology.arch == "cpu"
    gpus = "processes on CPU" if cpu else f"{topology.arch.capitalize()} GPUs"
    text = f"{_plural(topology.nodes, 'node')} x {topology.gpus_per_node} {gpus}"
    if not cpu:
        text += f", {topology.gpus_per_nvlink_domain} in an NVLink domain ({topology.source})"
    if topology.nodes > 1:
        text += f", joined by {topology.network} network"
    return ["machines", *_wrap("  ", text)]


def _run(report: Report, run: Run) -> list[str]:
    if run.layout is None or run.switches is None:
        return ["the run", "  cannot start as it is configured; see the findings"]
    batch = Batch(
        micro_batch_size=run.config.request.switches.micro_batch_size,
        samples=run.config.batch_size if run.num_microbatches else None,
        accumulate_grad_batches=run.config.accumulate_grad_batches,
    )
    header = format_header(
        versions=report.versions,
        layout=run.layout,
        facts=run.facts,
        switches=run.switches,
        batch=batch,
    )
    # Versions stand above already.
    return ["the run", *header.split("\n")[1:]]


def _groups(run: Run) -> list[str]:
    if run.layout is None or run.facts.topology is None or run.facts.topology.arch == "cpu":
        return []
    experts = run.layout.ep > 1
    rows: list[tuple[str, ...]] = [("groups", "ranks in each", "groups", "where")]
    for axis in _SHOWN_AXES:
        place = run.groups[axis]
        if place.size > 1 and (experts or axis not in ("ep", "etp", "edp")):
            rows.append((axis, f"{place.size:,}", f"{place.count:,}", place.text))
    return _table(rows, indent="") if len(rows) > 1 else []


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _experts(run: Run) -> list[str]:
    if run.experts is None:
        return []
    return ["experts", *(part for line in run.experts.lines for part in _wrap("  ", line))]


def _pipeline(run: Run) -> list[str]:
    layout = run.layout
    if layout is None or layout.pp == 1:
        return []
    vpp = layout.vpp or 1
    formula = f"(pp - 1) / (vpp x num_microbatches) = {layout.pp - 1} / ({vpp} x"
    if run.num_microbatches is not None and run.bubble is not None:
        text = f"{formula} {run.num_microbatches}) = {run.bubble:.1%} of the compute time"
    else:
        counts = [layout.pp * factor for factor in (1, 2, 4, 8)]
        shares = ", ".join(f"{(layout.pp - 1) / (vpp * n):.1%} at {n}" for n in counts)
        text = f"{formula} num_microbatches): {shares}; data.batch_size tells their number"
    return ["pipeline", *_wrap("  ", f"ideal bubble {text}")]


def _environment(report: Report) -> list[str]:
    wanted = {variable.name: variable for variable in report.environment.wanted}
    names = dict.fromkeys([CONNECTIONS, *report.variables, *wanted])
    if report.topology.arch == "cpu" and not report.variables:
        return []
    rows = [("environment", "set to", "wanted", "")]
    for name in names:
        variable = wanted.get(name)
        rows.append(
            (
                name,
                report.variables.get(name, "-"),
                variable.value if variable else "-",
                variable.reason if variable else "",
            )
        )
    lines = _table(rows, indent="")
    missing = report.environment.to_set
    if missing:
        text = "What is wanted and unset, the strategy sets for processes that Lightning starts"
        if CONNECTIONS in missing:
            text += f"; under torchrun or SLURM, export {CONNECTIONS}={missing[CONNECTIONS]}"
        lines += _wrap("  ", text)
    return lines


def _findings(report: Report) -> list[str]:
    lines = []
    for finding in report.findings:
        lines += _wrap(f"  {finding.severity:<8} ", f"{finding.message} [{finding.code}]")
    counts = Counter[str](finding.severity for finding in report.findings)
    nouns = (("error", "error"), ("warning", "warning"), ("info", "hint"))
    told = [_plural(counts[name], noun) for name, noun in nouns if counts[name]]
    return [f"findings: {', '.join(told) or 'none'}", *lines]


def _table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Aligns columns; the last one is folded."""
    cells = [tuple(row) for row in rows]
    count = max((len(row) for row in cells), default=0)
    padded = [row + ("",) * (count - len(row)) for row in cells]
    widths = [max(len(row[i]) for row in padded) for i in range(count - 1)]
    lines = []
    for row in padded:
        start = indent + "".join(f"{cell:<{w}}  " for cell, w in zip(row, widths, strict=False))
        lines += _wrap(start, row[-1]) if count else []
    return [line.rstrip() for line in lines]


def _wrap(start: str, text: str) -> list[str]:
    width = max(WIDTH, len(start) + 30)
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]
