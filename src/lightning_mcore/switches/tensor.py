"""Switches of tensor parallelism."""

from __future__ import annotations

from lightning_mcore.config import SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch
from lightning_mcore.topology import place_groups
from lightning_mcore.userbuffers import TPCommOverlap
from lightning_mcore.userbuffers_plan import UserbuffersPlan, plan_userbuffers

__all__ = ["sequence_parallel", "tp_comm_overlap", "userbuffers_plan"]


def sequence_parallel(
    request: SwitchRequest, layout: Layout, facts: Facts, findings: Findings
) -> Switch[bool]:
    """Activations between tensor-parallel regions cut along the sequence."""
    name, asked = "sequence_parallel", request.sequence_parallel
    tp, ep = layout.tp, layout.ep
    no_torch_norm = facts.on_gpu and not facts.has_te_or_apex
    if asked is True:
        if tp == 1:
            # model_parallel_config.py, __post_init__: "Cannot use sequence parallelism without ..."
            findings.error(
                "sequence-parallel-needs-tp",
                "`sequence_parallel` (True) needs `tp` (1) of at least 2: it shards activations"
                " over tensor-parallel ranks",
                "use tp=2 or more, or sequence_parallel='auto'",
                sequence_parallel=asked,
                tp=tp,
            )
        elif facts.native_model:
            findings.error(
                "sequence-parallel-needs-megatron-layers",
                "`sequence_parallel` (True) needs Megatron layers, and the model has only plain"
                " torch modules, which do not shard the sequence",
                "use layers of megatron.core, or sequence_parallel='auto'",
                sequence_parallel=asked,
                native_model=True,
            )
        caution = "; norms must come from TransformerEngine, Apex or the model itself"
        return Switch(name, asked, True, "requested" + (caution if no_torch_norm else ""))
    mandatory = tp > 1 and ep > 1
    if asked is False:
        if mandatory:
            # The engine only warns (model_parallel_config.py, __post_init__).
            findings.error(
                "sequence-parallel-needed-by-experts",
                f"`sequence_parallel` (False) must be on with `tp` ({tp}) and `ep` ({ep}) both"
                " above 1: the engine's experts take sequence shards",
                "use sequence_parallel='auto', or tp=1",
                sequence_parallel=asked,
                tp=tp,
                ep=ep,
            )
        return Switch(name, asked, False, "requested")
    if tp == 1:
        return Switch(name, asked, False, "tp = 1")
    if facts.native_model:
        return Switch(name, asked, False, "plain torch modules do not shard the sequence", "assert")
    if mandatory:
        return Switch(name, asked, True, f"tp = {tp} with ep = {ep} needs it", "assert")
    if facts.torch_norms_only:
        return Switch(name, asked, False, "the model's torch norms refuse it on GPUs", "assert")
    if no_torch_norm:
        reason = "without TransformerEngine or Apex the engine's norms refuse it on GPUs"
        return Switch(name, asked, False, reason, "assert")
    return Switch(name, asked, True, f"tp = {tp}", "doc")


def tp_comm_overlap(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    sequence: Switch[bool],
) -> Switch[bool]:
    """Tensor-parallel transfers under matrix products: TransformerEngine's userbuffers.

    Every flag of TransformerEngine is combined with sequence parallelism (module/linear.py), so
    that without it, or at tp = 1, the engine would accept the switch and do nothing.
    """
    name, asked = "tp_comm_overlap", request.tp_comm_overlap
    if isinstance(asked, TPCommOverlap):
        asked = True  # its settings are long, and nothing but on or off is decided here
    if asked is False:
        return Switch(name, asked, False, "requested")
    obstacles = _userbuffers_obstacles(request, layout, facts, sequence)
    if asked == "auto":
        if layout.tp == 1:
            return Switch(name, asked, False, "tp = 1")
        if request.comm == "safe":
            return Switch(name, asked, False, "comm='safe': no overlap")
        if obstacles:
            return Switch(name, asked, False, f"needs {obstacles[0][1]}", "assert")
        if request.comm == "max":
            return Switch(name, asked, True, "comm='max'")
        reason = "may gain or lose a few percent: measure it on and off"
        return Switch(name, asked, False, reason, "candidate")
    for code, needed, fix in obstacles:
        findings.error(
            code,
            f"`tp_comm_overlap` ({asked}) needs {needed}",
            f"use {fix}, or tp_comm_overlap=False",
            tp_comm_overlap=asked,
            tp=layout.tp,
            sequence_parallel=sequence.effective,
        )
    return Switch(name, asked, True, "requested")


def _userbuffers_obstacles(
    request: SwitchRequest, layout: Layout, facts: Facts, sequence: Switch[bool]
) -> list[tuple[str, str, str]]:
    """Code, what is needed, and how to get it, of each precondition that does not hold."""
    found = []
    if layout.tp == 1:
        found.append(
            ("tp-overlap-needs-tp", "`tp` (1) of at least 2: one rank sends nothing", "tp=2")
        )
    elif not sequence.effective:
        found.append(
            (
                "tp-overlap-needs-sequence-parallel",
                f"`sequence_parallel` (False: {sequence.reason}); TransformerEngine would ignore it"
                " without a word",
                "sequence_parallel=True where the layers can do it",
            )
        )
    if not facts.on_gpu:
        found.append(
            ("tp-overlap-needs-gpu", "GPUs: it copies between their memories", "accelerator='gpu'")
        )
    if facts.te_version is None:
        found.append(
            (
                "tp-overlap-needs-te",
                "TransformerEngine, which is not installed",
                "an installation with it (pip install 'lightning-mcore[te]')",
            )
        )
    if facts.native_model:
        found.append(
            (
                "tp-overlap-needs-megatron-layers",
                "layers of TransformerEngine, and the model has only plain torch modules",
                "Megatron layers built from a TransformerEngine spec",
            )
        )
    if facts.dims.multi_latent_attention:
        # core/extensions/transformer_engine.py, TELinear: a layer whose buffer is not one of qkv,
        # proj, fc1, fc2 switches the shared config off, for every later layer too.
        found.append(
            (
                "tp-overlap-without-mla",
                "attention without latent projections: the engine switches it off for all layers"
                " once it meets one that has no userbuffer",
                "plain or grouped-query attention",
            )
        )
    if facts.topology is not None and layout.tp > 1:
        place = place_groups(layout, facts.topology)["tp"]
        if facts.on_gpu and place.reach != "nvlink":
            found.append(
                (
                    "tp-overlap-needs-nvlink",
                    f"the `tp` ({layout.tp}) group to lie inside one NVLink domain"
                    f" ({facts.topology.gpus_per_nvlink_domain} GPUs), and it {_lies(place.text)}",
                    f"tp={facts.topology.gpus_per_nvlink_domain} or less",
                )
            )
    if not found and not facts.native_model:
        found += _plan_obstacle(request, layout, facts, sequence)
    return found


def _plan_obstacle(
    request: SwitchRequest, layout: Layout, facts: Facts, sequence: Switch[bool]
) -> list[tuple[str, str, str]]:
    """What keeps buffers from being made, though the machine and the layout allow them."""
    try:
        userbuffers_plan(request, layout, facts, sequence)
    except ConfigurationError as error:
        relation, _, fix = str(error).rstrip(".").rpartition("; use ")
        needed = relation.removeprefix("`tp_comm_overlap` needs ")
        return [("tp-overlap-plan", needed, fix.removesuffix(", or tp_comm_overlap=False"))]
    return []


def userbuffers_plan(
    request: SwitchRequest, layout: Layout, facts: Facts, sequence: Switch[bool]
) -> UserbuffersPlan:
    """The buffers to make, from all that is known before process groups exist.

    Raises:
        ConfigurationError: If they cannot be made; on every rank alike.
    """
    size = request.micro_batch_size
    return plan_userbuffers(
        request.userbuffers,
        tp=layout.tp,
        cp=layout.cp,
        sequence_parallel=sequence.effective,
        precision=facts.precision,
        on_gpu=facts.on_gpu,
        te_version=facts.te_version,
        gpus_per_nvlink_domain=facts.topology.gpus_per_nvlink_domain if facts.topology else None,
        seq_length=facts.dims.seq_length,
        hidden_size=facts.dims.hidden_size,
        micro_batch_size=1 if size is None and layout.pp > 1 else size,
    )


def _lies(text: str) -> str:
    return text if text.startswith("crosses") else f"lies {text}"
