"""Causal attention, forward and backward: TransformerEngine's backends against torch's.

    python benchmarks/attention.py --heads 32 --groups 8 --seq 4096

Three times of each: until the device is done with calls one after the other (what a small test
sees), of the kernels alone (what a step sees whose host is ahead), and of the host that launches
them. Where the first is the third, the host is the limit and not the kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

_TE = {
    "te flash": "NVTE_FLASH_ATTN",
    "te fused": "NVTE_FUSED_ATTN",
    "te unfused": "NVTE_UNFUSED_ATTN",
}
_SDPA = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}

Call = Callable[[], torch.Tensor]


def te_calls(shape: Any, device: torch.device) -> Iterator[tuple[str, Call, list[torch.Tensor]]]:
    """TransformerEngine's module on ``[s, b, h, d]``, as the engine's layers call it."""
    if find_spec("transformer_engine") is None or device.type == "cpu":
        return
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    for name, variable in _TE.items():
        os.environ.update({other: str(int(other == variable)) for other in _TE.values()})
        _attention_backends["backend_selection_requires_update"] = True
        module = DotProductAttention(
            shape.heads,
            shape.dim,
            num_gqa_groups=shape.groups,
            qkv_format="sbhd",
            attn_mask_type="causal",
        )
        sizes = [(shape.seq, shape.batch, n, shape.dim) for n in (shape.heads, *[shape.groups] * 2)]
        inputs = [make(size, device) for size in sizes]
        yield name, lambda module=module, inputs=inputs: module(*inputs), inputs


def sdpa_calls(shape: Any, device: torch.device) -> Iterator[tuple[str, Call, list[torch.Tensor]]]:
    """Torch's function on ``[b, h, s, d]``."""
    sizes = [(shape.batch, n, shape.seq, shape.dim) for n in (shape.heads, *[shape.groups] * 2)]
    for name, backend in _SDPA.items():
        inputs = [make(size, device) for size in sizes]

        def call(backend: Any = backend, inputs: Any = inputs) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

        yield name, call, inputs


def make(size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An input that wants a gradient, bf16 on GPUs."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.randn(size, device=device, dtype=dtype).requires_grad_()


def measure(
    call: Call, inputs: list[torch.Tensor], device: torch.device, calls: int
) -> list[float]:
    """Milliseconds of a forward and backward pass: wall, kernels, host; medians over rounds."""

    def step() -> None:
        call().backward(upstream)
        for tensor in inputs:
            tensor.grad = None

    def sync() -> None:
        if device.type != "cpu":
            torch.cuda.synchronize()

    upstream = torch.ones_like(call())
    for _ in range(5):
        step()
    rounds = []
    for _ in range(5):
        sync()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        host = time.perf_counter() - start
        sync()
        rounds.append((time.perf_counter() - start, host))
    wall, host = (1e3 * statistics.median(part) / calls for part in zip(*rounds, strict=True))
    if device.type == "cpu":
        return [wall, wall, host]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            step()
        sync()
    kernels = sum(event.device_time for event in seen.events()) / 1e3 / calls
    return [wall, kernels, host]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "heads": 32, "groups": 32, "dim": 128, "seq": 4096, "batch": 1, "calls": 20,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    shape = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if shape.accelerator == "gpu" else "cpu")
    # Causal attention counted half, backward 2.5 times the forward pass.
    flops = 3.5 * 2 * shape.batch * shape.heads * shape.dim * shape.seq**2
    print(f"command: python benchmarks/attention.py {' '.join(sys.argv[1:])}\n")
    print("| attention | wall ms | kernels ms | host ms | TFLOP/s of the kernels |")
    print("|---|---:|---:|---:|---:|")
    for calls in (te_calls, sdpa_calls):
        for name, call, inputs in calls(shape, device):
            try:
                wall, kernels, host = measure(call, inputs, device, shape.calls)
            except Exception as error:
                print(f"| {name} | cannot: {str(error).splitlines()[0][:100]} | | | |", flush=True)
                continue
            tflops = flops / kernels / 1e9
            print(
                f"| {name} | {wall:.3f} | {kernels:.3f} | {host:.3f} | {tflops:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
