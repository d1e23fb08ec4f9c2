"""Plain files: a state dict as torch or safetensors saved it. Nothing in a file is run."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.checkpoint_files import cause
from lightning_mcore.errors import CheckpointError
from lightning_mcore.safetensors_file import SUFFIX, read_safetensors

__all__ = ["load_pickle", "read_plain"]


def read_plain(path: Path) -> dict[str, Any]:
    """Reads a file's state dict: names and tensors, mapped into memory where the format allows.

    Raises:
        CheckpointError: If the file is not one, or needs code to be run.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no file `{path}`.")
    loaded = read_safetensors(path) if path.suffix == SUFFIX else load_pickle(path)
    inner = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(inner, Mapping) or not any(isinstance(v, Tensor) for v in inner.values()):
        raise CheckpointError(
            f"`{path}` holds no tensors by name; save a module's state_dict(), alone or under the"
            ' key "state_dict".'
        )
    return {str(name): value for name, value in inner.items()}


def load_pickle(path: Path) -> Any:
    """Loads what torch saved, without running code from the file.

    Raises:
        CheckpointError: If the file is damaged, or needs code to be run.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        kind = refused[1] if refused else "a type (or is no file of weights)"
        raise CheckpointError(
            f"`{path}` holds {kind} that torch does not load without running code from the file;"
            " if you trust it, name the type to torch.serialization.add_safe_globals, or save its"
            " state_dict alone."
        ) from error
    except Exception as error:  # As many kinds as there are ways to damage a file.
        raise CheckpointError(f"`{path}` cannot be read: {cause(error)}.") from error
