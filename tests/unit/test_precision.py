"""Lightning's precision names as dtypes of the engine."""

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.precision import SUPPORTED, MCorePrecision

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "params", "native_params", "bf16", "fp16"),
    [
        ("32-true", F32, F32, False, False),
        ("bf16-mixed", BF16, F32, True, False),
        ("bf16-true", BF16, BF16, True, False),
        ("16-mixed", F16, F32, False, True),
    ],
)
def test_dtypes_of_the_model(name, params, native_params, bf16, fp16):
    precision = MCorePrecision(name)
    fields = precision.engine_fields(native=False)
    assert fields["params_dtype"] == fields["pipeline_dtype"] == precision.params_dtype == params
    assert (fields["bf16"], fields["fp16"]) == (bf16, fp16)
    native = precision.engine_fields(native=True)
    assert native["params_dtype"] == native["pipeline_dtype"] == native_params
    assert precision.is_mixed == name.endswith("-mixed")


@pytest.mark.parametrize(
    ("name", "native", "bf16", "fp16"),
    [
        ("32-true", False, False, False),
        ("bf16-mixed", False, True, False),
        ("bf16-mixed", True, False, False),  # fp32 parameters in autocast have no main copy
        ("bf16-true", False, False, False),
        ("16-mixed", False, False, True),
    ],
)
def test_main_parameters_of_the_optimizer(name, native, bf16, fp16):
    fields = MCorePrecision(name).optimizer_fields(native=native)
    assert (fields["bf16"], fields["fp16"]) == (bf16, fp16)


@pytest.mark.parametrize("name", ["64-true", "16-true", "transformer-engine", "nf4", "32", ""])
def test_other_names_are_refused_with_the_list(name):
    with pytest.raises(ConfigurationError, match=r"`precision` \('.*'\) must be one of.*32-true"):
        MCorePrecision(name)


class TestFromPlugin:
    @pytest.mark.parametrize(
        ("plugin", "name"),
        [
            (Precision(), "32-true"),
            (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
            (HalfPrecision("bf16-true"), "bf16-true"),
        ],
    )
    def test_lightnings_own_are_translated(self, plugin, name):
        assert MCorePrecision.from_plugin(plugin).precision == name

    def test_ours_and_none_stay(self):
        ours = MCorePrecision("bf16-mixed")
        assert MCorePrecision.from_plugin(ours) is ours
        assert MCorePrecision.from_plugin(None) is None

    @pytest.mark.parametrize("plugin", [DoublePrecision(), HalfPrecision("16-true")])
    def test_unsupported_ones_are_refused(self, plugin):
        with pytest.raises(ConfigurationError, match="must be one of"):
            MCorePrecision.from_plugin(plugin)

    def test_a_users_own_is_refused(self):
        class Special(Precision):
            pass

        with pytest.raises(ConfigurationError, match=r"Special cannot run.*Trainer\(precision="):
            MCorePrecision.from_plugin(Special())


class TestInput:
    def test_bf16_true_casts_floats_of_the_batch(self):
        batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "names": ["a"]}
        cast = MCorePrecision("bf16-true").convert_input(batch)
        assert cast["x"].dtype == BF16
        assert cast["ids"].dtype == torch.int64
        assert cast["names"] == ["a"]

    @pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])
    def test_others_leave_the_batch_alone(self, name):
        batch = {"x": torch.ones(2, dtype=torch.float64)}
        assert MCorePrecision(name).convert_input(batch) is batch


@pytest.mark.parametrize("name", SUPPORTED)
def test_only_bf16_true_converts_plain_modules(name):
    module = MCorePrecision(name).convert_native(nn.Linear(1, 1))
    assert module.weight.dtype == (BF16 if name == "bf16-true" else F32)


@pytest.mark.parametrize(
    ("name", "native", "expected"),
    [("bf16-mixed", True, BF16), ("bf16-mixed", False, F32), ("32-true", True, F32)],
)
def test_autocast_is_for_plain_modules_under_mixed_precision(name, native, expected):
    with MCorePrecision(name).step_context(torch.device("cpu"), native=native):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == expected


class TestClipping:
    def test_nothing_is_clipped_at_first(self):
        clipping = MCorePrecision().clipping
        assert (clipping.norm, clipping.value) == (0.0, 0.0)

    @pytest.mark.parametrize(
        ("value", "algorithm", "norm", "limit"),
        [
            (0.5, "norm", 0.5, 0.0),
            (2, "value", 0.0, 2.0),
            (0.0, "norm", 0.0, 0.0),
            (None, "norm", 0.0, 0.0),
        ],
    )
    def test_lightnings_arguments(self, value, algorithm, norm, limit):
        for given in (algorithm, GradClipAlgorithmType(algorithm)):
            precision = MCorePrecision()
            precision.clip_gradients(None, value, given)
            assert (precision.clipping.norm, precision.clipping.value) == (norm, limit)
