"""The other side of the comparison: one process, the whole model, a plain torch loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.testing import run_ranks
from tests.gpt import call_gpt, gpt_chunk, token_dataset
from tests.parity.recipes import OPTIMIZERS, STEPS, Training, global_batch, make_schedule
from tests.parity.weights import fill, full_tensors

CPU_FIELDS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
}
"""Fields of the engine's TransformerConfig without which it needs a GPU."""


@dataclass(frozen=True)
class Reference:
    """What one process did."""

    losses: list[float]
    """Of each batch."""
    grad_norms: list[float]
    """Of each optimizer step, before clipping."""
    parameters: dict[str, Tensor]
    """After the last step."""


def train_plainly(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], data: Any, training: Training
) -> tuple[list[float], list[float]]:
    """Trains with torch alone; returns the loss of each batch and the norm of each step.

    With ``bf16-mixed`` the parameters are fp32 and a bf16 copy of the model runs forward and
    backward; with ``bf16-true`` the parameters are bf16.
    """
    dtype = torch.float32 if training.precision == "32-true" else torch.bfloat16
    if training.precision == "bf16-true":
        model.to(dtype)
    optimizer = OPTIMIZERS[training.optimizer](model.named_parameters())
    schedule = make_schedule(optimizer)
    clip = training.clip if training.clip_algorithm == "norm" else None
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for part in range(training.accumulate):
            batch = global_batch(data, step * training.accumulate + part)
            loss = _in_precision(model, loss_of, batch, training)
            losses.append(loss.item())
            (loss / training.accumulate).backward()
        params = [param for param in model.parameters() if param.grad is not None]
        norms.append(torch.nn.utils.clip_grad_norm_(params, clip or float("inf")).item())
        if training.clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(params, training.clip)
        optimizer.step()
        schedule.step()
    return losses, norms


def _in_precision(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], batch: Any, training: Training
) -> Tensor:
    if training.precision != "bf16-mixed":
        return loss_of(model, batch)
    # Gradients flow through the cast, so that they arrive at the fp32 parameters in fp32.
    halves = {name: param.to(torch.bfloat16) for name, param in model.named_parameters()}
    return loss_of(lambda *args, **kw: torch.func.functional_call(model, halves, args, kw), batch)


def gpt_loss(model: Any, samples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean loss over all tokens of the samples."""
    tokens, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    return call_gpt(model, tokens, labels).float().mean()


def _train_gpt(training: Training) -> Reference:
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    dtype = torch.float32 if training.precision == "32-true" else torch.bfloat16
    with CpuAdapter():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        fields = {**CPU_FIELDS, "params_dtype": torch.float32, "bf16": dtype == torch.bfloat16}
        model = gpt_chunk(tied=training.tied, experts=training.experts, **fields)
        shards = fill(model)
        losses, norms = train_plainly(model, gpt_loss, token_dataset(training.samples), training)
        return Reference(losses, norms, full_tensors(shard.copied() for shard in shards))


@functools.cache
def gpt_reference(training: Training) -> Reference:
    """The tests' GPT, trained in one process."""
    return run_ranks(_train_gpt, 1, training)[0]
