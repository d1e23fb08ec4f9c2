"""Shows a tuner's report: a table, the recommended arguments, a page to keep."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from pathlib import Path
from typing import Any

import yaml

from lightning_mcore.tuning.trials import BASELINE
from lightning_mcore.tuning.verdict import (
    LEAST_GAIN,
    Report,
    Row,
    shown_arguments,
    strategy_call,
)

__all__ = ["as_dict", "as_text", "as_yaml", "save_report"]

_COLUMNS = ("trial", "step", "ratio", "spread", "exposed", "memory", "loss", "verdict")


def as_text(report: Report) -> str:
    """The table, what was refused, and the recommendation, for a console."""
    cells = [list(_COLUMNS), *(_cells(report, row) for row in report.rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    for refusal in report.refused:
        lines.append(f"refused  {refusal.trial.name}: {refusal.reason}")
    lines += ["", _conclusion(report), "", strategy_call(report.recommended.measured.trial)]
    return "\n".join(lines)


def _cells(report: Report, row: Row) -> list[str]:
    found = row.measured
    middle = sorted(found.step_s)[len(found.step_s) // 2]
    exposed = f"{sum(found.exposed_ms.values()):.2f} ms" if found.exposed_ms else "-"
    return [
        row.name,
        f"{middle * 1e3:.2f} ms",
        f"{row.ratio:.3f}",
        f"{row.spread[0]:.3f}-{row.spread[1]:.3f}",
        exposed,
        f"{found.peak_bytes / 2**20:,.0f} MiB",
        _difference(row.parity.loss),
        _verdict(report, row),
    ]


def _difference(value: float) -> str:
    return "not finite" if math.isinf(value) else f"{value:.1e}"


def _verdict(report: Report, row: Row) -> str:
    if row is report.baseline:
        return "baseline" if row.parity.holds else "baseline, not reproducible"
    if not row.parity.holds:
        return "CHANGES TRAINING"
    if row is report.recommended:
        return "recommended"
    if row.wins:
        return "faster"
    return "slower" if row.spread[0] > 1.0 else "no clear gain"


def _conclusion(report: Report) -> str:
    best = report.recommended
    changed = [row.name for row in report.rows[1:] if not row.parity.holds]
    warning = f" Never use {', '.join(changed)}: the loss came out different." if changed else ""
    if not report.baseline.parity.holds:
        return (
            "The baseline did not reproduce its own loss, so nothing could be proven; look for"
            f" NaN, or for random numbers that the seed does not reach.{warning}"
        )
    if best is report.baseline:
        return (
            f"Nothing was {LEAST_GAIN:.0%} faster than {BASELINE} in every round: keep"
            f" {BASELINE}, or repeat with longer windows.{warning}"
        )
    gain = (1.0 / best.ratio - 1.0) * 100
    return (
        f"{best.name} gave {gain:.1f} % more steps per second (median of"
        f" {len(best.measured.step_s)} rounds) with the same losses to"
        f" {best.parity.loss:.1e} (allowed: {best.parity.loss_tolerance:.1e}).{warning}"
    )


def as_yaml(report: Report) -> str:
    """The recommended strategy as LightningCLI reads it."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in shown_arguments(report.recommended.measured.trial).items()
    }
    strategy = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": arguments}
    return str(yaml.safe_dump({"trainer": {"strategy": strategy}}, sort_keys=False))


def as_dict(report: Report) -> dict[str, Any]:
    """Everything measured, for machines."""
    return {
        "setting": dict(report.setting),
        "recommended": report.recommended.name,
        "trials": [
            {
                "name": row.name,
                "arguments": {k: _plain(v) for k, v in shown_arguments(row.measured.trial).items()},
                "effective": dict(row.measured.switches),
                "step_s": list(row.measured.step_s),
                "ratio": row.ratio,
                "spread": list(row.spread),
                "peak_bytes": row.measured.peak_bytes,
                "exposed_ms": dict(row.measured.exposed_ms),
                "losses": [list(once) for once in row.measured.losses],
                "grad_norms": [list(once) for once in row.measured.grad_norms],
                "same_training": row.parity.holds,
                "loss_difference": row.parity.loss,
                "loss_tolerance": row.parity.loss_tolerance,
                "grad_norm_difference": row.parity.grad_norm,
                "grad_norm_tolerance": row.parity.grad_norm_tolerance,
            }
            for row in report.rows
        ],
        "refused": [
            {"name": refusal.trial.name, "reason": refusal.reason} for refusal in report.refused
        ],
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | dict | list) else str(value)


def save_report(report: Report, folder: str | Path) -> dict[str, Path]:
    """Writes ``report.html``, ``report.json`` and ``strategy.yaml``; one process calls it.

    Args:
        report: Of a tuner.
        folder: Where to; created if missing.

    Returns:
        Paths by kind.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "html": ("report.html", _page(report)),
        "json": ("report.json", json.dumps(as_dict(report), indent=1)),
        "yaml": ("strategy.yaml", as_yaml(report)),
    }
    for name, text in contents.values():
        (folder / name).write_text(text)
    return {kind: folder / name for kind, (name, _) in contents.items()}


_STYLE = """\
body{font:16px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:14px}td,th{padding:.3em .8em;text-align:right}
td:first-child,th:first-child,td:last-child{text-align:left}tr:nth-child(even){background:#f4f6f8}
tr.recommended{background:#e2f3e5}tr.changes{background:#fbe3e1}img{max-width:100%}
pre{background:#f4f6f8;padding:1em;overflow-x:auto}"""


def _page(report: Report) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    rows = []
    for row in report.rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(report, row))
        kind = "recommended" if row is report.recommended else ""
        kind = "changes" if not row.parity.holds else kind
        rows.append(f'<tr class="{kind}">{cells}</tr>')
    refused = "".join(
        f"<li><b>{html.escape(r.trial.name)}</b>: {html.escape(r.reason)}</li>"
        for r in report.refused
    )
    setting = ", ".join(f"{name} {value}" for name, value in report.setting.items())
    call = html.escape(strategy_call(report.recommended.measured.trial))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tuner report</title>",
        f"<style>{_STYLE}</style><h1>Communication switches, measured</h1>",
        f"<p>{html.escape(_conclusion(report))}</p><pre>{call}</pre>",
        f"<pre>{html.escape(as_yaml(report))}</pre>",
        f"<table><tr>{head}</tr>{''.join(rows)}</table>",
        "<p>Ratio: step time through the baseline's in the same round, median and range; below 1 is"
        " faster. Loss: largest relative difference from the baseline, over all steps and rounds."
        f"</p>{_picture(report)}",
        f"<h2>Refused</h2><ul>{refused}</ul>" if refused else "",
        f"<p><small>{html.escape(setting)}</small></p></html>",
    ]
    return "\n".join(part for part in parts if part)


def _picture(report: Report) -> str:
    """Ratios with their range, and the loss curves on top of each other, as an inline PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>(Pictures need matplotlib: pip install 'lightning-mcore[plots]'.)</p>"
    figure = Figure(figsize=(11, 1.2 + 0.35 * len(report.rows)), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [row.name for row in report.rows]
    ratios = [row.ratio for row in report.rows]
    errors = [
        [row.ratio - row.spread[0] for row in report.rows],
        [row.spread[1] - row.ratio for row in report.rows],
    ]
    colors = [_color(report, row) for row in report.rows]
    bars.barh(names, ratios, xerr=errors, color=colors, ecolor="#444", height=0.6)
    bars.axvline(1.0, color="#444", linewidth=0.8)
    bars.invert_yaxis()
    bars.set_xlabel("step time / baseline")
    for row in report.rows:
        same = row.parity.holds
        curves.plot(
            list(row.measured.losses[0]),
            color="#9aa5b1" if same else "#c0392b",
            label=None if same else row.name,
            linewidth=1.2,
        )
    curves.set_xlabel("step")
    curves.set_ylabel("training loss")
    if any(not row.parity.holds for row in report.rows):
        curves.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img alt="Step time ratios and loss curves" src="data:image/png;base64,{data}">'


def _color(report: Report, row: Row) -> str:
    if not row.parity.holds:
        return "#c0392b"
    if row is report.recommended:
        return "#2e9e4f"
    return "#7b8794" if row is report.baseline else "#a9c4e0"
