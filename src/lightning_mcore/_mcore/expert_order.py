"""Experts in another order than the engine's: where tokens go, and what checkpoints see.

The engine gives expert ``i`` of a layer to rank ``i // (num_experts // ep)``
(transformer/moe/moe_layer.py, ``local_expert_indices``). Here that ``i`` becomes a *slot*: the
router stays as it is, with its weight, bias, expert bias and statistics in the canonical order, and
a forward hook on it permutes the columns of what it returns, which is all that the rest of the
layer knows of experts. So routing itself is the same to the last bit, and only what belongs to an
expert has to be moved. In checkpoints, slot ``s`` is named as the expert that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

__all__ = ["ExpertOrder", "canonical_tree", "expert_orders", "experts_by_slot", "has_order"]

_ATTRIBUTE = "lightning_expert_order"
"""Where a layer keeps its ``ExpertOrder``, so that a chunk alone says what it holds."""


class ExpertOrder:
    """The expert in each slot of one MoE layer of this rank, and the tokens that experts got.

    Args:
        name: Of the layer, the same in every layout.
        moe: The engine's MoE layer.
    """

    def __init__(self, name: str, moe: Any) -> None:
        self.name = name
        self.moe = moe
        self.num_experts = int(moe.config.num_moe_experts)
        self.slots: tuple[int, ...] = tuple(range(self.num_experts))
        """Experts by slot."""
        device = moe.router.weight.device
        self.columns = torch.arange(self.num_experts, device=device)
        """The same on the device."""
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        """Tokens of this rank that training steps sent to each expert since ``set_to_zero``."""
        # In front of other hooks, so that all of them see what the dispatcher gets: slots, whose
        # ranks are the ones that compute.
        self._hook = moe.router.register_forward_hook(self._after_router, prepend=True)
        setattr(moe, _ATTRIBUTE, self)

    @property
    def is_canonical(self) -> bool:
        """Whether expert ``i`` is in slot ``i``."""
        return self.slots == tuple(range(self.num_experts))

    def set_slots(self, slots: tuple[int, ...]) -> None:
        """Says what the slots hold from now on; the experts have been moved."""
        assert sorted(slots) == list(range(self.num_experts)), f"not a permutation: {slots}"
        self.slots = slots
        self.columns.copy_(torch.tensor(slots))

    def set_to_zero(self) -> None:
        """Begins to count anew."""
        self.counts.zero_()

    def release(self) -> None:
        """Leaves the layer as the engine made it, which holds its experts in canonical order."""
        assert self.is_canonical, f"{self.name}: experts are still in order {self.slots}"
        self._hook.remove()
        delattr(self.moe, _ATTRIBUTE)

    def _after_router(
        self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Takes ``probs`` and ``routing_map``, both ``[tokens, experts]``, to the slots."""
        probs, routing_map = output
        if router.training and torch.is_grad_enabled():
            # Recomputation runs the first pass without gradients: each token counts once.
            with torch.no_grad():
                self.counts += routing_map.sum(dim=0)
        if self.is_canonical:
            return None
        return probs.index_select(1, self.columns), routing_map.index_select(1, self.columns)


def experts_by_slot(moe: nn.Module) -> Tensor | None:
    """The expert in each slot of a layer, ``[experts]`` on its device; ``None``: as numbered."""
    order: ExpertOrder | None = getattr(moe, _ATTRIBUTE, None)
    return None if order is None else order.columns


def has_order(moe: nn.Module) -> bool:
    """Whether a layer has an ``ExpertOrder``."""
    return hasattr(moe, _ATTRIBUTE)


def expert_orders(chunk: nn.Module) -> dict[str, ExpertOrder]:
    """The layers of a chunk that have an ``ExpertOrder``, by their name in the chunk."""
    return {
        name: order
        for name, module in chunk.named_modules()
        if (order := getattr(module, _ATTRIBUTE, None)) is not None
    }


def canonical_tree(chunk: nn.Module, tree: dict[str, Any]) -> dict[str, Any]:
    """A chunk's shards, those of experts named by the expert and not by its slot.

    Optimizer state is named like its parameters, so this holds for it too.
    """
    moved = {
        f"{name}.experts.": order.slots
        for name, order in expert_orders(chunk).items()
        if not order.is_canonical
    }
    if not moved:
        return tree
    return {key: _renamed(leaf, _slots_of(key, moved)) for key, leaf in tree.items()}


def _slots_of(key: str, moved: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    return next((slots for prefix, slots in moved.items() if key.startswith(prefix)), None)


def _renamed(leaf: Any, slots: tuple[int, ...] | None) -> Any:
    if slots is None:
        return leaf
    if isinstance(leaf, ShardedTensorFactory):
        return replace(leaf, build_fn=partial(_build_renamed, leaf.build_fn, slots))
    if isinstance(leaf, ShardedTensor):
        # Experts are the last of the axes in front of the tensor's own (transformer/moe/experts.py,
        # sharded_state_dict).
        axis = leaf.prepend_axis_num - 1
    elif isinstance(leaf, ShardedObject):
        axis = len(leaf.global_offset) - 1
    else:
        return leaf
    assert leaf.global_shape[axis] == len(slots), f"{leaf.key}: no axis of experts: {leaf}"
    return replace(leaf, global_offset=_at(leaf.global_offset, axis, slots))


def _at(offset: Iterable[int], axis: int, slots: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(slots[o] if a == axis else o for a, o in enumerate(offset))


def _build_renamed(build: Any, slots: tuple[int, ...], *args: Any) -> Any:
    return dict_list_map_inplace(partial(_renamed, slots=slots), build(*args))
