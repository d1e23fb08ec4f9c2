"""Files in safetensors format: a JSON header and raw tensors, written one by one, read by mapping.

The format is short enough that no package is needed: eight bytes that hold the header's length
(little endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.errors import CheckpointError

SUFFIX = ".safetensors"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000
"""Readers of the format refuse longer ones."""


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    notes: Mapping[str, str],
) -> None:
    """Writes tensors one after the other; only one is in memory at a time.

    Args:
        file: To create.
        shapes: Shape and dtype by name.
        read: Gives the tensor of a name.
        notes: Goes into the header's metadata.

    Raises:
        CheckpointError: If the format has no name for a dtype.
    """
    # Largest elements first, so that every tensor starts at a multiple of its element's size.
    names = sorted(shapes, key=lambda name: -shapes[name][1].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    start = 0
    for name in names:
        shape, dtype = shapes[name]
        if dtype not in _NAMES:
            raise CheckpointError(
                f"`{name}` has dtype {dtype}, which safetensors cannot hold; export in the"
                " lightning format."
            )
        end = start + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for name in names:
            shape, dtype = shapes[name]
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
            if tensor.numel():
                stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Maps the tensors of a file into memory; pages are read when they are used.

    Raises:
        CheckpointError: If it is not such a file, or is cut short.
    """
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        entries = list(_entries(header, size - 8 - length))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"`{file}` is not a complete safetensors file: {error}.") from error
    whole = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    data = whole[8 + length :]
    return {name: _view(data[a:b], dtype).view(shape) for name, dtype, shape, a, b in entries}


def _entries(
    header: Mapping[str, Any], size: int
) -> Iterator[tuple[str, torch.dtype, list[int], int, int]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in _DTYPES:
            raise ValueError(f"`{name}` has dtype {dtype}, which is not known")
        numel = torch.Size(shape).numel()
        if not 0 <= start <= end <= size or end - start != numel * _DTYPES[dtype].itemsize:
            raise ValueError(f"`{name}` is said to be at {start} to {end} of {size} bytes")
        yield name, _DTYPES[dtype], shape, start, end


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
