"""TransformerEngine's fused optimizers rewritten in torch, for the engine's code around them.

Only what the engine and this package call. Adam keeps main parameters as the real one does
(transformer_engine/pytorch/optimizers/fused_adam.py), whole or as the 16 bits that the bf16
parameter lacks; tests/gpu/test_checkpoints.py has the real one.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_mcore._mcore.adam_forms import join, split


class HalvesAdam(torch.optim.Optimizer):
    """AdamW with the fused Adam's form of state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} == {torch.float32}
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.exp_avg_dtype = self.exp_avg_sq_dtype = torch.float32
        self.capturable = False
        self.multi_tensor_adam = self._step_group

    def _halves(self, param: Tensor, name: str = "master_param") -> bool:
        bf16 = param.dtype == torch.bfloat16
        return self.store_param_remainders and name == "master_param" and bf16

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=torch.float32)
        if self.master_weights and store_param_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        return self.state[param][name]

    def set_scaled_state(self, param: Tensor, name: str, value: Tensor) -> None:
        assert value.dtype == (torch.int16 if self._halves(param, name) else torch.float32)
        if name not in self.state[param]:
            self.initialize_state(param, self._halves(param))
        self.state[param][name].copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[tuple[Tensor, Tensor]] = []
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._halves(param))
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if grad is not None:
                    lists.append((param, grad.float()))
            if lists:
                self.multi_tensor_adam(group, lists)

    def _step_group(self, group: dict[str, Any], lists: list[tuple[Tensor, Tensor]]) -> None:
        for param, grad in lists:
            self._step(group, param, grad)

    def _step(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state, (first, second), step = self.state[param], group["betas"], group["step"]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}
        main = state["master_param"] if self.master_weights else param
        whole = join(param, main) if self._halves(param) else main.clone().float()
        mean = state["exp_avg"].lerp_(grad, 1 - first) / (1 - first**step)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        spread = (square / (1 - second**step)).sqrt() + group["eps"]
        whole -= group["lr"] * (mean / spread + group["weight_decay"] * whole)
        if self._halves(param):
            rounded, remainder = split(whole)
            param.copy_(rounded)
            main.copy_(remainder)
        else:
            main.copy_(whole)
            param.copy_(whole)


class FusedSGD(torch.optim.SGD):
    """Steps parameters in fp32 and fp16, and no others (fused_sgd.py, step)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        unseen = [(p, p.grad) for p in params if p.dtype not in (torch.float32, torch.float16)]
        for param, _ in unseen:
            param.grad = None
        super().step()
        for param, grad in unseen:
            param.grad = grad


def give_norms_as_tensors() -> bool:
    """Lets the engine of this process hand on norms unread, as with TransformerEngine's kernels.

    Returns:
        Whether this engine does so at all.
    """
    from megatron.core.optimizer import clip_grads

    def scale(_: int, __: Tensor, lists: list[list[Tensor]], factor: Tensor) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    if not hasattr(clip_grads, "multi_tensor_scale_tensor_impl"):
        return False
    clip_grads.multi_tensor_scale_tensor_impl = scale
    return True


def use_in_engine() -> None:
    """Lets the engine of this process take them for TransformerEngine's; there is no way back."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from lightning_mcore.switches import passed_on

    module: Any = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam, module.FusedSGD = HalvesAdam, FusedSGD
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
    sys.modules[module.__name__] = module
    for place in (optimizer, distrib_optimizer, optimizer_config):
        for name, value in {
            "Adam": HalvesAdam,
            "SGD": FusedSGD,
            "USING_PYTORCH_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
            "USING_TE_OPTIMIZER": True,
            "HAVE_APEX_OR_TE": True,
            "is_te_min_version": lambda *_, **__: True,
        }.items():
            if hasattr(place, name):
                setattr(place, name, value)
    # It would ask for GPUs and for TransformerEngine.
    passed_on.check_optimizer_fields = lambda *_: None
