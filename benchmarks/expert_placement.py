"""How evenly policies place experts, by simulation: skewed routers at 8 to 64 ranks.

Each token goes to the ``top_k`` experts with the largest ``bias + Gumbel noise``, where the biases
of a layer are drawn once from a normal distribution with deviation ``skew``. A policy places the
experts by the load of the first ``tokens`` tokens; its imbalance is the load of the fullest rank
over the mean, averaged over ``repeats`` layers.

    python benchmarks/expert_placement.py --json placement.json

With ``--fresh`` the imbalance is that of as many new tokens of the same router: what a placement by
past load is worth on the steps that follow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lightning_mcore import placement

POLICIES: tuple[placement.Policy, ...] = get_args(placement.Policy)
BOUND = "lower bound"


def expert_load(rng: np.random.Generator, bias: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    """Tokens per expert ``[experts]`` that a router with these biases sends."""
    logits = bias + rng.gumbel(size=(tokens, len(bias)))
    chosen = np.argpartition(-logits, top_k, 1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=len(bias))


def simulate(
    *,
    skews: Sequence[float],
    ranks: Sequence[int],
    experts: int,
    top_k: int,
    tokens: int,
    repeats: int,
    seed: int,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Mean imbalance of every policy for every skew and number of ranks."""
    rng = np.random.default_rng(seed)
    rows = []
    for skew in skews:
        for size in ranks:
            found: dict[str, list[float]] = {name: [] for name in (*POLICIES, BOUND)}
            for _ in range(repeats):
                bias = rng.normal(0, skew, experts)
                load = expert_load(rng, bias, tokens, top_k).tolist()
                seen = expert_load(rng, bias, tokens, top_k).tolist() if fresh else load
                for policy in POLICIES:
                    slots = placement.place(load, size, policy)
                    found[policy].append(placement.imbalance(seen, slots, size))
                found[BOUND].append(placement.bound(seen, size))
            means = {name: float(np.mean(values)) for name, values in found.items()}
            rows.append(
                {"skew": skew, "ep": size, "experts_per_rank": experts // size, "imbalance": means}
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    names = (*POLICIES, BOUND)
    lines = [
        f"| skew | ep | experts per rank | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for row in rows:
        values = " | ".join(f"{row['imbalance'][name]:.3f}" for name in names)
        lines.append(f"| {row['skew']} | {row['ep']} | {row['experts_per_rank']} | {values} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; the defaults are the setting of docs/expert-placement.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--skews", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5, help="layers to average over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="measure on tokens not planned for")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Simulates, prints and writes."""
    options = vars(parse(arguments))
    target = options.pop("json")
    rows = simulate(**options)
    print(table(rows))
    if target is not None:
        target.write_text(json.dumps({"setting": options, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
