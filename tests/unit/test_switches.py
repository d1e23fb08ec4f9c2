"""Every rule of every switch: what works, what is chosen, and what is refused with its numbers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout, resolve_layout
from lightning_mcore.switches import PRECISIONS, Facts, Switches, resolve_switches
from lightning_mcore.topology import Topology

CPU: dict[str, Any] = {"engine_version": (0, 19, 2), "on_gpu": False, "precision": "32-true"}
GPU: dict[str, Any] = {
    "engine_version": (0, 19, 2),
    "on_gpu": True,
    "precision": "bf16-mixed",
    "has_te_or_apex": True,
}
MEGATRON: dict[str, Any] = {"native_model": False, "optimizer": "adamw"}


def _layout(world: int, **sizes: Any) -> Layout:
    return resolve_layout(ParallelSizes(**sizes), world, 0)


def _resolve(
    world: int, *, sizes: dict[str, Any], facts: dict[str, Any], **request: Any
) -> Switches:
    return resolve_switches(SwitchRequest(**request), _layout(world, **sizes), Facts(**facts))


DP2 = (2, {})
TP2 = (2, {"tp": 2})
PP2 = (2, {"pp": 2})
PP2VPP2 = (2, {"pp": 2, "vpp": 2})
ONE = (1, {})

# (switch, request, (world, sizes), facts, effective, reason)
CHOICES: list[tuple[str, dict[str, Any], tuple[int, dict[str, Any]], dict[str, Any], Any, str]] = [
    # sequence_parallel
    ("sequence_parallel", {}, ONE, CPU, False, "tp = 1"),
    ("sequence_parallel", {}, TP2, CPU, True, "tp = 2"),
    ("sequence_parallel", {}, TP2, CPU | MEGATRON, True, "tp = 2"),
    ("sequence_parallel", {}, TP2, CPU | {"native_model": True}, False,
     "plain torch modules do not shard the sequence"),
    ("sequence_parallel", {}, TP2, GPU | MEGATRON, True, "tp = 2"),
    ("sequence_parallel", {}, TP2, GPU | {"has_te_or_apex": False}, False,
     "without TransformerEngine or Apex the engine's norms refuse it on GPUs"),
    ("sequence_parallel", {}, (4, {"tp": 2, "ep": 2}), GPU | {"has_te_or_apex": False}, True,
     "tp = 2 with ep = 2 needs it"),
    ("sequence_parallel", {"sequence_parallel": True}, TP2, CPU, True, "requested"),
    ("sequence_parallel", {"sequence_parallel": True}, TP2, GPU | {"has_te_or_apex": False}, True,
     "requested; norms must come from TransformerEngine, Apex or the model itself"),
    ("sequence_parallel", {"sequence_parallel": False}, TP2, CPU, False, "requested"),
    # use_distributed_optimizer
    ("use_distributed_optimizer", {}, ONE, CPU | MEGATRON, False, "dp = 1: nothing to shard"),
    ("use_distributed_optimizer", {}, DP2, CPU, True, "dp = 2"),
    ("use_distributed_optimizer", {}, DP2, CPU | MEGATRON, True, "dp = 2 with adamw"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"optimizer": "adam"}, True, "dp = 2 with adam"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"optimizer": "adam_l2"}, True,
     "dp = 2 with adam_l2"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"optimizer": "adamw", "native_model": True},
     True, "dp = 2 with adamw"),
    ("use_distributed_optimizer", {}, DP2,
     CPU | {"optimizer": "adamw", "native_model": True, "hooks_see_gradients": True}, False,
     "hooks between backward pass and step may want whole gradients"),
    ("use_distributed_optimizer", {}, DP2, CPU | MEGATRON | {"hooks_see_gradients": True}, True,
     "dp = 2 with adamw"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"optimizer": "sgd"}, False,
     "the engine shards the state of Adam and AdamW only, not of 'sgd'"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"optimizer": "other"}, False,
     "the engine shards the state of Adam and AdamW only, not of 'other'"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"precision": "bf16-true"}, False,
     "it keeps fp32 main parameters, which bf16-true does without"),
    ("use_distributed_optimizer", {}, DP2, CPU | {"precision": "16-mixed"}, True, "dp = 2"),
    ("use_distributed_optimizer", {"overlap_param_gather": True}, ONE, CPU | MEGATRON, True,
     "overlap_param_gather=True needs it"),
    ("use_distributed_optimizer", {"num_distributed_optimizer_instances": 2}, DP2, CPU, True,
     "2 optimizer instances need it"),
    ("use_distributed_optimizer", {"use_distributed_optimizer": True}, DP2, CPU, True,
     "requested"),
    ("use_distributed_optimizer", {"use_distributed_optimizer": True}, ONE, CPU, True,
     "requested; dp = 1: nothing to shard"),
    ("use_distributed_optimizer", {"use_distributed_optimizer": False}, DP2, CPU, False,
     "requested"),
    ("use_distributed_optimizer", {}, (4, {"tp": 4, "ep": 2, "etp": 1}), CPU | MEGATRON, True,
     "2 copies of each expert with adamw"),
    # overlap_grad_reduce
    ("overlap_grad_reduce", {}, ONE, CPU | MEGATRON, False, "dp = 1: nothing to reduce"),
    ("overlap_grad_reduce", {}, ONE, CPU | {"native_model": True}, False,
     "dp = 1: nothing to reduce"),
    ("overlap_grad_reduce", {}, DP2, CPU, True, "dp = 2"),
    ("overlap_grad_reduce", {}, DP2, CPU | MEGATRON, True, "dp = 2"),
    ("overlap_grad_reduce", {}, DP2, CPU | {"optimizer": "sgd"}, True, "dp = 2"),
    ("overlap_grad_reduce", {}, DP2, CPU | {"native_model": True}, False,
     "a parameter without a gradient in some step would stop the engine; set True if every"
     " parameter gets one in every step"),
    ("overlap_grad_reduce", {"overlap_grad_reduce": True}, DP2, CPU | {"native_model": True}, True,
     "requested; every parameter must get a gradient in every step"),
    ("overlap_grad_reduce", {"overlap_grad_reduce": True}, DP2, CPU | MEGATRON, True, "requested"),
    ("overlap_grad_reduce", {"overlap_grad_reduce": True}, ONE, CPU, True,
     "requested; dp = 1: nothing to reduce"),
    ("overlap_grad_reduce", {"overlap_grad_reduce": False}, DP2, CPU, False, "requested"),
    ("overlap_grad_reduce", {"overlap_param_gather": True}, ONE, CPU | MEGATRON, True,
     "overlap_param_gather=True needs it"),
    ("overlap_grad_reduce", {"num_distributed_optimizer_instances": 2}, DP2,
     CPU | {"engine_version": (0, 16, 1)}, False,
     "wrong gradients with 2 optimizer instances on megatron-core 0.16.1"),
    ("overlap_grad_reduce", {"num_distributed_optimizer_instances": 2}, DP2,
     CPU | {"engine_version": (0, 17, 0)}, True, "dp = 2"),
    # overlap_param_gather
    ("overlap_param_gather", {}, DP2, CPU | MEGATRON, True,
     "distributed optimizer with overlap_grad_reduce"),
    ("overlap_param_gather", {}, ONE, CPU, False, "use_distributed_optimizer is off"),
    ("overlap_param_gather", {}, DP2, CPU | {"optimizer": "sgd"}, False,
     "use_distributed_optimizer is off"),
    ("overlap_param_gather", {"overlap_grad_reduce": False}, DP2, CPU, False,
     "overlap_grad_reduce is off"),
    ("overlap_param_gather", {"overlap_grad_reduce": True}, DP2,
     CPU | {"native_model": True, "optimizer": "adamw"}, False,
     "plain torch code may read a weight before it has been gathered"),
    ("overlap_param_gather", {"overlap_param_gather": True}, DP2, CPU | MEGATRON, True,
     "requested"),
    ("overlap_param_gather", {"overlap_param_gather": False}, DP2, CPU, False, "requested"),
    # overlap_p2p and batch_p2p
    ("overlap_p2p", {}, ONE, CPU, False, "pp = 1: one stage sends nothing"),
    ("overlap_p2p", {}, PP2, CPU, False, "needs vpp >= 2: only an interleaved pipeline overlaps"),
    ("overlap_p2p", {}, (2, {"pp": 2, "vpp": 1}), CPU, False,
     "needs vpp >= 2: only an interleaved pipeline overlaps"),
    ("overlap_p2p", {}, PP2VPP2, CPU, True, "pp = 2 with vpp = 2"),
    ("overlap_p2p", {"overlap_p2p": True}, PP2VPP2, CPU, True, "requested"),
    ("overlap_p2p", {"overlap_p2p": False}, PP2, CPU, False, "requested"),
    ("overlap_p2p", {"overlap_p2p": False}, (4, {"pp": 4, "vpp": 2}), CPU, False, "requested"),
    ("batch_p2p", {}, ONE, CPU, False, "pp = 1: one stage sends nothing"),
    ("batch_p2p", {}, PP2, CPU, True, "overlap_p2p is off"),
    ("batch_p2p", {}, PP2VPP2, CPU, False, "excluded by overlap_p2p"),
    ("batch_p2p", {"overlap_p2p": False}, (4, {"pp": 4, "vpp": 2}), CPU, True,
     "overlap_p2p is off"),
    ("batch_p2p_sync", {}, PP2, CPU, False, "no device to wait for"),
    ("batch_p2p_sync", {}, PP2, GPU, False,
     "a batch's own order is enough since torch 1.13"),
    ("batch_p2p_sync", {"comm": "max"}, PP2, GPU, False,
     "a batch's own order is enough since torch 1.13"),
    ("batch_p2p_sync", {"comm": "safe"}, PP2, GPU, True,
     "comm='safe': as the engine by default"),
    ("batch_p2p_sync", {"batch_p2p_sync": False}, PP2, GPU, False, "requested"),
    ("batch_p2p_sync", {"batch_p2p_sync": True}, PP2, CPU, True, "requested"),
    ("batch_p2p_sync", {}, PP2VPP2, GPU, False, "batch_p2p is off"),
    # deallocate_pipeline_outputs
    ("deallocate_pipeline_outputs", {}, ONE, GPU, False, "pp = 1: one stage sends nothing"),
    ("deallocate_pipeline_outputs", {}, PP2, CPU, False,
     "on CPU a send may still be reading the tensor"),
    ("deallocate_pipeline_outputs", {}, PP2, GPU, True, "pp = 2 on GPU: saves memory"),
    ("deallocate_pipeline_outputs", {}, PP2, GPU | {"native_model": True}, False,
     "the output of plain torch modules may be a view"),
    ("deallocate_pipeline_outputs", {}, PP2VPP2, GPU | {"engine_version": (0, 16, 1)}, False,
     "before megatron-core 0.18 overlap_p2p may still be sending the tensor"),
    ("deallocate_pipeline_outputs", {}, PP2VPP2, GPU | {"engine_version": (0, 18, 0)}, True,
     "pp = 2 on GPU: saves memory"),
    ("deallocate_pipeline_outputs", {}, PP2, GPU | {"engine_version": (0, 16, 1)}, True,
     "pp = 2 on GPU: saves memory"),
    # grad_reduce_in_fp32
    ("grad_reduce_in_fp32", {}, ONE, CPU, False, "32-true: gradients are fp32 already"),
    ("grad_reduce_in_fp32", {}, ONE, CPU | {"precision": "bf16-mixed"}, True,
     "bf16-mixed sums gradients in fp32"),
    ("grad_reduce_in_fp32", {}, ONE, CPU | {"precision": "16-mixed"}, True,
     "16-mixed sums gradients in fp32"),
    ("grad_reduce_in_fp32", {}, ONE, CPU | {"precision": "bf16-true"}, False,
     "bf16-true: gradients are bf16, as the parameters"),
    # bucket_size
    ("bucket_size", {}, DP2, CPU, 40_000_000, "the engine's rule max(40M, 1M x dp)"),
    ("bucket_size", {}, (41, {}), CPU, 41_000_000, "the engine's rule max(40M, 1M x dp)"),
    ("bucket_size", {}, (4, {"pp": 2}), CPU, 40_000_000,
     "the engine's rule max(40M, 1M x dp) on the first stage, one bucket on the others"),
    ("bucket_size", {"bucket_size": 1000}, DP2, CPU, 1000, "requested"),
    ("bucket_size", {"bucket_size": 1000}, ONE, CPU, None,
     "one bucket: overlap_grad_reduce is off"),
    ("bucket_size", {"overlap_grad_reduce": False}, DP2, CPU, None,
     "one bucket: overlap_grad_reduce is off"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "request_", "grid", "facts", "effective", "reason"), CHOICES)
def test_what_is_chosen_and_why(
    name: str,
    request_: dict[str, Any],
    grid: tuple[int, dict[str, Any]],
    facts: dict[str, Any],
    effective: Any,
    reason: str,
) -> None:
    switch = getattr(_resolve(grid[0], sizes=grid[1], facts=facts, **request_), name)
    assert switch.effective == effective
    assert type(switch.effective) is type(effective)
    assert switch.reason == reason


# (request, (world, sizes), facts, how the message starts, what fix it names)
REFUSALS: list[tuple[dict[str, Any], tuple[int, dict[str, Any]], dict[str, Any], str, str]] = [
    ({"sequence_parallel": True}, DP2, CPU,
     "`sequence_parallel` (True) needs `tp` (1) of at least 2", "use tp=2 or more"),
    ({"sequence_parallel": True}, TP2, CPU | {"native_model": True},
     "`sequence_parallel` (True) needs Megatron layers", "sequence_parallel='auto'"),
    ({}, (4, {"tp": 2, "ep": 2}), CPU, "`etp` (2) with `ep` (2) needs GPUs", "etp=1 on CPU"),
    ({"sequence_parallel": False}, (4, {"tp": 2, "ep": 2, "etp": 1}), CPU,
     "`sequence_parallel` (False) must be on with `tp` (2) and `ep` (2) both above 1", "or tp=1"),
    ({"use_distributed_optimizer": True}, DP2, CPU | {"optimizer": "sgd"},
     "`use_distributed_optimizer` (True) cannot work: the engine shards the state of Adam and"
     " AdamW only, not of 'sgd'", "use torch.optim.AdamW in configure_optimizers"),
    ({"use_distributed_optimizer": True}, DP2, CPU | {"optimizer": "other"},
     "`use_distributed_optimizer` (True) cannot work", "use torch.optim.AdamW"),
    ({"use_distributed_optimizer": True}, DP2, CPU | {"precision": "bf16-true"},
     "`use_distributed_optimizer` (True) cannot work: it keeps fp32 main parameters",
     "use Trainer(precision='bf16-mixed')"),
    ({"overlap_param_gather": True, "use_distributed_optimizer": False}, DP2, CPU,
     "`overlap_param_gather` (True) needs `use_distributed_optimizer` (False: requested)",
     "use use_distributed_optimizer=True"),
    ({"overlap_param_gather": True, "overlap_grad_reduce": False}, DP2, CPU,
     "`overlap_param_gather` (True) needs `overlap_grad_reduce` (False: requested)",
     "use overlap_grad_reduce=True"),
    ({"overlap_param_gather": True}, DP2, CPU | {"optimizer": "sgd"},
     "`overlap_param_gather` (True) needs `use_distributed_optimizer` (False: the engine shards",
     "overlap_param_gather='auto'"),
    ({"overlap_param_gather": True}, DP2, CPU | {"native_model": True, "optimizer": "adamw"},
     "`overlap_param_gather` (True) needs Megatron layers", "overlap_param_gather='auto'"),
    ({"overlap_grad_reduce": True, "num_distributed_optimizer_instances": 2}, DP2,
     CPU | {"engine_version": (0, 16, 1)},
     "`overlap_grad_reduce` (True) with `num_distributed_optimizer_instances` (2) gives wrong"
     " gradients on megatron-core 0.16.1", "use megatron-core 0.17 or newer"),
    ({"overlap_param_gather": True, "num_distributed_optimizer_instances": 2}, DP2,
     CPU | {"engine_version": (0, 16, 1)},
     "`overlap_param_gather` (True) needs `overlap_grad_reduce` (False: wrong gradients with 2",
     "overlap_param_gather='auto'"),
    ({"num_distributed_optimizer_instances": 3}, DP2, CPU,
     "dp x cp (2) must be a multiple of `num_distributed_optimizer_instances` (3)",
     "divides 2"),
    ({"num_distributed_optimizer_instances": 2}, (4, {"ep": 4}), CPU,
     "expert data-parallel size (1) must be a multiple of `num_distributed_optimizer_instances`"
     " (2)", "divides 1"),
    ({"use_distributed_optimizer": False, "num_distributed_optimizer_instances": 2}, DP2, CPU,
     "`num_distributed_optimizer_instances` (2) needs `use_distributed_optimizer`, which is off"
     " (requested)", "use num_distributed_optimizer_instances=1"),
    ({"overlap_p2p": True}, DP2, CPU,
     "`overlap_p2p` (True) needs `pp` (1) of at least 2", "use pp=2 or more"),
    ({"overlap_p2p": True}, PP2, CPU,
     "`overlap_p2p` (True) needs `vpp` (None or 1) of at least 2 with `pp` (2)", "use vpp=2"),
    ({"overlap_p2p": False}, PP2VPP2, CPU,
     "`overlap_p2p` (False) with `pp` (2) and `vpp` (2) would give wrong gradients without an"
     " error", "use overlap_p2p=True, or vpp=None, or pp=4"),
    ({"overlap_p2p": False}, (2, {"pp": 2, "vpp": 3}), GPU,
     "`overlap_p2p` (False) with `pp` (2) and `vpp` (3) would give wrong gradients", "vpp=None"),
    ({"bucket_size": 1000, "overlap_grad_reduce": False}, DP2, CPU,
     "`bucket_size` (1000) has no effect with `overlap_grad_reduce` (False)",
     "use bucket_size=None"),
    ({}, (2, {"cp": 2}), CPU | {"native_model": True}, "`cp` (2) needs Megatron layers",
     "use cp=1"),
    ({}, ONE, CPU | {"precision": "64-true"},
     "`precision` ('64-true') must be one of 32-true, bf16-mixed, bf16-true, 16-mixed",
     "use Trainer(precision='32-true')"),
    ({}, ONE, CPU | {"precision": "16-true"}, "`precision` ('16-true') must be one of",
     "use Trainer(precision='bf16-mixed')"),
    ({}, ONE, CPU | {"precision": "transformer-engine"},
     "`precision` ('transformer-engine') must be one of", "use Trainer(precision='bf16-mixed')"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "grid", "facts", "start", "fix"), REFUSALS)
def test_what_is_refused(
    request_: dict[str, Any],
    grid: tuple[int, dict[str, Any]],
    facts: dict[str, Any],
    start: str,
    fix: str,
) -> None:
    with pytest.raises(ConfigurationError) as error:
        _resolve(grid[0], sizes=grid[1], facts=facts, **request_)
    message = str(error.value)
    assert message.startswith(start)
    relation, _, way_out = message.partition("; use ")
    assert fix in f"use {way_out}", relation
    assert message.endswith(".")


GRIDS = [
    ONE,
    DP2,
    TP2,
    PP2,
    PP2VPP2,
    (8, {"tp": 2, "pp": 2, "vpp": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 1}),
]
MODELS = [{}, MEGATRON, {"native_model": True, "optimizer": "sgd"}, MEGATRON | {"optimizer": "sgd"}]


HARDWARE = [CPU, GPU, GPU | {"has_te_or_apex": False}]
VERSIONS = [(0, 16, 1), (0, 19, 2)]


@pytest.mark.parametrize("grid", GRIDS)
def test_auto_always_gives_a_consistent_answer(grid: tuple[int, dict[str, Any]]) -> None:
    for hardware, model, version, precision in itertools.product(
        HARDWARE, MODELS, VERSIONS, PRECISIONS
    ):
        facts = hardware | model | {"engine_version": version, "precision": precision}
        _check_invariants(_resolve(grid[0], sizes=grid[1], facts=facts), grid[1])


SETTINGS = (
    "sequence_parallel",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "overlap_p2p",
)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", MODELS)
def test_explicit_values_are_obeyed_or_refused(
    grid: tuple[int, dict[str, Any]], model: dict[str, Any]
) -> None:
    obeyed = 0
    for values in itertools.product([True, False, "auto"], repeat=len(SETTINGS)):
        request = dict(zip(SETTINGS, values, strict=True))
        got = _resolve_or_message(grid[0], sizes=grid[1], facts=CPU | model, **request)
        if isinstance(got, str):
            asked = [f"`{name}` ({value})" for name, value in request.items() if value != "auto"]
            assert any(words in got for words in asked)
            continue
        for name, value in request.items():
            switch = getattr(got, name)
            assert switch.requested == value
            if value != "auto":
                assert switch.effective is value
                assert switch.reason.startswith("requested")
        _check_invariants(got, grid[1])
        obeyed += 1
    assert obeyed > 0


def _resolve_or_message(world: int, **arguments: Any) -> Switches | str:
    try:
        return _resolve(world, **arguments)
    except ConfigurationError as error:
        return str(error)


def _check_invariants(got: Switches, sizes: dict[str, Any]) -> None:
    """What the engine needs, whoever chose."""
    assert not (got.overlap_p2p.effective and got.batch_p2p.effective)
    if sizes.get("pp", 1) > 1:
        assert got.overlap_p2p.effective != got.batch_p2p.effective
    if got.overlap_p2p.effective:
        assert sizes.get("vpp", 1) >= 2
    if got.overlap_param_gather.effective:
        assert got.use_distributed_optimizer.effective
        assert got.overlap_grad_reduce.effective
    if got.sequence_parallel.effective:
        assert sizes.get("tp", 1) > 1
    assert (got.bucket_size.effective is not None) == got.overlap_grad_reduce.effective
    for field in dataclasses.fields(got):
        switch = getattr(got, field.name)
        assert switch.name == field.name
        assert switch.reason
        assert "\n" not in switch.reason
        assert not switch.reason.endswith(".")


def test_the_silently_wrong_schedule_is_refused_on_every_version() -> None:
    """At pp=2 the engine itself checks nothing; tests of the ranks show what would come out."""
    for version in [(0, 16, 1), (0, 17, 1), (0, 18, 2), (0, 19, 2)]:
        with pytest.raises(ConfigurationError, match=r"`pp` \(2\) and `vpp` \(2\)"):
            _resolve(
                2,
                sizes={"pp": 2, "vpp": 2},
                facts=CPU | {"engine_version": version},
                overlap_p2p=False,
            )


def test_derived_switches_carry_no_request() -> None:
    got = _resolve(1, sizes={}, facts=CPU)
    for name in (
        "align_param_gather",
        "deallocate_pipeline_outputs",
        "hierarchical_context_parallel_sizes",
    ):
        assert getattr(got, name).requested is None
    for name in ("overlap_p2p", "batch_p2p", "grad_reduce_in_fp32"):
        assert getattr(got, name).requested == "auto"


def test_instances_of_the_optimizer_are_proposed_for_many_copies_in_whole_domains() -> None:
    def reason(nodes: int, world: int) -> str:
        topology = Topology(gpus_per_nvlink_domain=8, nodes=nodes, arch="hopper")
        facts = GPU | MEGATRON | {"topology": topology}
        return _resolve(world, sizes={}, facts=facts).num_distributed_optimizer_instances.reason

    assert reason(16, 128).startswith("16, one per NVLink domain")
    assert "NVLink" not in reason(15, 120)
    # 17 domains, the last of them half full, do not divide 132 copies.
    assert "NVLink" not in reason(17, 132)


def test_a_group_of_microbatches_may_be_as_small_as_the_pipeline() -> None:
    switches = _resolve(
        2, sizes={"pp": 2, "vpp": 2}, facts=CPU, microbatch_group_size_per_vp_stage=2
    )
    assert switches.microbatch_group_size_per_vp_stage.effective == 2
