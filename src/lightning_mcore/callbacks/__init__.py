"""Callbacks that read what a step left behind; but for ``ExpertPlacement`` they never write to it.

What enters: the Trainer and its strategy. What leaves: values given to ``log``. Every rank calls
them, with equal values. None runs a collective but ``ModelSummary``, once per fit, ``MoEStats`` in
the steps that it logs, and ``ExpertPlacement``, at its intervals.
"""

from lightning_mcore.callbacks.expert_placement import ExpertPlacement
from lightning_mcore.callbacks.model_summary import ModelSummary
from lightning_mcore.callbacks.moe_stats import MoEStats
from lightning_mcore.callbacks.optimizer_stats import OptimizerStats
from lightning_mcore.callbacks.throughput import Throughput

__all__ = ["ExpertPlacement", "MoEStats", "ModelSummary", "OptimizerStats", "Throughput"]
