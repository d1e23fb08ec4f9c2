"""The cases of every item."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_mcore import GemmOverlap, TPCommOverlap
from multigpu.cases import MANY_QUEUES, ONE_ORDER, Case, Group, Plan

RING = GemmOverlap(method="ring_exchange")
_SCATTERING = ("proj_fprop", "fc2_fprop")


def _split(splits: int) -> TPCommOverlap:
    entry = GemmOverlap(method="pipeline", num_splits=splits)
    return TPCommOverlap(gemms=dict.fromkeys(_SCATTERING, entry))


USERBUFFERS: Mapping[str, Any] = {
    "all ring + dgrad (True)": True,
    "TransformerEngine's defaults (pipeline, 4 splits)": TPCommOverlap(),
    "all ring": TPCommOverlap(gemms=dict.fromkeys(_SCATTERING, RING)),
    "bulk only": TPCommOverlap(all_gather=False, reduce_scatter=False),
    "pipeline, 2 splits": _split(2),
    "pipeline, 8 splits": _split(8),
}
"""Settings of ``tp_comm_overlap``, the most promising first."""


def tensor_parallel(world: int) -> list[tuple[Group, Plan]]:
    """Userbuffers against NCCL at tp = all GPUs, one and two samples per microbatch."""
    groups = []
    for micro_batch in (1, 2):
        common: dict[str, Any] = {"model": "llama-70b-slice", "micro_batch": micro_batch}
        sizes = {"tp": world, "sequence_parallel": True}
        off = Case(
            name="off, async NCCL",
            strategy=sizes | {"tp_comm_overlap": False},
            environment=ONE_ORDER,
            **common,
        )
        names = list(USERBUFFERS) if micro_batch == 1 else list(USERBUFFERS)[:3]
        variants = [
            Case(
                name=name,
                strategy=sizes | {"tp_comm_overlap": USERBUFFERS[name]},
                environment=ONE_ORDER,
                needs=("gpu", "transformer_engine"),
                **common,
            )
            for name in names
        ]
        if micro_batch == 1:
            queues = dataclasses.replace(off, name="off, 8 hardware queues", environment={})
            variants.append(queues)
        group = Group(
            item="tp",
            name=f"tp{world}, micro-batch {micro_batch}",
            baseline=off,
            variants=tuple(variants),
        )
        groups.append((group, Plan(steps=8 if micro_batch == 1 else 5)))
    return groups


def pipeline(world: int) -> list[tuple[Group, Plan]]:
    """Schedules at pp = 2, with micro-batches of about 75 ms per stage.

    Launched kernel by kernel, a step has the GPU wait for the host wherever the host waits for a
    transfer or a schedule has small chunks: 9 to 50 % of a recorded step. CUDA graphs leave the
    host little to do; they want one number of microbatches per run, so each has a group of its own.
    Cases with few CTAs show what transfers cost that wait beside compute: each CTA of a waiting
    NCCL kernel holds an SM. They are set in the environment, since of two stages one direction goes
    over the world's group, which has no settings of the strategy's.

    The output layer is an eighth of a layer, so that the stages are alike. A case with one number
    of microbatches takes about 20 s, and one with three about 65 s.
    """
    common: dict[str, Any] = {
        "model": "gpt2-xl",
        "changes": {
            "layers": 16,
            "hidden": 2560,
            "heads": 20,
            "head_dim": 128,
            "ffn": 10240,
            "seq": 2048,
            "vocab": 4096,
        },
        "micro_batch": 4,
        "lateness": True,
    }

    def case(name: str, counts: tuple[int, ...], **strategy: Any) -> Case:
        return Case(name=name, strategy={"pp": 2, **strategy}, microbatches=counts, **common)

    def graphed(name: str, count: int, **strategy: Any) -> Case:
        made = case(name, (count,), cuda_graphs="transformer_engine", **strategy)
        return dataclasses.replace(made, needs=("gpu", "transformer_engine"))

    overlap = {"vpp": 4, "overlap_p2p": True}
    few = {"NCCL_MAX_CTAS": "4"}
    flush = {"overlap_p2p": True, "overlap_p2p_warmup_flush": True}
    name = f"pp2 dp{world // 2}"
    groups = [
        Group(
            item="pp",
            name=f"{name}, CUDA graphs, {count} microbatches",
            baseline=graphed("1F1B", count),
            variants=(
                graphed("vpp 4, overlap", count, **overlap),
                dataclasses.replace(
                    graphed("vpp 4, overlap, 4 CTAs", count, **overlap), environment=few
                ),
                graphed("vpp 2, overlap", count, **overlap | {"vpp": 2}),
            ),
        )
        for count in (4, 8)
    ]
    eager = Group(
        item="pp",
        name=name,
        baseline=case("1F1B", (4, 8, 16)),
        variants=(
            dataclasses.replace(case("vpp 4, overlap, 4 CTAs", (4, 8), **overlap), environment=few),
            case("vpp 4, overlap", (4, 8, 16), **overlap),
            case("1F1B, waiting for the device", (4, 8), batch_p2p_sync=True),
            case("vpp 2, overlap", (4,), vpp=2, overlap_p2p=True),
            case("1F1B, unbatched", (4,), batch_p2p=False),
            case("vpp 8, overlap", (4,), vpp=8, overlap_p2p=True),
            case("vpp 4, overlap, also warm-up and flush", (4,), vpp=4, **flush),
            case("vpp 4, no overlap", (4,), vpp=4, overlap_p2p=False, batch_p2p=False),
            case("vpp 8, overlap, also warm-up and flush", (4,), vpp=8, **flush),
        ),
    )
    return [(group, Plan(rounds=2, steps=4, warmup=4, window=1)) for group in (*groups, eager)]


def data_parallel(world: int) -> list[tuple[Group, Plan]]:
    """GPT-2 XL under Lightning's strategies and under ours.

    Our cases replay CUDA graphs but for one: launched kernel by kernel, a step of 48 layers leaves
    the GPU waiting for the host half of the time, whatever the switches. With graphs it waited 6 to
    9 % of the time, and under Lightning's compiled model 17 to 28 %; the column says how much.
    """
    common: dict[str, Any] = {"model": "gpt2-xl", "micro_batch": 8, "lateness": True}
    graphs = {"cuda_graphs": "local", "gradient_accumulation_fusion": True}
    off = graphs | {
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "use_distributed_optimizer": False,
    }
    grads = off | {"overlap_grad_reduce": True}
    sharded = grads | {"use_distributed_optimizer": True}
    params = sharded | {"overlap_param_gather": True}
    eager = {name: value for name, value in params.items() if name not in graphs}
    settings = {
        "mcore, + overlap_param_gather": params,
        "mcore, plain": off,
        "mcore, overlap_grad_reduce": grads,
        "mcore, + distributed optimizer": sharded,
        "mcore, all, buckets of 100M": params | {"bucket_size": 100_000_000},
        "mcore, all, buckets of 10M": params | {"bucket_size": 10_000_000},
        "mcore, all, gradients in bf16": params | {"grad_reduce_in_fp32": False},
        "mcore, all, without CUDA graphs": eager,
    }
    ours = [Case(name=name, strategy=strategy, **common) for name, strategy in settings.items()]
    adam = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
    lean = Case(
        name="mcore, all, TransformerEngine's cross entropy and Adam",
        strategy=params | {"optimizer": adam},
        options={"cross_entropy_fusion_impl": "te"},
        needs=("gpu", "transformer_engine"),
        **common,
    )
    fsdp = Case(name="Lightning FSDP", framework="fsdp", needs=("gpu",), **common)
    larger = Case(
        name="Lightning DDP, buckets of 100 MB",
        framework="ddp",
        strategy={"bucket_cap_mb": 100},
        **common,
    )
    group = Group(
        item="dp",
        name=f"dp{world}",
        baseline=Case(name="Lightning DDP", framework="ddp", **common),
        # What compiles longest is late.
        variants=(ours[0], lean, larger, *ours[1:4], fsdp, *ours[4:]),
    )
    return [(group, Plan(rounds=2, steps=6))]


EXPERTS: Mapping[str, Any] = {
    "model": "moe-wide-slice",
    "micro_batch": 5,
    "microbatches": (4,),
    "environment": MANY_QUEUES,
    "lateness": True,
}
"""Layers in which the GPU has more to do than the host.

Two layers of the width of Qwen3-30B-A3B with 128 experts had the GPU compute for 16 ms per layer
and microbatch, forward and backward, and took 65 ms: 64 experts of a rank are 128 weights, each
with launches and a gradient hook of its own. Here a layer has 31 TFLOP per microbatch of 5 x 4096
tokens, 63 ms at 500 TFLOP/s, and a rank has 16 experts of it, a quarter as many, whose gradients
need no hook's addition (``gradient_accumulation_fusion``). The column of lateness is the proof.

Memory of a rank: 2 layers x 16 experts x 18.9M parameters x 18 bytes (bf16 weights, fp32 gradients,
main weights and two moments) are 10.9 GB; attention, embedding and output layer, 0.4B x 12 bytes
with the optimizer sharded over two, 4.9 GB. A microbatch leaves about 10 GB of activations per
layer, of which ``1f1b`` holds two, and 7 GB of logits: 16 + 2 x 27 = 70 GB beside the 16 GB of the
baseline.
"""


def experts(world: int) -> list[tuple[Group, Plan]]:
    """Dispatchers of tokens, and their overlap, with experts over all GPUs."""
    return [(expert_group("moe", f"ep{world}", world, EXPERTS), Plan(rounds=3, steps=3))]


def expert_group(item: str, name: str, world: int, common: Mapping[str, Any]) -> Group:
    """Dispatchers against each other, with and without overlap, at ep = ``world``."""
    base = {
        "ep": world,
        "moe_dispatcher": "alltoall",
        "overlap_moe": False,
        "gradient_accumulation_fusion": True,
    }
    deepep = base | {"moe_dispatcher": "deepep"}
    needs = ("gpu", "deep_ep")
    variants = (
        Case(name="deepep", strategy=deepep, needs=needs, **common),
        Case(name="alltoall, 1f1b", strategy=base | {"overlap_moe": "1f1b"}, **common),
        Case(name="deepep, 1f1b", strategy=deepep | {"overlap_moe": "1f1b"}, needs=needs, **common),
    )
    return Group(
        item=item,
        name=name,
        baseline=Case(name="alltoall", strategy=base, **common),
        variants=variants,
    )
