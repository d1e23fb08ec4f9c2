"""Callbacks that measure, in real runs over gloo: two ranks, one pipeline and one data-parallel."""

import contextlib
import csv
import gc
import time
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_mcore import cli
from lightning_mcore.callbacks import (
    CommTimings,
    GarbageCollection,
    MemoryStats,
    NsightProfile,
    OptimizerStats,
    ReplicaCheck,
    ReplicasDiffer,
    Stragglers,
    Throughput,
    TraceExport,
)
from lightning_mcore.testing import run_ranks
from lightning_mcore.timeline import analyse, load_timelines
from lightning_mcore.timeline.pictures import has_matplotlib
from tests.gpt import HIDDEN, LAYERS, SEQ, VOCAB
from tests.ranks.trainers import (
    Blocks,
    NumberedGPT,
    as_floats,
    loader,
    make_trainer,
    numbered_rows,
    numbered_tokens,
)

SLEEP_S = 0.03


class SlowRank(Blocks):
    """Takes ``SLEEP_S`` longer in each step of rank 1."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            time.sleep(SLEEP_S)
        return super().training_step(batch, batch_idx)


class Corrupting(L.Callback):
    """Changes one parameter of rank 1 after a step, as a faulty device would."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 2:
            with torch.no_grad():
                dict(module.named_parameters())[CORRUPTED].view(-1)[3] += 1e-3


CORRUPTED = "model.chunks.0.blocks.1.0.weight"


def in_a_pipeline(folder):
    """Interleaved: every callback at once, sampling the same steps."""
    timings, export = CommTimings(3, 2), TraceExport(3, 2, dirpath=folder)
    loggers = [CSVLogger(folder, name="csv")]
    if has_matplotlib():
        loggers.append(TensorBoardLogger(folder, name="tb"))
    automatic = gc.isenabled()
    collecting = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *args):
            collecting.append(gc.isenabled())

    trainer = make_trainer(
        {"pp": 2, "vpp": 2, "optimizer": {"log_num_zeros_in_grad": True}},
        callbacks=[
            timings,
            export,
            Stragglers(3, 2, patience=1, threshold=100.0),
            MemoryStats(2, per_rank=True),
            GarbageCollection(2),
            OptimizerStats(),
            Throughput(window=2, peak_tflops=1e-3),
            Watch(),
        ],
        max_steps=5,
        logger=loggers,
        log_every_n_steps=50,
    )
    trainer.fit(NumberedGPT(), loader(numbered_tokens(8 * 5), 8))
    return {
        "metrics": as_floats(trainer.callback_metrics),
        "times": timings.latest,
        "trace": str(export.path),
        "automatic": (automatic, collecting, gc.isenabled()),
        "profiling": torch.autograd._profiler_enabled(),
        "patched": hasattr(torch.distributed.Work.wait, "__wrapped__"),
    }


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timing")
    return folder, run_ranks(in_a_pipeline, 2, str(folder))


class TestPipeline:
    def test_values_are_the_same_on_all_ranks(self, pipeline):
        first, second = (rank["metrics"] for rank in pipeline[1])
        own = {name for name in first if name.startswith("throughput/")}
        assert {k: v for k, v in first.items() if k not in own} == {
            k: v for k, v in second.items() if k not in own
        }
        assert pipeline[1][0]["times"] == pipeline[1][1]["times"]

    def test_compute_exposed_and_idle_make_up_the_step(self, pipeline):
        for times in pipeline[1][0]["times"]:
            parts = times.compute_us + times.exposed_us + times.idle_us
            assert parts == pytest.approx(times.step_us, rel=1e-6)
            assert times.compute_us > 0.1 * times.step_us
            assert times.microbatches == 8

    def test_communication_of_a_pipeline_is_found(self, pipeline):
        for times in pipeline[1][0]["times"]:
            # 8 microbatches through 4 stages on 2 ranks: 3 boundaries, each crossed by both
            # passes; each crossing is a send on one rank and a receive on the other.
            assert times.groups["pp"].operations == 8 * 3 * 2
            assert times.groups["pp"].bytes == 8 * 3 * 2 * SEQ * HIDDEN * 4
            assert times.groups["mp"].operations >= 1
            assert "other" not in times.groups

    def test_the_logger_gets_each_sample_once(self, pipeline):
        rows = list(csv.DictReader(next(Path(pipeline[0]).rglob("metrics.csv")).open()))
        logged = [row for row in rows if row.get("comm/pp/exposed_ms")]
        assert [row["step"] for row in logged] == ["4"], "although log_every_n_steps is 50"
        at_step = {k: v for row in rows if row["step"] == "4" for k, v in row.items() if v}
        metrics = pipeline[1][0]["metrics"]
        for name in (
            "step/ms",
            "compute/ms/slowest_rank",
            "comm/pp/share",
            "comm/pp/busbw_gbps",
            "pipeline/bubble_share",
            "comm_timings/cost_ms",
            "memory/rss_gib/rank_1",
            "stragglers/slowest_ratio",
        ):
            assert metrics[name] > 0, name
            if not name.startswith("memory"):
                assert float(at_step[name]) == pytest.approx(metrics[name])
        assert metrics["pipeline/ideal_bubble_share"] == pytest.approx(1 / (2 * 8 + 1))

    def test_other_values(self, pipeline):
        metrics = pipeline[1][0]["metrics"]
        assert metrics["memory/rss_gib"] == max(
            metrics["memory/rss_gib/rank_0"], metrics["memory/rss_gib/rank_1"]
        )
        assert metrics["optimizer/num_zeros"] > 0
        assert metrics["optimizer/skipped_steps"] == 0
        # 6 FLOPs per weight in products, and causal attention; per token and pass of 2 ranks.
        per_token = 6 * (12 * LAYERS * HIDDEN**2 + HIDDEN * VOCAB) + 6 * LAYERS * SEQ * HIDDEN
        rate = metrics["throughput/tokens_per_s"] * per_token / 2
        assert metrics["throughput/tflops_per_device"] == pytest.approx(rate / 1e12, rel=1e-4)
        assert metrics["throughput/mfu"] == pytest.approx(rate / 1e9, rel=1e-4)

    def test_everything_is_put_back(self, pipeline):
        for rank in pipeline[1]:
            before, during, after = rank["automatic"]
            assert not any(during)
            assert after == before
            assert not rank["profiling"]
            assert not rank["patched"]

    def test_passes_are_marked_in_the_order_of_their_dependencies(self, pipeline):
        """Whatever the schedule: a pass starts after those it needs, on whichever rank they ran."""
        timelines = load_timelines([pipeline[1][0]["trace"]])
        steps = [m for m in timelines[0].marks if m.name == "step"]
        assert len(steps) == 2
        spans = {}
        for timeline in timelines:
            for mark in timeline.marks:
                if mark.name in ("forward", "backward") and mark.start_us < steps[1].start_us:
                    key = mark.name, mark.stage, mark.microbatch
                    assert key not in spans
                    spans[key] = mark.start_us, mark.end_us
        assert len(spans) == 2 * 4 * 8
        for (name, stage, microbatch), (start, _) in spans.items():
            if name == "forward":
                needs = [("forward", stage - 1, microbatch)] if stage else []
            else:
                needs = [("forward", stage, microbatch)]
                needs += [("backward", stage + 1, microbatch)] if stage < 3 else []
            for need in needs:
                # A sent tensor is complete before the range of the pass that made it has ended.
                assert spans[need][0] < start, (name, stage, microbatch, need)
                if need[0] == "forward" or need[1] == stage:
                    assert spans[need][1] <= start + 2000, (name, stage, microbatch, need)

    def test_the_merged_trace_gives_the_same_figures(self, pipeline):
        timelines = load_timelines([pipeline[1][0]["trace"]])
        for timeline, times in zip(timelines, pipeline[1][0]["times"], strict=True):
            again = analyse(timeline, steps=2)
            assert again.compute_us == pytest.approx(times.compute_us, rel=1e-6)
            assert again.exposed_us == pytest.approx(times.exposed_us, rel=1e-6)

    def test_the_command_draws_it(self, pipeline, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        out = tmp_path / "pipeline.svg"
        assert cli.main(["timeline", pipeline[1][0]["trace"], "-o", str(out)]) == 0
        said = capsys.readouterr().out
        assert "2 ranks with 4 stages and 8 microbatches" in said
        assert "5.9 %" in said
        assert out.read_text().lstrip().startswith("<?xml")
        assert cli.main(["timeline", pipeline[1][0]["trace"], "-o", str(tmp_path / "x.gif")]) == 1
        assert "must end in .svg" in capsys.readouterr().err

    def test_tensorboard_gets_the_picture(self, pipeline):
        pytest.importorskip("matplotlib")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        (file,) = Path(pipeline[0]).rglob("events.out.*")
        events = EventAccumulator(str(file), size_guidance={"images": 0})
        events.Reload()
        assert len(events.Images("comm/step")) == 1
        assert events.Images("comm/step")[0].width > 300


def in_data_parallel(folder):
    """Three fits: a slow rank; another profiler at work; a parameter that differs."""
    import warnings

    found = {}
    rows = numbered_rows(4 * 2 * 6)
    timings = CommTimings(2, 1, picture=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            {},
            callbacks=[timings, Stragglers(2, 1, patience=2, threshold=1.15)],
            max_steps=6,
            logger=CSVLogger(folder),
        )
        trainer.fit(SlowRank(), loader(rows, 4))
    found["slow"] = [str(w.message) for w in caught if "Stragglers" in str(w.message)]
    found["times"] = timings.latest
    found["metrics"] = as_floats(trainer.callback_metrics)

    with warnings.catch_warnings(record=True) as caught, torch.profiler.profile():
        warnings.simplefilter("always")
        trainer = make_trainer({}, callbacks=[CommTimings(2, 1)], max_steps=4)
        trainer.fit(Blocks(), loader(rows, 4))
    found["profiled"] = [str(w.message) for w in caught if "CommTimings" in str(w.message)]

    trainer = make_trainer({}, callbacks=[Corrupting(), ReplicaCheck(1)], max_steps=6)
    try:
        trainer.fit(Blocks(), loader(rows, 4))
    except ReplicasDiffer as error:
        found["differ"] = str(error)
    return found


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return run_ranks(in_data_parallel, 2, str(tmp_path_factory.mktemp("copies")))


class TestDataParallel:
    def test_a_slow_rank_computes_and_the_other_waits_for_it(self, copies):
        fast, slow = copies[0]["times"]
        assert slow.compute_us - fast.compute_us > 0.8e6 * SLEEP_S
        waited = sum(fast.groups[g].exposed_us for g in ("dp", "world", "mp") if g in fast.groups)
        assert waited > 0.8e6 * SLEEP_S
        assert fast.step_us == pytest.approx(slow.step_us, rel=0.2)

    def test_the_slow_rank_is_named_once_with_its_place(self, copies):
        (warning,) = copies[0]["slow"]
        assert "rank 1 (dp 1) computed" in warning
        assert copies[1]["slow"] == []
        for rank in copies:
            assert rank["metrics"]["stragglers/slowest_rank"] == 1.0

    def test_another_profiler_is_left_alone(self, copies):
        assert any("another profiler was running" in text for text in copies[0]["profiled"])

    def test_copies_that_differ_are_an_error_on_all_ranks(self, copies):
        for rank in copies:
            assert CORRUPTED in rank["differ"]
            assert "after step 3" in rank["differ"]
            assert "rank 1 (dp 1)" in rank["differ"]


# ------------------------------------------------------------------------- Nsight's ranges


class Opened:
    """In place of ``emit_nvtx``: keeps the profiler's ranges that would become NVTX ranges."""

    def __init__(self):
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def __call__(self):
        return self.profile

    @property
    def names(self):
        return Counter(e.name for e in self.profile.events() if e.name.startswith("mcore:"))


class OnHost(NsightProfile):
    """What it does on a GPU, without the check for one."""

    def setup(self, trainer, pl_module, stage):
        pass


class Buckets(L.Callback):
    """Keeps the engine's groups of buckets, by chunk and kind; may raise within the window."""

    def __init__(self, fails):
        self.fails = fails
        self.groups = []

    def on_train_start(self, trainer, pl_module):
        self.groups = [
            [list(chunk.bucket_groups), list(chunk.expert_parallel_bucket_groups)]
            for chunk in trainer.strategy._model_run.chunks
        ]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.fails and trainer.global_step == 2:
            raise RuntimeError("in the window")


def nsight(strategy, fails):
    """Ranges of steps 1 and 2 on rank 0, its buckets' sizes, and what is left on them."""
    opened, calls = Opened(), []
    torch.cuda.synchronize = lambda: calls.append("synchronize")
    torch.cuda.profiler.start = lambda: calls.append("start")
    torch.cuda.profiler.stop = lambda: calls.append("stop")
    torch.autograd.profiler.emit_nvtx = opened
    buckets = Buckets(fails)
    trainer = make_trainer(strategy, callbacks=[OnHost(1, 2, ranks=[0]), buckets], max_steps=4)
    module = MoEGPT() if "ep" in strategy else NumberedGPT()
    with contextlib.suppress(RuntimeError):
        trainer.fit(module, loader(numbered_tokens(32), 4))
    groups = buckets.groups
    sizes = [[[sum(b.grad_data.numel() for b in g.buckets) for g in k] for k in c] for c in groups]
    left = [n for chunk in groups for kind in chunk for g in kind for n in vars(g) if "start_" in n]
    names = opened.names if calls else Counter()
    return names, sizes, left, [call for call in calls if call != "synchronize"]


class MoEGPT(NumberedGPT):
    def __init__(self):
        super().__init__(experts=2)


def nsight_runs():
    small = {"overlap_grad_reduce": True, "bucket_size": 4000}
    overlapping = {**small, "use_distributed_optimizer": True, "overlap_param_gather": True}
    return (
        nsight(overlapping, fails=False),
        nsight({"ep": 2, "use_distributed_optimizer": False, "micro_batch_size": 1}, fails=False),
        nsight(overlapping, fails=True),
    )


def test_nsight_names_what_each_bucket_sends():
    (whole, experts, failed), (other, *_) = run_ranks(nsight_runs, 2)
    names, ((sizes, none),), left, calls = whole
    assert calls == ["start", "stop"]
    assert left == []
    assert none == []
    assert len(sizes) > 5
    found = {n: count for n, count in names.items() if "bucket" in n}
    expected = {}
    for bucket, elements in enumerate(sizes):
        text = f"{elements / 1000:.1f}k" if elements >= 1000 else str(elements)
        for send in ("grad-reduce", "param-gather"):
            expected[f"mcore:{send} chunk=0 bucket={bucket} elements={text}"] = 2
    # Gathers are asked for by the bucket before and by the layers that wait, and start once.
    assert found.keys() == expected.keys()
    for name, count in found.items():
        assert count == 2 if "grad-reduce" in name else count >= 2, name
    assert names["mcore:step"] == 2
    assert names["mcore:forward stage=0 microbatch=0"] == 2

    names, ((_, of_experts),), left, _ = experts
    assert left == []
    assert len(of_experts) == 1
    (reduced,) = (n for n in names if n.startswith("mcore:grad-reduce chunk=0 expert-bucket=0 "))
    assert names[reduced] == 2, "once per step, whatever the microbatches"

    assert failed[2:] == ([], ["start", "stop"]), "put back after an exception too"
    assert other == (Counter(), whole[1], [], []), "a rank that was not chosen"
