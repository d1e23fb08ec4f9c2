"""Trains one GPT with several backends in turns: step time, memory, start-up time.

Backends are a direct loop on the engine (mcore-raw), a Trainer with MCoreStrategy
(lightning-mcore), and a Trainer with Lightning's own strategies on a plain torch model with
scaled_dot_product_attention, torch.compile and fused AdamW (lightning-ddp, lightning-fsdp). All
clip gradients at 1.0 and update fp32 parameters by AdamW with fp32 moments.

    python benchmarks/train_gpt.py --model gpt2-xl --json gpt2.json --markdown gpt2.md
    python benchmarks/train_gpt.py --model llama-8b-slice --backends lightning-mcore mcore-raw \\
        --variant 'graphs={"strategy": {"cuda_graphs": "local"}}' --variant 'plain={}'
    python benchmarks/train_gpt.py --model tiny --accelerator cpu
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import began
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from backends import (
    BACKENDS,
    OURS,
    RAW,
    SEED,
    Entry,
    Live,
    Memory,
    build,
    choose_reference,
    collect,
    differences,
    forget,
    now,
    plan_groups,
    refusal,
    selected_attention,
)
from kernels import profile_steps
from models import COMPILE, MODELS, Model, model_flops, parameter_count, uses_te
from train_report import as_markdown, plot, summarise

from lightning_mcore.flops import peak_flops
from lightning_mcore.version import package_versions
from ranks import be_quiet, become_rank, free_port, process_group

CHECKED_STEPS = 3
"""First steps, in which losses are compared; no block holds them, since the engine never overlaps
in the first."""
_GRACE_S = 60.0
"""How long after the time limit ranks may take for what they are at."""


class Run:
    """One comparison on one rank; rank zero prints and writes.

    Args:
        options: Of the command line.
        model: Dimensions.
        entries: What to compare.
        device: Of this rank.
    """

    def __init__(
        self, options: Any, model: Model, entries: Sequence[Entry], device: torch.device
    ) -> None:
        self._options, self._model, self._device = options, model, device
        refused = {
            entry.name: text
            for entry in entries
            if (
                text := refusal(
                    entry, model, devices=dist.get_world_size(), on_gpu=device.type != "cpu"
                )
            )
        }
        self._entries = [entry for entry in entries if entry.name not in refused]
        self._reference = choose_reference(self._entries, options.reference)
        self._settings: dict[str, Any] = {}
        self.result: dict[str, Any] = {
            "about": _about(options, model, device, dist.get_world_size()),
            "reference": self._reference.name,
            "backends": {
                entry.name: {
                    "status": "cannot run" if entry.name in refused else "not run",
                    "error": refused.get(entry.name, ""),
                    **dataclasses.asdict(entry),
                }
                for entry in entries
            },
            "groups": [],
            "checks": [],
        }

    def run(self) -> None:
        """Runs all groups, and goes on after those that fail."""
        on_gpu = self._device.type != "cpu"
        total = torch.cuda.get_device_properties(self._device).total_memory / 2**30 if on_gpu else 0
        groups = plan_groups(
            self._entries,
            mode=self._options.mode,
            reference=self._reference,
            total_gib=total if on_gpu else None,
            model=self._model,
            replicas=dist.get_world_size(),
        )
        self._log("groups: " + " | ".join(", ".join(e.name for e in group) for group in groups))
        for _ in range(self._options.rounds):
            for group in groups:
                if self._late("groups"):
                    return
                self._run_group(group)

    def _run_group(self, group: Sequence[Entry]) -> None:
        live: dict[str, Live] = {}
        record: dict[str, Any] = {"members": [], "ms": {}}
        self.result["groups"].append(record)
        for entry in group:
            if self._late(entry.name):
                break
            if self.result["backends"][entry.name]["status"] == "failed":
                continue
            started = self._attempt(entry, self._start)
            if started is not None:
                live[entry.name] = started
                record["members"].append(entry.name)
                record["ms"][entry.name] = []
        if list(live) == [self._reference.name] != [entry.name for entry in group]:
            self._log("the other one failed: no blocks")
            blocks = 0
        else:
            blocks = self._options.blocks
        for block in range(blocks):
            if not live or self._late(f"block {block}"):
                break
            for name in list(live):
                seconds = self._attempt(live[name].entry, self._block, live[name])
                if seconds is None:
                    live.pop(name).abandon()
                else:
                    record["ms"][name].append(1e3 * seconds)
            shown = ", ".join(f"{n} {ms[-1]:.2f}" for n, ms in record["ms"].items() if ms)
            self._log(f"block {block}: ms per step {shown}")
            self.write()
        for name in list(live) if self._options.profile else []:
            if not self._late(f"profile of {name}"):
                found = self._attempt(live[name].entry, self._profile, live[name])
                if found is not None:
                    self.result["backends"][name]["profile"] = found
        for name in reversed(list(live)):
            self._attempt(live[name].entry, self._free, live.pop(name))
        collect(compiled=True)
        if self._device.type != "cpu":
            record["left_gib"] = torch.cuda.memory_allocated() / 2**30
            # Pools of graphs keep what nothing is allocated from.
            record["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
            self._log(
                f"all freed: {record['left_gib']:.2f} GiB still allocated,"
                f" {record['reserved_gib']:.2f} GiB reserved"
            )
        self.write()

    def _attempt(self, entry: Entry, work: Callable[..., Any], *args: Any) -> Any:
        """Runs ``work`` on every rank; ``None`` if it failed on any. Collective over the world."""
        text, done = "", None
        try:
            done = work(entry, *args)
        except Exception as error:
            text = forget(error)
        texts = [""] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        failed = [f"rank {rank}: {found}" for rank, found in enumerate(texts) if found]
        if not failed:
            return done if done is not None else True
        done = None
        collect()
        # Often the same on all ranks; the first is enough then.
        told = failed[0] if len(failed) == len(texts) else "; ".join(failed)
        self._log(f"{entry.name} FAILED: {told}")
        self.result["backends"][entry.name].update(status="failed", error=told)
        self.write()
        return None

    def _start(self, entry: Entry) -> Live:
        self._log(f"{entry.name}: starts")
        memory = Memory(self._device)
        memory.start()
        begin = now(self._device)
        live = build(entry, self._model, self._device)
        try:
            self._warm_up(entry, live, memory, begin)
        except BaseException:
            live.abandon()
            raise
        return live

    def _warm_up(self, entry: Entry, live: Live, memory: Memory, begin: float) -> None:
        options, device = self._options, self._device
        loop = live.loop
        loop.keep_losses = True
        built = now(device)
        live.run(1)
        first = now(device)
        live.run(CHECKED_STEPS - 1)
        loop.keep_losses = False
        live.run(max(options.warmup - CHECKED_STEPS, 0) or 1)
        warm = now(device)
        start = {
            "losses": [float(loss) for loss in loop.losses],
            "startup_s": {
                "built": built - begin,
                "first_step": first - begin,
                "warm": warm - begin,
            },
            "memory_gib": memory.read(),
            "attention": selected_attention() if entry.backend in (OURS, RAW) else None,
        }
        found = self.result["backends"][entry.name]
        found["starts"] = [*found.get("starts", []), start]
        found.update({"status": "ok", **start} if len(found["starts"]) == 1 else {"status": "ok"})
        gib = start["memory_gib"]
        self._log(
            f"{entry.name}: built in {built - begin:.1f} s, first step done after"
            f" {first - begin:.1f} s, warm after {warm - begin:.1f} s"
            + (f"; peak {gib['peak']:.1f} GiB, attention {start['attention']}" if gib else "")
        )
        self._check(entry, live)
        self.write()

    def _check(self, entry: Entry, live: Live) -> None:
        """Compares losses and settings with those of the same variant on the other engine loop."""
        self._settings[entry.name] = live.settings
        for other in self._entries:
            pair = {entry.backend, other.backend} == {OURS, RAW}
            if not pair or other.variant != entry.variant or other.name not in self._settings:
                continue
            if len(self.result["backends"][entry.name]["starts"]) > 1:
                continue
            mine = self.result["backends"][entry.name]["losses"]
            theirs = self.result["backends"][other.name]["losses"]
            apart = [abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True)]
            # The first losses come from equal weights and one forward pass. After that, kernels
            # that add in any order may round bf16 gradients otherwise.
            limits = [1e-5, *[1e-5 if entry.precision == "32-true" else 1e-3] * (len(apart) - 1)]
            check = {
                "backends": [entry.name, other.name],
                "losses_apart": apart,
                "losses_agree": all(a <= limit for a, limit in zip(apart, limits, strict=True)),
                "settings_apart": differences(live, self._settings[other.name]),
            }
            self.result["checks"].append(check)
            verdict = "agree" if check["losses_agree"] else "DIFFER"
            self._log(f"losses of {entry.name} and {other.name} {verdict}: {mine}, {theirs}")
            if check["settings_apart"]:
                self._log(f"SETTINGS DIFFER: {check['settings_apart']}")

    def _block(self, entry: Entry, live: Live) -> float:
        """Seconds per step, of the slowest rank."""
        dist.barrier()
        start = now(self._device)
        live.run(self._options.steps)
        return self._max((now(self._device) - start) / self._options.steps)

    def _profile(self, entry: Entry, live: Live) -> Any:
        trace = self._options.trace
        if trace is not None:
            trace = trace.with_name(f"{trace.stem}-{entry.name.replace(':', '-')}.json")
        found = profile_steps(live, 3, self._device, trace if dist.get_rank() == 0 else None)
        self._log(f"{entry.name}: profiled")
        found["kernels"] = found["kernels"][:100]
        return found

    def _free(self, entry: Entry, live: Live) -> None:
        live.free()

    def _max(self, value: float) -> float:
        box = torch.tensor(float(value), dtype=torch.float64, device=self._device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)

    def _late(self, what: str) -> bool:
        limit = self._options.time_limit
        late = limit is not None and time.monotonic() - self._options.began > limit
        if self._max(late):
            self._log(f"time limit of {limit} s: no more {what}")
            return True
        return False

    def _log(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[{time.monotonic() - self._options.began:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        """Writes what is known so far, figures and tables included: this process may be killed."""
        if dist.get_rank() == 0:
            result = copy.deepcopy(self.result)
            summarise(result)
            _put(self._options.out, json.dumps(result, indent=1, default=str))
            if self._options.markdown is not None:
                _put(self._options.markdown, as_markdown([result], self._options.top))


def _put(path: Path, text: str) -> None:
    """Puts a whole file in place at once."""
    part = Path(f"{path}.part")
    part.write_text(text)
    part.replace(path)


def measure(rank: int, options: Any, model: Model, entries: Sequence[Entry], world: int) -> None:
    """Runs the comparison on one rank."""
    if world and "RANK" not in os.environ:
        become_rank(rank, world, options.port)
    be_quiet(logging.INFO if options.verbose and rank == 0 else logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with process_group(options.accelerator) as device:
        if device.type == "cuda":
            # What the first use of a device takes is nobody's start-up time.
            some = torch.ones(256, 256, dtype=torch.bfloat16, device=device)
            dist.all_reduce(some @ some)
            torch.cuda.synchronize()
        _measure(options, model, entries, device)


def _measure(options: Any, model: Model, entries: Sequence[Entry], device: torch.device) -> None:
    run = Run(options, model, entries, device)
    run.write()
    run.run()
    run.write()


def _about(options: Any, model: Model, device: torch.device, world: int) -> dict[str, Any]:
    on_gpu = device.type != "cpu"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "cpu"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": " ".join(["python", "benchmarks/train_gpt.py", *options.arguments]),
        "device": name,
        "devices": world,
        "peak_tflops": (peak_flops(name, "bf16") or 0.0) / 1e12 if on_gpu else None,
        "layers": "TransformerEngine" if uses_te() else "local",
        "versions": {
            **{key: str(value) for key, value in dict(package_versions()).items()},
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": dataclasses.asdict(model),
        "parameters": parameter_count(model),
        "flops_per_step": model_flops(model),
        "tokens_per_step": model.tokens,
        "microbatches": options.microbatches,
        "steps_per_block": options.steps,
        "warmup_steps": max(options.warmup, CHECKED_STEPS + 1),
        "seed": SEED,
    }


# ------------------------------------------------------------------------------ command line


def parse(arguments: Sequence[str]) -> tuple[Any, Model, list[Entry]]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2-xl")
    add("--layers", type=int, help="instead of the model's")
    add("--batch", type=int, help="samples per device and step, instead of the model's")
    add("--microbatches", type=int, default=1, help="parts of a step's batch")
    add("--seq", type=int, help="tokens per sample, instead of the model's")
    add("--backends", nargs="+", choices=BACKENDS, default=[OURS, RAW, "lightning-ddp"])
    add(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='{"strategy": {MCoreStrategy arguments}, "model": {TransformerConfig fields},'
        ' "precision": ..., "compile": ..., "backends": [...]}; without "backends", of'
        " lightning-mcore and mcore-raw",
    )
    add("--precision", help="bf16-mixed on GPUs, 32-true on CPU unless given")
    add("--compile", choices=COMPILE, default="blocks", help="of the plain torch model, on GPUs")
    add("--reference", metavar="BACKEND[:VARIANT]", help="what others are compared with")
    add(
        "--mode",
        choices=("auto", "together", "pairs", "solo"),
        default="auto",
        help="which backends live at the same time and take turns; auto: as many as fit",
    )
    add("--rounds", type=int, default=1, help="how often to go through all groups, built anew")
    add("--blocks", type=int, default=5, help="turns of each backend")
    add("--steps", type=int, default=10, help="steps per turn")
    add("--warmup", type=int, default=8, help="steps before the first turn, at least 4")
    add(
        "--time-limit",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds, imports included, after which nothing more starts; a minute later all is"
        " stopped",
    )
    add("--accelerator", choices=("cpu", "gpu"), default="gpu")
    add("--devices", type=int, default=1, help="processes to start, unless torchrun has")
    add("--profile", action="store_true", help="profile 3 steps of each backend after its turns")
    add("--trace", type=Path, help="keep the traces of --profile, one file per backend")
    add("--top", type=int, default=40, help="kernels in the tables of --profile")
    add("--json", type=Path, help="write all figures to a file, as they come")
    add("--markdown", type=Path, help="write the tables to a file")
    add("--plot", type=Path, metavar="PNG", help="draw step time by backend")
    add("--from-json", type=Path, nargs="+", help="measure nothing: tables and plot of these files")
    add("--verbose", action="store_true", help="print what Lightning and the strategy say")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    changes = {k: v for k in ("layers", "batch", "seq") if (v := getattr(options, k)) is not None}
    model = dataclasses.replace(MODELS[options.model], **changes)
    precision = options.precision or ("bf16-mixed" if options.accelerator == "gpu" else "32-true")
    shared: dict[str, Any] = {"precision": precision, "compile": options.compile}
    shared["microbatches"] = options.microbatches
    entries = []
    for variant in _variants(options.variant, parser) or [("", {})]:
        name, given = variant
        wanted = given.pop("backends", BACKENDS if not name else (OURS, RAW))
        entries += [Entry(b, name, **{**shared, **given}) for b in options.backends if b in wanted]
    for backend in options.backends:
        if backend not in {entry.backend for entry in entries}:
            entries.append(Entry(backend, **shared))
    if model.batch % options.microbatches:
        parser.error(f"--microbatches {options.microbatches} do not divide --batch {model.batch}")
    if options.microbatches > 1:
        size = model.batch // options.microbatches
        for entry in entries:
            if entry.backend in (OURS, RAW):
                entry.strategy.setdefault("micro_batch_size", size)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        parser.error(f"two variants have one name: {names}")
    if options.reference is not None and options.reference not in names:
        parser.error(f"--reference {options.reference} must be one of {names}")
    return options, model, entries


def _variants(texts: Sequence[str], parser: Any) -> list[tuple[str, dict[str, Any]]]:
    variants = []
    known = {"strategy", "model", "precision", "compile", "backends"}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given = json.loads(value)
        except ValueError as error:
            parser.error(f"--variant {text}: {error}; write NAME=JSON")
        if unknown := sorted(given.keys() - known):
            parser.error(f"--variant {name} has {unknown}, which is none of {sorted(known)}")
        variants.append((name, given))
    return variants


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; 1 if a backend failed or losses differ."""
    start = began.START if arguments is None else time.monotonic()
    options, model, entries = parse(sys.argv[1:] if arguments is None else arguments)
    if options.from_json:
        results = [json.loads(path.read_text()) for path in options.from_json]
        return _report(options, results)
    options.began = start
    with tempfile.TemporaryDirectory() as folder:
        options.out = options.json or Path(folder) / "result.json"
        if os.environ.get("RANK", "0") == "0":
            options.out.unlink(missing_ok=True)  # or that of an earlier run would be reported
        if "RANK" in os.environ:
            rank = int(os.environ["RANK"])
            measure(rank, options, model, entries, 0)
            if rank > 0:
                return 0
        else:
            _launch(options, model, entries)
        if not options.out.exists():
            return 1
        return _report(options, [json.loads(options.out.read_text())])


def _launch(options: Any, model: Model, entries: Sequence[Entry]) -> None:
    options.port = free_port()
    ranks = mp.start_processes(
        measure,
        args=(options, model, entries, options.devices),
        nprocs=options.devices,
        join=False,
        # CUDA cannot be used in a forked process.
        start_method="spawn" if options.accelerator == "gpu" else "fork",
    )
    limit = options.time_limit
    try:
        while not ranks.join(timeout=1.0):
            if limit is not None and time.monotonic() - options.began > limit + _GRACE_S:
                raise TimeoutError(f"not done {_GRACE_S:.0f} s after the time limit")
    except Exception as error:
        print(f"RANKS ENDED EARLY, what they wrote is below: {error}", flush=True)
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()


def _report(options: Any, results: list[dict[str, Any]]) -> int:
    for result in results:
        summarise(result)
    text = as_markdown(results, options.top)
    print(text, flush=True)
    if options.markdown is not None:
        _put(options.markdown, text)
    if options.plot is not None:
        plot(results, options.plot)
    well = all(
        all(found["status"] in ("ok", "cannot run") for found in result["backends"].values())
        and all(check["losses_agree"] for check in result["checks"])
        for result in results
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
