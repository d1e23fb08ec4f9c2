"""A checkpoint as files that one process reads, without process groups, model or engine.

Enters: a directory that ``checkpoint`` wrote. Leaves: whole tensors. No pickle of a checkpoint is
trusted: its index is read with the classes of torch's format only, tensors and objects as torch
reads weights.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_mcore.checkpoint_files import LIGHTNING_FILE, cause, read_manifest
from lightning_mcore.errors import CheckpointError
from lightning_mcore.index_file import INDEX_FILE, read_index
from lightning_mcore.state_dict import EXTRA_PREFIX, OPTIMIZER_PREFIX, RNG_PREFIX


class StoredCheckpoint:
    """What a checkpoint holds, read without any rank.

    Args:
        path: Checkpoint directory.

    Raises:
        CheckpointError: If it is not a checkpoint, or a file is missing or has another size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        try:
            index = read_index(self.path)
        except ValueError as error:
            raise CheckpointError(
                f"The index `{self.path / INDEX_FILE}` cannot be read: {error}."
            ) from error
        self._entries: Mapping[str, Any] = index.state_dict_metadata
        self._places: Mapping[MetadataIndex, Any] = index.storage_data
        try:
            self._check_places()
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The index `{self.path / INDEX_FILE}` is damaged: {cause(error)}."
            ) from error

    def _check_places(self) -> None:
        files = self.manifest["files"]
        wrong = {
            f"`{key.fqn}` lies at bytes {place.offset} to {place.offset + place.length} of"
            f" `{place.relative_path}`, which has {files.get(place.relative_path, 'none')}"
            for key, place in self._places.items()
            if place.offset < 0
            or place.length < 0
            or place.offset + place.length > files.get(place.relative_path, -1)
        }
        wrong |= {
            f"a part of `{key}` is in no file"
            for key, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
            if MetadataIndex(key, chunk.offsets) not in self._places
        }
        if wrong:
            raise CheckpointError(
                f"`{self.path}` is incomplete: {'; '.join(sorted(wrong)[:8])}; load another"
                " checkpoint."
            )

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every whole tensor by key, those of the optimizer too."""
        return {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def objects(self) -> list[str]:
        """Keys of everything that is not a tensor."""
        return [
            key
            for key, entry in self._entries.items()
            if not isinstance(entry, TensorStorageMetadata)
        ]

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Reads a tensor, or the part of it at ``index`` of its leading axes."""
        entry = self._entries[key]
        try:
            return self._join(key, entry, index)
        except CheckpointError:
            raise
        except Exception as error:  # As many kinds as there are ways to damage an index.
            raise CheckpointError(
                f"`{key}` of `{self.path}` is damaged: {cause(error)}."
            ) from error

    def _join(self, key: str, entry: TensorStorageMetadata, index: tuple[int, ...]) -> Tensor:
        axes = len(index)
        target = torch.empty(entry.size[axes:], dtype=entry.properties.dtype)
        found = 0
        for chunk in entry.chunks:
            offsets, sizes = chunk.offsets, chunk.sizes
            inside = [i - o for i, o in zip(index, offsets[:axes], strict=True)]
            if any(not 0 <= i < s for i, s in zip(inside, sizes[:axes], strict=True)):
                continue
            part = self._load(key, chunk.offsets).reshape(tuple(sizes))[tuple(inside)]
            place = zip(offsets[axes:], sizes[axes:], strict=True)
            target[tuple(slice(o, o + s) for o, s in place)] = part
            found += part.numel()
        if found != target.numel():
            raise CheckpointError(
                f"`{self.path}` holds {found} of {target.numel()} elements of `{key}` at"
                f" {list(index)}; load another checkpoint."
            )
        return target

    def read_object(self, key: str) -> Any:
        """Reads what is not a tensor. The engine keeps the objects of a key in a list."""
        value = self._load(key, None)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _load(self, key: str, offsets: Any) -> Any:
        place = self._places[MetadataIndex(key, offsets)]
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"`{key}` is stored as {place.transform_descriptors}, not plain.")
        with open(self.path / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        try:
            return torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"`{key}` of `{self.path}` holds a type that torch does not load without running"
                f" code from the file: {str(error).splitlines()[0]}"
            ) from error
        except Exception as error:  # As many kinds as there are ways to damage a file.
            raise CheckpointError(
                f"`{key}` of `{self.path}` is damaged: {cause(error)}."
            ) from error

    @property
    def lightning_file(self) -> Path:
        """The file with Lightning's own state."""
        return self.path / LIGHTNING_FILE


def is_of_model(key: str) -> bool:
    """Whether a key belongs to the model rather than to optimizer or ranks."""
    return not key.startswith((OPTIMIZER_PREFIX, RNG_PREFIX, EXTRA_PREFIX))
