"""Callbacks that read what a step left behind; they never write to it and never run a collective.

What enters: the Trainer and its strategy. What leaves: values given to ``log``. Every rank calls
them, with equal values.
"""

from lightning_mcore.callbacks.optimizer_stats import OptimizerStats
from lightning_mcore.callbacks.throughput import Throughput

__all__ = ["OptimizerStats", "Throughput"]
