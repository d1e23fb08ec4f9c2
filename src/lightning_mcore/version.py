"""Version of this package and of those that decide what a run does."""

from __future__ import annotations

from importlib.metadata import version

__version__ = "0.1.0"


def package_versions() -> dict[str, str]:
    """Versions by package, in the order in which the run header prints them."""
    return {"lightning-mcore": __version__} | {
        name: version(name) for name in ("megatron-core", "lightning", "torch")
    }
