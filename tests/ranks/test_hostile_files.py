"""A checkpoint is data: nothing in it runs, and damage of any kind is one clear error."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from lightning_mcore.checkpoint_files import LIGHTNING_FILE, MANIFEST_FILE
from lightning_mcore.errors import CheckpointError
from lightning_mcore.plain_file import load_pickle
from lightning_mcore.stored import StoredCheckpoint
from lightning_mcore.testing import run_ranks
from tests.ranks.trainers import Blocks, loader, make_trainer, numbered_rows

MUTATIONS = 600
RAN = "MCORE_TEST_CODE_RAN"


class Tripwire:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return exec, (f"import os; os.environ[{RAN!r}] = '1'",)


def save(path: str) -> None:
    trainer = make_trainer({}, max_steps=2)
    trainer.fit(Blocks(), loader(numbered_rows(8), 4))
    trainer.save_checkpoint(path)


def load_whole(path: Path) -> dict[str, torch.Tensor]:
    """Everything that `inspect`, `export` and a resume read."""
    stored = StoredCheckpoint(path)
    found = {key: stored.read(key) for key in stored.tensors}
    for key in stored.objects:
        stored.read_object(key)
    load_pickle(stored.lightning_file)
    load_pickle(path / "common.pt")
    return found


def outcome(path: Path) -> tuple[str | None, dict[str, torch.Tensor]]:
    try:
        return None, load_whole(path)
    except CheckpointError as error:
        return str(error), {}


def mutate(data: bytes, kind: str, draw: random.Random, others: list[bytes]) -> bytes:
    """Damaged bytes of the same length, so that the manifest's sizes do not tell, or of another."""
    at = draw.randrange(len(data))
    if kind == "bit":
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == "block":
        end = min(len(data), at + draw.randrange(1, 64))
        return data[:at] + draw.randbytes(end - at) + data[end:]
    if kind == "zeros":
        return data[:at] + bytes(len(data) - at)
    if kind == "foreign":
        other = draw.choice(others)
        return (other * (len(data) // len(other) + 1))[: len(data)]
    return data[:at]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "good.ckpt"
    run_ranks(save, 1, str(path))
    return path


def test_damage_is_one_clear_error(checkpoint, tmp_path):
    good = load_whole(checkpoint)
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    contents = {path.name: path.read_bytes() for path in files}
    names = [*contents, ".metadata", MANIFEST_FILE]
    draw = random.Random(7)
    broken = tmp_path / "broken.ckpt"
    shutil.copytree(checkpoint, broken)
    refused, slowest_s = 0, 0.0
    for number in range(MUTATIONS):
        name = draw.choice(names)
        kind = draw.choice(("bit", "bit", "block", "zeros", "foreign", "truncated"))
        others = [data for other, data in contents.items() if other != name]
        (broken / name).write_bytes(mutate(contents[name], kind, draw, others))
        started_s = time.perf_counter()
        error, found = outcome(broken)
        if error is not None:
            refused += 1
            assert str(broken) in error or name in error, (number, name, kind, error)
            assert len(error) < 2000
        else:
            # Numbers may have changed unseen, but nothing else.
            assert found.keys() == good.keys() or name == ".metadata", (number, name, kind)
        slowest_s = max(slowest_s, time.perf_counter() - started_s)
        (broken / name).write_bytes(contents[name])
    assert refused > MUTATIONS // 2
    assert slowest_s < 5.0


def resume_from(path: str) -> tuple[str, bool]:
    trainer = make_trainer({}, max_steps=3)
    message = ""
    try:
        trainer.fit(Blocks(), loader(numbered_rows(8), 4), ckpt_path=path)
    except CheckpointError as error:
        message = str(error)
    return message, RAN in os.environ


def poisoned(checkpoint: Path, target: Path, where: str) -> Path:
    """A copy that holds a pickle which runs code, with the size that the manifest states."""
    shutil.copytree(checkpoint, target)
    if where == "shard":
        stored = StoredCheckpoint(target)
        # Any object's place in the data will do, if the pickle fits there.
        place = max(
            (p for k, p in stored._places.items() if k.offset is None), key=lambda p: p.length
        )
        code = pickle.dumps(Tripwire())
        assert len(code) <= place.length
        file = target / place.relative_path
        data = bytearray(file.read_bytes())
        data[place.offset : place.offset + place.length] = code.ljust(place.length, b".")
        file.write_bytes(data)
        return target
    file = target / where
    file.write_bytes(pickle.dumps(Tripwire()).ljust(file.stat().st_size, b"."))
    return target


@pytest.mark.parametrize("where", [".metadata", "common.pt", LIGHTNING_FILE, "shard"])
def test_nothing_in_a_checkpoint_runs(checkpoint, tmp_path, where):
    path = poisoned(checkpoint, tmp_path / "bad.ckpt", where)
    with pytest.raises(CheckpointError):
        load_whole(path)
    assert RAN not in os.environ
    ((message, ran),) = run_ranks(resume_from, 1, str(path))
    assert not ran
    assert "was not loaded" in message or "cannot be read" in message, message


def test_a_good_checkpoint_resumes(checkpoint):
    assert run_ranks(resume_from, 1, str(checkpoint)) == [("", False)]
