"""Checkpoints in and out of plain files, and what one holds. One process; no model, no groups.

Enters: a directory that ``checkpoint`` wrote, or a plain file. Leaves: the other of the two.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mcore import names
from lightning_mcore.checkpoint_files import write_synced
from lightning_mcore.errors import CheckpointError
from lightning_mcore.plain_file import load_pickle
from lightning_mcore.safetensors_file import SUFFIX, write_safetensors
from lightning_mcore.stored import StoredCheckpoint, is_of_model
from lightning_mcore.version import __version__

__all__ = ["FORMATS", "PlainEntry", "PlainView", "export_checkpoint", "inspect_checkpoint"]

FORMATS = ("lightning", "safetensors")
WEIGHTS_ONLY_KEYS = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
    *("datamodule_hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_type"),
)
"""What Lightning writes with ``save_weights_only=True``."""
_GPT_NAMES = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
_NOT_STORED = "output_layer._extra_state"
"""Always empty; a GPT's ``state_dict`` has it, but its ``sharded_state_dict`` leaves it out."""


@dataclass(frozen=True, slots=True)
class PlainEntry:
    """One tensor under its plain name, and where it lies in a checkpoint."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlainView:
    """A checkpoint's model as a state dict with plain names, read tensor by tensor.

    Args:
        checkpoint: What to look at.
        fused_norms: Whether layers have no norms of their own (TransformerEngine); ``None`` asks
            the checkpoint.
    """

    def __init__(self, checkpoint: StoredCheckpoint, *, fused_norms: bool | None = None) -> None:
        self._checkpoint = checkpoint
        stored = {key: entry for key, entry in checkpoint.tensors.items() if is_of_model(key)}
        said: Mapping[str, Any] = checkpoint.manifest.get("model", {})
        self.kind: str = said.get("kind") or names.kind_of(list(stored))
        self._said = said
        self._fused = self._norms_are_fused() if fused_norms is None else fused_norms
        self._named: Mapping[str, str] = said.get("names", {}) if fused_norms is None else {}
        self.tensors = dict(self._plain_entries(stored))
        """Entries by plain name."""
        self.objects = dict(self._plain_objects())
        """Keys by plain name."""

    @property
    def prefix(self) -> str:
        """What a LightningModule's ``state_dict`` has in front, if run by one process."""
        attribute = self._said.get("attribute", "model")
        return {"plain": "", "sequential": f"{attribute}."}.get(self.kind, f"{attribute}.chunks.0.")

    def read(self, name: str) -> Tensor:
        """Reads one tensor by its plain name."""
        entry = self.tensors[name]
        return self._checkpoint.read(entry.key, entry.index)

    def read_object(self, name: str) -> Any:
        """Reads one object by its plain name."""
        return self._checkpoint.read_object(self.objects[name])

    def _template(self, key: str) -> tuple[str, int]:
        if self.kind != "megatron":
            return names.without_prefix(key, self.kind), 0
        template = self._named.get(key) or names.template_of(key, fused_norms=self._fused)
        return template, names.depth(key)

    def _plain_entries(
        self, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> Iterator[tuple[str, PlainEntry]]:
        for key, (shape, dtype) in stored.items():
            template, axes = self._template(key)
            for index in _places(shape[:axes]):
                entry = PlainEntry(key, index, shape[axes:], dtype)
                yield names.fill(template, index), entry

    def _plain_objects(self) -> Iterator[tuple[str, str]]:
        for key in self._checkpoint.objects:
            if is_of_model(key):
                name, index = names.split_object_key(key)
                template, axes = self._template(name)
                yield names.fill(template, index[:axes]), key

    def _norms_are_fused(self) -> bool:
        """Layers of TransformerEngine, which fuse norms, have an extra state; others store none."""
        checkpoint = self._checkpoint
        for key in checkpoint.objects:
            if "linear_qkv._extra_state" in key and is_of_model(key):
                try:
                    return checkpoint.read_object(key) is not None
                except CheckpointError:
                    return True
        return False


def _places(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _places(sizes[1:]):
            yield (first, *rest)


# ------------------------------------------------------------------------------ export


def export_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    weights_only: bool = False,
    prefix: str | None = None,
    fused_norms: bool | None = None,
    overwrite: bool = False,
) -> str:
    """Writes one plain file with the whole model.

    Args:
        path: Checkpoint directory.
        out: File to write. It appears when it is complete.
        format: ``"lightning"`` for a dict as Lightning saves it, ``"safetensors"`` for tensors
            only; ``None`` decides by the suffix of ``out``.
        weights_only: Leaves out callbacks and schedulers, as ``save_weights_only=True`` does.
        prefix: In front of every name; ``None`` for what a one-process run of the same
            LightningModule has (lightning), or nothing (safetensors).
        fused_norms: Whether the model's norms are fused into linear layers; ``None`` asks the
            checkpoint.
        overwrite: Whether an existing ``out`` is replaced.

    Returns:
        One line that says what was written.

    Raises:
        CheckpointError: If the checkpoint is incomplete or ``out`` exists.
    """
    checkpoint, out = StoredCheckpoint(path), Path(out)
    chosen = format or ("safetensors" if out.suffix == SUFFIX else "lightning")
    if out.exists() and not overwrite:
        raise CheckpointError(f"`{out}` exists; remove it, or pass --overwrite.")
    view = PlainView(checkpoint, fused_norms=fused_norms)
    if prefix is None:
        prefix = view.prefix if chosen == "lightning" else ""
    if chosen == "safetensors":
        _written(out, lambda aside: _write_safetensors(aside, view, prefix, checkpoint.manifest))
    else:
        _written(out, lambda aside: _write_lightning(aside, view, prefix, checkpoint, weights_only))
    size = out.stat().st_size
    return f"{out}: {len(view.tensors)} tensors, {size:,} bytes, {chosen} format"


def _write_safetensors(
    aside: Path, view: PlainView, prefix: str, manifest: Mapping[str, Any]
) -> None:
    shapes = {f"{prefix}{name}": (e.shape, e.dtype) for name, e in view.tensors.items()}
    notes = {"format": "pt", "lightning-mcore": __version__, "step": str(manifest["global_step"])}
    write_safetensors(aside, shapes, lambda name: view.read(name.removeprefix(prefix)), notes)


def _write_lightning(
    aside: Path, view: PlainView, prefix: str, checkpoint: StoredCheckpoint, weights_only: bool
) -> None:
    state: dict[str, Any] = load_pickle(checkpoint.lightning_file)
    outside = state.pop("state_dict", {})
    if weights_only:
        state = {key: state[key] for key in WEIGHTS_ONLY_KEYS if key in state}
    weights: dict[str, Any] = {f"{prefix}{name}": view.read(name) for name in view.tensors}
    weights |= {f"{prefix}{name}": view.read_object(name) for name in view.objects}
    if view.kind == "megatron" and view.tensors.keys() >= _GPT_NAMES:
        weights.setdefault(f"{prefix}{_NOT_STORED}", None)
    whole = {**state, "state_dict": {**weights, **outside}}
    write_synced(aside, lambda file: torch.save(whole, file))


def _written(out: Path, write: Callable[[Path], None]) -> None:
    """Writes beside ``out`` and renames, so that ``out`` is complete or as it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        aside.replace(out)
    except OSError as error:
        raise CheckpointError(
            f"`{out}` was not written: {error} ({free:,} bytes were free)."
        ) from error
    finally:
        aside.unlink(missing_ok=True)


# ------------------------------------------------------------------------------ inspect


def inspect_checkpoint(path: str | os.PathLike[str], *, tensors: bool = False) -> str:
    """Says what a checkpoint holds, after checking that all of it is there. Reads no tensor.

    Raises:
        CheckpointError: If it is not a checkpoint, or a file is missing or has another size.
    """
    checkpoint = StoredCheckpoint(path)
    manifest = checkpoint.manifest
    stored = checkpoint.tensors
    model = {key: entry for key, entry in stored.items() if is_of_model(key)}
    layout = ", ".join(f"{name} {size}" for name, size in manifest["layout"].items() if size)
    files = manifest["files"]
    rows = {
        "saved by": ", ".join(f"{k} {v}" for k, v in manifest["versions"].items()),
        "layout": layout,
        "step": f"{manifest.get('global_step')}, epoch {manifest.get('epoch')}",
        "precision": manifest.get("precision"),
        "model": f"{_elements(model):,} elements in {len(model)} tensors, {_bytes(model):,} bytes",
        "optimizer": f"{len(stored) - len(model)} tensors, {_bytes(stored) - _bytes(model):,} bytes"
        if manifest["optimizer"]
        else "none (weights only)",
        "objects": f"{len(checkpoint.objects)}",
        "files": f"{len(files)}, {sum(files.values()):,} bytes, all there with their sizes",
    }
    lines = [f"{checkpoint.path}  (format {manifest['version']}, step {manifest['global_step']})"]
    lines += [f"  {name:<10} {text}" for name, text in rows.items()]
    if tensors:
        lines += [
            f"  {key}  {list(shape)}  {str(dtype).removeprefix('torch.')}"
            for key, (shape, dtype) in sorted(model.items())
        ]
    return "\n".join(lines)


def _elements(stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() for shape, _ in stored.values())


def _bytes(stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in stored.values())
