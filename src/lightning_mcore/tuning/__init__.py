"""Finds out by measurement which communication switches help a training job, and proves them safe.

``trials`` says what is tried, ``verdict`` what the figures mean, ``report`` how they are shown;
``tuner`` runs them on the user's own module and data.
"""

from lightning_mcore.tuning.tuner import MCoreTuner
from lightning_mcore.tuning.verdict import Report

__all__ = ["MCoreTuner", "Report"]
