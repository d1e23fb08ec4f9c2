"""Main parameters in halves, as TransformerEngine's fused Adam keeps them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mcore._mcore import adam_forms

patterns = st.integers(min_value=-(2**31), max_value=2**31 - 1)


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@given(patterns)
def test_the_halves_make_the_whole_again(bits):
    """Every pattern, infinities and numbers that are none included."""
    whole = from_bits(bits)
    again = adam_forms.join(*adam_forms.split(whole))
    assert torch.equal(again.view(torch.int32), whole.view(torch.int32))


@given(patterns.filter(lambda bits: bits & 0xFFFF != 0x8000 and (bits >> 23) & 0xFF != 0xFF))
def test_the_upper_half_is_what_torch_rounds_to(bits):
    """But for ties, which torch rounds to even."""
    whole = from_bits(bits)
    assert torch.equal(adam_forms.split(whole)[0], whole.bfloat16())


def test_halves_of_known_numbers():
    """1 + 2^-8 lies between two bf16 numbers, and rounds up; 1 + 3 x 2^-9 rounds up as well."""
    whole = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-9, 1 + 2**-9, -1 - 2**-8])
    upper, lower = adam_forms.split(whole)
    up = 1 + 2**-7
    assert upper.tolist() == [1.0, up, up, 1.0, -up]
    assert lower.tolist() == [0, -(2**15), -(2**14), 2**14, -(2**15)]


class InHalves:
    """The parts of FusedAdam (transformer_engine/pytorch/optimizers) that are used here."""

    master_weights = store_param_remainders = True

    def __init__(self, *params: torch.Tensor) -> None:
        self.param_groups = [{"params": list(params)}]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param, store_param_remainders):
        dtype = torch.int16 if store_param_remainders else torch.float32
        self.state[param] = {"master_param": torch.zeros_like(param, dtype=dtype)}

    def set_scaled_state(self, param, name, value):
        assert value.dtype == (torch.int16 if param.dtype == torch.bfloat16 else torch.float32)
        self.state[param][name].copy_(value)


def part_of(inner: InHalves, param: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        optimizer=inner,
        model_param_group_index_map={param: (0, 0)},
        _get_main_param_and_optimizer_states=lambda _: {
            "param": inner.state[param]["master_param"]
        },
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_set_and_read(dtype):
    """What a checkpoint holds is what is read afterwards, and the model's parameter fits it."""
    param = torch.zeros(5, dtype=dtype)
    inner = InHalves(param)
    part = part_of(inner, param)
    assert adam_forms.initialize(part)
    whole = torch.tensor([1.0, 1 + 2**-8, 1e-30, -3.14159, 1 + 2**-20])
    with adam_forms.takes_whole_values(part) as sets_parameters:
        inner.set_scaled_state(param, "master_param", whole)
    assert sets_parameters
    assert torch.equal(adam_forms.owned_state(part, param)["param"], whole)
    if dtype == torch.bfloat16:
        assert torch.equal(param, adam_forms.split(whole)[0])
    assert "set_scaled_state" not in vars(inner), "the optimizer is as before"


def test_a_loaded_bf16_value_is_whole():
    """Where a checkpoint has no main parameters, the model's take their place."""
    param = torch.zeros(3, dtype=torch.bfloat16)
    inner = InHalves(param)
    part = part_of(inner, param)
    adam_forms.initialize(part)
    with adam_forms.takes_whole_values(part):
        inner.set_scaled_state(param, "master_param", torch.tensor([1.0, 2.0, -0.5]).bfloat16())
    assert adam_forms.owned_state(part, param)["param"].tolist() == [1.0, 2.0, -0.5]


def test_other_optimizers_are_left_alone():
    part = SimpleNamespace(optimizer=torch.optim.AdamW([torch.zeros(1)]))
    assert not adam_forms.initialize(part)
    with adam_forms.takes_whole_values(part) as sets_parameters:
        assert not sets_parameters


@pytest.mark.filterwarnings("ignore")
def test_state_of_an_offloaded_optimizer_that_has_not_stepped():
    """The engine has no function that makes it."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from lightning_mcore._mcore.checkpointing import materialize
    from lightning_mcore._mcore.cpu import CpuAdapter

    param = torch.nn.Parameter(torch.ones(3))
    with CpuAdapter():
        inner = HybridDeviceOptimizer(
            [{"params": [param]}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            lr=0.1,
        )
        assert not inner.state
        materialize(SimpleNamespace(optimizer=inner, init_state_fn=None, config=None))
    assert inner.state[param].keys() == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert float(inner.state[param]["step"]) == 0.0
