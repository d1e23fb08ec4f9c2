"""CUDA graphs and fused accumulation on one GPU: the same training, and graphs that are replayed.

All runs follow each other in one process, so that what a run leaves behind would show in the next.
"""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
import pytest
import torch

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import BATCH, LAYERS, TEGPT, te_train

pytestmark = needs_gpus(1)

STEPS, MICROBATCHES = 10, BATCH // 2
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "none again": {"cuda_graphs": False},
    "transformer_engine": {"cuda_graphs": "transformer_engine"},
    "local": {"cuda_graphs": "local"},
    "fused": {"gradient_accumulation_fusion": True},
    "transformer_engine, fused": {
        "cuda_graphs": "transformer_engine",
        "gradient_accumulation_fusion": True,
    },
    "local, fused": {"cuda_graphs": "local", "gradient_accumulation_fusion": True},
    # Behind the others: what they left would show here.
    "none at last": {},
}
GRAPHED = [name for name, settings in RUNS.items() if settings.get("cuda_graphs")]


class Launches(L.Callback):
    """Launches of graphs in one late step."""

    def __init__(self) -> None:
        self.launches = 0
        self._profile: Any = None

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == STEPS - 2:
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self._profile is None:
            return
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        events = self._profile.key_averages()
        self.launches = sum(e.count for e in events if e.key == "cudaGraphLaunch")
        self._profile = None


class TwoPasses(TEGPT):
    """Logs in validation how far two passes over a batch lie apart."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.losses(batch), self.losses(batch)
        self.log("val_loss", (first - second).abs().max())
        return {"num_tokens": batch[2].sum()}


def all_runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    stream = torch.cuda.current_stream()
    for name, settings in RUNS.items():
        launches = Launches()
        seen = te_train(1, settings, steps=STEPS, callbacks=[launches])
        found[name] = {
            "steps": seen.steps,
            "validation": seen.validation,
            "graphs": seen.graphs,
            "launches": launches.launches,
            "stream": torch.cuda.current_stream() == stream,
            "pools": _in_pools_of_graphs(),
        }
    for kind in ("local", "transformer_engine"):
        seen = te_train(1, {"cuda_graphs": kind}, module=TwoPasses(hidden_dropout=0.5), steps=6)
        found[f"dropout {kind}"] = {"steps": seen.steps, "validation": seen.validation}
    found["refused"] = _short_batch()
    found["after"] = te_train(1, {}, steps=2).steps
    return found


def _in_pools_of_graphs() -> int:
    """Bytes that torch keeps from the device in pools of graphs, once the cache is emptied."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


class Shorter(TEGPT):
    """Cuts the sequences of the fifth batch in half."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        short = self.trainer.training and self.trainer.fit_loop.epoch_loop.batch_idx == 4
        return [part[:, : part.shape[1] // 2] for part in batch] if short else batch


def _short_batch() -> str:
    try:
        te_train(1, {"cuda_graphs": "transformer_engine"}, module=Shorter(), steps=6)
    except ConfigurationError as error:
        return str(error)
    return "not refused"


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return run_ranks(all_runs, 1, timeout_s=240)[0]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "none"])
def test_the_same_training(runs, name):
    """Graphs replay the very kernels, so that only the order of atomic sums can differ.

    Fused accumulation rounds each entry of a gradient once less to bf16, by up to 2^-8 of it and at
    random, which changes a norm over many entries far less than 1e-2.
    """
    expected, found = runs["none"]["steps"], runs[name]["steps"]
    assert len(found) == STEPS
    for (loss, norm), (other_loss, other_norm) in zip(expected, found, strict=True):
        assert other_loss == pytest.approx(loss, rel=5e-3), (expected, found)
        assert other_norm == pytest.approx(norm, rel=1e-2), (expected, found)
    assert all(norm > 1e-3 for _, norm in expected), "no gradients, so nothing was compared"
    assert runs[name]["validation"] == pytest.approx(runs["none"]["validation"], rel=5e-3)


@pytest.mark.parametrize("name", list(RUNS))
def test_graphs_are_captured_and_replayed(runs, name):
    graphed = name in GRAPHED
    # Without a pipeline microbatches share one forward and one backward graph of each layer.
    assert runs[name]["graphs"] == (2 * LAYERS if graphed else 0)
    assert runs[name]["launches"] == (2 * LAYERS * MICROBATCHES if graphed else 0)
    assert runs[name]["stream"], "the run left another stream than it found"


@pytest.mark.parametrize("name", ["local", "local, fused"])
def test_memory_of_graphs_is_given_back(runs, name):
    before = list(RUNS)[list(RUNS).index(name) - 1]
    assert runs[name]["pools"] == runs[before]["pools"]


@pytest.mark.parametrize("kind", ["local", "transformer_engine"])
def test_validation_runs_the_layers_themselves(runs, kind):
    assert runs[f"dropout {kind}"]["validation"] == [0.0]


PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "gathers": (
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        "transformer_engine",
    ),
    "reductions": ({"use_distributed_optimizer": False, "overlap_grad_reduce": True}, "local"),
    "pipeline": ({"pp": 2}, "transformer_engine"),
}


def pairs() -> dict[str, Any]:
    found = {}
    for name, (settings, kind) in PAIRS.items():
        plain = te_train(2, settings, steps=STEPS)
        graphed = te_train(2, {**settings, "cuda_graphs": kind}, steps=STEPS)
        found[name] = [(seen.steps, seen.validation) for seen in (plain, graphed)]
    return found


@needs_gpus(2)
def test_overlaps_and_stages_on_two_gpus():
    """What graphs do not run themselves: hooks that gather and reduce, transfers of stages."""
    for found in run_ranks(pairs, 2, timeout_s=240):
        for name in PAIRS:
            (steps, validation), (graphed_steps, graphed_validation) = found[name]
            for (loss, norm), (other_loss, other_norm) in zip(steps, graphed_steps, strict=True):
                assert other_loss == pytest.approx(loss, rel=5e-3), name
                assert other_norm == pytest.approx(norm, rel=1e-2), name
            assert graphed_validation == pytest.approx(validation, rel=5e-3), name


def test_a_batch_of_another_shape_is_refused(runs):
    assert "replays steps of one sequence length, micro-batch size" in runs["refused"]
    assert runs["after"] == pytest.approx(runs["none"]["steps"][:2], rel=1e-2)
