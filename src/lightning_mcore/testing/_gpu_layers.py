"""Imports TransformerEngine for ranks that are forked, where it is installed and whole."""

import contextlib

with contextlib.suppress(Exception):
    import transformer_engine.pytorch  # noqa: F401
