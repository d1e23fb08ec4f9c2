"""Functions of TransformerEngine for which the engine looks elsewhere.

With ``gradient_accumulation_fusion`` the engine's own linear layers call Apex's extension
``fused_weight_gradient_mlp_cuda`` (tensor_parallel/layers.py, ColumnParallelLinear and
LinearWithGradAccumulationAndAsyncCommunication.backward), while TransformerEngine's layers use
their own product. Where Apex is missing, TransformerEngine's does for both.

And one function the engine imports from where TransformerEngine no longer has it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor

from lightning_mcore._mcore.patching import Patches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import attention

__all__ = ["accumulate_wgrad", "te_split_of_qkv", "te_stands_in_for_apex"]


def accumulate_wgrad(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Adds the weight gradient of a linear layer to its buffer, in place.

    Args:
        inputs: ``[s * b, in]``, contiguous.
        grad_output: ``[s * b, out]``, contiguous, of the same dtype.
        main_grad: ``[out, in]``, contiguous; fp32 or the dtype of the others.
    """
    if inputs.dtype == torch.float32:
        # TransformerEngine would multiply in TF32, which the unfused path does only when allowed.
        main_grad.addmm_(grad_output.t(), inputs)
        return
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    # Column-major, as in TransformerEngine's own linear layer (module/linear.py, wgrad_gemm).
    further = {}
    if "workspace" in inspect.signature(general_gemm).parameters:  # older TransformerEngine
        from transformer_engine.pytorch.module.base import get_workspace

        further["workspace"] = get_workspace()
    general_gemm(
        inputs,
        grad_output,
        out_dtype=main_grad.dtype,
        layout="NT",
        out=main_grad,
        accumulate=True,
        grad=True,
        **further,
    )


@contextmanager
def te_stands_in_for_apex() -> Iterator[None]:
    """Gives the engine's linear layers the kernel that they look for; put back at the end.

    ``defer_embedding_wgrad`` still needs Apex: it imports the extension by name (utils.py,
    drain_embedding_wgrad_compute).
    """
    kernels = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate_wgrad, wgrad_gemm_accum_fp16=accumulate_wgrad
    )
    with ExitStack() as stack:
        patches = Patches(stack)
        patches.replace(layers, "_grad_accum_fusion_available", True)
        # A name that is bound only where Apex is installed.
        patches.set(layers, "fused_weight_gradient_mlp_cuda", kernels)
        yield


@contextmanager
def te_split_of_qkv() -> Iterator[None]:
    """Gives attention TransformerEngine's split of queries, keys and values; put back at the end.

    Its backward joins the three gradients without a copy where they lie side by side, as fused
    attention leaves them with as many heads of keys as of queries and without rotary positions;
    elsewhere it copies, as ``torch.split`` always does. The engine takes the latter in silence
    where its import fails, as with TransformerEngine 2.20 (extensions/transformer_engine.py,
    ``_SplitAlongDim``).
    """
    with ExitStack() as stack:
        if attention.HAVE_TE and attention.SplitAlongDim is None:
            try:
                from transformer_engine.pytorch.utils import SplitAlongDim
            except ImportError:
                pass  # moved again: the engine's way is right, only slower
            else:
                Patches(stack).replace(attention, "SplitAlongDim", SplitAlongDim.apply)
        yield
