"""Models of the GPU benchmarks: dimensions, the engine's GPTModel, and a plain torch twin of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

with warnings.catch_warnings():
    # What is missing is said once per module of the engine.
    warnings.simplefilter("ignore")
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.flops import ModelShape, training_flops

COMPILE = ("none", "blocks", "all")
"""What ``TorchGPT.compile_parts`` compiles: all adds the output layer with its loss."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Dimensions of a model and of its batch. Embedding and output layer are not tied."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    """Of an MLP, or of one expert."""
    vocab: int
    seq: int
    batch: int
    """Samples per data-parallel rank and step."""
    head_dim: int
    groups: int | None = None
    """Heads of keys and values; ``None``: as many as of queries."""
    llama: bool = True
    """RMSNorm, SwiGLU, rotary positions and no biases; else LayerNorm, GELU, learned positions and
    biases, as in GPT-2."""
    qk_norm: bool = False
    experts: int = 0
    """Experts of every layer; 0: dense layers."""
    experts_per_token: int = 0
    rotary_base: int = 500_000

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.groups or self.heads

    @property
    def micro_batch(self) -> int:
        """Samples per microbatch where there is a pipeline."""
        return 1

    @property
    def tokens(self) -> int:
        """Per data-parallel rank and step."""
        return self.batch * self.seq


MODELS = {
    model.name: model
    for model in (
        Model(
            name="gpt2-xl",
            layers=48,
            hidden=1600,
            heads=25,
            head_dim=64,
            ffn=6400,
            vocab=50304,
            seq=1024,
            batch=8,
            llama=False,
        ),
        Model(
            name="llama-8b-slice",
            layers=12,
            hidden=4096,
            heads=32,
            groups=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            seq=4096,
            batch=2,
        ),
        Model(
            name="llama-70b-slice",
            layers=4,
            hidden=8192,
            heads=64,
            groups=8,
            head_dim=128,
            ffn=28672,
            vocab=32000,
            seq=4096,
            batch=1,
        ),
        # Attention and experts of Qwen3-30B-A3B.
        Model(
            name="moe-slice",
            layers=2,
            hidden=2048,
            heads=32,
            groups=4,
            head_dim=128,
            ffn=768,
            vocab=32000,
            seq=4096,
            batch=2,
            qk_norm=True,
            experts=128,
            experts_per_token=8,
            rotary_base=1_000_000,
        ),
        # Attention and experts of Qwen3-235B-A22B, with a quarter of its experts.
        Model(
            name="moe-wide-slice",
            layers=2,
            hidden=4096,
            heads=64,
            groups=4,
            head_dim=128,
            ffn=1536,
            vocab=32000,
            seq=4096,
            batch=5,
            qk_norm=True,
            experts=32,
            experts_per_token=8,
            rotary_base=1_000_000,
        ),
        Model(
            name="tiny",
            layers=2,
            hidden=64,
            heads=4,
            groups=2,
            head_dim=16,
            ffn=128,
            vocab=128,
            seq=32,
            batch=4,
        ),
        Model(
            name="tiny-moe",
            layers=2,
            hidden=64,
            heads=4,
            groups=2,
            head_dim=16,
            ffn=32,
            vocab=128,
            seq=32,
            batch=4,
            qk_norm=True,
            experts=4,
            experts_per_token=2,
        ),
    )
}


def model_shape(model: Model) -> ModelShape:
    """What the FLOPs follow from."""
    return ModelShape(
        hidden_size=model.hidden,
        vocab_size=model.vocab,
        num_attention_heads=model.heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        gated=model.llama,
        moe_layers=(model.experts > 0,) * model.layers,
        num_experts=model.experts,
        experts_per_token=model.experts_per_token,
        expert_ffn_hidden_size=model.ffn if model.experts else 0,
    )


def model_flops(model: Model) -> float:
    """FLOPs of a step on one data-parallel rank: 3 x forward, causal attention counted half."""
    return training_flops(model_shape(model), tokens=model.tokens, seq_length=model.seq)


def parameter_count(model: Model) -> int:
    """Parameters of the whole model."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.query_groups * model.head_dim
    attention = h * (q + 2 * kv) + q * h + (2 * model.head_dim if model.qk_norm else 0)
    mlp = (3 if model.llama else 2) * h * model.ffn
    if model.experts:
        mlp = mlp * model.experts + h * model.experts
    layer = attention + mlp + 2 * h
    if model.llama:
        ends = 2 * model.vocab * h + h
    else:
        layer += (q + 2 * kv + h) + (model.ffn + h) + 2 * h
        ends = 2 * model.vocab * h + 2 * h + model.seq * h
    return model.layers * layer + ends


# ------------------------------------------------------------------------------ the engine's


@cache
def uses_te() -> bool:
    """Whether layers are TransformerEngine's: where it is installed and there is a GPU."""
    return bool(HAVE_TE) and torch.cuda.is_available()


def transformer_fields(model: Model) -> dict[str, Any]:
    """Fields of the engine's TransformerConfig: the model, and the fastest settings known here."""
    fields: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "qk_layernorm": model.qk_norm,
    }
    if model.llama:
        fields |= {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        }
    if model.experts:
        fields |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.ffn,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": uses_te(),
            "moe_permute_fusion": uses_te(),
        }
    if uses_te():
        fields |= {
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "masked_softmax_fusion": True,
            "persist_layer_norm": True,
            "apply_rope_fusion": model.llama,
            "cross_entropy_loss_fusion": True,
            # The engine warns of "te", which computes in place and takes less memory.
            "cross_entropy_fusion_impl": "native",
        }
    return fields


def mcore_chunk(
    model: Model,
    *,
    is_first: bool = True,
    is_last: bool = True,
    vp_stage: int | None = None,
    options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> GPTModel:
    """One chunk of the engine's GPTModel.

    Args:
        model: Dimensions.
        is_first: Whether the chunk has the embedding.
        is_last: Whether the chunk has the output layer.
        vp_stage: Index among this rank's chunks.
        options: Further fields of TransformerConfig, which win over ours: ``fp8``, ``fp8_recipe``,
            ``recompute_granularity``, ``cuda_graph_impl``... ``attention_backend`` is given by
            name. None of them may be in ``fields``.
        fields: What the strategy decided.
    """
    chosen = dict(options or {})
    if isinstance(chosen.get("attention_backend"), str):
        chosen["attention_backend"] = AttnBackend[chosen["attention_backend"]]
    base = {k: v for k, v in transformer_fields(model).items() if k not in {**chosen, **fields}}
    config = TransformerConfig(**base, **chosen, **fields)
    spec: dict[str, Any] = {
        "num_experts": model.experts or None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": model.qk_norm,
    }
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(
            **spec,
            use_te_op_fuser=getattr(config, "use_transformer_engine_op_fuser", False),
            use_te_activation_func=config.use_te_activation_func,
        )
        if uses_te()
        else get_gpt_layer_local_spec(**spec, normalization=config.normalization),
        model.vocab,
        model.seq,
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope" if model.llama else "learned_absolute",
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )


def call_gpt(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Per-token losses ``[b, s]`` of ``tokens`` ``[b, s]``.

    TransformerEngine's attention masks by its type, which is causal, and is slower with a mask; the
    engine's own attention needs one.
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = None
    if not uses_te():
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    loss: Tensor = model(tokens, positions, mask, labels=labels)
    return loss


# ------------------------------------------------------------------------------ plain torch


class Block(nn.Module):
    """Attention and MLP with their norms: what is compiled, and sharded, as one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._sizes = [heads * model.head_dim for heads in (model.heads, *[model.query_groups] * 2)]
        self._head_dim = model.head_dim
        self._gqa = model.query_groups < model.heads
        self._gated = model.llama
        bias = not model.llama
        self.norm_1 = _norm(model, model.hidden)
        self.qkv = nn.Linear(model.hidden, sum(self._sizes), bias=bias)
        self.proj = nn.Linear(self._sizes[0], model.hidden, bias=bias)
        self.norm_2 = _norm(model, model.hidden)
        self.fc1 = nn.Linear(model.hidden, model.ffn * (2 if self._gated else 1), bias=bias)
        self.fc2 = nn.Linear(model.ffn, model.hidden, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """``x`` and the result are ``[b, s, h]``."""
        b, s, _ = x.shape
        parts = self.qkv(self.norm_1(x)).split(self._sizes, dim=-1)
        q, k, v = (part.view(b, s, -1, self._head_dim).transpose(1, 2) for part in parts)
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._gqa)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, -1))
        y = self.fc1(self.norm_2(x))
        if self._gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return x + self.fc2(y)


def _norm(model: Model, size: int) -> nn.Module:
    return nn.RMSNorm(size, eps=1e-5) if model.llama else nn.LayerNorm(size, eps=1e-5)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of ``x`` ``[b, heads, s, d]``, in the precision of ``x``."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class _Head(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = _norm(model, model.hidden)
        self.output = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean loss; under autocast logits are bf16 and the loss is computed in fp32."""
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), labels.flatten())


class TorchGPT(nn.Module):
    """The same model in plain torch, as a careful Lightning user would write it.

    Raises:
        ValueError: For a mixture of experts, of which torch has no layer.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        if model.experts:
            raise ValueError(f"There is no plain torch twin of {model.name}, which has experts.")
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.positions = None if model.llama else nn.Embedding(model.seq, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.head = _Head(model)
        self._rotary = (model.rotary_base, model.head_dim, model.seq) if model.llama else None
        angles = torch.zeros(1)
        if self._rotary is not None:
            base, dim, seq = self._rotary
            rates = base ** (-torch.arange(0, dim, 2).float() / dim)
            angles = torch.outer(torch.arange(seq).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def compile_parts(self, what: str) -> None:
        """Compiles block by block: all blocks as one take minutes."""
        if what != "none":
            for block in self.blocks:
                block.compile()
        if what == "all":
            self.head.compile()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of ``tokens`` ``[b, s]``."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        if torch.is_autocast_enabled(x.device.type):
            # So that the residual stream is bf16, as the engine's is.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope = None
        if self._rotary is not None:
            rope = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, rope)
        loss: Tensor = self.head(x, labels)
        return loss


def torch_weights(model: Model, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of the engine's whole model under TorchGPT's names and in its layout.

    The engine interleaves queries, keys and values by group.
    """
    state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    layer_norm = {"input_layernorm": "norm_1", "pre_mlp_layernorm": "norm_2"}
    names = {
        **{f"{theirs}.": f"{ours}." for theirs, ours in layer_norm.items()},
        "self_attention.linear_qkv.layer_norm_": "norm_1.",
        "mlp.linear_fc1.layer_norm_": "norm_2.",
        "self_attention.linear_qkv.": "qkv.",
        "self_attention.linear_proj.": "proj.",
        "mlp.linear_fc1.": "fc1.",
        "mlp.linear_fc2.": "fc2.",
        "decoder.layers.": "blocks.",
        "decoder.final_layernorm.": "head.norm.",
        "embedding.word_embeddings.": "embedding.",
        "embedding.position_embeddings.": "positions.",
        "output_layer.": "head.output.",
    }
    renamed = {}
    for name, value in state.items():
        new = name
        for theirs, ours in names.items():
            new = new.replace(theirs, ours)
        renamed[new] = _flat_qkv(model, value) if ".qkv." in new else value
    return renamed


def _flat_qkv(model: Model, value: Tensor) -> Tensor:
    groups, per_group = model.query_groups, model.heads // model.query_groups
    grouped = value.view(groups, per_group + 2, model.head_dim, *value.shape[1:])
    parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
    return torch.cat([part.reshape(-1, *value.shape[1:]) for part in parts])
