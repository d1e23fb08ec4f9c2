"""What the parts of the engine's ``ChainedOptimizer`` share, where the engine leaves them apart.

Dense parameters and experts are reduced over different ranks, so the engine gives each an optimizer
of its own in a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["is_expert", "loss_scalers", "measure_experts_apart", "share_loss_scale"]


def is_expert(param: Any) -> bool:
    """Whether a parameter of the model is reduced over the ranks that hold the same experts."""
    return not getattr(param, "allreduce", True)


def loss_scalers(optimizer: Any) -> list[Any]:
    """Loss scalers of all parts, also of those without parameters on this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found = (getattr(part, "grad_scaler", None) for part in parts)
    return [scaler for scaler in found if scaler is not None]


def share_loss_scale(chain: Any) -> None:
    """Gives the parts of a chain one loss scale, that of the loss.

    The engine gives each a dynamic scale of its own and changes it by the overflows of that part
    alone (optimizer.py, MixedPrecisionOptimizer.prepare_grads), but scales the loss by the first
    one's (ChainedOptimizer.get_loss_scale). From the first overflow of one part only, the gradients
    of the others would be divided by another number than the loss was multiplied by.
    """
    if len(loss_scalers(chain)) < 2:
        return
    shared = loss_scalers(chain)[0]
    for part in chain.chained_optimizers:
        part.grad_scaler = shared
    prepare_grads = chain.prepare_grads

    def prepare_with_one_scale() -> bool:
        # Every part unscales before the scale changes. Ranks agree: each part asks all of its own.
        shared.update = lambda found_inf: None
        try:
            overflow = bool(prepare_grads())
        finally:
            del shared.update
        shared.update(overflow)
        return overflow

    chain.prepare_grads = prepare_with_one_scale


def measure_experts_apart(chain: Any, experts: Sequence[bool]) -> None:
    """Lets ranks with different experts agree on a single optimizer's norm, zeros and overflows.

    The engine sums them over the ranks that share dense parameters: each of the others would have
    the norm of its own experts, clip dense parameters by it, and let them drift apart.

    Args:
        chain: The engine's chain of one optimizer, of all parameters.
        experts: Which of its parameters, in order, are experts.
    """
    dense_group = parallel_state.get_model_parallel_group()
    expert_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    ranks = dist.get_process_group_ranks
    if ranks(dense_group) == ranks(expert_group):
        return
    (inner,) = chain.chained_optimizers
    inner.expert_tp_group = parallel_state.get_expert_tensor_parallel_group()
    # An overflow is looked for in all parameters at once: over the world.
    inner.grad_stats_parallel_group = dist.group.WORLD

    def apart(measure: Callable[[], Any]) -> list[float]:
        params, found = inner.get_parameters(), []
        for of_experts, group in ((False, dense_group), (True, expert_group)):
            chosen = [p for p, flag in zip(params, experts, strict=True) if flag is of_experts]
            inner.get_parameters = lambda chosen=chosen: chosen
            inner.grad_stats_parallel_group = group
            try:
                found.append(float(measure()))
            finally:
                del inner.get_parameters
                inner.grad_stats_parallel_group = dist.group.WORLD
        return found

    norm, zeros = chain.get_grad_norm, chain.count_zeros
    chain.get_grad_norm = lambda: math.hypot(*apart(norm))
    chain.count_zeros = lambda: sum(apart(zeros))
