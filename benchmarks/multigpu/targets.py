"""What was measured against what was wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multigpu.figures import efficiency, expected_ratio, exposed_ms, exposed_share

Row = Mapping[str, Any]
Line = tuple[str, str, str, str, str]
"""Where, what, measured, wanted, whether it was met."""

_SAME_TRIAL = {
    "sequence_parallel": "safe",
    "comm=auto": "safe",
    "comm=max": "tp_comm_overlap",
}
"""The tuner's trials that run as a case of ``tuned.py``: with tensor parallelism alone there is
nothing else to switch."""
HEAD = ("group", "what", "measured", "target", "met")


def against_targets(rows: Sequence[Row]) -> list[Line]:
    """A line for every target of which anything was measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "microbatches" in row:
            groups.setdefault((row["item"], row["group"]), []).append(row)
    lines: list[Line] = []
    for (item, name), members in groups.items():
        lines += [(name, *line) for line in _BY_ITEM.get(item, _nothing)(members)]
    scaling = [row for (item, _), members in groups.items() if item == "scaling" for row in members]
    lines += [("scaling", *line) for line in _scaling(scaling)]
    turns = groups.get(("tune", "in turns"), [])
    for row in rows:
        if row["item"] == "tune" and "by_rank" in row:
            lines += [("tune", *line) for line in _tuned(row["by_rank"][0]["report"], turns)]
    return lines


_Line = tuple[str, str, str, str]


def _nothing(_rows: Sequence[Row]) -> Iterator[_Line]:
    yield from ()


def _met(holds: bool) -> str:
    return "yes" if holds else "no"


def _on(row: Row, switch: str) -> bool:
    """Whether a switch came out as on, or was set so where that was not noted."""
    found = (row.get("switches") or {}).get(switch) or row["strategy"].get(switch, "False")
    return str(found).startswith("True")


def _size(row: Row, axis: str) -> int:
    return int(row["strategy"].get(axis, "1"))


def _baseline(rows: Sequence[Row], row: Row) -> Row | None:
    """The baseline with as many microbatches."""
    for other in rows:
        if other["is_baseline"] and other["microbatches"] == row["microbatches"]:
            return other
    return None


def _tensor(rows: Sequence[Row]) -> Iterator[_Line]:
    """Userbuffers: no slower than NCCL, and half of its exposed communication."""
    for row in rows:
        base = _baseline(rows, row)
        if row["is_baseline"] or base is None or not _on(row, "tp_comm_overlap"):
            continue
        if "ratio" in row:
            ratio = row["ratio"]
            yield (
                f"{row['case']}: time of {base['case']}",
                f"{ratio:.3f}",
                "at most 1",
                _met(ratio <= 1.0),
            )
        mine, theirs = exposed_ms(row, "tp"), exposed_ms(base, "tp")
        if theirs:
            # Without a kernel of its group, nothing was exposed.
            mine = mine or 0.0
            measured = f"{mine / theirs:.2f} ({mine:.2f} of {theirs:.2f} ms)"
            what = f"{row['case']}: exposed tp communication of {base['case']}"
            yield what, measured, "at most 0.5", _met(mine <= 0.5 * theirs)


def _pipeline(rows: Sequence[Row]) -> Iterator[_Line]:
    """Interleaved and overlapped: what the bubbles give."""
    for row in sorted(rows, key=lambda each: each["microbatches"]):
        base = _baseline(rows, row)
        if base is None or "ratio" not in row or row["vpp"] == 1 or not _on(row, "overlap_p2p"):
            continue
        expected = expected_ratio(row, base)
        off = row["ratio"] / expected - 1.0
        yield (
            f"{row['case']}, {row['microbatches']} microbatches: time of {base['case']}",
            f"{row['ratio']:.3f} ({1 / row['ratio']:.3f} x as fast), {100 * off:+.1f} %",
            f"{expected:.3f} ({1 / expected:.3f} x), within 5 %",
            # Faster than the arithmetic is no failure.
            _met(off <= 0.05),
        )


def _data(rows: Sequence[Row]) -> Iterator[_Line]:
    """With the distributed optimizer and fp32 gradients, as Lightning's, ahead of its DDP."""
    timed = [row for row in rows if "ratio" in row]
    ours = [row for row in timed if _on(row, "use_distributed_optimizer")]
    ours = [row for row in ours if row["framework"] == "mcore"]
    ours = [row for row in ours if row["strategy"].get("grad_reduce_in_fp32") != "False"]
    if not ours:
        return
    best = min(ours, key=lambda row: row["ratio"])
    others = {best["baseline"]: 1.0}
    others |= {row["case"]: row["ratio"] for row in timed if row["framework"] != "mcore"}
    fastest = min(others, key=lambda name: others[name])
    for name in dict.fromkeys((best["baseline"], fastest)):
        gain = others[name] / best["ratio"] - 1.0
        yield (
            f"{best['case']}: tokens/s beyond {name}",
            f"{100 * gain:+.1f} %",
            "at least 10 %" if name == best["baseline"] else "-",
            _met(gain >= 0.1) if name == best["baseline"] else "-",
        )


def _combined(rows: Sequence[Row]) -> Iterator[_Line]:
    """Presets, and how much communication stays exposed."""
    for row in rows:
        auto = row["strategy"].get("comm") == "'auto'" and "ratio" in row
        if auto and row["group"].startswith("70B") and row["pp"] == 1:
            gain = 1.0 / row["ratio"]
            what = f"{row['case']}: speed over {row['baseline']}"
            yield what, f"{gain:.3f}", "at least 1.3", _met(gain >= 1.3)
    for row in rows:
        share = exposed_share(row)
        if share is None:
            continue
        long = row["group"].startswith("32K")
        sequence = long and _size(row, "cp") == 1
        if not sequence and not (_on(row, "tp_comm_overlap") and _size(row, "tp") >= 4):
            continue
        limit = 0.08 if sequence else 0.12
        yield (
            f"{row['case']}: exposed communication",
            f"{100 * share:.1f} % of the step",
            f"under {100 * limit:.0f} %",
            _met(share < limit),
        )


def _scaling(rows: Sequence[Row]) -> Iterator[_Line]:
    found = efficiency(rows)
    if len(found) > 1:
        most = max(found)
        measured = f"{found[most]:.3f}"
        yield (
            f"efficiency on {most} GPUs over {min(found)}",
            measured,
            "at least 0.92" if most == 8 else "at least 0.92 (on 8)",
            _met(found[most] >= 0.92),
        )


def _tuned(report: Row, turns: Sequence[Row]) -> Iterator[_Line]:
    """Whether the tuner's choice is as fast as the fastest case measured in turns, to 1 %."""
    ratios = {trial["name"]: trial["ratio"] for trial in report["trials"]}
    name = report["recommended"]
    pick = _SAME_TRIAL.get(name, name)
    table = {row["case"]: row["ratio"] for row in turns if "ratio" in row}
    table |= {row["case"]: 1.0 for row in turns if row["is_baseline"]}
    if not table:
        return
    fastest = min(table, key=lambda case: table[case])
    runs_as = "" if pick == name else f", which runs as {pick}"
    measured = f"{name} ({ratios[name]:.3f} of safe){runs_as}"
    wanted = f"{fastest} ({table[fastest]:.3f} of safe in turns)"
    if pick not in table:
        yield "recommended", measured, wanted, "-"
    else:
        yield "recommended", measured, wanted, _met(table[pick] <= 1.01 * table[fastest])


_BY_ITEM = {"tp": _tensor, "pp": _pipeline, "dp": _data, "layouts": _combined}
