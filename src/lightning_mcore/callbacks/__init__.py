"""Callbacks that read what a step left behind; but for ``ExpertPlacement`` they never write to it.

What enters: the Trainer and its strategy. What leaves: values given to loggers. Every rank calls
them, with equal values where not said otherwise. Those that sample run collectives, and wait for
the device, in the steps they sample only; ``ModelSummary`` does once per fit, ``ExpertPlacement``
at its intervals.
"""

from lightning_mcore.callbacks.comm_timings import CommTimings
from lightning_mcore.callbacks.expert_placement import ExpertPlacement
from lightning_mcore.callbacks.garbage_collection import GarbageCollection
from lightning_mcore.callbacks.loss_spike import LossSpike
from lightning_mcore.callbacks.memory_stats import MemoryStats
from lightning_mcore.callbacks.model_summary import ModelSummary
from lightning_mcore.callbacks.moe_stats import MoEStats
from lightning_mcore.callbacks.mtp_losses import MTPLosses
from lightning_mcore.callbacks.nsight_profile import NsightProfile
from lightning_mcore.callbacks.optimizer_stats import OptimizerStats
from lightning_mcore.callbacks.replica_check import ReplicaCheck, ReplicasDiffer
from lightning_mcore.callbacks.stragglers import Stragglers
from lightning_mcore.callbacks.throughput import Throughput
from lightning_mcore.callbacks.trace_export import TraceExport

__all__ = [
    "CommTimings",
    "ExpertPlacement",
    "GarbageCollection",
    "LossSpike",
    "MTPLosses",
    "MemoryStats",
    "MoEStats",
    "ModelSummary",
    "NsightProfile",
    "OptimizerStats",
    "ReplicaCheck",
    "ReplicasDiffer",
    "Stragglers",
    "Throughput",
    "TraceExport",
]
