"""FLOPs by the formula against torch's own count of what the engine's model runs.

Both count the same matrix products, so they agree exactly once attention is counted in full: the
engine's own attention (and the counter) computes what the causal mask then hides. The router is the
one product that runs in another precision, and it is counted all the same.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_mcore.config import ParallelSizes
from lightning_mcore.flops import (
    _PEAK_TFLOPS,
    ModelShape,
    forward_flops,
    peak_flops,
    training_flops,
)
from lightning_mcore.layout import resolve_layout
from lightning_mcore.testing import run_ranks

BATCH, SEQ, VOCAB = 2, 16, 64

CONFIGS = {
    "dense": {},
    "gqa": {"num_query_groups": 2},
    "wide heads": {"kv_channels": 16},
    "gated": {"gated_linear_unit": True, "add_bias_linear": False, "ffn_hidden_size": 48},
    "moe": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24},
    "moe every other": {"num_moe_experts": 4, "moe_router_topk": 3, "moe_layer_freq": 2},
    "moe gated shared": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1],
        "gated_linear_unit": True,
        "moe_shared_expert_intermediate_size": 40,
    },
}


def counts_of_both():
    """In one process on the engine, without a Trainer: formula and counter for each config."""
    import torch.distributed as dist

    from lightning_mcore._mcore import groups
    from lightning_mcore._mcore.cpu import CpuAdapter
    from tests.gpt import call_gpt

    found = {}
    with CpuAdapter():
        dist.init_process_group("gloo")
        layout = resolve_layout(ParallelSizes(), 1, 0)
        groups.init_parallel_state(layout, timeout_minutes=1, fields={}, communicators={})
        groups.seed_parallel_rng(1)
        for name, fields in CONFIGS.items():
            config, model = build(fields)
            tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
            with FlopCounterMode(display=False) as counter:
                call_gpt(model, tokens, tokens).mean().backward()
            shape = ModelShape.from_config(config, VOCAB)
            ours = training_flops(shape, tokens=BATCH * SEQ, seq_length=SEQ, causal=False)
            found[name] = ours, counter.get_total_flops()
        groups.destroy_parallel_state()
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def counts():
    return run_ranks(counts_of_both, 1, env={"CUDA_VISIBLE_DEVICES": ""})[0]


def build(fields):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = (
        {
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        }
        if "num_moe_experts" in fields
        else {}
    )
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **moe,
        **fields,
    )
    spec = (
        get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        if moe
        else get_gpt_layer_local_spec()
    )
    return config, GPTModel(config, spec, VOCAB, SEQ)


@pytest.mark.parametrize("name", CONFIGS)
def test_formula_counts_what_runs(counts, name):
    ours, counted = counts[name]
    assert ours == counted


def shape(**changes):
    given = {
        "hidden_size": 4096,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 14336,
        "gated": True,
        "moe_layers": (False,) * 32,
    }
    return ModelShape(**{**given, **changes})


def test_a_known_model():
    """Llama 3 8B, 8192 tokens: 6 FLOPs per weight that multiplies, and causal attention.

    7.504e9 weights in products (8.030e9 without the input embedding and norms).
    """
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert weights == 7_504_658_432
    expected = 6 * weights + 3 * 32 * 4 * 8192 * 4096 / 2
    assert training_flops(shape(), tokens=1, seq_length=8192) == pytest.approx(expected)


def test_causal_attention_counts_half_and_nothing_else_does():
    full, half = (forward_flops(shape(), tokens=8, seq_length=512, causal=c) for c in (False, True))
    assert full - half == pytest.approx(8 * 32 * 2 * 512 * 4096)


def test_only_active_experts_count():
    moe = shape(
        moe_layers=(True,) * 32,
        num_experts=64,
        experts_per_token=2,
        expert_ffn_hidden_size=7168,
    )
    router = 32 * 2 * 4096 * 64
    dense = forward_flops(shape(), tokens=1, seq_length=1)
    assert forward_flops(moe, tokens=1, seq_length=1) == pytest.approx(dense + router)


def test_models_that_the_formula_does_not_know_have_no_count():
    class Config:
        multi_latent_attention = True

    assert ModelShape.from_config(Config(), 64) is None


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA B200", "tf32", 1100.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("NVIDIA Z999", "bf16", None),
    ],
)
def test_peaks_are_known_or_not_given(name, precision, tflops):
    found = peak_flops(name, precision)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


# Lightning's name of a device, and ours, where both give dense rates of one GPU. Not so its H200
# (with sparsity), H100 NVL (of two GPUs) and A40 (without tensor cores): docs/measuring.md.
LIGHTNING = {
    "h100 sxm": "NVIDIA H100 80GB HBM3",
    "h100 pcie": "NVIDIA H100 PCIe",
    "a100": "NVIDIA A100-SXM4-80GB",
    "l4": "NVIDIA L4",
}


@pytest.mark.parametrize("name", LIGHTNING)
def test_peaks_are_those_that_lightning_knows(name):
    from lightning.fabric.utilities.throughput import _CUDA_FLOPS

    for precision, key in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", "tfloat32")):
        assert peak_flops(LIGHTNING[name], precision) == pytest.approx(_CUDA_FLOPS[name][key])


def test_tensor_cores_of_a_device_are_alike():
    """A rate with sparsity, or without tensor cores, among dense ones would stand out."""
    for name, rates in _PEAK_TFLOPS.items():
        if "bf16" in rates:
            assert rates["bf16"] == rates["fp16"], name
            assert rates["tf32"] / rates["bf16"] == pytest.approx(0.5, rel=0.03), name
        if "tf32" in rates and "fp32" in rates:
            assert 1.5 <= rates["tf32"] / rates["fp32"] < 10, name
