"""What each communication switch is worth on the GPUs of one machine, item by item.

    python benchmarks/several_gpus.py --items links tp pp dp moe --devices 2 \\
        --json several_gpus.json --markdown several_gpus.md --time-limit 400

Every case runs in rank processes of its own and takes turns, block by block, with the baseline of
its group: A B B A ... What fails is written down with its error, and the rest goes on; what may not
end within ``--time-limit`` is not begun. The JSON is whole after every case; the table ends with
what was measured against what was wanted, and what is missing. On a machine without GPUs,
`--accelerator cpu --model tiny` runs the same code over gloo, which shows that it works and nothing
else.

Items: links (topology, bandwidths), tp (userbuffers), pp (schedules), dp (Lightning's DDP and FSDP
against Megatron's), moe (dispatchers, overlap), layouts (combined, by number of GPUs), scaling (1,
2, 4... GPUs), tune (`lightning-mcore tune`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# NVLink multicast can take the GPUs of a shared host out of service: it stays off in NCCL,
# symmetric memory, NVSHMEM and userbuffers, in this process and in those that it starts.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
os.environ.setdefault("UB_SKIPMC", "1")
# Asking whether there are GPUs then leaves this process free to fork ranks that use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import argparse
import contextlib
import dataclasses
import importlib
import logging
import multiprocessing
import platform
import time
import traceback
import warnings
from importlib.util import find_spec

import began
import torch
from multigpu import items, layouts, training, tuned
from multigpu.bench import Bench, Clock, Results
from multigpu.cases import Case, Group, Plan
from multigpu.compare import run_group, run_once
from multigpu.links import SIZES, measure_links
from multigpu.report import as_markdown
from multigpu.teams import start_method

from lightning_mcore.experts.probe import probe_deep_ep
from lightning_mcore.topology_probe import read_hardware
from lightning_mcore.version import package_versions

GROUPS = {
    "tp": items.tensor_parallel,
    "pp": items.pipeline,
    "dp": items.data_parallel,
    "moe": items.experts,
    "layouts": layouts.layouts,
    "scaling": layouts.scaling,
}
ITEMS = ("links", *GROUPS, "tune")
_TINY = {
    "pp": {"layers": 16},
    # So that tp = 8 divides them.
    "layouts": {"heads": 8, "groups": 8, "head_dim": 8},
}
_ON_GPUS = ("cuda_graphs", "gradient_accumulation_fusion")
"""Arguments of the strategy that tiny cases on CPU do without."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--items", nargs="+", choices=ITEMS, default=["links", "tp", "pp", "dp", "moe"])
    add("--devices", type=int, default=2)
    add("--accelerator", choices=("gpu", "cpu"), default="gpu")
    add("--model", choices=("full", "tiny"), default="full", help="tiny: to try the code")
    add(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="cases whose name holds one of these, and baselines",
    )
    add("--groups", nargs="+", metavar="TEXT", help="groups whose name holds one of these")
    add("--list", action="store_true", help="print the cases of the items and run nothing")
    add("--rounds", type=int, help="turns of each side, instead of what an item wants")
    add("--steps", type=int, help="steps in a turn, instead of what an item wants")
    add("--json", type=Path, metavar="PATH")
    add("--markdown", type=Path, metavar="PATH")
    add("--traces", type=Path, metavar="FOLDER", help="keep the traces of pp and dp")
    add("--time-limit", type=float, default=400.0, help="seconds, imports included")
    add("--case-limit", type=float, default=90.0, help="seconds for one answer of a case's ranks")
    add("--start", choices=("auto", "fork", "spawn"), default="auto", help="how ranks start")
    return parser.parse_args()


def _tiny(group: Group, accelerator: str) -> Group:
    """The same cases on a model for tests, on CPU without what would refuse to run there."""

    def small(case: Case) -> Case:
        dropped = _ON_GPUS if accelerator == "cpu" else ()
        strategy = {name: v for name, v in case.strategy.items() if name not in dropped}
        changes: dict[str, Any] = dict(_TINY.get(group.item, {}))
        if group.item == "layouts":
            changes["layers"] = max(2, case.pp * case.vpp)
        if "moe" in case.model:
            changes |= {"experts": 8, "experts_per_token": 2}
        return dataclasses.replace(case, model="tiny", changes=changes, strategy=strategy)

    return dataclasses.replace(
        group, baseline=small(group.baseline), variants=tuple(map(small, group.variants))
    )


def _groups(item: str, options: argparse.Namespace) -> list[tuple[Group, Plan]]:
    """The groups of an item that were asked for."""
    return [
        _chosen(group, plan, options)
        for group, plan in GROUPS[item](options.devices)
        if options.groups is None or any(text in group.name for text in options.groups)
    ]


def _chosen(group: Group, plan: Plan, options: argparse.Namespace) -> tuple[Group, Plan]:
    if options.model == "tiny":
        group = _tiny(group, options.accelerator)
    if options.only:
        named = [v for v in group.variants if any(text in v.name for text in options.only)]
        group = dataclasses.replace(group, variants=tuple(named))
    changes = {name: getattr(options, name) for name in ("rounds", "steps")}
    return group, dataclasses.replace(plan, **{k: v for k, v in changes.items() if v is not None})


def main() -> None:
    """Runs the items asked for."""
    options = _parse()
    if options.list:
        for item in options.items:
            for group, _ in _groups(item, options) if item in GROUPS else ():
                print(f"{item}: {group.name}: {group.baseline.name} against")
                for case in group.variants:
                    print(f"    {case.name}")
        return
    clock = Clock(began.START, options.time_limit)
    on_gpu = options.accelerator == "gpu"
    if on_gpu:
        # What the engine imports late; ranks inherit it.
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("transformer_engine.pytorch")
        if find_spec("deep_ep") is not None and {"moe", "layouts"} & set(options.items):
            probe_deep_ep()  # In a process of its own; forked ranks know the answer.
    clock.say("imports are done")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    method = options.start
    if method == "auto":
        method = start_method(training.probe_gpu) if on_gpu else "fork"
    gpus = read_hardware(os.environ).gpus if on_gpu else ()
    setting = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "gpu": gpus[0].name if gpus else None,
        **package_versions(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "devices": options.devices,
        "accelerator": options.accelerator,
        "model": options.model,
        "host": platform.machine(),
        "start": method,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }
    results = Results(options.json, setting)
    clock.say(f"ranks start by {method}")
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        world=options.devices,
        accelerator=options.accelerator,
        method=method,
        clock=clock,
        results=results,
        case_limit_s=options.case_limit,
        traces=options.traces,
    )
    for item in options.items:
        start = clock.passed_s
        try:
            _run_item(item, bench, options)
        except Exception as error:  # What is wrong with one item must not cost the others.
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            row = {"item": item, "group": item, "case": item, "status": "failed"}
            results.add(row | {"reason": reason})
            # Ranks that it left behind.
            for process in multiprocessing.active_children():
                process.kill()
        clock.say(f"{item} took {clock.passed_s - start:.1f} s")
        _write_table(results, options.markdown)
    clock.say("done")
    print(_write_table(results, options.markdown), flush=True)


def _run_item(item: str, bench: Bench, options: argparse.Namespace) -> None:
    if item == "links":
        largest = max(SIZES) if options.accelerator == "gpu" else 2**20
        run_once(bench, item, measure_links, options.accelerator, largest, limit_s=60.0)
    elif item == "tune":
        tuned.run(bench, tiny=options.model == "tiny")
    else:
        for group, plan in _groups(item, options):
            world = group.world or options.devices
            run_group(dataclasses.replace(bench, world=world), group, plan)


def _write_table(results: Results, path: Path | None) -> str:
    """The table so far; a row that it cannot show costs the table only."""
    try:
        text = as_markdown(results.content)
    except Exception:
        return traceback.format_exc()
    if path is not None:
        path.write_text(text)
    return text


if __name__ == "__main__":
    main()
