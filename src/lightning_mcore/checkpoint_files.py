"""Files of a checkpoint: what makes a directory one, and how it takes its name in one step.

Enters: paths. Leaves: a directory that is complete or absent. No process group is needed; where
ranks must agree, ``checkpoint`` asks rank 0 to call these functions.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout
from lightning_mcore.version import package_versions

FORMAT = "lightning-mcore"
FORMAT_VERSION = 1
MANIFEST_FILE = "lightning_mcore.json"
LIGHTNING_FILE = "lightning.pt"
SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "world_size")
"""Sizes of a layout that a manifest states."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

fault_hook: Callable[[str], None] | None = None
"""For tests only: called with the name of each point of a save as this rank passes it."""


def pass_point(name: str) -> None:
    """Marks a point of a save at which tests may stop or fail this rank."""
    if fault_hook is not None:
        fault_hook(name)


def cause(error: BaseException) -> str:
    """An error as part of a sentence."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------ reading


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a complete checkpoint of ours. Needs no process group."""
    path = Path(path)
    try:
        return not _is_leftover(path.name) and _parse(path)["format"] == FORMAT
    except (OSError, ValueError, KeyError):
        return False


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what a checkpoint says of itself. Needs no process group.

    Raises:
        CheckpointError: If it is not a checkpoint of ours, of a newer format, or incomplete.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint `{path}`.{_name_leftovers(path)}")
    if _is_leftover(path.name):
        raise CheckpointError(f"`{path}` is what an unfinished save left; load another checkpoint.")
    try:
        manifest = _parse(path)
        versions = {**manifest["versions"]}
        version = int(manifest["version"])
        files = {Path(name): int(size) for name, size in manifest["files"].items()}
        if any(name.is_absolute() or ".." in name.parts for name in files):
            raise ValueError("it names files outside its directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"`{path}` is not a checkpoint of lightning-mcore, which is a directory with"
            f" `{MANIFEST_FILE}` ({cause(error)}).{_name_other_ways(path)}"
        ) from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"`{path}` has format version {version}, newer than {FORMAT_VERSION};"
            f" install lightning-mcore {versions.get('lightning-mcore')} or later."
        )
    wrong = [
        text for name, size in files.items() if (text := _wrong_file(path / name, size)) is not None
    ]
    if wrong:
        raise CheckpointError(
            f"`{path}` is incomplete: {', '.join(wrong[:8])}"
            f"{f' and {len(wrong) - 8} more' if len(wrong) > 8 else ''}; copy it again with all"
            f" {len(files)} files, hidden ones too, or load another checkpoint."
        )
    return manifest


def _name_other_ways(path: Path) -> str:
    """For one plain file, as DDP saves it: what reads that."""
    if not path.is_file():
        return ""
    return (
        " Of a plain file, MCoreStrategy(init_from=PATH) loads the weights; the optimizer and the"
        " step it was saved at cannot be resumed."
    )


def _is_leftover(name: str) -> bool:
    return re.fullmatch(r"\..+\.[0-9a-f]{8}\.(tmp|old)", name) is not None


def _leftovers(target: Path) -> list[Path]:
    """What unfinished saves of the same name left beside ``target``."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(tmp|old)")
    try:
        return sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name))
    except OSError:
        return []


def _name_leftovers(target: Path) -> str:
    old = [str(p) for p in _leftovers(target) if p.suffix == ".old"]
    hint = f" A save that was killed while renaming left its predecessor as {old}; rename it back."
    return hint if old else ""


def _parse(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST_FILE).read_text())
    if not isinstance(manifest, dict):
        raise ValueError("the manifest is not an object")
    return manifest


def write_manifest(directory: Path, layout: Layout, info: Mapping[str, Any]) -> None:
    """Writes what makes the files of ``directory`` a checkpoint."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "versions": package_versions(),
        "layout": {name: getattr(layout, name) for name in SIZES},
        **info,
        "files": {str(p.relative_to(directory)): p.stat().st_size for p in files},
    }
    text = json.dumps(manifest, indent=1).encode()
    write_synced(directory / MANIFEST_FILE, lambda file: file.write(text))
    pass_point("manifest written")
    _sync_directory(directory)


def _wrong_file(file: Path, size: int) -> str | None:
    try:
        found = file.stat().st_size
    except OSError:
        return f"`{file.name}` is missing"
    return None if found == size else f"`{file.name}` has {found} bytes instead of {size}"


def prepare(target: Path, aside: Path) -> None:
    """Creates the directory to write to and removes what earlier saves of the name left."""
    if re.match(r"[a-z][a-z0-9]+:/", str(target)):
        raise CheckpointError(
            f"`{target}` is a URL, but checkpoints are written to a file system that all ranks"
            " share; use a local path."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(target):
        if leftover.suffix == ".old" and not target.exists():
            leftover.rename(target)
        else:
            shutil.rmtree(leftover)
    aside.mkdir()


def check_visible(aside: Path) -> None:
    """Checks that this rank sees the directory that rank 0 has created."""
    if not aside.is_dir():
        raise CheckpointError(
            f"`{aside.parent}` is not the directory that rank 0 writes to; use a path that all"
            " ranks share."
        )


def commit(aside: Path, target: Path) -> None:
    """Puts the new checkpoint in the place of the old one, in one step where the system can."""
    if not os.path.lexists(target):
        aside.rename(target)
        _sync_directory(target.parent)
        return
    old = aside.with_suffix(".old")
    if _exchange_names(aside, target):
        pass_point("exchanged")
        aside.rename(old)
    else:
        target.rename(old)
        pass_point("old one aside")
        try:
            aside.rename(target)
        except OSError:
            old.rename(target)
            raise
    _sync_directory(target.parent)
    pass_point("renamed")
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchanges two directory entries atomically; false where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here = ctypes.c_int(_AT_FDCWD)
    flags = ctypes.c_uint(_RENAME_EXCHANGE)
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), flags) == 0)


def write_synced(file: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file and waits until it is on the disk."""
    with open(file, "wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    """Waits until names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
