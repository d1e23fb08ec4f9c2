"""Callbacks that measure: arguments, pure parts, and one process in a real Trainer."""

import gc

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lightning_mcore.callbacks import (
    CommTimings,
    GarbageCollection,
    MemoryStats,
    NsightProfile,
    ReplicaCheck,
    Stragglers,
    Throughput,
    TraceExport,
)
from lightning_mcore.callbacks.replica_check import digest, first_difference
from lightning_mcore.callbacks.stragglers import slow_ranks
from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import resolve_layout
from lightning_mcore.ranges import ScheduleRanges, profiling
from lightning_mcore.timeline import load_timelines
from tests.unit.test_callbacks import Net, loader


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CommTimings(0), "`every_n_steps` \\(0\\)"),
        (lambda: CommTimings(2, 3), "`window` \\(3\\) must be at most `every_n_steps` \\(2\\)"),
        (lambda: CommTimings(True), "`every_n_steps` \\(True\\)"),
        (lambda: Stragglers(threshold=1.0), "`threshold` \\(1.0\\)"),
        (lambda: Stragglers(patience=0), "`patience` \\(0\\)"),
        (lambda: TraceExport(-1), "`at_step` \\(-1\\)"),
        (lambda: TraceExport(1, 0), "`window` \\(0\\)"),
        (lambda: MemoryStats(0), "`every_n_steps` \\(0\\)"),
        (lambda: GarbageCollection(0), "`every_n_steps` \\(0\\)"),
        (lambda: GarbageCollection(generation=3), "`generation` \\(3\\)"),
        (lambda: ReplicaCheck(0), "`every_n_steps` \\(0\\)"),
        (lambda: NsightProfile(-1), "`at_step` \\(-1\\)"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def fit(*callbacks, module=None, steps=4, **options):
    trainer = L.Trainer(
        strategy=SingleDeviceStrategy("cpu"),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": steps, "limit_val_batches": 0, **options},
    )
    trainer.fit(module or Net(), loader(32))
    return trainer


def test_nsight_without_a_gpu_is_refused():
    with pytest.raises(ConfigurationError, match=r"needs a GPU, but the Trainer runs on cpu"):
        fit(NsightProfile())


def test_comm_timings_work_under_another_strategy():
    timings = CommTimings(2, 1)
    trainer = fit(timings)
    (times,) = timings.latest
    assert times.compute_us + times.exposed_us + times.idle_us == pytest.approx(times.step_us)
    assert times.groups == {}
    assert float(trainer.callback_metrics["step/ms"]) == pytest.approx(times.step_us / 1e3)
    assert not profiling()


def test_samples_begin_with_an_accumulation():
    steps = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if profiling():
                steps.append(batch_idx)

    timings = CommTimings(2, 1, picture=False)
    fit(timings, Watch(), accumulate_grad_batches=3, steps=4)
    assert steps == [6, 7, 8]


def test_a_failing_step_leaves_no_profiler_behind():
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(CommTimings(2, 1), module=Failing())
    assert not profiling()
    assert not hasattr(torch.distributed.Work.wait, "__wrapped__")


def test_trace_of_one_process(tmp_path):
    export = TraceExport(1, 2, dirpath=tmp_path)
    fit(export)
    (timeline,) = load_timelines([export.path])
    assert [mark.name for mark in timeline.marks] == ["step", "step"]


def test_garbage_collection_restores_what_was():
    during = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *args):
            during.append(gc.isenabled())

    assert gc.isenabled()
    fit(GarbageCollection(2), Watch())
    assert during == [False] * 4
    assert gc.isenabled()
    gc.disable()
    try:
        fit(GarbageCollection(2))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_of_one_process():
    metrics = fit(MemoryStats(2)).callback_metrics
    assert 0.05 < float(metrics["memory/rss_gib"]) < 100
    assert float(metrics["memory/fullest_rank"]) == 0


class Counted(L.LightningModule):
    """Two linear layers, whose products are easily counted."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_flops_of_other_modules_are_counted_in_the_first_batch():
    metrics = fit(Throughput(window=3, peak_tflops=1e-6), module=Counted()).callback_metrics
    # Forward 2 x 2 x (4 x 8 + 8 x 3); backward the same twice, but no gradient of the input.
    per_batch = 2 * 2 * (3 * (4 * 8 + 8 * 3) - 4 * 8)
    rate = float(metrics["throughput/samples_per_s"]) / 2 * per_batch
    assert float(metrics["throughput/tflops_per_device"]) == pytest.approx(rate / 1e12, rel=1e-4)
    assert float(metrics["throughput/mfu"]) == pytest.approx(rate / 1e6, rel=1e-4)


def test_declared_flops_win_and_an_unknown_device_has_no_mfu():
    module = Counted()
    module.flops_per_batch = 3e9
    metrics = fit(Throughput(window=3), module=module).callback_metrics
    rate = float(metrics["throughput/samples_per_s"]) / 2 * 3e9
    assert float(metrics["throughput/tflops_per_device"]) == pytest.approx(rate / 1e12, rel=1e-4)
    assert "throughput/mfu" not in metrics
    assert "throughput/tflops_per_device" not in fit(Throughput(flops=False)).callback_metrics


def test_slow_ranks_are_compared_with_their_stage():
    ratios = slow_ranks([10, 10, 13, 30, 30, 30], {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1})
    assert ratios == pytest.approx({0: 1, 1: 1, 2: 1.3, 3: 1, 4: 1, 5: 1})
    assert slow_ranks([10, 12], {0: 0, 1: 0})[1] == pytest.approx(1.2)


class TestReplicas:
    LAYOUT = resolve_layout(ParallelSizes(tp=2), 4, 0)
    """Ranks 0 and 2 hold copies, and so do 1 and 3."""

    def test_copies_are_compared_along_data_parallelism(self):
        def ranks(*values, expert=False):
            return [{"a": (b"same", False), "w": (value, expert)} for value in values]

        assert first_difference(ranks(b"x", b"y", b"x", b"y"), self.LAYOUT) is None
        assert first_difference(ranks(b"x", b"y", b"x", b"z"), self.LAYOUT) == ("w", [3])
        assert first_difference(ranks(b"x", b"x"), None) is None
        assert first_difference(ranks(b"x", b"y"), None) == ("w", [1])

    def test_experts_are_compared_where_they_are_copies(self):
        layout = resolve_layout(ParallelSizes(ep=2), 4, 0)
        values = (b"0", b"1", b"0", b"1")
        of_experts = [{"e": (value, True)} for value in values]
        assert first_difference(of_experts, layout) is None
        of_all = [{"e": (value, False)} for value in values]
        assert first_difference(of_all, layout) == ("e", [1, 3])

    def test_a_missing_parameter_differs(self):
        assert first_difference([{"w": (b"x", False)}, {}], None) == ("w", [1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_digest_is_of_the_bits(self, dtype):
        tensor = torch.arange(6, dtype=dtype).reshape(2, 3)
        assert digest(tensor) == digest(tensor.clone())
        assert digest(tensor.T) == digest(tensor.T.contiguous())
        changed = tensor.clone()
        changed[1, 2] += 1
        assert digest(tensor) != digest(changed)
        nans = torch.full((2,), float("nan"))
        assert digest(nans) == digest(nans.clone())
        assert digest(torch.tensor(1.0)) == digest(torch.tensor(1.0))


def test_ranges_name_backward_passes_in_the_given_order():
    ranges = ScheduleRanges([(3, 0), (1, 0)])
    with torch.profiler.profile() as profile:
        for _ in range(2):
            ranges("backward-compute", log_level=2).start()
            ranges("forward-send").start()
            ranges("forward-send").stop()
            ranges("backward-compute").stop()
        ranges("forward-compute").start()
        ranges("forward-compute").stop()
        with ranges.forward(2, 5):
            pass
        ranges("forward-backward", log_level=1).start(barrier=True)
        ranges("forward-backward").stop()
    names = [event.name for event in profile.events() if event.name.startswith("mcore:")]
    assert sorted(names) == [
        "mcore:backward stage=1 microbatch=0",
        "mcore:backward stage=3 microbatch=0",
        "mcore:forward stage=2 microbatch=5",
        "mcore:forward-backward",
        "mcore:forward-send",
        "mcore:forward-send",
    ]


def test_every_collective_of_torch_is_named_in_profiles_on_cpu():
    """torch renames them now and then; one that is missed would count as of an unknown group."""
    import re

    import torch.distributed as dist

    from lightning_mcore._mcore.gloo_ranges import gloo_ranges
    from lightning_mcore.timeline.names import COLLECTIVES

    before = {cls: dict(vars(cls)) for cls in (dist.ProcessGroup, dist.Work)}
    words = re.compile("reduce|gather|scatter|broadcast|all_?to_?all|^barrier|send|recv")
    collectives = {name for name in before[dist.ProcessGroup] if words.search(name)}
    assert len(collectives) > 15
    with gloo_ranges():
        for name in collectives:
            assert hasattr(vars(dist.ProcessGroup)[name], "__wrapped__"), name
        assert hasattr(dist.Work.wait, "__wrapped__")
    assert {cls: dict(vars(cls)) for cls in before} == before
    operators = {
        name.removeprefix("c10d::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::") and words.search(name.removeprefix("c10d::"))
    }
    assert len(operators) > 15
    assert operators - COLLECTIVES.keys() - {"barrier", "monitored_barrier_"} == set()
