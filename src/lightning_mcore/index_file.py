"""Lets nothing in a sharded checkpoint run: its index and its objects are pickles."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

__all__ = ["INDEX_FILE", "data_only", "read_index"]

INDEX_FILE = ".metadata"
_FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_PLAIN_TYPES: list[Any] = [
    io.BytesIO,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    # The function that numpy pickles arrays with, under the name that this version gives it.
    np.zeros(0).__reduce__()[0],
]
"""What objects in shards hold besides tensors and built-in types: random states of loaders, and
extra states of TransformerEngine."""

_ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}
_ALLOWED_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def _member(owner: Any, name: Any) -> enum.Enum:
    """A member of an enum, which Python 3.11 before 3.11.4 pickles as a call of ``getattr``."""
    if not (isinstance(owner, enum.EnumMeta) and name in owner.__members__):
        raise pickle.UnpicklingError(f"it asks {owner} for {name}, which no index needs")
    found: enum.Enum = owner[name]
    return found


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        if (module, name) == ("builtins", "getattr"):
            found = _member
        elif module in _ALLOWED_MODULES and "." not in name:
            found = super().find_class(module, name)
            if not (isinstance(found, type) and found.__module__ == module):
                found = None
        elif (module, name) in _ALLOWED_NAMES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return found


def read_index(directory: Path) -> Metadata:
    """Reads the index without running anything that it names.

    Raises:
        ValueError: If it is not an index, whatever its bytes are.
    """
    try:
        with open(directory / INDEX_FILE, "rb") as file:
            index = _IndexUnpickler(file).load()
        # Truncated and altered pickles fail in as many ways as there are bytes.
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(index, Metadata) or not _is_sound(index):
        raise ValueError(f"it holds a {type(index).__name__} that is not an index of shards")
    return index


def _is_sound(index: Metadata) -> bool:
    # A pickle may leave attributes out, or give them any value.
    entries = getattr(index, "state_dict_metadata", None)
    places = getattr(index, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return False
    tensors = (entry for entry in entries.values() if isinstance(entry, TensorStorageMetadata))
    return all(map(_is_sound_tensor, tensors))


def _is_sound_tensor(entry: Any) -> bool:
    properties = getattr(entry, "properties", None)
    return (
        isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(getattr(entry, "size", None), tuple)
        and isinstance(getattr(entry, "chunks", None), list)
    )


@contextlib.contextmanager
def data_only() -> Iterator[None]:
    """Makes torch load the objects in shards as it loads weights, running nothing they name.

    The planner passes ``weights_only=False`` (checkpoint/default_planner.py, load_bytes); the
    variable outranks that (torch/serialization.py, load).
    """
    before = os.environ.get(_FORCE_WEIGHTS_ONLY)
    os.environ[_FORCE_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(_PLAIN_TYPES):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE_WEIGHTS_ONLY]
        else:
            os.environ[_FORCE_WEIGHTS_ONLY] = before
