"""Functions of TransformerEngine that the engine is lent: what they compute, and that they run."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_mcore.testing import run_ranks
from tests.gpu.gpus import needs_gpus
from tests.gpu.te_gpt import LAYERS, te_train

pytestmark = needs_gpus(1)

TOKENS, WIDTH, VOCAB = 512, 256, 384


def linear(inputs: Any, weight: Any, *, fused: bool) -> Any:
    """The engine's linear layer on one rank."""
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

    values = {
        "input": inputs,
        "weight": weight,
        "bias": None,
        "gradient_accumulation_fusion": fused,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "grad_output_buffer": None,
        "wgrad_deferral_limit": 0,
        "tp_group": None,
        "gtp_remat_size": 1,
    }
    names = list(
        inspect.signature(LinearWithGradAccumulationAndAsyncCommunication.forward).parameters
    )
    return LinearWithGradAccumulationAndAsyncCommunication.apply(*(values[n] for n in names[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(TOKENS, 1), (TOKENS // 4, 4)])
def test_sums_are_those_of_the_unfused_path(dtype, shape):
    """Fused sums are exact but for sums in fp32 and roundings to the buffer's dtype."""
    from lightning_mcore._mcore.te_bindings import te_stands_in_for_apex

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Any:
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    weight = draw(VOCAB, WIDTH).requires_grad_()
    microbatches = [(draw(*shape, WIDTH), draw(*shape, VOCAB)) for _ in range(2)]
    # As in the engine's DDP: a view into a larger buffer, which holds what came before.
    buffer = torch.ones(64 + VOCAB * WIDTH, device="cuda", dtype=dtype)
    exact = torch.ones(VOCAB, WIDTH, device="cuda", dtype=torch.float64)
    allowed = torch.zeros_like(exact)
    unfused = torch.ones(VOCAB, WIDTH, device="cuda", dtype=dtype)
    for inputs, grad in microbatches:
        x, g = inputs.view(-1, WIDTH).double(), grad.view(-1, VOCAB).double()
        exact += g.T @ x
        # A sum of n terms in fp32: at most n x 2^-24 of the sum of their sizes.
        allowed += 2.0**-24 * TOKENS * (g.T.abs() @ x.abs())
        if dtype is torch.bfloat16:  # the product may be rounded before it is added
            allowed += torch.finfo(dtype).eps / 2 * (g.T @ x).abs()
        allowed += torch.finfo(dtype).eps / 2 * (exact.abs() + allowed)
        (made,) = torch.autograd.grad(linear(inputs, weight, fused=False), weight, grad)
        unfused += made
    weight.main_grad = buffer[64:].view(VOCAB, WIDTH)
    weight.grad_added_to_main_grad = False
    with te_stands_in_for_apex():
        for inputs, grad in microbatches:
            linear(inputs, weight, fused=True).backward(grad)
    assert weight.grad_added_to_main_grad
    assert torch.all(buffer[:64] == 1.0), "wrote outside its part of the buffer"
    error = (weight.main_grad - exact).abs()
    assert (error - allowed).max() <= 0, (error - allowed).max()
    # Unfused, each gradient is rounded to bf16 before it is added.
    limit = (unfused - exact).abs().mean() * (1.0 if dtype is torch.float32 else 1.01)
    assert error.mean() <= limit, (error.mean(), limit)


def test_the_engine_is_as_before_at_the_end():
    from megatron.core.tensor_parallel import layers

    from lightning_mcore._mcore.te_bindings import te_stands_in_for_apex

    before = dict(vars(layers))
    with te_stands_in_for_apex():
        assert layers._grad_accum_fusion_available
    assert dict(vars(layers)) == before


class Copies(L.Callback):
    """Counts the kernels of one step that join tensors."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == 3:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == 3:
            torch.cuda.synchronize()
            self._profiler.stop()
            self.count = sum("CatArray" in event.name for event in self._profiler.events())


def train_with_split(*, lent: bool) -> Any:
    copies = Copies()
    without = mock.patch("lightning_mcore.loop_hooks.te_split_of_qkv", contextlib.nullcontext)
    with contextlib.nullcontext() if lent else without:
        seen = te_train(1, {"micro_batch_size": 4}, callbacks=[copies])
    return seen.steps, copies.count


def test_gradients_of_queries_keys_and_values_are_not_copied():
    """One copy fewer for every layer, and the same training."""
    ((steps, count),) = run_ranks(train_with_split, 1, lent=True, timeout_s=240)
    ((plain, copied),) = run_ranks(train_with_split, 1, lent=False, timeout_s=240)
    print("copies:", count, copied)
    assert copied - count == LAYERS
    for (loss, norm), (expected, expected_norm) in zip(steps, plain, strict=True):
        # Attention's backward adds in another order from run to run.
        assert loss == pytest.approx(expected, abs=2e-3)
        assert norm == pytest.approx(expected_norm, rel=1e-2)
