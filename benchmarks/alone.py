"""One backend by itself in the main thread of its process, as a script of its own would run it.

    python benchmarks/alone.py --model gpt2-xl --backend lightning-mcore [--without-room]
    python benchmarks/alone.py --model gpt2-xl --backend mcore-raw

Other benchmarks let backends take turns, for which a Trainer gets a thread; here each process has
one. Prints, per step and as the median of blocks: wall clock, processor time, the part of it in the
kernel, and page faults, of which calls without room for their frames make many
(lightning_mcore/frames.py). One device.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import lightning.pytorch as pl
import torch
from backends import OURS, RAW, SEED, Entry, build, trainer_loop
from models import MODELS, Model

from ranks import be_quiet, become_rank, free_port, process_group, without_room_for_frames


class Blocks(pl.Callback):
    """Ends blocks of steps, and the run."""

    def __init__(self, device: torch.device, warmup: int, blocks: int, steps: int) -> None:
        self._device, self._warmup, self._steps = device, warmup, steps
        self._last = warmup + blocks * steps
        self._marks: list[tuple[float, ...]] = []

    def mark(self) -> None:
        """Between two blocks, with nothing left to do for the device."""
        if self._device.type != "cpu":
            torch.cuda.synchronize()
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._marks.append(
            (time.perf_counter(), time.process_time(), used.ru_stime, used.ru_minflt)
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        beyond = trainer.global_step - self._warmup
        if beyond >= 0 and beyond % self._steps == 0:
            self.mark()
        trainer.should_stop = trainer.global_step >= self._last

    def __str__(self) -> str:
        per_step = [
            [(b - a) / self._steps for a, b in zip(*pair, strict=True)]
            for pair in zip(self._marks, self._marks[1:], strict=False)
        ]
        wall, cpu, kernel, faults = map(list, zip(*per_step, strict=True))
        low, middle, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else wall * 3
        return (
            f"{1e3 * middle:.1f} ms per step [{1e3 * low:.1f}, {1e3 * high:.1f}], processor"
            f" {1e3 * statistics.median(cpu):.1f} ms, of them {1e3 * statistics.median(kernel):.1f}"
            f" in the kernel, {statistics.median(faults):.0f} page faults"
        )


def main() -> None:
    """Runs one backend and prints what a step takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backend", choices=(OURS, RAW), default=OURS)
    add("--model", choices=MODELS, default="gpt2-xl")
    add("--microbatches", type=int, default=1, help="of the model's batch each, per step")
    add("--warmup", type=int, default=10)
    add("--blocks", type=int, default=5)
    add("--steps", type=int, default=5, help="in a block")
    add("--without-room", action="store_true", help="without room for frames (frames.py)")
    add("--accelerator", choices=("cpu", "gpu"), default="gpu")
    options = parser.parse_args()
    become_rank(0, 1, free_port())
    be_quiet()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if options.without_room:
        without_room_for_frames()
    size = MODELS[options.model]
    model = dataclasses.replace(size, batch=size.batch * options.microbatches)
    precision = "bf16-mixed" if options.accelerator == "gpu" else "32-true"
    entry = Entry(
        options.backend,
        strategy={"micro_batch_size": size.batch},
        precision=precision,
        microbatches=options.microbatches,
    )
    with process_group(options.accelerator) as device:
        blocks = _run(entry, model, device, options)
    room = ", without room for frames" if options.without_room else ""
    print(f"{options.backend}, {options.model}{room}: {blocks}")


def _run(entry: Entry, model: Model, device: torch.device, options: Any) -> Blocks:
    blocks = Blocks(device, options.warmup, options.blocks, options.steps)
    if entry.backend == RAW:
        live = build(entry, model, device)
        live.run(options.warmup)
        blocks.mark()
        for _ in range(options.blocks):
            live.run(options.steps)
            blocks.mark()
        live.free()
        return blocks
    pl.seed_everything(SEED)
    trainer_loop(entry, model, device).run_alone(blocks)
    return blocks


if __name__ == "__main__":
    main()
