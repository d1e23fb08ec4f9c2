"""Version of this package and of those that decide what a run does."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def package_versions() -> dict[str, str]:
    """Versions by package, in the order in which the run header prints them."""
    return {"lightning-mcore": __version__} | {
        name: version(name) for name in ("megatron-core", "lightning", "torch")
    }


def installed_version(package: str) -> tuple[int, ...] | None:
    """Release numbers of a package, for example ``(2, 11, 0)``; ``None`` if it is not installed."""
    try:
        text = version(package)
    except PackageNotFoundError:
        return None
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
