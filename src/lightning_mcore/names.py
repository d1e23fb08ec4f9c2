"""Plain names of what a checkpoint holds under global keys.

A checkpoint keeps equal layers as one tensor with a layer axis in front, and experts with one more
(``decoder.layers.mlp.linear_fc1.weight`` ``[layers, ...]``). A plain ``state_dict`` has one tensor
for each (``decoder.layers.3.mlp.linear_fc1.weight``). A *template* is a plain name with ``{}`` in
place of each number. Pure text; nothing here is collective.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACE = "{}"
BLOCKS_PREFIX = "blocks."
"""Of the keys of a model that was cut from an ``nn.Sequential``."""
PLAIN_PREFIX = "inner."
"""Of the keys of a LightningModule that runs whole."""
KINDS = ("megatron", "sequential", "plain")

_STACKS = re.compile(r"(?<![^.])layers\.(?![0-9])|(?<![^.])experts\.experts\.")
_SHARD = re.compile(r"(.+)/shard_([0-9.]+)_[0-9.]+")
_LAYER_NUMBER = re.compile(r"(?<![^.])layers\.([0-9]+)\.")
_EXPERT_NUMBER = re.compile(
    r"(?<=\.local_experts\.)[0-9]+(?=\.)|(?<=\.weight)[0-9]+$|(?<=\.bias)[0-9]+$"
)
# The engine's name where norm and linear layer are fused, and that of a norm of its own.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def kind_of(keys: Sequence[str]) -> str:
    """Which of ``KINDS`` of model wrote the model's ``keys``."""
    if keys and all(key.startswith(PLAIN_PREFIX) for key in keys):
        return "plain"
    if keys and all(re.match(r"blocks\.[0-9]+\.", key) for key in keys):
        return "sequential"
    return "megatron"


def depth(key: str) -> int:
    """Leading axes of the tensor of ``key`` that count layers or experts."""
    return len(_STACKS.findall(key))


def fused_template(key: str) -> str:
    """Template of a key, for layers in which norms are fused with what follows them."""

    def number(match: re.Match[str]) -> str:
        stack = match[0]
        return f"layers.{PLACE}." if stack == "layers." else f"experts.local_experts.{PLACE}."

    return _STACKS.sub(number, key)


def template_of(key: str, *, fused_norms: bool) -> str:
    """Template of a key in a model with fused norms (TransformerEngine) or without."""
    template = fused_template(key)
    if not fused_norms and _in_layer(key):
        for fused, separate in _FUSED_NORMS:
            template = template.replace(fused, separate)
    return template


def _in_layer(key: str) -> bool:
    return "layers." in key


def fill(template: str, index: Sequence[int]) -> str:
    """A template with its numbers."""
    parts = template.split(PLACE)
    numbers = [*map(str, index), *[""] * len(parts)]
    return "".join(part + number for part, number in zip(parts, numbers, strict=False))


def global_template(local: str, key: str) -> str:
    """Template of a tensor that a rank calls ``local`` and a checkpoint ``key``.

    Ranks count layers and experts from zero; where the key has no axis for layers, it has their
    number in the whole model.
    """
    numbered = _LAYER_NUMBER.search(key)
    template = local
    if _STACKS.search(key) and numbered is None and "layers." in key:
        template = _LAYER_NUMBER.sub(f"layers.{PLACE}.", template, count=1)
    elif numbered is not None:
        template = _LAYER_NUMBER.sub(f"layers.{numbered[1]}.", template, count=1)
    if "experts.experts." in key:
        template = _EXPERT_NUMBER.sub(PLACE, template, count=1)
    return template


def split_object_key(key: str) -> tuple[str, tuple[int, ...]]:
    """Name and place of an object that is listed as ``name/shard_<place>_<count>``."""
    match = _SHARD.fullmatch(key)
    if match is None:
        return key, ()
    return match[1], tuple(int(number) for number in match[2].split("."))


def is_extra_state(name: str) -> bool:
    """Whether a name is a layer's extra state, which depends on the kernels that run it."""
    return name.split("/")[0].endswith("_extra_state")


def without_prefix(key: str, kind: str) -> str:
    """The key without what the strategy put in front of the module's own names."""
    prefix = {"plain": PLAIN_PREFIX, "sequential": BLOCKS_PREFIX}.get(kind, "")
    return key.removeprefix(prefix)


def layer_key(name: str) -> tuple[str, int] | None:
    """Key and layer of a plain name, in a model whose layers are equal; ``None`` outside layers."""
    match = _LAYER_NUMBER.search(name)
    if match is None:
        return None
    key = _LAYER_NUMBER.sub("layers.", name, count=1)
    for fused, separate in _FUSED_NORMS:
        key = key.replace(f"layers.{separate}", f"layers.{fused}")
    return key, int(match[1])
