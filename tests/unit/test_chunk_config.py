"""What the TransformerConfig of a user's chunk may say besides what the strategy decided."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.stage import (
    check_fields_used,
    check_nothing_is_missing,
    check_token_prediction,
    check_variable_lengths,
)

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


@pytest.mark.parametrize(
    ("chunk", "use"),
    [
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='rope'"),
        ({"share_embeddings_and_output_weights": True}, "embeddings_and_output_weights=False"),
    ],
)
def test_embeddings_under_multi_token_prediction(chunk, use):
    predicting = SimpleNamespace(config=config(mtp_num_layers=1), **chunk)
    with pytest.raises(ConfigurationError, match=rf"`mtp_num_layers` \(1\) with `pp` \(2\).*{use}"):
        check_token_prediction(predicting, pp=2)
    check_token_prediction(predicting, pp=1)
    check_token_prediction(SimpleNamespace(config=config(), **chunk), pp=2)
    check_token_prediction(SimpleNamespace(config=config(mtp_num_layers=1)), pp=2)


def test_variable_lengths_in_batched_transfers():
    fields = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with pytest.raises(ConfigurationError, match=r"`pp` \(4\).*batch_p2p=False"):
        check_variable_lengths(config(**fields), pp=4)
    check_variable_lengths(config(**fields), pp=2)
    check_variable_lengths(config(**fields, batch_p2p_comm=False), pp=4)
    check_variable_lengths(config(), pp=4)
