"""``lightning-mcore check``: what would run, and what is wrong, before a job is queued."""

from lightning_mcore.check.config import UsageError, apply_overrides, read_config, read_yaml
from lightning_mcore.check.installation import Package, probe_packages
from lightning_mcore.check.report import Machines, Report, make_report
from lightning_mcore.check.text import format_report

__all__ = [
    "Machines",
    "Package",
    "Report",
    "UsageError",
    "apply_overrides",
    "format_report",
    "make_report",
    "probe_packages",
    "read_config",
    "read_yaml",
]
