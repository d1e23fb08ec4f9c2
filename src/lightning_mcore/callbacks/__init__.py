"""Callbacks that read what a step left behind; they never write to it.

What enters: the Trainer and its strategy. What leaves: values given to ``log``. Every rank calls
them, with equal values. None runs a collective but ``ModelSummary``, once per fit.
"""

from lightning_mcore.callbacks.loss_spike import LossSpike
from lightning_mcore.callbacks.model_summary import ModelSummary
from lightning_mcore.callbacks.optimizer_stats import OptimizerStats
from lightning_mcore.callbacks.throughput import Throughput

__all__ = ["LossSpike", "ModelSummary", "OptimizerStats", "Throughput"]
