"""A plain file's weights as a checkpoint directory, written by one process.

``MCoreStrategy(init_from=...)`` reads plain files itself, for every model. A directory is worth
writing where many ranks start from the same weights again and again. It holds weights only.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_mcore import names
from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore.checkpoint_files import (
    LIGHTNING_FILE,
    commit,
    prepare,
    write_manifest,
    write_synced,
)
from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import CheckpointError
from lightning_mcore.export import WEIGHTS_ONLY_KEYS
from lightning_mcore.layout import resolve_layout
from lightning_mcore.plain_file import load_pickle, read_plain
from lightning_mcore.safetensors_file import SUFFIX
from lightning_mcore.version import package_versions

__all__ = ["import_checkpoint", "keys_of"]

_MEGATRON = re.compile(r"(.*?)(?=(?:embedding|encoder|decoder|output_layer|mtp)\.)")
_BLOCK = re.compile(r"(.*?)(?=[0-9]+\.)")


def import_checkpoint(
    plain: str | os.PathLike[str], target: str | os.PathLike[str], *, kind: str | None = None
) -> str:
    """Writes a checkpoint of the weights in a plain file.

    Args:
        plain: File with a state dict, or with one under ``"state_dict"``.
        target: Directory to create; an existing checkpoint is replaced when the new one is
            complete.
        kind: Of the model that will load it, one of ``names.KINDS``; ``None`` decides by the names.

    Returns:
        One line that says what was written.

    Raises:
        CheckpointError: If names do not tell how the engine will ask for them.
    """
    plain, target = Path(plain), Path(target)
    found = read_plain(plain)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    tensors = {name: value for name, value in tensors.items() if not names.is_extra_state(name)}
    if kind is None:
        layers = any(re.search(r"(?<![^.])decoder\.layers\.[0-9]", name) for name in tensors)
        kind = "megatron" if layers else "plain"
    keyed = {
        key: parts[0] if isinstance(parts, tuple) else torch.stack(parts)
        for key, parts in keys_of(tensors, kind).items()
    }
    state: dict[str, Any] = {"epoch": 0, "global_step": 0}
    state["pytorch-lightning_version"] = package_versions()["lightning"]
    if plain.suffix != SUFFIX:
        loaded = load_pickle(plain)
        state |= {key: loaded[key] for key in WEIGHTS_ONLY_KEYS if key in loaded}
    _write(target, keyed, state, next(iter(tensors.values())).dtype)
    return f"{target}: {len(tensors)} tensors, weights only, for a {kind} model"


def keys_of(tensors: Mapping[str, Tensor], kind: str) -> dict[str, tuple[Tensor] | list[Tensor]]:
    """Tensors by the key that the model's kind asks for: one, or one for each layer.

    Raises:
        CheckpointError: If names do not tell the keys.
    """
    if kind == "plain":
        return {f"{names.PLAIN_PREFIX}{name}": (value,) for name, value in tensors.items()}
    pattern = _BLOCK if kind == "sequential" else _MEGATRON
    prefixes = {match[1] if (match := pattern.match(name)) else None for name in tensors}
    if len(prefixes) != 1 or None in prefixes:
        raise CheckpointError(
            f"Names of a {kind} model start alike up to"
            f" {'a number' if kind == 'sequential' else '`embedding.` or `decoder.`'}, but these"
            f" have {sorted(map(str, prefixes))} in front; give MCoreStrategy(init_from=...) the"
            " file itself."
        )
    (prefix,) = prefixes
    own = {name.removeprefix(str(prefix)): value for name, value in tensors.items()}
    if kind == "sequential":
        return {f"{names.BLOCKS_PREFIX}{name}": (value,) for name, value in own.items()}
    return _stacked(own)


def _stacked(own: Mapping[str, Tensor]) -> dict[str, tuple[Tensor] | list[Tensor]]:
    keyed: dict[str, tuple[Tensor] | list[Tensor]] = {}
    layers: dict[str, dict[int, Tensor]] = {}
    for name, value in own.items():
        place = names.layer_key(name)
        if place is None:
            keyed[name] = (value,)
        else:
            layers.setdefault(place[0], {})[place[1]] = value
    counts = {key: len(found) for key, found in layers.items()}
    unequal = any(
        sorted(found) != list(range(max(counts.values())))
        or len({(part.shape, part.dtype) for part in found.values()}) != 1
        for found in layers.values()
    )
    if unequal or any(".experts." in key for key in layers):
        raise CheckpointError(
            "Layers with experts, or that are not all alike, have keys that only the model itself"
            " knows; give MCoreStrategy(init_from=...) the file itself."
        )
    for key, found in layers.items():
        keyed[key] = [found[index] for index in sorted(found)]
    return keyed


def _write(
    target: Path, keyed: dict[str, Tensor], state: dict[str, Any], dtype: torch.dtype
) -> None:
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        prepare(target, aside)
        with warnings.catch_warnings():
            # Torch announces that it saves in one process, which is the intention.
            warnings.simplefilter("ignore")
            save_shards(
                keyed,
                storage_writer=FileSystemWriter(aside),
                planner=DefaultSavePlanner(flatten_state_dict=False),
            )
        engine.write_common(aside, {})
        write_synced(aside / LIGHTNING_FILE, lambda file: torch.save(state, file))
        info = {
            "precision": str(dtype).removeprefix("torch."),
            "global_step": state["global_step"],
            "epoch": state["epoch"],
            "optimizer": False,
        }
        write_manifest(aside, resolve_layout(ParallelSizes(), 1, 0), info)
        commit(aside, target)
    except OSError as error:
        raise CheckpointError(f"`{target}` was not written: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
