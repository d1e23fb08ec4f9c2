"""Idle time of pipeline schedules on CPU ranks whose compute is sleep, against (p - 1) / (v m).

The engine's own schedules run on real processes over gloo; only the work in a stage is emulated, by
sleeping, so that two cores can play four stages. `--delays` adds a latency to every message between
stages, as a slow network would: the sender posts it that much later from a thread of its own.

    python benchmarks/bubble.py --json bubble.json --plot bubble.png

Reported is the time of a step's forward and backward passes through the work of one rank, less one:
ideal is (p - 1) / (v m) for p ranks, v chunks on each and m microbatches (Narayanan et al. 2021,
arXiv:2104.04473, section 2.2). Each row is the median of the
steps of one run, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks

_WIDTH = 8
_WARMUP = 2

spans: list[tuple[float, float]] = []
"""Begin and end of every piece of work on this rank in the running step."""


def work(seconds: float) -> None:
    """Keeps this rank busy without the CPU."""
    start = time.monotonic()
    time.sleep(seconds)
    spans.append((start, time.monotonic()))


class Sleep(torch.autograd.Function):
    """The identity; sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        work(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        work(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    """A layer that takes ``seconds`` forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.scale, self.seconds)


class Job(pl.LightningModule):
    """``chunks`` blocks that together keep a rank busy for ``seconds`` per microbatch, forward."""

    def __init__(self, pp: int, vpp: int, seconds: float) -> None:
        super().__init__()
        self.blocks = [Block(seconds / vpp) for _ in range(pp * vpp)]
        self.steps: list[float] = []
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.trainer.strategy.build(nn.Sequential(*self.blocks))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        spans.clear()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        busy = sum(end - start for start, end in spans)
        mine = (spans[0][0], max(end for _, end in spans), busy)
        ranks: list[Any] = [None] * self.trainer.world_size
        dist.all_gather_object(ranks, mine)
        # The clock is the machine's, so the ranks' times compare.
        whole = max(end for _, end, _ in ranks) - min(start for start, _, _ in ranks)
        self.steps.append(whole / max(busy for *_, busy in ranks) - 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class LateSend:
    """Stands in for the handle of a message that is posted after a delay."""

    def __init__(self) -> None:
        self.sent = threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        return self.sent.wait()

    def is_completed(self) -> bool:
        return self.sent.is_set()


def delay_messages(seconds: float) -> None:
    """Makes every point-to-point message of this process leave ``seconds`` later, in order."""
    send = dist.isend
    waiting: queue.Queue[Any] = queue.Queue()

    def post() -> None:
        while True:
            due, handle, args, kwargs = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            request = send(*args, **kwargs)
            request.wait()
            handle.sent.set()

    def late(*args: Any, **kwargs: Any) -> LateSend:
        handle = LateSend()
        waiting.put((time.monotonic() + seconds, handle, args, kwargs))
        return handle

    threading.Thread(target=post, daemon=True).start()
    # batch_isend_irecv compares the operation with the function of its own module.
    dist.isend = distributed_c10d.isend = late


def run(case: dict[str, Any], seconds: float, steps: int) -> list[float]:
    """Idle time of each step through the work of a step, on one rank."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities", "lightning_mcore"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if case["delay_ms"]:
        delay_messages(case["delay_ms"] / 1e3)
    pp, vpp, m = case["pp"], case["vpp"], case["microbatches"]
    job = Job(pp, vpp, seconds)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=pp,
        max_steps=steps + _WARMUP,
        strategy=MCoreStrategy(
            pp=pp,
            vpp=vpp if vpp > 1 else None,
            micro_batch_size=1,
            overlap_p2p=case["overlap"],
        ),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.ones((steps + _WARMUP) * m, _WIDTH), batch_size=m)
    trainer.fit(job, data)
    return job.steps[_WARMUP:]


def cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Schedules to run: without delay by microbatches, with delay by overlap."""
    found = []
    for pp in options.pp:
        for vpp in (1, 2):
            for m in options.microbatches:
                found.append({"pp": pp, "vpp": vpp, "microbatches": m, "overlap": vpp > 1})
    for delay in options.delays:
        for vpp, overlap in ((1, False), (2, False), (2, True)):
            case = {"pp": 4, "vpp": vpp, "microbatches": 8, "overlap": overlap}
            found.append({**case, "delay_ms": delay})
    return [{"delay_ms": 0.0, **case} for case in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--delays", type=float, nargs="*", default=[0.0, 2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--forward-ms", type=float, default=20.0, help="per microbatch and rank")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    print("p  v   m  overlap  delay    measured (range)          (p-1)/(vm)", flush=True)
    for case in cases(options):
        ranks = run_ranks(run, case["pp"], case, options.forward_ms / 1e3, options.steps)
        steps = ranks[0]
        row = {
            **case,
            "bubble": statistics.median(steps),
            "range": [min(steps), max(steps)],
            "ideal": (case["pp"] - 1) / (case["vpp"] * case["microbatches"]),
        }
        rows.append(row)
        print(
            f"{row['pp']}  {row['vpp']}  {row['microbatches']:>2}  {row['overlap']!s:<7}"
            f"  {row['delay_ms']:>4g} ms  {row['bubble']:.3f} ({row['range'][0]:.3f}-"
            f"{row['range'][1]:.3f})      {row['ideal']:.3f}",
            flush=True,
        )
    if options.json:
        setting = {"forward_ms": options.forward_ms, "steps": options.steps, "rows": rows}
        options.json.write_text(json.dumps(setting, indent=1))
    if options.plot:
        plot(rows, options.plot, options.forward_ms)


def plot(rows: list[dict[str, Any]], path: Path, forward_ms: float) -> None:
    """Draws measured against ideal, and what a message's delay costs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = [row for row in rows if not row["delay_ms"]]
    for pp, vpp in sorted({(row["pp"], row["vpp"]) for row in plain}):
        found = [r for r in plain if (r["pp"], r["vpp"]) == (pp, vpp) and r["overlap"] == (vpp > 1)]
        found = sorted({row["microbatches"]: row for row in found}.items())
        label = f"p = {pp}, " + ("1F1B" if vpp == 1 else f"interleaved, v = {vpp}")
        (line,) = left.plot(
            [m for m, _ in found], [r["bubble"] for _, r in found], "o", label=label
        )
        left.plot(
            [m for m, _ in found], [r["ideal"] for _, r in found], "-", color=line.get_color()
        )
    left.set(
        xlabel="microbatches", ylabel="idle time / compute time", title="measured, lines: ideal"
    )
    left.legend(fontsize=8)
    late = [row for row in rows if row["pp"] == 4 and row["microbatches"] == 8]
    labels = {
        (1, False): "1F1B",
        (2, False): "interleaved, overlap_p2p off",
        (2, True): "interleaved, overlap_p2p on",
    }
    for (vpp, overlap), label in labels.items():
        found = {r["delay_ms"]: r for r in late if (r["vpp"], r["overlap"]) == (vpp, overlap)}
        delays = sorted(found)
        shares = [delay / (3 * forward_ms) for delay in delays]
        right.plot(shares, [found[delay]["bubble"] for delay in delays], "o-", label=label)
    right.set(
        xlabel="delay of a message / compute time of a microbatch",
        title="p = 4, m = 8",
    )
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
