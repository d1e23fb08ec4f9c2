"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_mcore.flops import peak_flops
from lightning_mcore.timeline.bandwidth import BUS_FACTORS
from multigpu.figures import (
    bubble,
    bubble_deviation,
    efficiency,
    expected_ratio,
    exposed_ms,
    exposed_share,
    ideal_bubble,
    median_rank,
)
from multigpu.targets import HEAD, against_targets

_GROUPS = ("tp", "pp", "dp", "cp", "ep", "mp", "world", "other")


def as_markdown(content: Mapping[str, Any]) -> str:
    """All items, one table per group."""
    rows = content["rows"]
    setting = content["setting"]
    lines = [", ".join(f"{name} {value}" for name, value in setting.items()), ""]
    for row in rows:
        if row["item"] == "links" and row["status"] == "measured":
            lines += _links(row["by_rank"])
        elif row["item"] == "tune" and "by_rank" in row:
            lines += [f"### {row['item']}", "", "```", row["by_rank"][0]["text"], "```", ""]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "microbatches" in row:
            groups.setdefault((row["item"], row["group"]), []).append(row)
    rate = peak_flops(setting.get("gpu") or "", "bf16")
    peak = None if rate is None else rate / 1e12
    for (item, name), members in groups.items():
        lines += [f"### {item}: {name}", "", *_group(members, peak), ""]
    if any(row["item"] == "scaling" for row in rows):
        lines += _scaling(
            [row for row in rows if "microbatches" in row and row["item"] == "scaling"]
        )
    if reached := against_targets(rows):
        lines += ["### Against the targets", "", *_table(HEAD, reached), ""]
    without = [row for row in rows if row["status"] != "measured"]
    if without:
        lines += ["### Without figures", ""]
        lines += _table(
            ("group", "case", "what", "why"),
            (
                (row["group"], row["case"], row["status"], row["reason"].replace("|", "/"))
                for row in without
            ),
        )
        lines.append("")
    return "\n".join(lines)


def _links(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    first = by_rank[0]
    lines = ["### links", ""]
    lines += [f"* GPU {index}: {gpu}" for index, gpu in enumerate(first["gpus"])]
    lines += [f"* {index} reaches {' '.join(row)}" for index, row in enumerate(first["links"])]
    lines += [f"* peer access of rank {i}: {each['peer_access']}" for i, each in enumerate(by_rank)]
    lines += [f"* {note}" for note in first["notes"]]
    versions = {name: first.get(name) for name in ("driver", "cuda", "nccl")}
    lines += [f"* {name} {value}" for name, value in versions.items() if value]
    sizes = sorted({row["bytes"] for row in first["rows"]})
    found = {(row["operation"], row["bytes"]): row for row in first["rows"]}
    operations = [name for name in BUS_FACTORS if any(key[0] == name for key in found)]
    lines += ["", "Bus bandwidth in GB/s (time of a call in us):", ""]
    lines += _table(
        ("", *(_bytes(size) for size in sizes)),
        (
            (
                operation,
                *(
                    f"{row['busbw_gbps']:.3g} ({row['us']:.0f})"
                    if (row := found.get((operation, size)))
                    else "-"
                    for size in sizes
                ),
            )
            for operation in operations
        ),
    )
    return [*lines, ""]


def _bytes(size: int) -> str:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _group(rows: Sequence[Mapping[str, Any]], peak: float | None) -> list[str]:
    names = [name for name in _GROUPS if any(exposed_ms(row, name) is not None for row in rows)]
    pipelined = any(row["pp"] > 1 for row in rows)
    schedules = len({row["vpp"] for row in rows}) > 1
    late = any(row["lateness"] for row in rows)
    head = ["case", "m", "step ms (range)", "ratio to baseline (range)"]
    head += ["expected", "off"] if schedules else []
    head += ["tokens/s", "TFLOP/s"]
    head += ["MFU"] if peak else []
    head += ["GiB", "compute ms", "idle ms", *(f"exposed {name} ms" for name in names), "exposed"]
    head += ["bubble", "ideal", "step off"] if pipelined else []
    head += ["host late"] if late else []
    head += ["loss diff."]
    cells = []
    ordered = sorted(rows, key=lambda row: (row["microbatches"], not row["is_baseline"]))
    for row in ordered:
        times = median_rank(row)
        line = [row["case"] + (" (baseline)" if row["is_baseline"] else ""), row["microbatches"]]
        line += [_range(row["step_ms"], ".1f")]
        line += [_range(row["ratios"], ".3f") if "ratios" in row else "-"]
        line += [*_expected(row, rows)] if schedules else []
        line += [f"{row['tokens_per_s']:,.0f}", f"{row['tflops_per_gpu']:.0f}"]
        line += [f"{100 * row['tflops_per_gpu'] / peak:.1f} %"] if peak else []
        line += [f"{row['peak_gib']:.1f}"]
        line += [_ms(times, "compute_us"), _ms(times, "idle_us")]
        line += ["-" if (ms := exposed_ms(row, name)) is None else f"{ms:.2f}" for name in names]
        line += ["-" if (share := exposed_share(row)) is None else f"{100 * share:.1f} %"]
        line += [*_bubble(row)] if pipelined else []
        line += [_late(row)] if late else []
        line += [_loss(row, ordered[0])]
        cells.append(line)
    return _table(head, cells)


def _expected(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The ratio that ideal bubbles would give, and how far the measured one is from it."""
    for other in rows:
        same = other["microbatches"] == row["microbatches"]
        if same and other["is_baseline"] and "ratio" in row:
            wanted = expected_ratio(row, other)
            return f"{wanted:.3f}", _percent(row["ratio"] / wanted - 1.0)
    return "-", "-"


def _loss(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """How far losses are from those of the first case with the same weights and batches."""
    if "loss_difference" not in row:
        return "-"
    peer = row["loss_peer"]
    to = "" if peer == baseline["case"] and baseline["is_baseline"] else f" to {peer}"
    return f"{row['loss_difference']:.1e}{to}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _ms(times: Mapping[str, Any] | None, name: str) -> str:
    return "-" if times is None else f"{times[name] / 1e3:.1f}"


def _bubble(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Measured, ideal, and how much longer than with the ideal one a step was."""
    found = bubble(row)
    measured = "-" if found is None else f"{found:.3f}"
    return measured, f"{ideal_bubble(row):.3f}", _percent(bubble_deviation(row))


def _late(row: Mapping[str, Any]) -> str:
    if not row["lateness"]:
        return "-"
    return f"{100 * max(each['late_share'] for each in row['lateness']):.1f} %"


def _scaling(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    rates = {len(row["parameters_by_rank"]): row["tokens_per_s"] for row in rows}
    lines = _table(
        ("GPUs", "tokens/s", "tokens/s per GPU", "efficiency"),
        (
            (count, f"{rates[count]:,.0f}", f"{rates[count] / count:,.0f}", f"{share:.3f}")
            for count, share in efficiency(rows).items()
        ),
    )
    return ["### scaling", "", *lines, ""]


def _range(values: Sequence[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
