"""Model FLOPs of a training step, counted from the engine's config, and peak rates of devices.

Enters: a config's numbers. Leaves: FLOPs. Pure.

Counted as Megatron-LM counts (megatron/training/training.py, ``num_floating_point_operations``) and
most papers report: matrix products of the forward pass, 2 FLOPs per multiply and add, times 3 for
forward and backward; what activation recomputation repeats does not count. Per token, with ``h``
hidden size, ``a`` heads of ``d`` channels, ``g`` groups of keys and values, ``f`` width of an MLP
(``m`` = 3 matrices if it is gated, else 2) and ``s`` tokens in a sequence::

    attention projections   2 h (a d + 2 g d) + 2 a d h
    attention               4 s a d, halved if causal
    MLP                     2 m h f
    mixture of experts      2 m h (k f_expert + f_shared) + 2 h E    k of E experts, and the router
    logits                  2 h v

The router's product is not in Megatron-LM's count (it is below 0.1 % of a layer); embeddings, norms
and softmax are in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ModelShape", "forward_flops", "peak_flops", "training_flops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of a decoder-only transformer that its FLOPs follow from."""

    hidden_size: int
    vocab_size: int
    """Rows of the output layer, padding included."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    gated: bool
    """Whether MLPs have a third matrix (SwiGLU, GEGLU)."""
    moe_layers: tuple[bool, ...]
    """For each layer, whether it is a mixture of experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    shared_ffn_hidden_size: int = 0

    @classmethod
    def from_config(cls, config: Any, vocab_size: int) -> ModelShape | None:
        """Reads the engine's TransformerConfig.

        Args:
            config: Of a chunk.
            vocab_size: Rows of the output layer over all tensor-parallel ranks.

        Returns:
            The shape, or ``None`` for attention of another kind (latent, linear, Mamba) or further
            prediction layers, which this formula does not count.
        """
        others = (
            "multi_latent_attention",
            "mtp_num_layers",
            "experimental_attention_variant",
            "linear_attention_type",
            "moe_latent_size",
            "attention_output_gate",
            "is_hybrid_model",
        )
        if any(getattr(config, name, None) for name in others):
            return None
        experts = config.num_moe_experts or 0
        return cls(
            hidden_size=config.hidden_size,
            vocab_size=vocab_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups or config.num_attention_heads,
            kv_channels=config.kv_channels or config.hidden_size // config.num_attention_heads,
            ffn_hidden_size=config.ffn_hidden_size,
            gated=bool(config.gated_linear_unit),
            moe_layers=_moe_layers(experts, config.moe_layer_freq, config.num_layers),
            num_experts=experts,
            experts_per_token=config.moe_router_topk if experts else 0,
            expert_ffn_hidden_size=(config.moe_ffn_hidden_size or config.ffn_hidden_size)
            if experts
            else 0,
            shared_ffn_hidden_size=(config.moe_shared_expert_intermediate_size or 0)
            if experts
            else 0,
        )


def _moe_layers(experts: int, frequency: int | Sequence[int], layers: int) -> tuple[bool, ...]:
    """The engine's rule: every ``frequency``-th layer from the first, or a list of 0 and 1."""
    if not experts:
        return (False,) * layers
    if isinstance(frequency, int):
        return tuple(index % frequency == 0 for index in range(layers))
    return tuple(bool(is_moe) for is_moe in frequency)


def forward_flops(shape: ModelShape, *, tokens: int, seq_length: int, causal: bool = True) -> float:
    """FLOPs of one forward pass through the whole model.

    Args:
        shape: Of the model.
        tokens: In the batch, over all samples.
        seq_length: Tokens that attend to each other.
        causal: Whether attention is counted half, since a token attends to those before it.
    """
    h, heads = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    keys = shape.num_query_groups * shape.kv_channels
    matrices = 3 if shape.gated else 2
    attention = 2 * h * (heads + 2 * keys) + 2 * heads * h
    attention += 4 * seq_length * heads // (2 if causal else 1)
    dense = 2 * matrices * h * shape.ffn_hidden_size
    active = shape.experts_per_token * shape.expert_ffn_hidden_size + shape.shared_ffn_hidden_size
    experts = 2 * matrices * h * active + 2 * h * shape.num_experts
    layers = sum(attention + (experts if is_moe else dense) for is_moe in shape.moe_layers)
    return float(tokens * (layers + 2 * h * shape.vocab_size))


def training_flops(
    shape: ModelShape, *, tokens: int, seq_length: int, causal: bool = True
) -> float:
    """FLOPs of forward and backward passes: three times those of the forward pass."""
    return 3 * forward_flops(shape, tokens=tokens, seq_length=seq_length, causal=causal)


# Dense tensor-core rates in TFLOP/s, from NVIDIA's data sheets; where a sheet prints the rate with
# sparsity (from Ampere on, often only by a footnote), half of it. "fp32" is the rate without tensor
# cores. Keys are words of torch.cuda.get_device_name; the longest match counts.
#
# B200, GB200: specifications of HGX B200 and GB200 NVL72, which print rates with sparsity: bf16 4.5
#   and 5 PFLOP/s, tf32 2.2 and 2.5 (rounded, so tf32 is not half of bf16 on the B200).
#   https://www.nvidia.com/en-us/data-center/gb200-nvl72/, https://www.nvidia.com/en-us/data-center/hgx/
# H200: https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446 (bf16 1,979
#   with sparsity; NVL 1,671).
# H100: https://resources.nvidia.com/en-us-tensor-core (SXM 1,979 and NVL 1,671 with sparsity, for
#   one GPU; PCIe 1,513). The H800 has the H100's compute, slower links.
# A100: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/
#   nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf (SXM and PCIe alike). The A800 likewise.
# A40, A10, L4, L40S: their data sheets at https://www.nvidia.com/en-us/data-center/ (L40S
#   "362.05 | 733" is dense and sparse).
# V100: https://images.nvidia.com/content/technologies/volta/pdf/
#   volta-v100-datasheet-update-us-1165301-r5.pdf (SXM2 125, PCIe 112).
# H20: no public data sheet; the figure that vendors print, 148.
_PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0},
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0},
    "H200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H100 80GB HBM3": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2},
    "H800": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H20": {"bf16": 148.0, "fp16": 148.0, "tf32": 74.0, "fp32": 44.0},
    "A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "A800": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of one device; ``None`` rather than a guess if it is not in the table.

    Args:
        device_name: As torch names the device: ``NVIDIA H100 80GB HBM3``.
        precision: Of the matrix products: ``bf16``, ``fp16``, ``tf32`` or ``fp32``.
    """
    words = device_name.replace("-", " ").split()
    best: tuple[int, dict[str, float]] | None = None
    for name, rates in _PEAK_TFLOPS.items():
        wanted = name.replace("-", " ").split()
        found = any(words[i : i + len(wanted)] == wanted for i in range(len(words)))
        if found and (best is None or len(wanted) > best[0]):
            best = len(wanted), rates
    rate = best[1].get(precision) if best is not None else None
    return rate * 1e12 if rate is not None else None
