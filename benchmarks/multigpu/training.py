"""What a rank does: opens a training run, runs blocks of its steps, records some of them.

The functions are called on every rank of a team by the main process (``teams.py``).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from loops import TrainerLoop
from models import MODELS, model_flops, uses_te
from modules import ddp_strategy, engine_module, fsdp_strategy, torch_module
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from gpt import GPT, TokenRows
from lightning_mcore import MCoreStrategy
from lightning_mcore.callbacks import CommTimings
from lightning_mcore.callbacks._sampling import StepSampler
from lightning_mcore.config import ParallelSizes
from lightning_mcore.layout import resolve_layout
from multigpu.cases import Case
from multigpu.lateness import host_lateness

_NEVER = 10**9


class Timings(CommTimings):
    """CommTimings that samples when it is asked to, not every so many steps."""

    def __init__(self) -> None:
        super().__init__(_NEVER, 1, picture=False)
        self.window = 0
        """Steps to record from the next one on; 0: none."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Starts the sample that was asked for."""
        if self.window:
            self._sampler = StepSampler(_NEVER, self.window, first=trainer.global_step)
            self._sampler.begin(trainer)
            self.window = 0
        super().on_train_batch_start(trainer, *args)


class Rows:
    """Batches of one data-parallel rank, of a size that may change between steps."""

    def __init__(self, replicas: int, replica: int) -> None:
        self.samples = 1
        self._replicas, self._replica = replicas, replica

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[list[int]]:
        step = 0
        while True:
            first = (step * self._replicas + self._replica) * self.samples
            yield list(range(first, first + self.samples))
            step += 1


def make_module(case: Case) -> GPT:
    """A GPT of either kind, with the dimensions that userbuffers want to know in advance."""
    dims = dataclasses.replace(MODELS[case.model], **case.changes)
    if case.framework == "mcore":
        module = engine_module(dims, case.options)
        if case.strategy.get("cp", 1) > 1:
            # A step has a part of each sequence only.
            module.call = lambda model, tokens, labels: model(
                tokens, module.trainer.strategy.position_ids(tokens), None, labels=labels
            )
    else:
        module = torch_module(dims)
    module.model_dims = {
        "num_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.query_groups,
        "hidden_size": dims.hidden,
        "seq_length": dims.seq,
    }
    return module


class TrainingRun:
    """The training run of this process."""

    def __init__(self, case: Case, accelerator: str) -> None:
        self.case = case
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", rank) if accelerator == "gpu" else torch.device("cpu")
        self.timings = Timings()
        module = make_module(case)
        sizes = case.strategy if case.framework == "mcore" else {}
        axes = ("tp", "pp", "vpp", "cp", "ep")
        chosen = ParallelSizes(**{axis: sizes[axis] for axis in axes if axis in sizes})
        layout = resolve_layout(chosen, world, rank)
        self.rows = Rows(layout.dp, layout.dp_rank)
        loader: Any = DataLoader(
            TokenRows(module.size),
            batch_sampler=self.rows,  # type: ignore[arg-type]
            pin_memory=self.device.type == "cuda",
        )
        self.use(case.microbatches[0])
        self.loop = TrainerLoop(
            _strategy(case, module),
            module,
            loader,
            self.device,
            case.precision,
            callbacks=[self.timings],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            # Named, since looking for others starts MPI where mpi4py is installed.
            plugins=[LightningEnvironment()],
        )
        pl.seed_everything(1, verbose=False)
        self.loop.start()

    def use(self, microbatches: int) -> None:
        """Sets the size of batches from the step after next on: one is fetched in advance."""
        self.rows.samples = self.case.micro_batch * microbatches

    def settle(self) -> None:
        """Lets all ranks arrive, and their GPUs finish."""
        self.sync()
        dist.barrier()
        self.sync()

    def sync(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


_run: TrainingRun | None = None


def _open_run() -> TrainingRun:
    assert _run is not None, "A case is opened first."
    return _run


def _strategy(case: Case, module: GPT) -> Any:
    if case.framework == "ddp":
        return ddp_strategy(case.strategy)
    if case.framework == "fsdp":
        return fsdp_strategy(case.precision, case.strategy)
    return MCoreStrategy(
        micro_batch_size=case.micro_batch, seq_length=module.size.seq, **case.strategy
    )


# ------------------------------------------------------------------------- called on every rank


def touch_device(accelerator: str) -> str:
    """Starts CUDA, which takes seconds, while other teams do the same."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning_utilities", "lightning_mcore", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric"):  # which have levels of their own
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if accelerator == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        one = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        return f"{float((one @ one).sum())}"
    return "cpu"


def probe_gpu() -> str:
    """Whether a forked process can use a GPU."""
    return f"{float(torch.ones(1, device='cuda').sum())}"


def open_case(case: Case, accelerator: str) -> dict[str, Any]:
    """Builds the model and runs ``trainer.fit`` up to its first batch."""
    global _run
    start = time.perf_counter()
    if accelerator == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _run = TrainingRun(case, accelerator)
    strategy: Any = _run.loop.trainer.strategy
    module = _run.loop.module
    dims = dataclasses.replace(module.size, batch=case.micro_batch)
    found: dict[str, Any] = {
        "opening_s": time.perf_counter() - start,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "flops_of_a_microbatch": model_flops(dims),
        "tokens_of_a_microbatch": dims.tokens,
        "layers": "TransformerEngine's" if uses_te() else "local",
    }
    for family in ("switches", "expert_switches"):
        for name, switch in _fields(getattr(strategy, family, None)):
            found.setdefault("switches", {})[name] = f"{switch.effective} ({switch.reason})"
    return found


def _fields(value: Any) -> list[tuple[str, Any]]:
    names = getattr(value, "__dataclass_fields__", ())
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def run_block(microbatches: int, lead: int, steps: int) -> dict[str, Any]:
    """Runs steps, and leaves the GPU's memory to others."""
    run = _open_run()
    run.use(microbatches)
    run.loop.keep_losses = True
    if lead:
        run.loop.run(lead)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run.settle()
    start = time.perf_counter()
    if steps:
        run.loop.run(steps)
    run.sync()
    seconds = time.perf_counter() - start
    losses = [float(loss) for loss in run.loop.losses]
    run.loop.losses.clear()
    peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else 0
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return {"step_s": seconds / max(steps, 1), "losses": losses, "peak_bytes": peak}


def record(microbatches: int, window: int) -> list[dict[str, Any]]:
    """Figures of CommTimings for the next steps, by rank."""
    run = _open_run()
    run.loop.keep_losses = False
    run.use(microbatches)
    run.loop.run(2)
    run.timings.latest = []
    run.timings.window = window
    run.loop.run(window)
    return [dataclasses.asdict(times) for times in run.timings.latest]


def find_lateness(keep: str | None) -> dict[str, float]:
    """How long the GPU waited for the host in one step like those before.

    Args:
        keep: A folder for the trace.
    """
    run = _open_run()
    run.loop.keep_losses = False
    run.settle()
    kinds = [ProfilerActivity.CPU]
    if run.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    profiler = profile(activities=kinds)

    class Around:
        def __enter__(self) -> None:
            profiler.start()

        def __exit__(self, *_: object) -> None:
            run.sync()
            profiler.stop()

    run.loop.run(1, Around)
    with tempfile.TemporaryDirectory() as folder:
        name = f"{run.case.name.replace(' ', '-')}-rank-{os.environ['RANK']}.json"
        path = Path(keep or folder) / name
        profiler.export_chrome_trace(str(path))
        return host_lateness(json.loads(path.read_bytes())["traceEvents"])
