"""Files in safetensors format, read by its package and written tensor by tensor.

The package's writers (``save_file``, ``serialize_file``) take pointers to all tensors at once, so
the whole model would have to be in memory. The format is short: eight bytes that hold the header's
length (little endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mcore.errors import CheckpointError

SUFFIX = ".safetensors"

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


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
    try:
        with safe_open(file, framework="pt") as mapped:
            return {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"`{file}` is not a complete safetensors file: {error}.") from error
