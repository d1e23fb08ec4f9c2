"""Faults of the engine's ``DistributedOptimizer`` over torch's Adam, put right.

They show where neither TransformerEngine nor Apex is installed, as on every CPU machine. Torch's
Adam counts its steps in a tensor per parameter; the engine expects fused optimizers, which count
per group.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from lightning_mcore._mcore.patching import Patches

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer ?Engine)")
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Method = Callable[..., Any]


def fix_distributed_optimizer(patches: Patches) -> None:
    """Where: optimizer/distrib_optimizer.py: three methods of ``DistributedOptimizer``."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for name, fix in {
        "state_dict": _with_state,
        "load_state_dict": _with_own_steps,
        "_set_main_param_and_optimizer_states": _with_kept_step,
    }.items():
        patches.replace(DistributedOptimizer, name, fix(getattr(DistributedOptimizer, name)))


def _with_state(state_dict: Method) -> Method:
    """Lets ``state_dict`` work before the first step and on ranks that own no parameter.

    It asserts that there is exactly one count of steps among this rank's parameters, also when it
    is called to build the template for loading.
    """

    @wraps(state_dict)
    def with_state(optimizer: Any) -> Any:
        materialize_adam_state(optimizer.optimizer)
        if optimizer.optimizer.state:
            return state_dict(optimizer)
        with _pretended_state(optimizer.optimizer):
            return state_dict(optimizer)

    return with_state


def materialize_adam_state(inner: torch.optim.Optimizer) -> None:
    """Creates the state that torch's Adam would create in its first step."""
    for group in inner.param_groups:
        for param in group["params"]:
            if not inner.state.get(param):
                inner.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param.data),
                    "exp_avg_sq": torch.zeros_like(param.data),
                }


@contextlib.contextmanager
def _pretended_state(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Shows a step counter that belongs to no parameter; the engine reads it and drops the rest."""
    real = inner.state_dict
    steps = [float(group["step"]) for group in inner.param_groups if "step" in group]
    pretended = {-1: {"step": torch.tensor(max(steps, default=0.0))}}

    def state_dict(_: Any) -> dict[str, Any]:
        return {**real(), "state": pretended}

    inner.state_dict = types.MethodType(state_dict, inner)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del inner.state_dict


def _with_own_steps(load_state_dict: Method) -> Method:
    """Unshares the counters after ``load_state_dict``.

    It gives one tensor to all parameters, so that each step is counted once per parameter.
    """

    @wraps(load_state_dict)
    def with_own_steps(optimizer: Any, state_dict: Any) -> Any:
        result = load_state_dict(optimizer, state_dict)
        for state in optimizer.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    return with_own_steps


def _with_kept_step(set_states: Method) -> Method:
    """Keeps the step, which came with the parameter groups, and copies without a gradient.

    ``_set_main_param_and_optimizer_states`` copies every entry of the state from the checkpoint.
    There the step is missing (``fully_reshardable``) or the template's 0 (``dp_reshardable``), and
    the parameter it writes to is a leaf that requires a gradient.
    """

    @wraps(set_states)
    def with_kept_step(optimizer: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = optimizer.model_param_group_index_map[model_param]
        main_param = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main_param]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            return set_states(optimizer, model_param, tensors)

    return with_kept_step
