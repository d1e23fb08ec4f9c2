"""What the validator says about settings: errors, warnings and hints, as values.

Enters: broken relations, noted one by one by the modules that know the rules. Leaves: a list of
findings, or one ConfigurationError that tells all errors at once, the same on every rank. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightning_mcore.errors import ConfigurationError

__all__ = ["Finding", "Findings", "Severity", "raise_errors"]

Severity: TypeAlias = Literal["error", "warning", "info"]
"""``"error"`` cannot run or would train something else; ``"warning"`` runs but may not do what was
wanted; ``"info"`` is worth knowing, such as a switch worth measuring."""

_DOCS = "docs/switches.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One relation between settings, with what to do about it."""

    code: str
    """Stable name of the rule, for example ``"overlap-p2p-needs-vpp"``."""
    severity: Severity
    """How bad it is."""
    relation: str
    """What does not hold, with the values, without a full stop."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The settings in the relation and their values."""
    fix: str
    """A way out, starting with a verb, without a full stop."""
    docs: str = ""
    """Where the rule is explained: file and anchor."""

    def __post_init__(self) -> None:
        if not self.docs:
            object.__setattr__(self, "docs", f"{_DOCS}#{self.code}")

    @property
    def message(self) -> str:
        """Relation and fix as one sentence."""
        return f"{self.relation}; {self.fix}."

    def as_dict(self) -> dict[str, object]:
        """Plain types, for JSON."""
        plain = (bool, int, float, str, type(None))
        values = {k: v if isinstance(v, plain) else str(v) for k, v in self.values.items()}
        return {
            "code": self.code,
            "severity": self.severity,
            "relation": self.relation,
            "values": values,
            "fix": self.fix,
            "docs": self.docs,
        }


class Findings:
    """Collects findings while settings are resolved; each text is kept once."""

    def __init__(self) -> None:
        self._all: dict[str, Finding] = {}

    def error(self, code: str, relation: str, fix: str, **values: object) -> None:
        """Notes what cannot run."""
        self._add("error", code, relation, fix, values)

    def warning(self, code: str, relation: str, fix: str, **values: object) -> None:
        """Notes what runs, but may not do what was wanted."""
        self._add("warning", code, relation, fix, values)

    def info(self, code: str, relation: str, fix: str, **values: object) -> None:
        """Notes what is worth knowing."""
        self._add("info", code, relation, fix, values)

    def add(self, finding: Finding) -> None:
        """Notes a finding that exists already."""
        self._all.setdefault(finding.message, finding)

    def sorted(self) -> list[Finding]:
        """Errors first, then warnings and hints, each in the order in which they were noted."""
        order = ("error", "warning", "info")
        return sorted(self._all.values(), key=lambda finding: order.index(finding.severity))

    def _add(
        self, severity: Severity, code: str, relation: str, fix: str, values: Mapping[str, object]
    ) -> None:
        self.add(
            Finding(code=code, severity=severity, relation=relation, fix=fix, values=dict(values))
        )


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raises one error that tells every finding of severity ``"error"``; returns if there is none.

    Raises:
        ConfigurationError: With the message of the one error, or a numbered list of all.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise ConfigurationError(errors[0].message)
    if errors:
        rows = "\n".join(f"  {n}. {e.message} [{e.code}]" for n, e in enumerate(errors, 1))
        raise ConfigurationError(f"{len(errors)} settings cannot work:\n{rows}")
