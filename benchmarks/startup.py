"""What it takes to start a run, and the runs after it in the same process.

    python benchmarks/startup.py --devices 2 --strategy '{"pp": 2}' [--bound]

Fits of a tiny GPT, one after another: seconds from the call of ``fit`` until the first batch is
due (process groups, model, optimizer), of the first two steps, which open what connections are
opened by use, and of the whole; memory of the fullest device that torch's allocator does not hold
(contexts, NCCL's buffers). With ``--bound`` the default process group gets a ``device_id``, as from
Lightning's own strategies: torch then opens a communicator for every process group as it is made,
and not at its first use.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment

from gpt import GPT, SIZES, batches
from lightning_mcore import MCoreStrategy
from lightning_mcore.testing import run_ranks
from ranks import be_quiet

STEPS = 4
COLUMNS = ("fit", "until the first batch s", "step 1 s", "step 2 s", "whole s", "outside torch GiB")


class Marks(pl.Callback):
    """Notes when training starts and when steps end, with nothing left to do for the device."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.outside_gib = 0.0

    def mark(self) -> None:
        """Now."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.outside_gib = (total - free - torch.cuda.memory_reserved()) / 2**30
        self.times.append(time.perf_counter())

    def on_train_start(self, *_: Any) -> None:
        self.mark()

    def on_train_batch_end(self, *_: Any) -> None:
        self.mark()


def fit(strategy: dict[str, Any], options: argparse.Namespace) -> list[float]:
    """One fit: what the columns say."""
    marks, size = Marks(), SIZES["tiny"]
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=MCoreStrategy(micro_batch_size=size.micro_batch, **strategy),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[marks],
        plugins=[LightningEnvironment()],
    )
    module = GPT(size, lambda trainer, factory: trainer.strategy.build(factory))
    marks.mark()
    trainer.fit(module, batches(size, replicas=1, replica=0))
    marks.mark()
    begin, ready, first, second, *_, end = marks.times
    return [ready - begin, first - ready, second - first, end - begin, marks.outside_gib]


def on_rank(options: argparse.Namespace) -> list[list[float]]:
    """All fits of a rank."""
    be_quiet()
    if options.bound and options.accelerator == "gpu":
        make = dist.init_process_group

        def bound(*args: Any, **kwargs: Any) -> None:
            make(*args, **kwargs, device_id=torch.device("cuda", torch.cuda.current_device()))

        dist.init_process_group = bound
    return [fit(json.loads(options.strategy), options) for _ in range(options.fits)]


def main() -> None:
    """Measures and prints a table of the slowest rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=1)
    add("--strategy", default="{}", help="arguments of MCoreStrategy, as JSON")
    add("--fits", type=int, default=3)
    add("--bound", action="store_true")
    add("--accelerator", choices=("cpu", "gpu"), default="gpu")
    options = parser.parse_args()
    ranks = run_ranks(on_rank, options.devices, options, timeout_s=60 + 60 * options.fits)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---:|" * len(COLUMNS))
    for number, fits in enumerate(zip(*ranks, strict=True), 1):
        *seconds, gib = (max(values) for values in zip(*fits, strict=True))
        print(f"| {number} | " + " | ".join(f"{s:.2f}" for s in seconds) + f" | {gib:.2f} |")


if __name__ == "__main__":
    main()
