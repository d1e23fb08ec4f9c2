"""Trains PyTorch Lightning modules on Megatron-Core."""

from lightning_mcore._lightning import register_strategies as _register_strategies
from lightning_mcore.errors import (
    CheckpointError,
    ConfigurationError,
    MCoreError,
    NonFiniteError,
    NotInitializedError,
    RankFailed,
)
from lightning_mcore.findings import Finding
from lightning_mcore.layout import Layout
from lightning_mcore.optimizer import StepStats
from lightning_mcore.parallel_state import Groups
from lightning_mcore.precision import MCorePrecision
from lightning_mcore.stage import Pipeline, Stage
from lightning_mcore.strategy import MCoreStrategy
from lightning_mcore.switches import Switch, Switches, validate
from lightning_mcore.topology import Topology
from lightning_mcore.userbuffers import GemmOverlap, TPCommOverlap
from lightning_mcore.version import __version__

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "Finding",
    "GemmOverlap",
    "Groups",
    "Layout",
    "MCoreError",
    "MCorePrecision",
    "MCoreStrategy",
    "NonFiniteError",
    "NotInitializedError",
    "Pipeline",
    "RankFailed",
    "Stage",
    "StepStats",
    "Switch",
    "Switches",
    "TPCommOverlap",
    "Topology",
    "__version__",
    "validate",
]

_register_strategies(MCoreStrategy)
