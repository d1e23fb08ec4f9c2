"""What the TransformerConfig of a user's chunk may say besides what the strategy decided."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.stage import check_fields_used, check_nothing_is_missing

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("name", "value", "off", "use"),
    [
        ("cuda_graph_impl", "local", "none", "cuda_graphs='local'"),
        ("overlap_moe_expert_parallel_comm", True, False, "overlap_moe='1f1b'"),
        ("delay_wgrad_compute", True, False, "delay_wgrad_compute=True"),
    ],
)
def test_fields_of_a_switch_need_the_switch(name, value, off, use):
    assert name in FIELDS
    with pytest.raises(ConfigurationError, match=use):
        check_fields_used(SimpleNamespace(**{name: value}), {})
    check_fields_used(SimpleNamespace(**{name: value}), {name: value})
    check_fields_used(SimpleNamespace(**{name: off}), {})
    check_fields_used(SimpleNamespace(), {})


def test_a_field_that_was_not_passed_on():
    with pytest.raises(ConfigurationError, match=r"sequence_parallel \(False, needed True\)"):
        check_fields_used(SimpleNamespace(sequence_parallel=False), {"sequence_parallel": True})


def config(**fields):
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, **fields
    )


def test_the_engines_defaults_are_complete():
    check_nothing_is_missing(config())


@pytest.mark.parametrize("name", ["qk_clip", "hybrid_context_parallel", "fp8_param"])
def test_what_only_megatrons_script_completes(name):
    plain = config()
    if name not in FIELDS:
        pytest.skip(f"this megatron-core has no {name}")
    setattr(plain, name, True)
    with pytest.raises(ConfigurationError, match=f"`{name}` .True.*training"):
        check_nothing_is_missing(plain)


@pytest.mark.skipif("use_mup" not in FIELDS, reason="this megatron-core has no MuP")
def test_mup_warns_of_learning_rates():
    with pytest.warns(UserWarning, match="mup_width_mult"):
        check_nothing_is_missing(SimpleNamespace(use_mup=True, mup_width_mult=4.0))
