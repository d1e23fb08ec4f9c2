"""The CPU adapter: one test for each seam, which fails when the engine moves it; exact restore."""

import importlib
import inspect
import logging
import queue
import sys
import types
import warnings

import pytest
import torch
from megatron.core import jit, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as engine_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from lightning_mcore._mcore import cpu
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore._mcore.distopt_fixes import materialize_adam_state
from lightning_mcore.errors import ConfigurationError

OWNERS = [
    *(torch.Tensor, torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.random),
    *(engine_random, token_dispatcher, moe_utils, filesystem_async, WrappedTorchNorm),
    *(DistributedOptimizer, distrib_optimizer, logging.getLogger(engine_random.__name__)),
]
LAZY = "megatron.core.models.bert.pooler"
"""A small engine module that is imported by none of the above."""


def everything():
    """Each attribute that the adapter might touch, by identity."""
    state = {(repr(o), n): id(v) for o in OWNERS for n, v in list(vars(o).items())}
    state.update(
        {
            (name, "torch"): id(vars(module)["torch"])
            for name, module in list(sys.modules.items())
            if name.startswith("megatron") and "torch" in vars(module)
        }
    )
    state["meta_path"] = tuple(map(id, sys.meta_path))
    state["filters"] = tuple(warnings.filters)
    state["logger"] = tuple(logging.getLogger(engine_random.__name__).filters)
    state["stance"] = torch._dynamo.eval_frame._stance.stance
    return state


def changed(before, after):
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def config(**fields):
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **fields)


@pytest.fixture
def adapter():
    with CpuAdapter() as entered:
        yield entered


@pytest.fixture
def view(adapter):
    """What an engine module sees as ``torch``."""
    return vars(engine_random)["torch"]


def as_engine(function):
    """The function as if it were written in a module of the engine."""
    inside = {**function.__globals__, "__name__": "megatron.core.of_a_test"}
    return types.FunctionType(function.__code__, inside)


# ------------------------------------------------------------------ entering and leaving


def test_everything_is_restored_exactly():
    before = everything()
    with CpuAdapter():
        during = everything()
        assert len(changed(before, during)) > 40
    assert changed(before, everything()) == set()


def test_everything_is_restored_after_an_exception():
    before = everything()

    def fail():
        with CpuAdapter():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert changed(before, everything()) == set()
    assert not CpuAdapter.is_active()


def test_a_seam_that_fails_undoes_the_others(monkeypatch):
    def fail(_):
        raise AttributeError("moved")

    monkeypatch.setattr(cpu, "_compile_nothing", fail)
    before = everything()
    with pytest.raises(AttributeError, match="moved"), CpuAdapter():
        pass
    assert changed(before, everything()) == set()
    assert not CpuAdapter.is_active()


def test_contexts_nest_and_end_in_any_order():
    before = everything()
    first, second = CpuAdapter(), CpuAdapter()
    first.__enter__()
    during = everything()
    second.__enter__()
    assert changed(during, everything()) == set()
    first.__exit__(None, None, None)
    assert changed(during, everything()) == set()
    assert CpuAdapter.is_active()
    second.__exit__(None, None, None)
    assert changed(before, everything()) == set()
    assert not CpuAdapter.is_active()


def test_one_adapter_serves_twice():
    adapter, before = CpuAdapter(), everything()
    for _ in range(2):
        with adapter:
            assert vars(engine_random)["torch"] is not torch
        assert changed(before, everything()) == set()


def test_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"is 2; hide .* CUDA_VISIBLE_DEVICES=\"\""):
        CpuAdapter().__enter__()
    assert not CpuAdapter.is_active()


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"SLURM_PROCID": "1"}, False),
    ],
)
def test_rank_zero_says_so_once(variables, speaks, monkeypatch, caplog):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(CpuAdapter, "_announced", False)
    for _ in range(2):
        with CpuAdapter():
            pass
    said = [r for r in caplog.records if "runs on CPU through an adapter" in r.message]
    assert len(said) == speaks
    assert all(record.levelno == logging.WARNING for record in said)


# ------------------------------------------------------------------ what others see


def test_user_code_sees_the_real_torch(adapter):
    assert sys.modules["torch"] is torch
    assert torch.cuda.current_device is importlib.import_module("torch.cuda").current_device
    assert "Stream" in vars(torch.cuda)
    for call in (
        torch.cuda.current_device,
        lambda: torch.zeros(1, device="cuda"),
        lambda: torch.zeros(1).cuda(),
    ):
        with pytest.raises((RuntimeError, AssertionError)):
            call()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type() != "torch.cuda.FloatTensor"


def test_modules_that_are_not_the_engines_keep_their_torch(adapter):
    assert vars(cpu)["torch"] is torch
    assert all(
        vars(module).get("torch") is torch
        for name, module in list(sys.modules.items())
        if name.startswith("lightning") and "torch" in vars(module)
    )


# ------------------------------------------------------------------ the view of torch


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_factories_redirect_cuda(view, device):
    source = torch.ones(2)
    for made in (
        view.tensor([1.0], device=device),
        view.empty(2, device=device),
        view.full((2,), 1.0, device=device),
        view.arange(3, device=device),
        view.zeros_like(source, device=device),
        view.randn(2, device=device),
        view.randperm(3, device=device),
    ):
        assert made.device.type == "cpu"
    assert view.zeros(1, device="meta").device.type == "meta"


def test_factories_exist_in_torch(view):
    for name in cpu.torch_view.FACTORIES:
        assert vars(view)[name].__wrapped__ is getattr(torch, name)


def test_current_device_serves_as_device(view):
    device = view.cuda.current_device()
    assert view.zeros(1, device=device).to(device).device.type == "cpu"


def test_streams_and_events_do_nothing(view):
    cuda = view.cuda
    stream, start, end = cuda.Stream(), cuda.Event(enable_timing=True), cuda.Event()
    stream.wait_stream(cuda.current_stream())
    stream.wait_event(stream.record_event(start))
    cuda.default_stream().synchronize()
    with cuda.stream(stream), stream, cuda.nvtx.range("x"):
        cuda.nvtx.range_push("y")
        cuda.nvtx.range_pop()
        end.record()
    assert start.elapsed_time(end) >= 0
    assert stream.query()
    assert end.query()
    assert not cuda.is_current_stream_capturing()
    for call in (cuda.synchronize, cuda.empty_cache):
        assert call() is None
    assert cuda.set_device(0) is None


def test_autocast_means_the_cpu(view):
    with view.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_the_view_reads_and_writes_through(view):
    view.of_a_test = 1
    assert torch.of_a_test == 1
    torch.of_a_test = 2
    assert view.of_a_test == 2
    del view.of_a_test
    assert not hasattr(torch, "of_a_test")
    assert view.cuda.is_available() is torch.cuda.is_available()
    assert view.nn is torch.nn
    assert isinstance(view, types.ModuleType)


def test_modules_loaded_before_see_the_view(adapter):
    with_torch = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.")
        and getattr(vars(module).get("torch"), "__name__", None) == "torch"
    ]
    assert len(with_torch) > 30
    assert len({id(vars(module)["torch"]) for module in with_torch}) == 1
    assert vars(with_torch[0])["torch"] is not torch


def test_modules_loaded_later_see_the_view_and_get_torch_back():
    sys.modules.pop(LAZY, None)
    with CpuAdapter():
        module = importlib.import_module(LAZY)
        assert vars(module)["torch"] is vars(engine_random)["torch"]
        assert type(module.__loader__).__name__ == "SourceFileLoader"
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        assert inspect.getsource(module)
    assert vars(module)["torch"] is torch
    sys.modules.pop(LAZY)
    assert vars(importlib.import_module(LAZY))["torch"] is torch


def test_modules_that_do_not_exist_fail_as_usual(adapter):
    with pytest.raises(ModuleNotFoundError, match="of_a_test"):
        importlib.import_module("megatron.core.of_a_test")


# ------------------------------------------------------------------ tensor methods


def test_tensor_cuda_is_the_tensor_for_the_engine(adapter):
    tensor = torch.ones(1)
    assert as_engine(lambda t: t.cuda())(tensor) is tensor
    assert as_engine(lambda t: t.cuda(non_blocking=True))(tensor) is tensor


def test_record_stream_does_nothing_for_the_engine(adapter):
    tensor = torch.ones(1)
    stream = as_engine(lambda: None)
    assert as_engine(lambda t, s: t.record_stream(s))(tensor, stream) is None
    with pytest.raises((RuntimeError, TypeError)):
        tensor.record_stream(stream)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "FloatTensor"),
        (torch.bfloat16, "BFloat16Tensor"),
        (torch.float16, "HalfTensor"),
    ],
)
def test_tensor_type_has_both_names_for_the_engine(adapter, dtype, name):
    called = as_engine(lambda t: t.type())(torch.ones(1, dtype=dtype))
    assert called == f"torch.{name}"
    assert called == f"torch.cuda.{name}"
    assert f"torch.cuda.{name}" == called
    assert called in [f"torch.cuda.{name}"]
    assert called != "torch.cuda.IntTensor"
    assert called != 1
    converted = as_engine(lambda t: t.type(torch.float64))(torch.ones(1))
    assert converted.dtype is torch.float64


@pytest.mark.parametrize("module", [optimizer, distrib_optimizer, clip_grads])
def test_the_engine_still_asks_for_tensor_types(module):
    assert ".type()" in inspect.getsource(module), "Tensor.type need not be patched any more"


# ------------------------------------------------------------------ functions of the engine


def test_rng_functions_use_the_cpu_generator(adapter):
    state = engine_random._get_cuda_rng_state()
    first = torch.rand(3)
    engine_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(engine_random._get_cuda_rng_state(clone=True), torch.get_rng_state())


def test_the_rng_tracker_forks_without_a_warning(adapter, caplog):
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("of-a-test", 123)
    before = torch.get_rng_state()
    with tracker.fork("of-a-test"):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(torch.rand(3), inside)
    tracker.reset()
    assert "RNG state changed" not in caplog.text
    assert "CPU RNG state changed within GPU RNG context" in inspect.getsource(engine_random)


def test_other_warnings_of_the_rng_module_pass(adapter, caplog):
    logging.getLogger(engine_random.__name__).warning("something else")
    assert "something else" in caplog.text


def test_only_warnings_about_missing_gpu_extensions_are_silent(adapter):
    for message in (
        "Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
        "Apex is not installed. Falling back to Torch Norm",
    ):
        warnings.warn(message, stacklevel=1)
    with pytest.warns(UserWarning, match="Apex is not what it was"):
        warnings.warn("Apex is not what it was", stacklevel=1)


def test_split_sizes_become_numpy(adapter):
    move = token_dispatcher.maybe_move_tensor_to_cpu
    sizes = torch.tensor([1, 2])
    assert move(sizes, as_numpy=True).tolist() == [1, 2]
    assert type(move(sizes, as_numpy=True)).__module__ == "numpy"
    assert move(sizes, record_stream=True) is sizes
    assert move([1, 2], as_numpy=True) == [1, 2]


def test_the_signature_of_the_split_size_function_is_known():
    parameters = list(inspect.signature(moe_utils.maybe_move_tensor_to_cpu).parameters)
    assert parameters == ["tensor", "as_numpy", "record_stream"]


def test_te_general_gemm_is_bound(adapter):
    assert moe_utils.te_general_gemm is None
    assert "te_general_gemm is not None" in inspect.getsource(moe_utils)


def test_torch_norms_work_under_sequence_parallel(adapter):
    marked = WrappedTorchNorm(config(sequence_parallel=True, tensor_model_parallel_size=2), 8)
    assert all(p.sequence_parallel for p in marked.parameters())
    plain = WrappedTorchNorm(config(normalization="RMSNorm"), 8)
    assert isinstance(plain, torch.nn.RMSNorm)
    assert not any(hasattr(p, "sequence_parallel") for p in plain.parameters())


def test_torch_norms_refuse_sequence_parallel_without_the_adapter():
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config(sequence_parallel=True, tensor_model_parallel_size=2), 8)


def test_checkpoints_are_written_in_this_process(adapter):
    assert isinstance(filesystem_async._results_queue, queue.Queue)
    named = [n for n in dir(filesystem_async) if n.endswith("get_write_results_queue")]
    assert getattr(filesystem_async, named[0])() is filesystem_async._results_queue


def test_nothing_is_compiled(adapter):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert compiled == []
    assert "torch.compile" in inspect.getsource(jit)


# ------------------------------------------------------------------ DistributedOptimizer


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("state_dict", ["self"]),
        ("load_state_dict", ["self", "state_dict"]),
        ("_set_main_param_and_optimizer_states", ["self", "model_param", "tensors"]),
    ],
)
def test_methods_of_the_distributed_optimizer_are_fixed(name, parameters):
    real = getattr(DistributedOptimizer, name)
    assert list(inspect.signature(real).parameters) == parameters
    with CpuAdapter():
        assert getattr(DistributedOptimizer, name).__wrapped__ is real
    assert getattr(DistributedOptimizer, name) is real


def test_the_distributed_optimizer_stays_where_fused_optimizers_are(monkeypatch):
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    real = DistributedOptimizer.state_dict
    with CpuAdapter():
        assert DistributedOptimizer.state_dict is real


class OneBuffer:
    """As much of a DistributedOptimizer as its ``state_dict`` reads."""

    grad_scaler = None
    state_dict = DistributedOptimizer.state_dict

    def __init__(self, *params):
        self.optimizer = torch.optim.Adam([{"params": list(params)}])


@pytest.mark.parametrize("params", [0, 2])
def test_state_dict_works_before_the_first_step(params, adapter):
    part = OneBuffer(*(torch.nn.Parameter(torch.ones(2)) for _ in range(params)))
    state = DistributedOptimizer.state_dict(part)
    assert [group["step"] for group in state["optimizer"]["param_groups"]] == [0.0]
    assert "state_dict" not in vars(part.optimizer)
    assert len(part.optimizer.state) == params


def test_materialized_state_steps_like_a_new_one():
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    for param, ready in ((first, True), (second, False)):
        adam = torch.optim.Adam([param])
        if ready:
            materialize_adam_state(adam)
        for _ in range(3):
            param.grad = torch.tensor([1.0, 2.0])
            adam.step()
    assert torch.equal(first, second)


def test_parameters_count_their_own_steps_after_loading(monkeypatch):
    part = OneBuffer(*(torch.nn.Parameter(torch.ones(2)) for _ in range(2)))
    shared = torch.tensor(5.0)

    def load(optimizer, state_dict):
        for param in optimizer.optimizer.param_groups[0]["params"]:
            optimizer.optimizer.state[param] = {"step": shared}

    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", load)
    with CpuAdapter():
        DistributedOptimizer.load_state_dict(part, {})
    counters = [state["step"] for state in part.optimizer.state.values()]
    assert len({id(counter) for counter in counters}) == 2
    assert counters == [5.0, 5.0]
