"""What the user may write: types, ranges, and the messages for everything else."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from lightning_mcore.config import ModelDims, ParallelSizes, SwitchRequest
from lightning_mcore.errors import (
    CheckpointError,
    ConfigurationError,
    MCoreError,
    NotInitializedError,
)

TRI_STATES = (
    "sequence_parallel",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "overlap_p2p",
)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigurationError, ValueError),
        (CheckpointError, RuntimeError),
        (NotInitializedError, RuntimeError),
    ],
)
def test_errors_are_caught_as_ours_and_as_builtins(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, MCoreError)
    assert issubclass(error, builtin)


def test_defaults_are_one_rank_and_auto() -> None:
    sizes = ParallelSizes()
    assert dataclasses.asdict(sizes) == {
        "tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": None
    }  # fmt: skip
    request = SwitchRequest()
    assert all(getattr(request, name) == "auto" for name in TRI_STATES)
    assert request.bucket_size is None
    assert request.micro_batch_size is None


@pytest.mark.parametrize("value", [ParallelSizes(), SwitchRequest(), ModelDims()])
def test_values_are_frozen(value: object) -> None:
    name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 2)


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "ep"])
@pytest.mark.parametrize(
    ("value", "fix"),
    [(0, 1), (-2, 1), (2.0, 2), ("4", 4), (True, 1), (None, 1), (float("nan"), 1), ([2], 1)],
)
def test_sizes_are_integers_of_at_least_one(name: str, value: object, fix: int) -> None:
    with pytest.raises(ConfigurationError) as error:
        ParallelSizes(**{name: value})  # type: ignore[arg-type]
    assert str(error.value) == (
        f"`{name}` ({value!r}) must be an integer of at least 1; use {name}={fix}."
    )


@pytest.mark.parametrize("name", ["vpp", "etp"])
@pytest.mark.parametrize("value", [0, 1.5, "2", False])
def test_optional_sizes_take_none_too(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        ParallelSizes(pp=2, **{name: value})  # type: ignore[arg-type]
    assert f"`{name}` ({value!r}) must be an integer of at least 1 or None" in str(error.value)
    assert getattr(ParallelSizes(pp=2, **{name: None}), name) is None


@pytest.mark.parametrize("vpp", [2, 3])
def test_interleaving_needs_a_pipeline(vpp: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"`vpp` \({vpp}\).*`pp` \(1\).*use pp=2"):
        ParallelSizes(vpp=vpp)


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (1, 1), (2, 1), (2, 2), (4, 3)])
def test_interleaving_that_fits(pp: int, vpp: int | None) -> None:
    assert ParallelSizes(pp=pp, vpp=vpp).vpp == vpp


@pytest.mark.parametrize("name", TRI_STATES)
@pytest.mark.parametrize("value", [None, 1, 0, "true", "off", "AUTO"])
def test_switches_are_tri_state(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        SwitchRequest(**{name: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"`{name}` ({value!r}) must be True, False or 'auto';")


@pytest.mark.parametrize("name", TRI_STATES)
@pytest.mark.parametrize("value", [True, False, "auto"])
def test_switches_keep_what_they_were_given(name: str, value: bool | str) -> None:
    assert getattr(SwitchRequest(**{name: value}), name) is value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("ddp", DistributedDataParallelConfig()), ("optimizer", OptimizerConfig())],
)
def test_configs_of_the_engine_are_asked_for_as_mappings(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        SwitchRequest(**{name: value})  # type: ignore[arg-type]
    start = f"`{name}` ({type(value).__name__}) must be a mapping of the fields that you choose"
    assert str(error.value).startswith(start)
    assert len(str(error.value)) < 300, "not with all fields of the config"


@pytest.mark.parametrize("name", ["bucket_size", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "auto"])
def test_request_sizes(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        SwitchRequest(**{name: value})  # type: ignore[arg-type]
    assert f"`{name}` ({value!r}) must be an integer of at least 1 or None" in str(error.value)
    assert getattr(SwitchRequest(**{name: 7}), name) == 7  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, ModelDims()),
        ({}, ModelDims()),
        ({"num_layers": 4, "seq_length": 32}, ModelDims(num_layers=4, seq_length=32)),
        ({"num_query_groups": None}, ModelDims()),
        (ModelDims(num_moe_experts=8), ModelDims(num_moe_experts=8)),
        (
            SimpleNamespace(num_layers=4, num_attention_heads=8, hidden_size=64, vocab=9),
            ModelDims(num_layers=4, num_attention_heads=8, hidden_size=64),
        ),
    ],
)
def test_model_dims_are_read_from_what_users_have(source: object, expected: ModelDims) -> None:
    assert ModelDims.from_object(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"layers": 4, "heads": 2}, r"unknown keys \['heads', 'layers'\]; use any of"),
        ({"num_layers": 0}, r"`num_layers` of `model_dims` \(0\) must be an integer"),
        ({"seq_length": "32"}, r"`seq_length` of `model_dims` \('32'\).*use seq_length=32"),
        (SimpleNamespace(vocab=64), r"`model_dims` \(SimpleNamespace\) must be a mapping"),
        (4, r"`model_dims` \(int\) must be a mapping"),
    ],
)
def test_model_dims_refuse_what_they_do_not_understand(source: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelDims.from_object(source)
