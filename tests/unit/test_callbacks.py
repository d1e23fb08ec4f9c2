"""Callbacks in a real Trainer of one process; what the engine reports is stated as plain values."""

from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_mcore.callbacks import ExpertPlacement, OptimizerStats, Throughput
from lightning_mcore.errors import ConfigurationError


@dataclass
class Stats:
    norm: float | None
    skipped: bool = False
    num_zeros: int | None = None
    loss_scale: float | None = None


class ReportingStrategy(SingleDeviceStrategy):
    """One CPU process that claims a layout and reports given statistics."""

    def __init__(self, stats=None, dp=1):
        super().__init__("cpu")
        self.step_stats = stats
        self.layout = SimpleNamespace(dp=dp)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].float()).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(L.Callback):
    """What the Trainer's metrics were after each batch (it runs after the callback under test)."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append({name: float(v) for name, v in trainer.callback_metrics.items()})


def fit(callback, data, strategy, clock=None, monkeypatch=None, **options):
    if clock is not None:
        monkeypatch.setattr("lightning_mcore.callbacks.throughput.time.perf_counter", clock)
    recorder = Recorder()
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[callback, recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "limit_val_batches": 0, **options},
    )
    trainer.fit(Net(), data, data)
    return recorder.seen


class Clock:
    """Stands still until told; each batch of the loader below moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class TickingLoader:
    """Batches whose loading takes ``seconds`` on the given clock."""

    def __init__(self, clock, batches, seconds):
        self.clock, self.batches, self.seconds = clock, batches, seconds

    def __iter__(self):
        for batch in self.batches:
            self.clock.now += self.seconds
            yield batch

    def __len__(self):
        return len(self.batches)


def tokens(batch=2, length=4):
    return (torch.ones(batch, length, dtype=torch.int64),)


def loader(samples=8):
    return DataLoader(TensorDataset(torch.ones(samples, 4)), batch_size=2)


class TestOptimizerStats:
    def test_logs_what_the_step_reported(self):
        seen = fit(OptimizerStats(), loader(), ReportingStrategy(Stats(2.5, skipped=True)))
        for values in seen:
            assert values["optimizer/skipped_steps"] == 1.0, "the same step counts once"
            assert values["optimizer/grad_norm"] == 2.5
            assert values["optimizer/skipped"] == 1.0

    def test_leaves_out_a_norm_that_was_not_computed(self):
        seen = fit(OptimizerStats(), loader(), ReportingStrategy(Stats(None)))
        assert all("optimizer/grad_norm" not in values for values in seen)
        assert seen[0]["optimizer/skipped"] == 0.0

    def test_logs_nothing_before_the_first_step(self):
        assert fit(OptimizerStats(), loader(), ReportingStrategy(None)) == [{}] * 4

    def test_refuses_a_strategy_without_statistics(self):
        with pytest.raises(ConfigurationError, match=r"SingleDeviceStrategy.*MCoreStrategy"):
            fit(OptimizerStats(), loader(), SingleDeviceStrategy("cpu"))


class TestThroughput:
    def test_rate_is_tokens_of_all_data_parallel_ranks_over_time(self, monkeypatch):
        clock = Clock()
        data = TickingLoader(clock, [tokens(batch=2, length=4)] * 7, seconds=0.5)
        seen = fit(
            Throughput(window=3), data, ReportingStrategy(dp=5), clock, monkeypatch, max_steps=7
        )
        # The first batch is not counted: the first window ends with the fourth.
        assert ["throughput/tokens_per_s" in v for v in seen] == [False] * 3 + [True] * 4
        assert seen[-1]["throughput/tokens_per_s"] == pytest.approx(2 * 4 * 5 / 0.5)
        assert seen[-1]["throughput/step_time_s"] == pytest.approx(0.5)

    def test_step_time_spans_the_batches_of_an_accumulation(self, monkeypatch):
        clock = Clock()
        data = TickingLoader(clock, [tokens()] * 8, seconds=0.5)
        seen = fit(
            Throughput(window=4),
            data,
            ReportingStrategy(),
            clock,
            monkeypatch,
            accumulate_grad_batches=2,
        )
        assert seen[-1]["throughput/step_time_s"] == pytest.approx(1.0)

    def test_validation_does_not_count(self, monkeypatch):
        clock = Clock()

        class SlowValidation(L.Callback):
            def on_validation_batch_start(self, *args):
                clock.now += 1000.0

        monkeypatch.setattr("lightning_mcore.callbacks.throughput.time.perf_counter", clock)
        recorder = Recorder()

        class Working(Net):
            def training_step(self, batch, batch_idx):
                clock.now += 0.5
                return super().training_step(batch, batch_idx)

        trainer = L.Trainer(
            strategy=ReportingStrategy(),
            callbacks=[Throughput(window=2), SlowValidation(), recorder],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=2,
            max_epochs=2,
            num_sanity_val_steps=0,
        )
        trainer.fit(
            Working(),
            TickingLoader(clock, [tokens()] * 6, seconds=0.0),
            TickingLoader(clock, [tokens()], seconds=0.0),
        )
        assert recorder.seen[-1]["throughput/step_time_s"] == pytest.approx(0.5)

    def test_counts_samples_where_there_are_no_tokens(self, monkeypatch):
        clock = Clock()
        data = TickingLoader(clock, [(torch.ones(6, 4),)] * 4, seconds=2.0)
        seen = fit(Throughput(window=2), data, ReportingStrategy(), clock, monkeypatch)
        assert seen[-1]["throughput/samples_per_s"] == pytest.approx(3.0)
        assert "throughput/tokens_per_s" not in seen[-1]

    def test_users_own_count_wins(self, monkeypatch):
        clock = Clock()
        data = TickingLoader(clock, [tokens()] * 4, seconds=1.0)
        callback = Throughput(tokens=lambda batch: 100, window=2)
        seen = fit(callback, data, ReportingStrategy(), clock, monkeypatch)
        assert seen[-1]["throughput/tokens_per_s"] == pytest.approx(100.0)

    def test_two_fits_do_not_share_a_window(self, monkeypatch):
        clock = Clock()
        callback = Throughput(window=2)
        data = TickingLoader(clock, [tokens()] * 4, seconds=1.0)
        fit(callback, data, ReportingStrategy(), clock, monkeypatch)
        clock.now += 1000.0
        seen = fit(callback, data, ReportingStrategy(), clock, monkeypatch)
        assert seen[0] == {}
        assert seen[-1]["throughput/step_time_s"] == pytest.approx(1.0)

    def test_works_under_another_strategy(self):
        seen = fit(Throughput(window=1), loader(), SingleDeviceStrategy("cpu"))
        assert seen[-1]["throughput/samples_per_s"] > 0

    def test_refuses_an_empty_window(self):
        with pytest.raises(ValueError, match=r"`window` \(0\) must be at least 1"):
            Throughput(window=0)


@pytest.mark.parametrize("callback", [OptimizerStats(), Throughput(window=1)])
def test_logged_values_stay_on_the_host(callback, monkeypatch):
    """A number or device tensor would make `log` or the progress bar wait for the device."""
    logged = []
    monkeypatch.setattr(Net, "log", lambda self, name, value, **kw: logged.append(value))
    data = TickingLoader(Clock(), [tokens()] * 3, seconds=0.0)
    fit(callback, data, ReportingStrategy(Stats(1.0)))
    assert logged
    for value in logged:
        assert isinstance(value, torch.Tensor)
        assert value.device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, r"`every_n_steps` \(0\) must be at least 1"),
        ({"policy": "contiguous"}, r"`policy` \('contiguous'\) must be 'serpentine' or 'lpt'"),
        ({"smoothing": 1.0}, r"`smoothing` \(1.0\) must be in \[0, 1\)"),
        ({"min_gain": -0.1}, r"`min_gain` \(-0.1\) must be in \[0, 1\)"),
    ],
)
def test_expert_placement_checks_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(**arguments)


def test_expert_placement_needs_the_strategy():
    with pytest.raises(ConfigurationError, match="the Trainer runs ReportingStrategy"):
        fit(ExpertPlacement(), tokens(8), ReportingStrategy())


def test_expert_placement_keeps_average_and_order_in_checkpoints():
    state = {"ep": 2, "averages": {"layer.1": [0.75, 0.25]}, "slots": {"layer.1": [1, 0]}}
    callback = ExpertPlacement()
    assert callback.state_dict() == {"ep": 0, "averages": {}, "slots": {}}
    callback.load_state_dict(state)
    assert callback.state_dict() == state
