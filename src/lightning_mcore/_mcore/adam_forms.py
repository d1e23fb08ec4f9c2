"""State that an Adam keeps in a form of its own, as checkpoints hold it: for any Adam, any layout.

With ``use_precision_aware_optimizer`` the engine leaves main parameters to TransformerEngine's
fused Adam, which by default (``store_param_remainders``) has only the 16 low bits of each, in an
int16 beside the bf16 parameter. With ``optimizer_cpu_offload`` they and the moments are on the
host, in optimizers behind the engine's ``HybridDeviceOptimizer``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

_HIGH = 16


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values of which the bf16 ``rounded`` and the int16 ``remainder`` are the halves.

    As in TransformerEngine's kernel (common/multi_tensor/adam.cu, AdamFunctorMasterParamRemainder):
    a low half of 0x8000 or more, which is negative as an int16, has rounded the high half up.
    """
    low = remainder.to(torch.int32)
    high = rounded.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << _HIGH) | (low & 0xFFFF)).view(torch.float32)


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of fp32 values: bf16, rounded to the nearest (ties up in size), and int16."""
    bits = whole.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = (bits >> _HIGH) + (remainder < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def owned_state(part: Any, param: Tensor) -> dict[str, Tensor]:
    """What a distributed optimizer holds of a parameter on this rank, flat, main parameter whole.

    Args:
        part: The engine's ``DistributedOptimizer``.
        param: Of the model; this rank owns some of its state.
    """
    state: dict[str, Tensor] = part._get_main_param_and_optimizer_states(param)
    if state["param"].dtype == torch.int16:
        group, order = part.model_param_group_index_map[param]
        shard = part.optimizer.param_groups[group]["params"][order]
        # To the host, where it is written from: all of them would take 4 bytes per parameter.
        state["param"] = join(shard.detach().view(-1), state["param"].view(-1)).cpu()
    return state


def initialize(part: Any) -> bool:
    """Gives an Adam of this module that has not stepped its state; whether it was one.

    The engine's own ``init_state_fn`` (optimizer/__init__.py) gives moments the dtype of
    parameters, where the fused Adam keeps them in fp32 and fails with others; it does not tell it
    how to keep main parameters, and fails; and there is none for the offloaded one.
    """
    inner = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        _initialize_offloaded(inner)
        return True
    if not hasattr(inner, "initialize_state"):
        return False
    takes_form = len(inspect.signature(inner.initialize_state).parameters) > 1
    for group in inner.param_groups:
        for param in group["params"]:
            if not inner.state.get(param):
                form = (_keeps_remainder(inner, param),) if takes_form else ()
                inner.initialize_state(param, *form)
    return True


def _initialize_offloaded(inner: Any) -> None:
    if inner.state:
        return
    for optimizer in inner.sub_optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
    inner._sync_sub_optimizers_state_to_hdo()
    set_steps(inner, 0)


def set_steps(inner: Any, step: float) -> None:
    """Tells the optimizers behind an offloaded one how many steps they have done.

    Torch's count per parameter, on the host. The fused one counts per group, in groups of its own:
    a count in those of ``inner`` would be copied to it before every step, and stand still
    (hybrid_optimizer.py, _sync_hdo_param_groups_to_sub_optimizers).
    """
    for optimizer in inner.sub_optimizers:
        if isinstance(optimizer, inner.defaults["cpu_optimizer_cls"]):
            for state in optimizer.state.values():
                state["step"] = torch.tensor(float(step))
        else:
            for group in optimizer.param_groups:
                group["step"] = int(step)


def settle(inner: Any, step: float) -> None:
    """Completes what the engine loaded into an offloaded optimizer.

    Its state are slices of tensors on the host that hold the whole data-parallel group's
    (distrib_optimizer.py, ``load_parameter_state_from_fully_reshardable``), which optimizers on the
    host would keep alive; and the main parameters in it are not those that are stepped.

    Args:
        inner: The engine's ``HybridDeviceOptimizer``.
        step: How many steps it has done.
    """
    inner._sync_sub_optimizers_state_to_hdo()
    for optimizer in inner.sub_optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if value.untyped_storage().nbytes() > value.nbytes:
                    state[name] = value.clone()
    set_steps(inner, step)


@torch.no_grad()
def take_parameters(part: Any) -> None:
    """Sets main parameters that a fused Adam keeps to the model's parameters.

    The engine leaves that to the optimizer (distrib_optimizer.py,
    ``_copy_model_params_to_main_params``), which does so in its first step only.
    """
    inner = part.optimizer
    if not getattr(inner, "master_weights", False):
        return
    with takes_whole_values(part):
        for group in inner.param_groups:
            for param in group["params"]:
                if inner.state.get(param):
                    inner.set_scaled_state(param, "master_param", param.detach())


@contextmanager
def takes_whole_values(part: Any) -> Iterator[bool]:
    """Lets a fused Adam be set to values as checkpoints hold them.

    Yields:
        Whether that sets this rank's part of the model's parameters too.
    """
    inner = part.optimizer
    if not getattr(inner, "master_weights", False):
        yield False
        return
    original: Callable[..., None] = inner.set_scaled_state

    def set_scaled_state(param: Tensor, name: str, value: Tensor) -> None:
        value = value.float()
        if name == "master_param" and _keeps_remainder(inner, param):
            rounded, value = split(value)
            # Equal to what was loaded but for ties, which torch rounds to even.
            param.copy_(rounded.view_as(param))
        original(param, name, value)

    inner.set_scaled_state = set_scaled_state
    try:
        yield bool(getattr(inner, "store_param_remainders", False))
    finally:
        del inner.set_scaled_state


def _keeps_remainder(inner: Any, param: Tensor) -> bool:
    return bool(getattr(inner, "store_param_remainders", False)) and param.dtype == torch.bfloat16
