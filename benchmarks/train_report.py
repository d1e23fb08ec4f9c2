"""Figures, tables and plots of what train_gpt.py measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends import OURS
from kernels import profile_table


def spread(values: Sequence[float]) -> list[float]:
    """Median and quartiles."""
    if len(values) < 2:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def summarise(result: dict[str, Any]) -> None:
    """Adds the figures that follow from the blocks."""
    about, reference = result["about"], result["reference"]
    for name, found in result["backends"].items():
        mine, ratios, beside = [], [], set()
        for group in result["groups"]:
            ms = group["ms"].get(name, [])
            mine += ms
            if ms and reference in group["ms"]:
                ratios += [a / b for a, b in zip(ms, group["ms"][reference], strict=False)]
                beside |= set(group["members"])
        if not mine:
            continue
        if not ratios and reference in result["backends"]:
            # Not at the same time: block by block in the order of measuring.
            theirs = [ms for group in result["groups"] for ms in group["ms"].get(reference, [])]
            ratios = [a / b for a, b in zip(mine, theirs, strict=False)]
        step_ms = spread(mine)
        parts = math.prod(found["strategy"].get(axis, 1) for axis in ("tp", "pp", "cp"))
        replicas = about["devices"] // parts
        tflops = about["flops_per_step"] / parts / step_ms[0] / 1e9
        peak = about["peak_tflops"]
        found |= {
            "blocks": len(mine),
            "step_ms": step_ms,
            "tokens_per_s": about["tokens_per_step"] * replicas / step_ms[0] * 1e3,
            "tflops_per_device": tflops,
            "mfu": tflops / peak if peak else None,
            "ratio": spread(ratios) if ratios else None,
            "in_turns_with_reference": name == reference or reference in beside,
        }


def as_markdown(results: Sequence[dict[str, Any]], top: int) -> str:
    """Tables of results, each summarised before, with the ``top`` kernels of what was profiled."""
    lines: list[str] = []
    for result in results:
        lines += [*_table(result), ""]
        for name, found in result["backends"].items():
            if "profile" in found:
                lines += [*profile_table(name, found["profile"], top), ""]
    return "\n".join(lines)


def _table(result: dict[str, Any]) -> list[str]:
    about = result["about"]
    versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
    lines = [
        f"## {about['model']['name']}: {about['parameters'] / 1e9:.2f}B parameters,"
        f" {about['model']['batch']} x {about['model']['seq']} tokens per device and step, in"
        f" {about.get('microbatches', 1)} microbatch(es)",
        "",
        f"{about['date']}, {about['devices']} x {about['device']}, {about['layers']} layers,"
        f" {versions}",
        "",
        f"`{about['command']}`",
        "",
        "| backend | ms per step [quartiles] | tokens/s | TFLOP/s | MFU % | peak GiB | first step s"
        f" | warm s | time / {result['reference']} [quartiles] |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in result["backends"].items():
        if "step_ms" not in found:
            why = found.get("error") or ("no turn of it" if found["status"] == "ok" else "")
            lines.append(f"| {name} | {found['status']}: {why[:200]} |")
            continue
        memory, startup = found["memory_gib"], found["startup_s"]
        ratio = "{:.4f} [{:.4f}, {:.4f}]".format(*found["ratio"]) if found["ratio"] else ""
        ratio += "" if found["in_turns_with_reference"] else " (not in turns)"
        lines.append(
            f"| {name} | {{:.2f}} [{{:.2f}}, {{:.2f}}] ".format(*found["step_ms"])
            + f"| {found['tokens_per_s']:,.0f} | {found['tflops_per_device']:.4g} "
            + (f"| {100 * found['mfu']:.1f} " if found["mfu"] is not None else "| - ")
            + (f"| {memory['peak']:.1f} " if memory else "| - ")
            + f"| {startup['first_step']:.1f} | {startup['warm']:.1f} | {ratio} |"
        )
    for check in result["checks"]:
        agree = "agree" if check["losses_agree"] else "DIFFER"
        apart = ", ".join(f"{value:.1e}" for value in check["losses_apart"])
        first, second = check["backends"]
        lines += ["", f"First losses of {first} and {second} {agree} (relative: {apart})."]
        if check["settings_apart"]:
            lines.append(f"Their settings differ: {check['settings_apart']}.")
    return lines


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Step time by backend: medians, with quartiles as whiskers; a panel per result."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 1.6 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        found = {n: b for n, b in result["backends"].items() if "step_ms" in b}
        middle = [b["step_ms"][0] for b in found.values()]
        low = [b["step_ms"][0] - b["step_ms"][1] for b in found.values()]
        high = [b["step_ms"][2] - b["step_ms"][0] for b in found.values()]
        colors = ["C0" if b["backend"] == OURS else "0.65" for b in found.values()]
        bars = panel.barh(list(found), middle, xerr=[low, high], color=colors)
        panel.bar_label(bars, fmt="%.1f", label_type="center")
        panel.invert_yaxis()
        panel.set_xlabel("ms per step")
        about = result["about"]
        count = about.get("microbatches", 1)
        split = f", {count} microbatches per step" if count > 1 else ""
        panel.set_title(f"{about['model']['name']}, {about['devices']} x {about['device']}{split}")
    figure.savefig(path, dpi=150)
