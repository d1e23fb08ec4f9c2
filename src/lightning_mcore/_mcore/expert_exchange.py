"""Moves experts between expert-parallel ranks: weights, main parameters and optimizer state.

An expert travels as bytes: each of its parameters as the model has it, then the entries of its
optimizer state. With the distributed optimizer a rank holds slices of that state, cut where its
shard of a gradient buffer begins and ends, which is somewhere else for every slot. So the ranks
that share a slot first put its state together, and each takes its own slices of what arrives.

Between steps gradients are not moved: the next step clears them before it adds to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor, nn

from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore._mcore.expert_order import ExpertOrder, has_order

__all__ = [
    "entries_of",
    "expert_parameters",
    "moe_layers",
    "move_experts",
    "why_not_movable",
]

MAIN = "main parameter"
"""Entry of an expert's state that is its fp32 copy; the others have the names torch gives them."""

_PER_EXPERT = (
    # transformer/moe/experts.py: SequentialMLP has a module per expert, TEGroupedMLP numbers the
    # parameters of its grouped layers.
    re.compile(r"local_experts\.(?P<expert>\d+)\.(?P<name>.+)"),
    re.compile(r"(?P<name>.*\b(?:weight|bias))(?P<expert>\d+)"),
)


def moe_layers(chunks: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """MoE layers of this rank by a name that is the same in every layout."""
    found = []
    for chunk in chunks:
        for path, module in chunk.named_modules():
            if isinstance(module, BaseMoELayer):
                # Layers of multi-token prediction are numbered from 1 again.
                kind = "mtp" if "mtp" in path.split(".") else "layer"
                found.append((f"{kind}.{module.layer_number}", module))
    return found


def expert_parameters(moe: Any) -> list[dict[str, nn.Parameter]] | None:
    """Parameters of each local expert by a name that all experts share.

    ``None`` where a parameter belongs to several experts, as in grouped layers of one weight.
    """
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(moe.num_local_experts)]
    for path, param in moe.experts.named_parameters():
        match = next((m for pattern in _PER_EXPERT if (m := pattern.fullmatch(path))), None)
        if match is None or int(match["expert"]) >= len(found):
            return None
        found[int(match["expert"])][match["name"]] = param
    shapes = [{name: param.shape for name, param in one.items()} for one in found]
    return found if all(shape == shapes[0] for shape in shapes) else None


def why_not_movable(moe: Any, optimizer: Any) -> str | None:
    """What in a layer or its optimizer rules out moving experts, with the way out; else ``None``.

    Args:
        moe: The engine's MoE layer.
        optimizer: The engine's optimizer.
    """
    config = moe.config
    if has_order(moe):
        return "a fit that failed has left them in another order; build the model anew"
    if expert_parameters(moe) is None:
        return (
            f"its experts ({type(moe.experts).__name__}) share parameters; use SequentialMLP or"
            " TEGroupedMLP with one weight per expert"
        )
    if config.fp8 and (config.fp8_recipe == "delayed" or config.fp8_param):
        return (
            "`fp8_recipe='delayed'` and `fp8_param` keep scales that belong to a slot; use"
            " another recipe, and bf16 parameters"
        )
    if getattr(config, "fp4", None) and getattr(config, "fp4_param", False):
        return "`fp4_param` keeps scales that belong to a slot; use bf16 parameters"
    if config.cuda_graph_impl != "none":
        return f"`cuda_graph_impl` ({config.cuda_graph_impl!r}) records where tokens go; use 'none'"
    known = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
    for part in engine.parts_of(optimizer):
        if type(part) not in known:
            return f"{type(part).__name__} keeps state in a form of its own; use Adam, AdamW or SGD"
        if part.config.use_precision_aware_optimizer or part.config.optimizer_cpu_offload:
            return (
                "`use_precision_aware_optimizer` and `optimizer_cpu_offload` keep main parameters"
                " elsewhere; leave them out of `optimizer`"
            )
    return None


# ------------------------------------------------------------------------------ state


@dataclass(frozen=True, slots=True)
class _Slice:
    """This rank's part of one entry of a parameter's state."""

    entry: str
    tensor: Tensor
    start: int
    """Of its first element in the flat parameter."""


def _part_finder(optimizer: Any) -> Callable[[Tensor], Any]:
    """Finds the engine optimizer that updates a parameter, whichever ranks hold its state."""
    owners: list[tuple[set[int], Any]] = []
    for part in engine.parts_of(optimizer):
        if engine.is_distributed(part):
            own = {id(param) for buffer in part.buffers for param in buffer.param_index_map}
        else:
            own = {id(param) for group in part.optimizer.param_groups for param in group["params"]}
        owners.append((own, part))

    def find(param: Tensor) -> Any:
        for own, part in owners:
            key = param if engine.is_distributed(part) else engine.main_parameter(part, param)
            if id(key) in own:
                return part
        return None

    return find


def _main_slice(part: Any, param: Tensor) -> tuple[Tensor, int] | None:
    """What an optimizer updates on this rank for a parameter, and where it begins in it.

    Reads what ``DistributedOptimizer._get_main_param_and_optimizer_states`` reads
    (optimizer/distrib_optimizer.py).
    """
    if not engine.is_distributed(part):
        return engine.main_parameter(part, param), 0
    place = part.model_param_group_index_map.get(param)
    if place is None:
        return None
    group, order = place
    main = part.optimizer.param_groups[group]["params"][order]
    return main, part._get_model_param_range_map(param)["param"].start


def _slices(part: Any, param: Tensor) -> Iterator[_Slice]:
    """Everything a rank keeps beside the parameter itself; counters of steps are alike for all."""
    found = _main_slice(part, param)
    if found is None:
        return
    main, start = found
    if main.untyped_storage().data_ptr() != param.untyped_storage().data_ptr():
        yield _Slice(MAIN, main, start)
    for entry, value in part.optimizer.state.get(main, {}).items():
        if isinstance(value, Tensor) and value.dim() > 0:
            assert value.shape == main.shape, f"{entry}: {value.shape} for {main.shape}"
            yield _Slice(entry, value, start)


def entries_of(orders: Sequence[ExpertOrder], optimizer: Any) -> dict[str, torch.dtype]:
    """Names and types of what this rank keeps of any expert's optimizer state.

    Creates the state of an optimizer that has not stepped. A rank may hold no slice of any expert,
    so the dicts of all ranks together say what an expert consists of.
    """
    found: dict[str, torch.dtype] = {}
    find_part = _part_finder(optimizer)
    for part in engine.parts_of(optimizer):
        engine.materialize(part)
    for order in orders:
        for expert in expert_parameters(order.moe) or ():
            for param in expert.values():
                part = find_part(param)
                if part is not None:
                    found |= {s.entry: s.tensor.dtype for s in _slices(part, param)}
    return found


# ------------------------------------------------------------------------------ moving


@torch.no_grad()
def move_experts(
    order: ExpertOrder,
    slots: tuple[int, ...],
    optimizer: Any,
    entries: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
) -> None:
    """Brings the experts of a layer into another order, by one all-to-all.

    Collective over ``group`` and, with the distributed optimizer, over the ranks that share its
    state. Parameters must be whole.

    Args:
        order: Of the layer; says the new order afterwards.
        slots: The expert that each slot shall hold.
        optimizer: The engine's optimizer.
        entries: Of all ranks together, from ``entries_of``.
        group: The expert-parallel group.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    size = order.num_experts // ranks
    home = {expert: slot for slot, expert in enumerate(order.slots)}
    moves = [(home[expert], slot) for slot, expert in enumerate(slots) if home[expert] != slot]
    if not moves:
        return
    # Sender and receiver walk through the moves in the same order.
    outgoing = [
        [a % size for a, b in moves if a // size == rank and b // size == peer]
        for peer in range(ranks)
    ]
    incoming = [
        [b % size for a, b in moves if b // size == rank and a // size == peer]
        for peer in range(ranks)
    ]
    experts = expert_parameters(order.moe)
    assert experts is not None, "checked when the layer was found"
    layer = _Layer(experts, optimizer, entries)
    sent = layer.read([expert for peer in outgoing for expert in peer])
    received = sent.new_empty(sum(map(len, incoming)), sent.shape[1])
    dist.all_to_all_single(
        received, sent, [len(peer) for peer in incoming], [len(peer) for peer in outgoing], group
    )
    layer.write([expert for peer in incoming for expert in peer], received)
    order.set_slots(slots)


class _Layer:
    """The local experts of a layer as rows of bytes ``[experts, bytes]``."""

    def __init__(
        self,
        experts: Sequence[Mapping[str, nn.Parameter]],
        optimizer: Any,
        entries: Mapping[str, torch.dtype],
    ) -> None:
        self._experts = [[one[name] for name in sorted(one)] for one in experts]
        find_part = _part_finder(optimizer)
        self._parts = [find_part(param) for param in self._experts[0]]
        self._widths = [param.numel() * param.element_size() for param in self._experts[0]]
        self._offsets: list[dict[str, int]] = []
        """Of each parameter, where in a row of state its entries begin."""
        self._state_width = 0
        for param, part in zip(self._experts[0], self._parts, strict=True):
            offsets = {}
            for entry in sorted(entries) if part is not None else ():
                offsets[entry] = self._state_width
                self._state_width += param.numel() * entries[entry].itemsize
            self._offsets.append(offsets)

    def read(self, experts: Sequence[int]) -> Tensor:
        """Rows of these experts. Collective over the ranks that share their state."""
        device = self._experts[0][0].device
        weights = torch.empty(len(experts), sum(self._widths), dtype=torch.uint8, device=device)
        state = torch.zeros(len(experts), self._state_width, dtype=torch.uint8, device=device)
        for row, expert in enumerate(experts):
            params = [_as_bytes(param) for param in self._experts[expert]]
            weights[row].copy_(torch.cat(params))
            for own, begin in self._own_state(expert):
                state[row, begin : begin + own.numel()].copy_(own)
        shared = [part for part in self._parts if part is not None and engine.is_distributed(part)]
        if shared and experts and self._state_width:
            # Each byte is zero on all ranks but its owner.
            dist.all_reduce(state, group=shared[0].data_parallel_group)
        return torch.cat([weights, state], dim=1)

    def write(self, experts: Sequence[int], rows: Tensor) -> None:
        """Sets these experts from their rows."""
        weights, state = rows.tensor_split([sum(self._widths)], dim=1)
        for row, expert in enumerate(experts):
            parts = torch.split(weights[row], self._widths)
            for param, value in zip(self._experts[expert], parts, strict=True):
                _as_bytes(param).copy_(value)
            for own, begin in self._own_state(expert):
                own.copy_(state[row, begin : begin + own.numel()])

    def _own_state(self, expert: int) -> Iterator[tuple[Tensor, int]]:
        """Bytes of this rank's slices, and where they begin in a row of state."""
        params = zip(self._experts[expert], self._parts, self._offsets, strict=True)
        for param, part, offsets in params:
            for own in _slices(part, param) if part is not None else ():
                begin = offsets[own.entry] + own.start * own.tensor.element_size()
                yield _as_bytes(own.tensor), begin


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
