"""Time and device synchronisations per step: MCoreStrategy, a direct loop, DDPStrategy.

All loops run in the same processes and take turns block by block, so that they meet the same
machine. Only ratios within one run mean something; absolute times depend on the machine and on
what else it does.

    python benchmarks/overhead.py --layouts dp1 dp2 tp2 pp2vpp2 --json overhead.json
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy
from loops import DirectLoop, TrainerLoop, check_same_settings
from syncs import Syncs

from gpt import GPT, SIZES, batches
from lightning_mcore import MCoreStrategy
from lightning_mcore.stage import stages_of
from ranks import be_quiet, become_rank, free_port, without_room_for_frames

LAYOUTS: dict[str, dict[str, int]] = {
    "dp1": {"tp": 1, "pp": 1, "dp": 1},
    "dp2": {"tp": 1, "pp": 1, "dp": 2},
    "tp2": {"tp": 2, "pp": 1, "dp": 1},
    "pp2": {"tp": 1, "pp": 2, "dp": 1},
    "pp2vpp2": {"tp": 1, "pp": 2, "vpp": 2, "dp": 1},
}
_SWITCHES = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "bucket_size",
    "grad_reduce_in_fp32",
)
_CHECKED_STEPS = 5


def measure(rank: int, options: argparse.Namespace, layout: str, size_name: str, out: str) -> None:
    """Runs one comparison on one rank; rank zero writes the result to ``out``."""
    sizes, size = LAYOUTS[layout], SIZES[size_name]
    world = sizes["tp"] * sizes["pp"] * sizes["dp"]
    become_rank(rank, world, options.port)
    be_quiet()
    on_gpu = options.accelerator == "gpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if options.without_room:
        without_room_for_frames()
    strategy = MCoreStrategy(
        sizes["tp"],
        sizes["pp"],
        sizes.get("vpp"),
        micro_batch_size=size.micro_batch if sizes["pp"] > 1 else None,
    )
    replica = rank // sizes["tp"] % sizes["dp"]
    loader = partial(batches, size, replicas=sizes["dp"], replica=replica)
    module = GPT(size, lambda trainer, factory: trainer.strategy.build(factory))
    mcore = TrainerLoop(strategy, module, loader(), device, depth=options.depth)
    mcore.start()
    pipeline: Any = module.model
    switches = {name: getattr(strategy.switches, name).effective for name in _SWITCHES}
    weights = [chunk.state_dict() for chunk in pipeline.chunks]
    direct = DirectLoop(size, stages_of(strategy.layout), module.fields, switches, weights, device)
    check_same_settings(direct, strategy._model_run.chunks[0])
    loops: dict[str, Any] = {"MCoreStrategy": mcore, "direct": direct}
    _check_losses(mcore, direct)
    if sizes["tp"] * sizes["pp"] == 1 and not options.without_ddp:
        ddp_module = GPT(size, partial(_whole_model, fields=module.fields))
        loops["DDPStrategy"] = TrainerLoop(
            DDPStrategy(), ddp_module, loader(), device, depth=options.depth
        )
        loops["DDPStrategy"].start()
    result = {
        "layout": layout,
        "size": size_name,
        "parameters_per_rank": sum(p.numel() for p in pipeline.parameters()),
        **_time_blocks(loops, options, device),
        "syncs": _count_syncs(loops, options.count, device),
    }
    if options.profile and rank == options.profile_rank:
        _profile(loops, options)
    elif options.profile:
        for loop in (mcore, direct):
            loop.run(options.profile)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    for name in ("DDPStrategy", "MCoreStrategy"):
        if name in loops:
            loops[name].stop()


def _whole_model(trainer: pl.Trainer, factory: Any, *, fields: dict[str, Any]) -> Any:
    (stage,) = stages_of(_whole_layout())
    return factory(stage, **fields)


def _whole_layout() -> Any:
    from lightning_mcore.config import ParallelSizes
    from lightning_mcore.layout import resolve_layout

    return resolve_layout(ParallelSizes(), 1, 0)


def _check_losses(mcore: TrainerLoop, direct: DirectLoop) -> None:
    """Trains a few steps from equal weights: the loops must do the same work."""
    for loop in (mcore, direct):
        loop.keep_losses = True
        loop.run(_CHECKED_STEPS)
        loop.keep_losses = False
    for mine, theirs in zip(mcore.losses, direct.losses, strict=False):
        assert torch.allclose(mine.float(), theirs.float(), rtol=1e-5), (mine, theirs)


def _time_blocks(
    loops: dict[str, Any], options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Per step of each block, of the slowest rank: seconds, wall and processor, and page faults.

    Loops take turns.
    """
    for loop in loops.values():
        loop.run(options.warmup)
    rows = []
    for _ in range(options.blocks):
        row = []
        for loop in loops.values():
            _settle(device)
            start, start_busy, start_faults = time.perf_counter(), time.process_time(), _faults()
            loop.run(options.steps)
            if device.type != "cpu":
                torch.cuda.synchronize()
            end, end_busy, end_faults = time.perf_counter(), time.process_time(), _faults()
            row.append([end - start, end_busy - start_busy, end_faults - start_faults])
        rows.append(row)
    per_step = torch.tensor(rows, dtype=torch.float64, device=device) / options.steps
    dist.all_reduce(per_step, op=dist.ReduceOp.MAX)
    return {
        kind: {name: per_step[:, index, column].tolist() for index, name in enumerate(loops)}
        for column, kind in enumerate(("wall", "busy", "faults"))
    }


def _faults() -> int:
    """Minor page faults of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()
    dist.barrier()


def _count_syncs(loops: dict[str, Any], steps: int, device: torch.device) -> dict[str, Any]:
    """Synchronisations per step by kind and call site, on the rank where the host waits most."""
    counts = {}
    for name, loop in loops.items():
        syncs = Syncs()
        loop.run(steps, partial(syncs.counting, device))
        counts[name] = {
            kind: {site: count / steps for site, count in getattr(syncs, kind).items()}
            for kind in ("device", "uploads", "host")
        }
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, counts[name])
        counts[name] = max(of_ranks, key=_waits)
    return counts


def _waits(counts: dict[str, dict[str, float]]) -> float:
    return sum(sum(counts[kind].values()) for kind in ("device", "uploads"))


def _profile(loops: dict[str, Any], options: argparse.Namespace) -> None:
    for name in ("MCoreStrategy", "direct"):
        profile = cProfile.Profile()
        loops[name].run(options.profile, lambda profile=profile: profile)
        print(f"\n{name}, {options.profile} steps, rank {options.profile_rank}:")
        stats = pstats.Stats(profile)
        stats.sort_stats(options.sort).print_stats(options.top)
        stats.dump_stats(f"overhead-{name}.prof")


def _launch(options: argparse.Namespace, layout: str, size: str) -> dict[str, Any]:
    sizes = LAYOUTS[layout]
    options.port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        mp.start_processes(
            measure,
            args=(options, layout, size, out),
            nprocs=sizes["tp"] * sizes["pp"] * sizes["dp"],
            # CUDA cannot be used in a forked process.
            start_method="spawn" if options.accelerator == "gpu" else "fork",
        )
        return dict(json.loads(Path(out).read_text()))


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def summarise(result: dict[str, Any]) -> list[str]:
    """Lines of the table for one result; also adds their figures to it."""
    result["summary"] = {}
    lines = []
    for name in result["wall"]:
        figures: dict[str, Any] = {
            kind: sum(sites.values()) for kind, sites in result["syncs"][name].items()
        }
        line = f"{result['layout']:8} {result['size']:6} {name:14}"
        for kind in ("wall", "busy"):
            mine, direct = result[kind][name], result[kind]["direct"]
            pairs = list(zip(mine, direct, strict=True))
            figures[f"{kind}_ms"] = spread([1e3 * value for value in mine])
            figures[f"{kind}_ratio"] = spread([a / b for a, b in pairs])
            figures[f"{kind}_more_ms"] = spread([1e3 * (a - b) for a, b in pairs])
            ratio, low, high = figures[f"{kind}_ratio"]
            more = figures[f"{kind}_more_ms"][0]
            line += f" | {figures[f'{kind}_ms'][0]:8.2f} {ratio:6.3f} [{low:5.3f}, {high:5.3f}]"
            line += f" {more:+6.2f}"
        waits = [figures[kind] for kind in ("device", "uploads", "host")]
        figures["faults"] = spread(result["faults"][name])
        counts = " ".join(f"{value:5.1f}" for value in waits)
        lines.append(f"{line} | {counts} | {figures['faults'][0]:6.0f}")
        result["summary"][name] = figures
    return lines


_TIMES = f"{'ms':>8} {'ratio [quartiles]':>21} {'more':>6}"
HEADER = (
    f"{'':30} | {'wall clock of a step':^37} | {'processor time of a step':^37} |{'':19}|\n"
    f"{'layout':8} {'model':6} {'loop':14} | {_TIMES} | {_TIMES} | waits uplds  host | faults"
)


def main() -> None:
    """Measures the layouts and sizes asked for and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=["dp1", "dp2", "tp2", "pp2vpp2"])
    add("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    add("--blocks", type=int, default=20, help="turns of each loop")
    add("--steps", type=int, default=20, help="steps per turn")
    add("--warmup", type=int, default=10, help="steps of each loop before the first turn")
    add("--count", type=int, default=4, help="further steps in which synchronisations are counted")
    add("--accelerator", choices=("cpu", "gpu"), default="cpu")
    add("--without-ddp", action="store_true", help="leave out Lightning's DDPStrategy")
    add("--depth", type=int, default=0, help="further calls on the stack below each Trainer")
    add("--without-room", action="store_true", help="without room for frames (frames.py)")
    add("--sites", action="store_true", help="print where the host waits")
    add("--profile", type=int, default=0, metavar="STEPS", help="profile so many steps on one rank")
    add("--profile-rank", type=int, default=0)
    add("--sort", default="tottime")
    add("--top", type=int, default=40)
    add("--json", type=Path, metavar="PATH", help="write all figures to a file")
    options = parser.parse_args()
    print(
        "ratio: to the direct loop, block by block. more: ms beyond it. Per step, waits: reads of\n"
        "device values, for which the host waits; uplds: blocking copies to the device; host:\n"
        "reads of host tensors (gloo votes, step counts), which wait for no device; faults: page\n"
        "faults."
    )
    print(HEADER, flush=True)
    results = []
    for size in options.sizes:
        for layout in options.layouts:
            result = _launch(options, layout, size)
            print("\n".join(summarise(result)), flush=True)
            results.append(result)
            if options.sites:
                _print_sites(result)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


def _print_sites(result: dict[str, Any]) -> None:
    for name, kinds in result["syncs"].items():
        for kind, sites in kinds.items():
            for site, count in sorted(sites.items()):
                print(f"    {name:14} {kind:8} {count:5.2f}  {site}")


if __name__ == "__main__":
    main()
