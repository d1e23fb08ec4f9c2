"""From what the user asked for to what the engine gets, and why: no switch changes in silence.

Enters: a ``SwitchRequest``, a ``Layout`` and ``Facts`` about the installation, the hardware and the
model. Leaves: ``Switches``, each with its effective value and the reason, and findings; or one
ConfigurationError that tells every error, which every rank raises alike. Pure. The strategy asks
twice: before any process group exists, when the model and the optimizer are not known yet (``None``
in ``Facts``), and again once they are.

Three rules hold throughout. An explicit ``True`` or ``False`` is obeyed or refused, never changed.
``"auto"`` may choose, and tells why. A switch that nobody can set (its request is ``None``) follows
from the others.
"""

from lightning_mcore.switches.communicators import communicator_settings
from lightning_mcore.switches.compute import check_graphs_with_experts
from lightning_mcore.switches.plan import (
    check_settings,
    plan_switches,
    resolve_switches,
    validate,
    with_picked_vpp,
)
from lightning_mcore.switches.tensor import userbuffers_plan
from lightning_mcore.switches.values import PRECISIONS, Evidence, Facts, Switch, Switches

__all__ = [
    "PRECISIONS",
    "Evidence",
    "Facts",
    "Switch",
    "Switches",
    "check_graphs_with_experts",
    "check_settings",
    "communicator_settings",
    "plan_switches",
    "resolve_switches",
    "userbuffers_plan",
    "validate",
    "with_picked_vpp",
]
