"""What the measuring callbacks cost per step between their samples.

One Trainer on one process trains a tiny GPT, in blocks of steps with and without the callbacks by
turns, so that both meet the same machine. Only the ratios mean something.

    python benchmarks/callback_cost.py --blocks 40 --steps 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from loops import TrainerLoop

from gpt import GPT, SIZES, batches
from lightning_mcore import MCoreStrategy
from lightning_mcore.callbacks import CommTimings, MemoryStats, Stragglers, TraceExport
from ranks import be_quiet, become_rank, free_port

NEVER = 10**9
CALLBACKS = {
    # Sampled so rarely that no step of the benchmark is: this is the cost between samples.
    "CommTimings": lambda: CommTimings(NEVER),
    "Stragglers": lambda: Stragglers(NEVER),
    "TraceExport": lambda: TraceExport(NEVER),
    "MemoryStats": lambda: MemoryStats(NEVER),
}


def spread(values: list[float]) -> str:
    """Median and quartiles as text."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4f} [{low:.4f}, {high:.4f}]"


def start(size: Any, callbacks: list[Any], device: torch.device) -> TrainerLoop:
    """A Trainer in a thread that waits for its turn."""
    module = GPT(size, lambda trainer, factory: trainer.strategy.build(factory))
    loader = batches(size, replicas=1, replica=0)
    loop = TrainerLoop(MCoreStrategy(), module, loader, device)
    loop.trainer.callbacks.extend(callbacks)
    loop.start()
    return loop


def own_cost(steps: int) -> float:
    """Seconds per step of the hooks alone, called on a Trainer that does nothing else."""
    from types import SimpleNamespace

    trainer: Any = SimpleNamespace(global_step=1, accumulate_grad_batches=1)
    callbacks = [make() for make in CALLBACKS.values()]
    nothing: Any = None
    for callback in callbacks:
        callback.on_train_start(trainer, nothing)
    begin = time.perf_counter()
    for index in range(steps):
        trainer.global_step = index + 1
        for callback in callbacks:
            callback.on_train_batch_start(trainer, nothing, nothing, index)
        for callback in callbacks:
            callback.on_train_batch_end(trainer, nothing, nothing, nothing, index)
    return (time.perf_counter() - begin) / steps


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40, help="turns of each Trainer")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    become_rank(0, 1, free_port())
    device = torch.device("cuda", 0) if options.accelerator == "gpu" else torch.device("cpu")
    size = SIZES[options.size]
    without, again, with_them = measure(size, options, device)
    ratios = [a / b for a, b in zip(with_them, without, strict=True)]
    noise = [a / b for a, b in zip(again, without, strict=True)]
    step_s = statistics.median(without)
    alone = own_cost(20_000)
    print(f"callbacks: {', '.join(CALLBACKS)}; between samples; {options.blocks} blocks")
    print(f"step without callbacks, median: {1e3 * step_s:.2f} ms of processor time")
    print(f"with callbacks / without: {spread(ratios)}")
    print(f"without / without (the noise of this machine): {spread(noise)}")
    print(f"hooks alone: {1e6 * alone:.1f} us per step = {100 * alone / step_s:.3f} % of it")


def measure(size: Any, options: Any, device: torch.device) -> tuple[list[float], ...]:
    """Processor time per step of each block: without, without again, with; in turns."""
    loop = start(size, [], device)
    trainer = loop.trainer
    callbacks = [make() for make in CALLBACKS.values()]
    plain = list(trainer.callbacks)
    for callback in callbacks:
        callback.on_train_start(trainer, loop.module)
    loop.run(options.warmup)
    rows: tuple[list[float], ...] = ([], [], [])
    for block in range(options.blocks):
        order = (0, 1, 2) if block % 2 == 0 else (2, 1, 0)
        for index in order:
            trainer.callbacks[:] = plain + (callbacks if index == 2 else [])
            begin = time.process_time()
            loop.run(options.steps)
            rows[index].append((time.process_time() - begin) / options.steps)
    trainer.callbacks[:] = plain
    loop.stop()
    return rows


if __name__ == "__main__":
    main()
