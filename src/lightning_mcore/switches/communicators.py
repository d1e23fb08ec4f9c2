"""Settings of NCCL communicators, by process group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_mcore.config import SwitchRequest
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.findings import Findings
from lightning_mcore.layout import Layout
from lightning_mcore.switches.values import Facts, Switch

__all__ = [
    "GROUP_NAMES",
    "communicator_settings",
    "high_priority_streams",
    "nccl_communicators",
]

GROUP_NAMES = (
    "cp", "dp", "dp_cp", "embd", "ep", "ep_dp", "ep_tp", "hcp", "inter_ep_dp",
    "intra_dist_opt_instance", "intra_dp_cp", "intra_ep_dp", "mp", "pos_embd", "pp", "tp", "tp_cp",
    "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp",
)  # fmt: skip
"""Names for which the engine looks up settings (parallel_state.py, get_nccl_options); it ignores
others without a word."""

_SETTINGS: dict[str, tuple[type, str]] = {
    "is_high_priority_stream": (bool, "True or False"),
    "cga_cluster_size": (int, "an integer"),
    "max_ctas": (int, "an integer"),
    "min_ctas": (int, "an integer"),
    "net_name": (str, "'IB' or 'Socket'"),
}
"""What the engine reads of a group's settings."""


def nccl_communicators(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    batched: Switch[bool],
) -> Switch[Mapping[str, Mapping[str, Any]]]:
    """Settings by group, as the engine's ``nccl_communicator_config_path`` takes them."""
    name, asked = "nccl_communicators", request.nccl_communicators
    if not asked:
        return Switch(name, None, {}, "NCCL's own choice")
    if not facts.on_gpu:
        # ProcessGroupNCCL.Options does not exist in a torch without CUDA.
        findings.error(
            "nccl-settings-need-gpu",
            f"`{name}` ({sorted(asked)}) needs GPUs: gloo has no such settings",
            f"use {name}=None on CPU",
            on_gpu=False,
        )
    for group, settings in asked.items():
        _check_group(name, group, findings)
        if not isinstance(settings, Mapping):
            findings.error(
                "nccl-settings-unknown",
                f"`{name}` has {settings!r} for {group!r}, which must be a mapping of settings",
                f"use {{{group!r}: {{'max_ctas': 16}}}}, for example",
                group=group,
            )
            continue
        for setting, value in settings.items():
            kind, wanted = _SETTINGS.get(setting, (None, ""))
            if kind is None:
                findings.error(
                    "nccl-settings-unknown",
                    f"`{name}` has a setting {setting!r} for {group!r}, which the engine ignores",
                    f"use any of {', '.join(_SETTINGS)}",
                    group=group,
                    setting=setting,
                )
            elif not _is(value, kind) or (kind is str and value.lower() not in ("ib", "socket")):
                findings.error(
                    "nccl-settings-unknown",
                    f"`{setting}` ({value!r}) for {group!r} in `{name}` must be {wanted}",
                    f"use {wanted}",
                    group=group,
                    setting=setting,
                    value=value,
                )
    _note_two_stages(name, asked, layout, batched, findings)
    return Switch(name, tuple(asked), asked, "requested")


def high_priority_streams(
    request: SwitchRequest,
    layout: Layout,
    facts: Facts,
    findings: Findings,
    batched: Switch[bool],
) -> Switch[tuple[str, ...]]:
    """Groups whose communication kernels go first when they compete with others for the GPU."""
    name, asked = "high_priority_streams", tuple(request.high_priority_streams)
    if not asked:
        return Switch(name, None, (), "no group named")
    if not facts.on_gpu:
        findings.error(
            "nccl-settings-need-gpu",
            f"`{name}` ({list(asked)}) needs GPUs: a CPU has no streams",
            f"use {name}=() on CPU",
            on_gpu=False,
        )
    for group in asked:
        _check_group(name, group, findings)
    _note_two_stages(name, asked, layout, batched, findings)
    return Switch(name, asked, asked, "requested")


def _check_group(name: str, group: object, findings: Findings) -> None:
    if group not in GROUP_NAMES:
        findings.error(
            "nccl-group-unknown",
            f"`{name}` names {group!r}, which is no group of the engine; it would be ignored",
            f"use any of {', '.join(GROUP_NAMES)}",
            group=group,
        )


def _note_two_stages(
    name: str, groups: Collection[str], layout: Layout, batched: Switch[bool], findings: Findings
) -> None:
    """Settings of the pipeline's group that govern half of its transfers.

    Unbatched, two stages send in one direction over their group and in the other over the world's,
    so that both go on at once (p2p_communication.py, _p2p_ops); that one has NCCL's own settings.
    """
    if "pp" in groups and layout.pp == 2 and not batched.effective:
        findings.warning(
            "nccl-settings-one-way-at-pp2",
            f"`{name}` for 'pp' governs one direction of two at `pp` (2) without `batch_p2p`: the"
            " engine sends the other over the group of all ranks, which has no settings",
            "use NCCL's variables for all groups, such as NCCL_MAX_CTAS, or pp=4",
            pp=2,
            batch_p2p=False,
        )


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def communicator_settings(given: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    """NCCL settings by group, read from a YAML file where a path is given.

    Raises:
        ConfigurationError: If there is no such file, or it holds no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, (str, Path)):
        return given
    try:
        read = yaml.safe_load(Path(given).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"`nccl_communicators` ({str(given)!r}) must be a readable YAML file: {error}; use"
            " {'dp_cp': {'max_ctas': 16}}, for example."
        ) from error
    if not isinstance(read, Mapping):
        raise ConfigurationError(
            f"`nccl_communicators` ({str(given)!r}) must hold a mapping from process group to"
            f" settings, but holds {type(read).__name__}; use dp_cp: {{max_ctas: 16}}."
        )
    return read
