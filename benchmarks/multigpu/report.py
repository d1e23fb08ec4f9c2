"""Tables of what was measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_mcore.flops import peak_flops
from lightning_mcore.timeline.bandwidth import BUS_FACTORS

_GROUPS = ("tp", "pp", "dp", "cp", "ep", "mp", "world", "other")


def as_markdown(content: Mapping[str, Any]) -> str:
    """All items, one table per group."""
    rows = content["rows"]
    setting = content["setting"]
    lines = [", ".join(f"{name} {value}" for name, value in setting.items()), ""]
    for row in rows:
        if row["item"] == "links" and row["status"] == "measured":
            lines += _links(row["by_rank"])
        elif row["item"].startswith("tune") and row["status"] == "measured":
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
    names = [name for name in _GROUPS if any(_exposed(row, name) is not None for row in rows)]
    pipelined = any(row["pp"] > 1 for row in rows)
    late = any(row["lateness"] for row in rows)
    head = ["case", "m", "step ms (range)", "ratio to baseline (range)", "tokens/s", "TFLOP/s"]
    head += ["MFU"] if peak else []
    head += ["GiB", "compute ms", "idle ms", *(f"exposed {name} ms" for name in names), "exposed"]
    head += ["bubble", "ideal"] if pipelined else []
    head += ["host late"] if late else []
    head += ["loss diff."]
    cells = []
    ordered = sorted(rows, key=lambda row: (row["microbatches"], not row["is_baseline"]))
    for row in ordered:
        times = _median_rank(row)
        line = [row["case"] + (" (baseline)" if row["is_baseline"] else ""), row["microbatches"]]
        line += [_range(row["step_ms"], ".1f")]
        line += [_range(row["ratios"], ".3f") if "ratios" in row else "-"]
        line += [f"{row['tokens_per_s']:,.0f}", f"{row['tflops_per_gpu']:.0f}"]
        line += [f"{100 * row['tflops_per_gpu'] / peak:.1f} %"] if peak else []
        line += [f"{row['peak_gib']:.1f}"]
        line += [_ms(times, "compute_us"), _ms(times, "idle_us")]
        line += ["-" if (ms := _exposed(row, name)) is None else f"{ms:.2f}" for name in names]
        line += [f"{100 * times['exposed_us'] / times['step_us']:.1f} %" if times else "-"]
        line += [*_bubble(row)] if pipelined else []
        line += [_late(row)] if late else []
        line += [f"{row['loss_difference']:.1e}" if "loss_difference" in row else "-"]
        cells.append(line)
    return _table(head, cells)


def _median_rank(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rank whose compute time is the median, as CommTimings shows it."""
    recorded = row["recorded"]
    if not recorded:
        return None
    return sorted(recorded, key=lambda times: times["compute_us"])[len(recorded) // 2]


def _exposed(row: Mapping[str, Any], group: str) -> float | None:
    times = _median_rank(row)
    if times is None or group not in times["groups"]:
        return None
    return float(times["groups"][group]["exposed_us"]) / 1e3


def _ms(times: Mapping[str, Any] | None, name: str) -> str:
    return "-" if times is None else f"{times[name] / 1e3:.1f}"


def _bubble(row: Mapping[str, Any]) -> tuple[str, str]:
    """Time of an unprofiled step beyond the compute of its slowest stage, over that; and ideal."""
    found = bubble(row)
    ideal = (row["pp"] - 1) / (row["vpp"] * row["microbatches"])
    return ("-" if found is None else f"{found:.3f}", f"{ideal:.3f}")


def bubble(row: Mapping[str, Any]) -> float | None:
    """The measured bubble of a row, as a share of compute time; ``None`` without a recording."""
    if not row["recorded"] or row["pp"] == 1:
        return None
    slowest = max(times["compute_us"] for times in row["recorded"]) / 1e3
    return float(row["median_step_ms"] / slowest - 1.0)


def _late(row: Mapping[str, Any]) -> str:
    if not row["lateness"]:
        return "-"
    return f"{100 * max(each['late_share'] for each in row['lateness']):.1f} %"


def _scaling(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    each = [(len(row["parameters_by_rank"]), row["tokens_per_s"]) for row in rows]
    least, rate = min(each)
    lines = _table(
        ("GPUs", "tokens/s", "tokens/s per GPU", "efficiency"),
        (
            (count, f"{all_:,.0f}", f"{all_ / count:,.0f}", f"{all_ / count / (rate / least):.3f}")
            for count, all_ in each
        ),
    )
    return ["### scaling", "", *lines, ""]


def _range(values: Sequence[float], form: str) -> str:
    middle = format(statistics.median(values), form)
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
