"""What the index of a checkpoint may name: tests/ranks/test_hostile_files.py has whole files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mcore.index_file import INDEX_FILE, read_index


class Asks:
    """Pickled as a call of ``getattr``, as Python 3.11 before 3.11.4 does with members of enums."""

    def __init__(self, owner: Any, name: str) -> None:
        self.asked = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.asked


def write(folder: Path, planner_data: Any) -> None:
    (folder / INDEX_FILE).write_bytes(pickle.dumps(Metadata({}, planner_data, {})))


@pytest.mark.parametrize("asked", list(_MEM_FORMAT_ENCODING))
def test_members_of_enums(tmp_path, asked):
    write(tmp_path, Asks(_MEM_FORMAT_ENCODING, asked.name))
    assert read_index(tmp_path).planner_data is asked


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (TensorProperties, "__init__"),
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        ("text", "format"),
    ],
)
def test_nothing_else_is_got_from_anything(tmp_path, owner, name):
    write(tmp_path, Asks(owner, name))
    with pytest.raises(ValueError, match=f"for {name}, which no index needs"):
        read_index(tmp_path)


@pytest.mark.parametrize("lost", ["properties", "size", "chunks"])
def test_an_entry_that_lacks_something_is_no_index(tmp_path, lost):
    whole = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [])
    index = Metadata({"weight": whole}, None, {})
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(index))
    assert read_index(tmp_path).state_dict_metadata["weight"].size == (2,)
    del vars(whole)[lost]
    (tmp_path / INDEX_FILE).write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="not an index of shards"):
        read_index(tmp_path)
