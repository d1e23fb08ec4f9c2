"""Time and host memory of checkpoints: MCoreStrategy, torch.save, DDPStrategy.

All variants save and load the state of the same model in the same processes, in turns. Only ratios
within one run mean something; absolute times depend on the machine and its disk. Files are read
back from the page cache.

    python benchmarks/checkpoint.py --layouts dp1 dp2 --json checkpoint.json

Variants of a save:

* ``sync``: ``trainer.save_checkpoint`` under MCoreStrategy;
* ``async``: the same with ``async_save``, until the call returns; ``async all``: until the
  checkpoint is complete, without training meanwhile;
* ``torch``: ``torch.save`` of as many bytes on each rank, to a file of its own, and ``fsync``;
* ``DDP``: ``trainer.save_checkpoint`` under DDPStrategy, which does not wait for the disk.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy
from loops import TrainerLoop
from overhead import LAYOUTS, _whole_model

from gpt import GPT, SIZES, batches
from lightning_mcore import MCoreStrategy
from ranks import be_quiet, become_rank, free_port

MIB = 2**20


def measure(rank: int, options: argparse.Namespace, layout: str, out: str) -> None:
    """Runs the rounds of one layout on one rank; rank zero writes the result to ``out``."""
    sizes, size = LAYOUTS[layout], SIZES[options.size]
    become_rank(rank, _ranks(layout), options.port)
    be_quiet()
    torch.set_num_threads(1)
    strategy = MCoreStrategy(
        sizes["tp"],
        sizes["pp"],
        sizes.get("vpp"),
        micro_batch_size=size.micro_batch if sizes["pp"] > 1 else None,
        async_save=True,
    )
    replica = rank // sizes["tp"] % sizes["dp"]
    loader = partial(batches, size, replicas=sizes["dp"], replica=replica)
    module = GPT(size, lambda trainer, factory: trainer.strategy.build(factory))
    loop = TrainerLoop(strategy, module, loader(), torch.device("cpu"))
    loop.start()
    loop.run(1)
    ddp_loop = None
    if sizes["tp"] * sizes["pp"] == 1:
        ddp_module = GPT(size, partial(_whole_model, fields=module.fields))
        ddp_loop = TrainerLoop(DDPStrategy(), ddp_module, loader(), torch.device("cpu"))
        ddp_loop.start()
        ddp_loop.run(1)
    folder = Path(options.folder)
    variants = _variants(strategy, loop, ddp_loop, folder, rank)
    rows: list[dict[str, list[float]]] = []
    for number in range(options.rounds + 1):
        row = {name: _measured(action) for name, action in variants.items()}
        # Started by the save in the background, ends with it.
        row["save async all"][0] += row["save async"][0]
        row["save async all"][1] = max(row["save async"][1], row["save async all"][1])
        # The first round warms up: pages of files, the allocator, imports.
        if number:
            rows.append(row)
    shard = sum(file.stat().st_size for file in (folder / "ours.ckpt").glob(f"__{rank}_*.distcp"))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (rows, shard))
    if rank == 0:
        parameters = sum(p.numel() for p in module.parameters())
        result = {"layout": layout, "parameters_per_rank": parameters, **_joined(of_ranks)}
        Path(out).write_text(json.dumps(result))
    for running in (ddp_loop, loop):
        if running is not None:
            running.stop()


def _variants(
    strategy: MCoreStrategy, loop: TrainerLoop, ddp: TrainerLoop | None, folder: Path, rank: int
) -> dict[str, Callable[[], Any]]:
    """What is measured, in the order of a round."""

    def save(*, background: bool) -> None:
        strategy._async_save = background
        loop.trainer.save_checkpoint(folder / "ours.ckpt")

    own = _share(strategy, rank)
    file = folder / f"torch-{rank}.pt"

    def torch_save() -> None:
        with open(file, "wb") as stream:
            torch.save(own, stream)
            os.fsync(stream.fileno())
        dist.barrier()

    def torch_load() -> None:
        loaded = torch.load(file, weights_only=True)
        with torch.no_grad():
            for target, value in zip(own, loaded, strict=True):
                target.copy_(value)
        dist.barrier()

    variants: dict[str, Callable[[], Any]] = {
        "save sync": partial(save, background=False),
        "save torch": torch_save,
        "save async": partial(save, background=True),
        "save async all": strategy.finish_save,
        "load ours": lambda: strategy.load_checkpoint(folder / "ours.ckpt"),
        "load torch": torch_load,
    }
    if ddp is not None:
        path, plain = folder / "ddp.ckpt", ddp.trainer.strategy

        def ddp_load() -> None:
            loaded = plain.load_checkpoint(path)
            plain.load_model_state_dict(loaded)
            plain.load_optimizer_state_dict(loaded)

        variants["save DDP"] = lambda: ddp.trainer.save_checkpoint(path)
        variants["load DDP"] = ddp_load
    return variants


def _share(strategy: MCoreStrategy, rank: int) -> list[torch.Tensor]:
    """Tensors with as many bytes as this rank writes: its part of the weights, its moments."""
    run = strategy._model_run
    params = [p.detach() for chunk in run.inner for p in chunk.parameters()]
    total, seen, own = sum(p.numel() for p in params), 0, []
    replicas, place = strategy.layout.dp, strategy.layout.dp_rank
    for param in params:
        if place * total <= seen * replicas < (place + 1) * total:
            own.append(param)
        seen += param.numel()
    engine = run.optimizer.engine
    for part in getattr(engine, "chained_optimizers", [engine]):
        for entry in part.optimizer.state.values():
            own += [value for value in entry.values() if value.dim() > 0]
    return own


def _measured(action: Callable[[], Any]) -> list[float]:
    """Seconds until all ranks are done, and by how many bytes this process grew meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Sets the high-water mark of resident memory to what is resident now (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - start
    return [seconds, max(0, _resident("VmHWM") - before)]


def _resident(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) * 1024


def _joined(of_ranks: list[Any]) -> dict[str, Any]:
    """Seconds of the slowest rank in each round; memory of each rank against its shard."""
    names = list(of_ranks[0][0][0])
    rounds = range(len(of_ranks[0][0]))
    return {
        "seconds": {n: [max(rows[i][n][0] for rows, _ in of_ranks) for i in rounds] for n in names},
        "grown": {n: [[rows[i][n][1] for i in rounds] for rows, _ in of_ranks] for n in names},
        "shards": [shard for _, shard in of_ranks],
    }


def _ranks(layout: str) -> int:
    sizes = LAYOUTS[layout]
    return sizes["tp"] * sizes["pp"] * sizes["dp"]


def _launch(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    options.port = free_port()
    with tempfile.TemporaryDirectory(dir=options.parent) as folder:
        options.folder = folder
        out = os.path.join(folder, "result.json")
        arguments = (options, layout, out)
        mp.start_processes(measure, args=arguments, nprocs=_ranks(layout), start_method="fork")
        return dict(json.loads(Path(out).read_text()))


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:6.2f} [{low:.2f}, {high:.2f}]"


_COMPARED = (
    ("save sync", "save torch"),
    ("save sync", "save DDP"),
    ("save async", "save sync"),
    ("save async all", "save sync"),
    ("load ours", "load torch"),
    ("load ours", "load DDP"),
)


def summarise(result: dict[str, Any]) -> list[str]:
    """Lines of the tables for one result."""
    seconds, shards = result["seconds"], result["shards"]
    millions = result["parameters_per_rank"] / 1e6
    files = ", ".join(f"{shard / MIB:.0f} MiB" for shard in shards)
    lines = [f"{result['layout']}: {millions:.1f} M parameters on rank 0; ranks write {files}"]
    for one, other in _COMPARED:
        if other in seconds:
            ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
            lines.append(f"  time    {one:>14} / {other:10} {_spread(ratios)}")
    for name, values in seconds.items():
        lines.append(f"  seconds {name:>14}   {'':10} {_spread(values)}")
    for name, of_ranks in result["grown"].items():
        most = [
            max(grown[i] / shard for grown, shard in zip(of_ranks, shards, strict=True))
            for i in range(len(of_ranks[0]))
        ]
        lines.append(f"  memory  {name:>14} / {'shard':10} {_spread(most)}")
    return lines


def main() -> None:
    """Measures the layouts asked for and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=["dp1", "dp2"])
    add("--size", choices=SIZES, default="100m")
    add(
        "--rounds", type=int, default=7, help="turns of each variant, after one that is not counted"
    )
    add("--parent", type=Path, help="where to write; default: the system's temporary folder")
    add("--json", type=Path, metavar="PATH", help="write all figures to a file")
    options = parser.parse_args()
    print("median [quartiles] of all rounds; memory: growth of the process that grew most")
    results = []
    for layout in options.layouts:
        results.append(_launch(options, layout))
        print("\n".join(summarise(results[-1])), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
