"""Combined layouts of four and eight GPUs, and the same work per GPU on ever more of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from multigpu.cases import ONE_ORDER, Case, Group, Plan
from multigpu.items import EXPERTS, expert_group

_PLAN = Plan(rounds=2, steps=4, warmup=3, window=1)


def layouts(world: int) -> list[tuple[Group, Plan]]:
    """Those that use all of ``world`` GPUs, the most wanted first."""
    # Samples of the global batch are by GPU, so that a step takes as long on any number of them.
    wide = {"model": "llama-8b-slice", "changes": {"layers": 16}}, 2 * world
    wider = {"model": "llama-70b-slice", "changes": {"layers": 8}}, world
    presets = [
        ("70B width, 8 layers", *wider, {"tp": world}),
        ("8B width, 16 layers", *wide, {"tp": 2, "pp": 2, "vpp": 4}),
        # Without the distributed optimizer, what it shards would not fit.
        ("8B width, 16 layers", *wide, {"use_distributed_optimizer": True}),
        ("70B width, 8 layers", *wider, {"tp": world // 2, "pp": 2}),
        ("8B width, 16 layers", *wide, {"tp": world // 2, "pp": 2}),
        ("8B width, 16 layers", *wide, {"tp": world}),
    ]
    groups = [
        _presets(what, model, samples, strategy, world)
        for what, model, samples, strategy in presets
        if strategy.get("tp", 1) * strategy.get("pp", 1) <= world
    ]
    return [groups[0], (_long(world), _PLAN), *groups[1:3], (_experts(world), _PLAN), *groups[3:]]


def _presets(
    what: str, model: dict[str, Any], samples: int, strategy: dict[str, Any], world: int
) -> tuple[Group, Plan]:
    """One layout under each preset of ``comm``."""
    tp, pp = strategy.get("tp", 1), strategy.get("pp", 1)
    dp = world // (tp * pp)
    named = {"tp": tp, "pp": pp, "vpp": strategy.get("vpp") or 1, "dp": dp}
    name = " ".join(f"{axis}{size}" for axis, size in named.items() if size > 1)

    def case(comm: str, **more: Any) -> Case:
        choices: dict[str, Any] = {"comm": comm, **strategy, **more}
        if tp > 1:
            # The baseline too: the presets are about overlap.
            choices["sequence_parallel"] = True
        if pp == 2 and "vpp" in strategy and comm == "safe":
            # At pp=2 the engine mixes up batched messages of an interleaved schedule.
            choices["batch_p2p"] = False
        return Case(
            name=f"comm={comm}",
            strategy=choices,
            microbatches=(max(pp, samples // dp),),
            environment=ONE_ORDER if tp > 1 else {},
            **model,
        )

    variants = [case("auto"), case("max")]
    if tp > 1:
        ring = case("auto", tp_comm_overlap=True)
        needs = ("gpu", "transformer_engine")
        ring = dataclasses.replace(ring, name="comm=auto, all ring + dgrad", needs=needs)
        variants.insert(1, ring)
    group = Group(
        item="layouts",
        name=f"{what}, {name}",
        baseline=case("safe"),
        variants=tuple(variants),
    )
    return group, _PLAN


def _experts(world: int) -> Group:
    """As many experts per GPU as on two."""
    changes = {"experts": 16 * world}
    return expert_group(
        "layouts", f"{16 * world} experts, ep{world}", world, {**EXPERTS, "changes": changes}
    )


def _long(world: int) -> Group:
    """One sequence of 32K tokens on all GPUs: by tensor or by context parallelism."""
    common: dict[str, Any] = {
        "model": "llama-8b-slice",
        "changes": {"layers": 4, "seq": 32768},
        "microbatches": (2,),
        "environment": ONE_ORDER,
    }

    def sizes(cp: int) -> dict[str, Any]:
        tp = world // cp
        return {"tp": tp, "cp": cp} | ({"sequence_parallel": True} if tp > 1 else {})

    ring = Case(
        name=f"tp{world}, sequence parallel, all ring + dgrad",
        strategy=sizes(1) | {"tp_comm_overlap": True},
        needs=("gpu", "transformer_engine"),
        **common,
    )
    contexts = [cp for cp in (2, 4, 8) if cp <= world]
    variants = [
        Case(
            name=f"tp{world // cp} cp{cp}, {kind}",
            strategy=sizes(cp) | {"cp_comm_type": kind},
            needs=("gpu", "transformer_engine"),
            **common,
        )
        for kind in ("p2p", "a2a")
        for cp in contexts
    ]
    return Group(
        item="layouts",
        name="32K tokens",
        baseline=Case(name=f"tp{world}, sequence parallel", strategy=sizes(1), **common),
        variants=(ring, *variants),
    )


def scaling(world: int) -> list[tuple[Group, Plan]]:
    """The same work per GPU on 1, 2, 4... GPUs, data parallel."""
    counts = [count for count in (1, 2, 4, 8) if count <= world]
    return [
        (
            Group(
                item="scaling",
                name=f"dp{count}",
                world=count,
                baseline=Case(
                    name=f"{count} GPUs",
                    model="llama-8b-slice",
                    changes={"layers": 8},
                    micro_batch=2,
                    microbatches=(2,),
                ),
                variants=(),
            ),
            Plan(rounds=3, steps=6),
        )
        for count in counts
    ]
