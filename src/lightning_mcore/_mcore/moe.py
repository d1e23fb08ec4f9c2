"""The engine's expert layers: their parameters, routers, and losses that balance them.

What enters and leaves are modules, tensors and plain values. Nothing here is collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from lightning_mcore._mcore.chained import is_expert
from lightning_mcore._mcore.engine import engine_version

LOSS_NAMES = (
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "global_load_balancing_loss",
    "z_loss",
)
"""Losses that the engine's routers note, under the engine's names (transformer/moe/router.py)."""


def mark_expert_parameters(chunks: Iterable[nn.Module], *, tp: int, etp: int) -> None:
    """Has the gradient norm count expert parameters right on engines before 0.19.

    They leave out what is not marked as split on every tensor-parallel rank but the first, taking
    it for a copy (tensor_parallel/layers.py, param_is_not_tensor_parallel_duplicate; 0.19 looks at
    the rank inside the experts instead). At ``etp = 1`` these ranks hold *different* experts. The
    engine's own layers and TransformerEngine's mark weights, but neither biases nor experts of the
    user's own are marked: the norm would miss them, and clipping would be too weak.
    """
    if tp == 1 or etp > 1 or engine_version() >= (0, 19):
        return
    for chunk in chunks:
        for param in chunk.parameters():
            if is_expert(param):
                param.tensor_model_parallel = True  # type: ignore[attr-defined]


def weakens_losses_per_token(config: Any, *, tp: int, cp: int) -> bool:
    """Whether losses that balance experts count ``tp * cp`` times too little per token.

    Before 0.19 the router multiplies them by the tokens of its own part of a sequence only, while
    gradients are divided by those of all parts (transformer/moe/router.py,
    attach_and_log_load_balancing_loss and apply_z_loss; 0.19 has the factor).
    """
    if not (config.calculate_per_token_loss and config.num_moe_experts):
        return False
    coefficients = config.moe_aux_loss_coeff
    balances = bool(any(coefficients) if isinstance(coefficients, (list, tuple)) else coefficients)
    return (
        (balances or bool(config.moe_z_loss_coeff)) and tp * cp > 1 and engine_version() < (0, 19)
    )


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """A router and its place."""

    router: nn.Module
    moe: nn.Module
    """The expert layer that it belongs to."""
    layer: int
    """Number of its layer in the whole model, from 0."""
    num_experts: int
    topk: int
    pads: bool
    """Whether the routing map it returns is filled up to the capacity of each expert."""


def find_routers(chunks: Iterable[nn.Module]) -> list[RouterInfo]:
    """Routers of this rank's layers.

    Those of multi-token prediction, which have no place among the layers, are left out.
    """
    return [
        RouterInfo(
            router=module,
            moe=chunk.get_submodule(name.rpartition(".")[0]),
            layer=module.layer_number - 1,
            num_experts=module.config.num_moe_experts,
            topk=module.config.moe_router_topk,
            pads=bool(module.config.moe_pad_expert_input_to_capacity),
        )
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
    ]


LossKind = Literal["partial", "partial over data parallel", "mean"]
"""What a rank's value is: a summand over the ranks that share samples, a summand over all ranks, or
a mean over the rank's own tokens."""


def take_losses() -> Iterator[tuple[str, Tensor, LossKind]]:
    """Sums of balancing losses by layer since the last call, on this rank, and sets them to zero.

    The engine reduces them in ``track_moe_metrics``, but not alike: before 0.19 the z loss stays
    what one rank saw. So what is handed out here are values before any reduction.

    Yields:
        Name, values ``[layers]`` summed over microbatches, and what they are.
    """
    for name, values, group, has_dp in _tracked():
        kind: LossKind = "mean"
        if group is not None:
            kind = "partial over data parallel" if has_dp else "partial"
        yield name, values.clone(), kind
        values.zero_()


def _tracked() -> list[tuple[str, Tensor, Any, bool]]:
    """The engine's tracker: a dict until 0.18, an object with entries from then on."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        entries = moe_utils.get_moe_metrics_tracker().metrics
        return [(n, e.values, e.reduce_group, not e.needs_dp_avg) for n, e in entries.items()]
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    return [
        (n, e["values"], e.get("reduce_group"), bool(e.get("reduce_group_has_dp")))
        for n, e in tracker.items()
    ]


def drop_routing_graphs(chunks: Iterable[nn.Module]) -> None:
    """Drops the graph of the last microbatch, to which dispatchers hold on.

    They keep the router's probabilities until the next forward pass
    (transformer/moe/token_dispatcher.py, dispatch_preprocess). Its graph ends in the nodes that
    accumulate gradients, whose hooks hold DDP and with it all chunks: a ring through C++, which
    Python's garbage collector cannot see. The model, its gradients and its process groups would
    stay for as long as the process runs.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    fields = [value for module in modules for value in vars(module).values()]
    dispatchers = [field for field in fields if isinstance(field, MoETokenDispatcher)]
    # DeepEP's and HybridEP's state is in an object of its own.
    managers = [each._comm_manager for each in dispatchers if hasattr(each, "_comm_manager")]
    for holder in (*dispatchers, *managers):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(holder, name, None)


def has_schedule_plan(chunk: nn.Module) -> bool:
    """Whether the combined 1F1B schedule can run the layers of ``chunk`` one by one."""
    return hasattr(chunk, "build_schedule_plan")


def runs_experts_in_turn(chunk: nn.Module) -> bool:
    """Whether a rank's experts are modules of their own that run one after the other."""
    return any(isinstance(module, SequentialMLP) for module in chunk.modules())
