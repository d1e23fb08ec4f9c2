"""What a step's log calls record, and what one rank makes of it."""

import math

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.step_log import LOSS, LogExchange, StepLog, _digest


@pytest.fixture
def world():
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def exchange(world):
    return LogExchange(world, is_source=True, device=torch.device("cpu"))


def step_log(*calls):
    """A log of calls ``(samples, name, value, settings)``, one microbatch each."""
    log = StepLog(lambda metric: "path.of.metric")
    for samples, name, value, settings in calls:
        with log.microbatch(samples):
            log.log(name, value, **settings)
    return log


def values(exchange, log):
    return {logged.key.name: float(logged.value) for logged in exchange(log)}


class TestReduction:
    @pytest.mark.parametrize(
        ("reduce_fx", "expected"),
        [
            ("mean", (1.0 * 3 + 5.0 * 1) / 4),
            (torch.mean, 2.0),
            ("sum", 6.0),
            (sum, 6.0),
            ("min", 1.0),
            (torch.min, 1.0),
            (torch.amin, 1.0),
            ("max", 5.0),
            (max, 5.0),
            ("MAX", 5.0),
        ],
    )
    def test_over_microbatches(self, exchange, reduce_fx, expected):
        settings = {"reduce_fx": reduce_fx}
        log = step_log((3, "x", torch.tensor(1.0), settings), (1, "x", torch.tensor(5.0), settings))
        assert values(exchange, log) == {"x": expected}

    def test_the_default_is_the_mean_over_samples(self, exchange):
        log = step_log((3, "x", 1.0, {}), (1, "x", 5.0, {}))
        (logged,) = exchange(log)
        assert (float(logged.value), float(logged.weight)) == (2.0, 4.0)
        assert logged.value.dtype == torch.float32
        assert logged.value.dim() == 0

    def test_the_users_batch_size_is_the_weight(self, exchange):
        log = step_log((1, "x", 1.0, {"batch_size": 1}), (1, "x", 4.0, {"batch_size": 2}))
        (logged,) = exchange(log)
        assert (float(logged.value), float(logged.weight)) == (3.0, 3.0)

    def test_negative_values_and_infinities(self, exchange):
        log = step_log(
            (1, "low", -2.0, {"reduce_fx": "max"}),
            (1, "low", -3.0, {"reduce_fx": "max"}),
            (1, "inf", math.inf, {"reduce_fx": "min"}),
            (1, "nan", math.nan, {}),
        )
        seen = values(exchange, log)
        assert (seen["low"], seen["inf"]) == (-2.0, math.inf)
        assert math.isnan(seen["nan"])

    def test_fp32_values_come_back_unchanged(self, exchange):
        value = torch.rand(50)
        for one in value:
            (logged,) = exchange(step_log(*[(7, "x", one, {})] * 3))
            assert logged.value == one

    def test_another_reduction_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"'median'.*'mean', 'sum', 'min', 'max'"):
            step_log((1, "x", 1.0, {"reduce_fx": "median"}))
        with pytest.raises(ConfigurationError, match="lambda"):
            step_log((1, "x", 1.0, {"reduce_fx": lambda x: x}))


class TestRecording:
    def test_calls_outside_a_counted_microbatch_are_dropped(self, exchange):
        log = step_log((None, "earlier stage", 1.0, {}), (1, "x", 2.0, {}))
        log.log("outside", 1.0)
        assert values(exchange, log) == {"x": 2.0}

    def test_a_failing_microbatch_ends_its_recording(self, exchange):
        log = step_log((1, "x", 2.0, {}))

        def fail():
            with log.microbatch(1):
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        log.log("outside", 1.0)
        assert values(exchange, log) == {"x": 2.0}

    def test_the_value_is_a_copy(self, exchange):
        """The schedule scales the loss in place after the step has logged it."""
        loss = torch.tensor(3.0, requires_grad=True)
        scaled = loss * 1.0
        log = step_log((1, "x", scaled, {}))
        with log.microbatch(1):
            log.add_loss(scaled, 1)
        scaled.detach().div_(2)
        assert values(exchange, log) == {"x": 3.0, LOSS: 3.0}
        assert all(not logged.value.requires_grad for logged in exchange(log))

    def test_integers_and_tensors_of_one_element(self, exchange):
        log = step_log(
            (1, "int", 3, {}), (1, "bool", True, {}), (1, "long", torch.tensor([[4]]), {})
        )
        assert values(exchange, log) == {"int": 3.0, "bool": 1.0, "long": 4.0}

    def test_a_vector_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"self\.log\(x, tensor\).*\(2,\)"):
            step_log((1, "x", torch.zeros(2), {}))

    def test_settings_tell_entries_apart_and_are_passed_on(self, exchange):
        log = step_log(
            (1, "x", 1.0, {"prog_bar": True, "on_epoch": True, "on_step": None}),
            (1, "y", 1.0, {"sync_dist": True, "batch_size": 2, "rank_zero_only": True}),
        )
        first, second = exchange(log)
        assert dict(first.key.settings) == {"prog_bar": True, "on_epoch": True}
        # Values are synchronised already; a second reduction would be collective once more.
        assert dict(second.key.settings) == {}

    def test_a_metric_is_recorded_by_its_path(self, exchange):
        metric = MeanMetric()
        metric(torch.tensor(2.0))
        (logged,) = exchange(step_log((1, "m", metric, {"on_epoch": True})))
        assert logged.key.metric == "path.of.metric"
        (logged,) = exchange(step_log((1, "m", metric, {"metric_attribute": "other"})))
        assert logged.key.metric == "other"

    def test_the_loss_is_weighted_with_samples(self, exchange):
        log = step_log()
        log.add_loss(torch.tensor(1.0), 3)
        log.add_loss(torch.tensor(5.0), 1)
        assert values(exchange, log) == {LOSS: 2.0}


class TestExchange:
    def test_a_rank_without_a_say_contributes_nothing(self, world):
        silent = LogExchange(world, is_source=False, device=torch.device("cpu"))
        assert silent(step_log((1, "x", 1.0, {}))) == []

    def test_an_empty_log_is_fine(self, exchange):
        assert exchange(step_log()) == []

    def test_keys_keep_their_order(self, exchange):
        log = step_log((1, "b", 1.0, {}), (1, "a", 2.0, {}), (1, "b", 3.0, {}))
        assert [logged.key.name for logged in exchange(log)] == ["b", "a"]

    def test_the_digest_is_the_same_in_every_process(self):
        keys = tuple(step_log((1, "x", 1.0, {"prog_bar": True})).entries)
        assert 0 <= _digest(keys) < 2**62
        other = tuple(step_log((1, "x", 1.0, {"prog_bar": False})).entries)
        assert _digest(keys) != _digest(other)
        assert _digest(keys) == _digest(tuple(step_log((1, "x", 9.0, {"prog_bar": True})).entries))
