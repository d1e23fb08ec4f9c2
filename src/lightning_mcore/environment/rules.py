"""What is wrong with single variables, as a table, and with those that need each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_mcore.environment.values import Noted, Uses
from lightning_mcore.findings import Severity

__all__ = ["check_missing", "check_multicast", "check_single", "is_off"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is wrong with one variable, if its value and the run's uses say so."""

    name: str
    code: str
    severity: Severity
    value: Callable[[str], bool]
    uses: Callable[[Uses], bool]
    effect: str
    fix: str


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "y", "yes")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "n", "no")


def _any(_: object) -> bool:
    return True


def _several_per_node(uses: Uses) -> bool:
    return uses.world_size > uses.nodes


def _several_nodes(uses: Uses) -> bool:
    return uses.nodes > 1


_FORCED = "binds every collective of every size and group"
_MEASURED = "unset it, unless it was measured for this very run"
_DEBUGGING = "unset it outside of debugging"
_ATTENTION = (
    # language_module.py, _set_attention_backend: all three are 1 with the default backend.
    "stops the engine's language models unless `attention_backend` of TransformerConfig agrees"
)
_RULES = (
    _Rule(
        *("NCCL_P2P_DISABLE", "env-nccl-slow-path", "warning", _on, _several_per_node),
        "makes GPUs of one node talk past NVLink and PCIe",
        "unset it",
    ),
    _Rule(
        *("NCCL_SHM_DISABLE", "env-nccl-slow-path", "warning", _on, _several_per_node),
        "makes ranks of one node talk past shared memory where they have no peer access",
        "unset it",
    ),
    _Rule(
        *("NCCL_IB_DISABLE", "env-nccl-slow-path", "warning", _on, _several_nodes),
        "makes nodes talk over sockets",
        "unset it if the nodes have InfiniBand or RoCE",
    ),
    _Rule(
        *("NCCL_SOCKET_IFNAME", "env-nccl-loopback", "error"),
        *(lambda value: value.strip().lstrip("=") == "lo", _several_nodes),
        "reaches one node only",
        "name the interface that the nodes share",
    ),
    _Rule(*("NCCL_ALGO", "env-nccl-forced", "warning", bool, _any), _FORCED, _MEASURED),
    _Rule(*("NCCL_PROTO", "env-nccl-forced", "warning", bool, _any), _FORCED, _MEASURED),
    _Rule(
        *("NCCL_DEBUG", "env-nccl-debug", "info"),
        *(lambda value: value.strip().upper() in ("INFO", "TRACE"), _any),
        "writes much from every rank",
        "set it to WARN once the links are understood",
    ),
    _Rule(
        # parallel_state.py, initialize_model_parallel: deleted at its start, set for SHARP alone.
        *("NCCL_COLLNET_ENABLE", "env-no-effect", "warning", _any, _any),
        "is deleted by the engine when it creates its groups",
        "leave it out",
    ),
    _Rule(
        *("CUDA_LAUNCH_BLOCKING", "env-serialises", "warning", _on, _any),
        "makes the host wait for every kernel, so nothing overlaps",
        _DEBUGGING,
    ),
    _Rule(
        *("TORCH_NCCL_BLOCKING_WAIT", "env-serialises", "warning", _on, _any),
        "makes the host block in every wait for a collective",
        _DEBUGGING,
    ),
    _Rule(
        *("TORCH_NCCL_NAN_CHECK", "env-serialises", "warning", _on, _any),
        "reads every tensor before it is sent",
        _DEBUGGING,
    ),
    _Rule(
        *("TORCH_DISTRIBUTED_DEBUG", "env-serialises", "warning"),
        *(lambda value: value.strip().upper() == "DETAIL", _any),
        "compares every collective between its ranks before it runs",
        _DEBUGGING,
    ),
    _Rule(
        *("TORCH_NCCL_AVOID_RECORD_STREAMS", "env-no-effect", "info"),
        *(_any, lambda uses: uses.torch_version >= (2, 11)),
        "has no effect in this torch, which always does so",
        "leave it out",
    ),
    *(
        _Rule(
            *(f"NCCL_{name}", "env-old-name", "info", _any, _any),
            f"is the old name of TORCH_NCCL_{name}",
            f"set TORCH_NCCL_{name} instead",
        )
        for name in ("BLOCKING_WAIT", "ASYNC_ERROR_HANDLING", "DESYNC_DEBUG")
    ),
    *(
        _Rule(
            *(f"NVTE_{name}_ATTN", "env-attention", "warning", _off, lambda uses: uses.has_te),
            _ATTENTION,
            "unset it, and set attention_backend in TransformerConfig",
        )
        for name in ("FLASH", "FUSED", "UNFUSED")
    ),
)


def check_missing(uses: Uses, found: Noted) -> None:
    """Variables that are not set, and which the run may gain from."""
    margins = [f"NVTE_{way}_LAYERNORM_SM_MARGIN" for way in ("FWD", "BWD")]
    missing = [name for name in margins if name not in found.environ]
    if uses.has_te and missing and (uses.overlaps_data_parallel or uses.overlaps_experts):
        value = 10 if uses.overlaps_experts else 16
        found.note(
            "info",
            "env-norm-margin",
            "TransformerEngine's norms take every SM, and communication under them waits",
            f"measure with {' '.join(f'{name}={value}' for name in missing)}, which layers read"
            " when they are built",
            *missing,
        )
    domain, ibgda = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "NVSHMEM_IB_ENABLE_IBGDA"
    if uses.dispatcher == "hybridep" and domain not in found.environ:
        found.note(
            "warning",
            "env-hybridep-domain",
            "HybridEP must be told how many ranks of an expert group share an NVLink domain",
            f"set {domain}",
            domain,
        )
    if uses.dispatcher == "deepep" and uses.nodes > 1 and ibgda not in found.environ:
        found.note(
            "info",
            "env-deepep-ibgda",
            "DeepEP between nodes can let GPUs drive InfiniBand themselves",
            f"measure with {ibgda}=true where the driver allows it",
            ibgda,
        )


def check_single(uses: Uses, found: Noted) -> None:
    """Notes every variable of the table whose value is wrong for these uses."""
    for rule in _RULES:
        value = found.environ.get(rule.name)
        if value is not None and rule.value(value) and rule.uses(uses):
            relation = f"`{rule.name}` ({value}) {rule.effect}"
            found.note(rule.severity, rule.code, relation, rule.fix, rule.name)


def check_multicast(uses: Uses, found: Noted) -> None:
    """Notes what would use NVLink multicast although it is off."""
    off = is_off(found.environ, "NCCL_NVLS_ENABLE") or not uses.multicast
    if off and uses.nccl_ub:
        # core/nccl_allocator.py: init() sets NCCL_NVLS_ENABLE=1 in the process.
        found.note(
            "error",
            "env-multicast-nccl-ub",
            "`nccl_ub` (True) makes the engine turn NVLink multicast on, whatever"
            " `NCCL_NVLS_ENABLE` (0) says",
            "use nccl_ub=False, or unset NCCL_NVLS_ENABLE",
            "NCCL_NVLS_ENABLE",
        )
    if off and uses.userbuffers and is_off(found.environ, "UB_SKIPMC"):
        found.note(
            "error",
            "env-multicast-userbuffers",
            "`UB_SKIPMC` (0) lets userbuffers create NVLink multicast objects, which"
            " `NCCL_NVLS_ENABLE` (0) rules out",
            "unset UB_SKIPMC, or set it to 1",
            "UB_SKIPMC",
            "NCCL_NVLS_ENABLE",
        )
    conf = " ".join(
        found.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    old = bool(uses.torch_version) and uses.torch_version < (2, 11)
    if uses.nccl_ub and old and "expandable_segments:true" in conf.lower().replace(" ", ""):
        found.note(
            "error",
            "env-nccl-ub-segments",
            "`nccl_ub` (True) cannot register expandable segments before torch 2.11",
            "take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF, or use nccl_ub=False",
            "PYTORCH_CUDA_ALLOC_CONF",
        )


def is_off(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set, and to no."""
    return _off(environ.get(name, ""))
