"""Graphs of layers on a machine without GPUs: when, of what, and what is put back."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import tensor_parallel
from megatron.core.transformer import cuda_graphs as engine_graphs
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from lightning_mcore._mcore import cuda_graphs, engine
from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.graphs import LayerGraphs
from lightning_mcore.layout import resolve_layout
from lightning_mcore.timeline.on_device import _Launches

needs_0_19 = pytest.mark.skipif(
    engine.engine_version() < (0, 19), reason="graphs are refused before megatron-core 0.19"
)


def _graphs(kind: str = "transformer_engine", pp: int = 1, warmup: int = 3) -> LayerGraphs:
    layout = resolve_layout(ParallelSizes(pp=pp), 4, 0)
    config = SimpleNamespace(cuda_graph_warmup_steps=warmup)
    return LayerGraphs(kind, [], config, None, layout, overlap_param_gather=False)


# ------------------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("pp", "later", "fits"),
    [
        (1, (256, 2, 4), True),
        (1, (256, 2, 1), True),
        (2, (256, 2, 4), True),
        (2, (256, 2, 2), False),
        (1, (128, 2, 4), False),
        (1, (256, 1, 4), False),
    ],
)
def test_every_step_fits_the_first(pp: int, later: tuple[int, int, int], fits: bool) -> None:
    graphs = _graphs(pp=pp)
    graphs.check_step(256, 2, 4)
    if fits:
        graphs.check_step(*later)
        return
    with pytest.raises(ConfigurationError, match=r"replays steps of one .*\(256, 2.*drop_last"):
        graphs.check_step(*later)
    # The first one still counts.
    graphs.check_step(256, 2, 4)


@pytest.mark.parametrize(
    ("kind", "warmup", "step"),
    [("transformer_engine", 3, 4), ("transformer_engine", 0, 2), ("local", 3, None)],
)
def test_capture_is_once_and_after_the_warm_up(
    monkeypatch: Any, kind: str, warmup: int, step: int | None
) -> None:
    """What the engine does at capture needs a GPU: tests/gpu/test_cuda_graphs.py."""
    graphs, captured = _graphs(kind, pp=2, warmup=warmup), []
    steps: list[int] = []
    hooks: list[bool] = []

    def capture(*args: Any, **settings: Any) -> Any:
        captured.append((len(steps), hooks[-1], settings))
        return SimpleNamespace()

    monkeypatch.setattr(cuda_graphs, "make_te_graphs", capture)
    for step_now in range(1, 8):
        steps.append(step_now)
        graphs.start_step(hooks.append, True)
        graphs.check_step(256, 2, 5)
    if step is None:
        assert (captured, hooks) == ([], [])
        return
    assert hooks == [False, True]
    shape = {"seq_length": 256, "micro_batch_size": 2, "num_microbatches": 5}
    assert captured == [(step, False, {**shape, "data_parallel_size": 2})]


@pytest.mark.parametrize(("kind", "step"), [("transformer_engine", 4), ("local", 2)])
def test_a_switch_that_captured_nothing_is_an_error(monkeypatch: Any, kind: str, step: int) -> None:
    monkeypatch.setattr(cuda_graphs, "make_te_graphs", lambda *args, **settings: object())
    graphs = _graphs(kind)
    for _ in range(step - 1):
        graphs.start_step(lambda on: None, False)
        graphs.check_step(256, 2, 4)
    with pytest.raises(ConfigurationError, match="captured nothing"):
        graphs.start_step(lambda on: None, False)


# ------------------------------------------------------------------------------ models


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **fields)


def _chunk() -> nn.Module:
    return nn.ModuleDict({"decoder": nn.Identity()})


EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False}


@needs_0_19
@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("transformer_engine", {}, None),
        ("local", {}, None),
        ("local", EXPERTS, "needs dense layers"),
        ("local", {"fp32_residual_connection": True}, None),
        ("transformer_engine", {"fp32_residual_connection": True}, "makes the inputs"),
        ("transformer_engine", EXPERTS, "fixed shapes"),
        ("transformer_engine", {**EXPERTS, "moe_expert_capacity_factor": 1.0}, "fixed shapes"),
        ("transformer_engine", {**EXPERTS, "cuda_graph_modules": ["attn"]}, None),
        (
            "transformer_engine",
            {
                **EXPERTS,
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
            None,
        ),
    ],
)
def test_models_that_cannot_be_captured(kind: str, fields: Any, said: str | None) -> None:
    config = _config(cuda_graph_impl=kind, **fields)
    if said is None:
        cuda_graphs.check_graphed_model(kind, config, [_chunk()])
        return
    with pytest.raises(ConfigurationError, match=said):
        cuda_graphs.check_graphed_model(kind, config, [_chunk()])


@needs_0_19
def test_layers_where_nothing_would_be_captured() -> None:
    with pytest.raises(ConfigurationError, match="in `decoder`"):
        cuda_graphs.check_graphed_model("local", _config(cuda_graph_impl="local"), [nn.Identity()])


def test_layers_run_themselves_in_evaluation() -> None:
    layer, bare = nn.Linear(2, 2), nn.Linear(2, 2)
    manager = nn.Identity()
    layer.cudagraph_manager = manager

    def fail() -> None:
        with cuda_graphs.layers_themselves([layer, bare]):
            assert not hasattr(layer, "cudagraph_manager")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert layer.cudagraph_manager is manager
    assert not hasattr(bare, "cudagraph_manager")


# ------------------------------------------------------------------------------ the engine's state


@needs_0_19
def test_a_failed_capture_is_forgotten() -> None:
    """Else the engine's DDP would drop all gradients of the next run (its hook returns at once)."""
    engine_graphs._set_capture_start()
    engine_graphs._set_warmup_start()
    engine_graphs._CudagraphGlobalRecord.cudagraph_created = True
    engine_graphs.fwd_buffer_reuse_ref_count = 3
    cuda_graphs.forget_graphs()
    assert not engine_graphs.is_graph_capturing()
    assert not engine_graphs.is_graph_warmup()
    assert not engine_graphs._CudagraphGlobalRecord.cudagraph_created
    assert engine_graphs.fwd_buffer_reuse_ref_count == 0


@needs_0_19
@pytest.mark.parametrize("fails", [False, True])
def test_every_use_of_the_pool_is_released(monkeypatch: Any, fails: bool) -> None:
    """By torch's rules, with the engine's own allocation; the allocator itself needs a GPU."""
    uses: Counter[Any] = Counter()
    allocate = engine_graphs.alloc_tensor_from_graph_mempool
    pools = [(0, 7), (0, 8)]

    def at(change: int) -> Any:
        return lambda device, pool: uses.update({(device, pool): change})

    for name, change in (("beginAllocateCurrentThread", 1), ("endAllocate", 0), ("release", -1)):
        to = "Pool" if name == "release" else "ToPool"
        monkeypatch.setattr(torch._C, f"_cuda_{name}{to}", at(change), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    kept = suppress(ZeroDivisionError)
    with kept, cuda_graphs.pool_given_back():
        for pool in pools:
            monkeypatch.setattr(engine_graphs.CudaGraphManager, "global_mempool", pool)
            for _ in range(2):
                meta = engine_graphs.ArgMetadata(torch.ones(4))
                assert engine_graphs.alloc_tensor_from_graph_mempool(meta).shape == (4,)
        assert uses == {(3, pool): 2 for pool in pools}
        # As at the end of a run, where the engine forgets it first.
        monkeypatch.setattr(engine_graphs.CudaGraphManager, "global_mempool", None)
        if fails:
            raise ZeroDivisionError
    assert not any(uses.values())
    assert engine_graphs.alloc_tensor_from_graph_mempool is allocate


@needs_0_19
def test_a_failed_capture_is_told_and_leaves_nothing(monkeypatch: Any) -> None:
    class Layer(GraphableMegatronModule):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    class Helper:
        def __init__(self, **arguments: Any) -> None:
            assert set(arguments) == {
                "model", "config", "seq_length", "micro_batch_size", "optimizers"
            }  # fmt: skip

        def create_cudagraphs(self) -> None:
            assert calculator.get_num_microbatches() == 4
            Layer.__call__ = lambda self: None  # as TransformerEngine does during capture
            raise RuntimeError("operation not permitted when stream is capturing")

    call = Layer.__call__
    monkeypatch.setattr(engine_graphs, "TECudaGraphHelper", Helper)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(ConfigurationError, match="could not capture the layers: operation not"):
        cuda_graphs.make_te_graphs(
            [Layer()],
            None,
            None,
            seq_length=256,
            micro_batch_size=2,
            num_microbatches=4,
            data_parallel_size=2,
        )
    assert Layer.__call__ is call
    assert calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None


@needs_0_19
def test_graphs_of_layers_are_dropped_with_their_runners() -> None:
    layer = nn.Linear(2, 2)
    runner = SimpleNamespace(fwd_graph=object(), bwd_graph=object())
    layer.cudagraph_manager = SimpleNamespace(
        cudagraph_runners=[runner], custom_cudagraphs_lookup_table={"key": runner}
    )
    layer.weight._cudagraph_wgrad_ready_event = object()
    assert cuda_graphs.count_graphs([layer]) == 2

    def fail() -> None:  # as the engine does once process groups were aborted
        torch.distributed.get_rank()

    helper = SimpleNamespace(graphs_created=lambda: True, delete_cuda_graphs=fail)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        fail()
    cuda_graphs.delete_graphs([layer], helper)
    assert cuda_graphs.count_graphs([layer]) == 0
    assert not layer.cudagraph_manager.custom_cudagraphs_lookup_table
    assert not hasattr(layer.weight, "_cudagraph_wgrad_ready_event")


@needs_0_19
def test_replayed_layers_are_freed_at_once() -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    hidden = torch.ones(2, requires_grad=True)
    for layer in layers:
        output = torch.ones(2) * layer.bias
        runner = SimpleNamespace(
            base_module=layer,
            fwd_graph=SimpleNamespace(replay=lambda: None),
            bwd_graph=None,
            status=engine_graphs._GraphStatus.FWD_READY,
            fp8_enabled=False,
            fp4_enabled=False,
            use_stream=False,
            fwd_graph_input_surface=(torch.ones(2), layer.bias),
            fwd_graph_output_surface=(output,),
            fwd_graph_outputs=(output,),
        )
        layer.cudagraph_manager = SimpleNamespace(
            cudagraph_runners=[runner], custom_cudagraphs_lookup_table={}
        )
        (hidden,) = engine_graphs._CudagraphReplayNode.apply(runner, False, hidden, layer.bias)
    cuda_graphs.delete_graphs(layers)
    left = [weakref.ref(layer) for layer in layers]
    del layer, layers, output, runner, hidden
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


@needs_0_19
def test_the_engine_has_what_capture_uses() -> None:
    helper = inspect.signature(engine_graphs.TECudaGraphHelper.__init__).parameters
    assert {"model", "config", "seq_length", "micro_batch_size", "optimizers"} <= set(helper)
    for name in ("create_cudagraphs", "cuda_graph_set_manual_hooks", "delete_cuda_graphs"):
        assert callable(getattr(engine_graphs.TECudaGraphHelper, name))
    manager = inspect.getsource(engine_graphs.CudaGraphManager)
    for name in ("cudagraph_runners", "custom_cudagraphs_lookup_table"):
        assert f"self.{name}" in manager
    seed = inspect.signature(tensor_parallel.model_parallel_cuda_manual_seed).parameters
    assert {"te_rng_tracker", "use_cudagraphable_rng"} <= set(seed)
    assert callable(calculator.destroy_num_microbatches_calculator)
    arguments = inspect.signature(calculator.init_num_microbatches_calculator).parameters
    assert set(arguments) >= {
        "rank", "rampup_batch_size", "global_batch_size", "micro_batch_size", "data_parallel_size"
    }  # fmt: skip


@pytest.mark.parametrize(("launch", "calls"), [("cudaLaunchKernel", 1), ("cudaGraphLaunch", 0)])
def test_kernels_of_a_graph_belong_to_no_earlier_call(launch, calls):
    """They have the correlation of the graph's launch; their calls were made at its capture."""
    made = {"Collective name": "allreduce", "External id": 7}
    events = [
        {"cat": "cpu_op", "name": "record_param_comms", "tid": 1, "ts": 1.0, "args": made},
        {
            "cat": "cuda_runtime",
            "name": launch,
            "tid": 1,
            "ts": 2.0,
            "args": {"correlation": 3},
        },
    ]
    assert len(_Launches(events).calls_behind(3, None)) == calls
