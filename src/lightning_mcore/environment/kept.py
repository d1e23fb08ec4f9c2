"""Environment variables that are put back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["kept_variables"]


@contextmanager
def kept_variables(names: Iterable[str]) -> Iterator[None]:
    """Gives the variables of this process the values, or the absence, from before again."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
