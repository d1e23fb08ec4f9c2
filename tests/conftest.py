"""What holds for all tests: one thread per process, and nothing that outlives its test."""

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

torch.set_num_threads(1)

REAL_TENSOR_CUDA = torch.Tensor.cuda
REAL_TENSOR_RECORD_STREAM = torch.Tensor.record_stream
REAL_TENSOR_TYPE = torch.Tensor.type
OF_THE_TOOLS = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Variables that pytest or an import of torch changes, and no test."""


def environment():
    return {name: value for name, value in os.environ.items() if name not in OF_THE_TOOLS}


@pytest.fixture(autouse=True)
def no_environment_variable_is_left_changed():
    before = environment()
    yield
    after = environment()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    assert not changed, f"the test left environment variables changed: {changed}"


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    yield
    engine = sys.modules.get("megatron.core.parallel_state")
    of_the_engine = engine is not None and engine.model_parallel_is_initialized()
    if of_the_engine:
        engine.destroy_model_parallel()
    of_torch = dist.is_initialized()
    if of_torch:
        dist.destroy_process_group()
    assert not of_the_engine, "the test left the engine's process groups initialised"
    assert not of_torch, "the test left torch.distributed initialised"


def is_view(module):
    return module is not torch and module.__name__ == "torch"


@pytest.fixture(autouse=True)
def no_patch_is_left():
    yield
    left = [
        name
        for name, module in list(sys.modules.items())
        # A package of the engine has a submodule of that name, with another `__name__`.
        if name.split(".")[0] == "megatron" and is_view(getattr(module, "torch", torch))
    ]
    assert not left, f"the test left engine modules with another torch: {left[:3]} ..."
    assert torch.Tensor.cuda is REAL_TENSOR_CUDA, "the test left Tensor.cuda patched"
    real = REAL_TENSOR_RECORD_STREAM
    assert torch.Tensor.record_stream is real, "the test left Tensor.record_stream patched"
    assert torch.Tensor.type is REAL_TENSOR_TYPE, "the test left Tensor.type patched"
