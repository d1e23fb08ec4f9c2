"""Weights from plain files: what DDP, a torch script or ``lightning-mcore export`` saved.

Enters: one file that holds the whole model under plain names. Leaves: each rank's part of it in
this rank's chunks, in any layout. Files are mapped into memory, so a rank reads the pages of its
part only, and nothing in them is run.

Every rank of the world calls ``init_weights`` and ``manifest_names``; all return, or all raise the
same ``CheckpointError``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore import names, state_dict
from lightning_mcore._mcore import checkpointing as engine
from lightning_mcore._mcore import slices
from lightning_mcore._mcore.slices import Slice
from lightning_mcore.agreement import CheckpointGroups, Steps
from lightning_mcore.build import PlainChunk
from lightning_mcore.checkpoint import load_weights
from lightning_mcore.errors import CheckpointError
from lightning_mcore.layout import Layout
from lightning_mcore.plain_file import read_plain
from lightning_mcore.sequential import SequentialChunk
from lightning_mcore.stage import Pipeline

__all__ = ["init_weights", "manifest_names"]

log = logging.getLogger(__name__)

_PROBES = 20
"""Tensors by which the prefix of a file's names is found."""


def init_weights(
    path: str | os.PathLike[str],
    chunks: Sequence[nn.Module],
    *,
    beside: Mapping[str, Any],
    strict: bool = True,
    layout: Layout,
    groups: CheckpointGroups,
) -> None:
    """Loads weights only, from a checkpoint directory or a plain file. Collective over the world.

    Args:
        path: Directory of ours, or a file with a state dict (``.ckpt``, ``.pt``, ``.safetensors``).
        chunks: This rank's chunks as the user built them.
        beside: Tensors of the LightningModule outside of them by name; a plain file may have some.
        strict: Whether names that are missing or unexpected in the file are an error; other shapes
            are one in any case.
        layout: Sizes and this rank's place.
        groups: For agreement between ranks.

    Raises:
        CheckpointError: On every rank, with the cause.
    """
    is_file = [Path(path).is_file()]
    dist.broadcast_object_list(is_file, 0, group=groups.world_cpu)
    if is_file[0]:
        _load_plain(Path(path), chunks, beside, strict=strict, layout=layout, groups=groups)
    else:
        load_weights(path, chunks, strict=strict, layout=layout, groups=groups)


def _load_plain(
    path: Path,
    chunks: Sequence[nn.Module],
    beside: Mapping[str, Any],
    *,
    strict: bool,
    layout: Layout,
    groups: CheckpointGroups,
) -> None:
    """The same from one file that holds the whole model.

    Names may have any prefix in front (``model.``, ``module.``). Another padding of the vocabulary
    is cut or filled up with zeros; another dtype is converted; both are logged on rank 0.
    """

    def describe() -> tuple[dict[str, Any], list[_Wanted]]:
        metadata = engine.sharding_metadata(groups.dp_cp)
        tree = state_dict.model_tree(chunks, layout, metadata)
        return read_plain(path), [
            wanted
            for index, chunk in enumerate(chunks)
            for wanted in _wanted_of(chunk, f"model{index}", tree[f"model{index}"])
        ]

    step = Steps(f"`{path}` was not loaded", groups.world_cpu)
    (found, wanted), everyone = step.sharing(
        "reading names", describe, lambda result: {w.names: w.described for w in result[1]}
    )
    whole = {names: described for one in everyone for names, described in one.items()}
    match = _Match(found, whole)
    problems = match.problems(strict=strict, beside=beside)
    if problems:
        raise CheckpointError(
            f"`{path}` does not fit the model: {problems}; build the model as it was when it was"
            " saved, or set strict_loading=False to skip names that are on one side only."
        )
    if layout.rank == 0:
        for note in match.notes():
            log.warning("%s: %s", path, note)

    def install() -> None:
        loaded: dict[str, dict[str, Any]] = {}
        for one in wanted:
            value = match.value(one)
            if value is not None:
                loaded.setdefault(one.chunk, {})[one.local] = value
        state_dict.load_model(chunks, loaded)
        for name, tensor in beside.items():
            if name in found and isinstance(tensor, Tensor):
                tensor.detach().copy_(found[name])

    step("installing the weights", install)


# ------------------------------------------------------------------------------ names


@dataclass(frozen=True)
class _Wanted:
    """A tensor or object of this rank."""

    chunk: str
    local: str
    """Name in the chunk's own state dict."""
    names: tuple[str, ...]
    """Names in a plain file, the likeliest first."""
    leaf: Any
    first: Slice | None
    """Any of the parts; ``None`` for an object."""

    @property
    def described(self) -> tuple[tuple[int, ...], bool, Any] | None:
        """Whole shape, whether it may differ, dtype; the same on every rank."""
        if self.first is None:
            return None
        return self.first.shape, self.first.may_differ, self.first.dtype


def _wanted_of(chunk: nn.Module, label: str, tree: Mapping[str, Any]) -> Iterable[_Wanted]:
    kind = _kind_of(chunk)
    for local, leaf in tree.items():
        parts = slices.slices_of(leaf)
        if parts:
            key, index = parts[0].key, parts[0].index
        else:
            key, index = names.split_object_key(slices.object_key(leaf) or local)
        key = names.without_prefix(key, kind)
        aliases = [key]
        if kind == "megatron":
            templates = [
                names.global_template(local, key),
                names.fused_template(key),
                names.template_of(key, fused_norms=False),
            ]
            aliases = [names.fill(template, index) for template in dict.fromkeys(templates)]
        first = parts[0] if parts else None
        yield _Wanted(label, local, tuple(dict.fromkeys(aliases)), leaf, first)


def _kind_of(chunk: nn.Module) -> str:
    if isinstance(chunk, PlainChunk):
        return "plain"
    return "sequential" if isinstance(chunk, SequentialChunk) else "megatron"


def manifest_names(
    module: nn.Module, chunks: Sequence[nn.Module], layout: Layout, groups: CheckpointGroups
) -> dict[str, Any]:
    """What a manifest states so that ``export`` finds the model's own names. Collective.

    Returns:
        ``model``: kind, the attribute of the LightningModule that holds the model, and the
        templates of plain names that do not follow from the keys.
    """
    own: dict[str, str] = {}
    metadata = engine.sharding_metadata(groups.dp_cp)
    for chunk in chunks:
        if _kind_of(chunk) == "megatron":
            for local, leaf in (engine.chunk_tree(chunk, metadata) or {}).items():
                key = next((part.key for part in slices.slices_of(leaf)), None)
                if key is not None:
                    template = names.global_template(local, key)
                    # A tied output layer has the embedding's key, whose own name is the plain one.
                    if own.get(key) != names.fused_template(key):
                        own[key] = template
    everyone: list[Any] = [None] * layout.world_size
    dist.all_gather_object(everyone, own, group=groups.world_cpu)
    held = [name for name, part in module.named_modules() if isinstance(part, Pipeline)]
    found = {(key, template) for one in everyone for key, template in one.items()}
    own = {
        key: template
        for key, template in sorted(found)
        if (key, names.fused_template(key)) not in found
    }
    attribute = held[0] if held else ""
    return {"model": {"kind": _kind_of(chunks[0]), "attribute": attribute, "names": own}}


# ------------------------------------------------------------------------------ what fits


class _Match:
    """Which name of a file is which tensor of the whole model; the same on every rank."""

    def __init__(
        self, found: Mapping[str, Any], whole: Mapping[tuple[str, ...], tuple[Any, ...] | None]
    ) -> None:
        self._found = found
        self._whole = whole
        self._prefix = self._find_prefix()
        self._names = {aliases: self._name(aliases, self._prefix) for aliases in whole}

    def _find_prefix(self) -> str:
        tensors = [aliases for aliases, described in self._whole.items() if described is not None]
        candidates = {
            key[: len(key) - len(alias)]
            for aliases in tensors[:_PROBES]
            for alias in aliases
            for key in self._found
            if key == alias or key.endswith(f".{alias}")
        }

        def matches(prefix: str) -> int:
            return sum(self._name(aliases, prefix) is not None for aliases in tensors)

        return max(sorted(candidates, key=len), key=matches, default="")

    def _name(self, aliases: tuple[str, ...], prefix: str) -> str | None:
        return next((n for alias in aliases if (n := prefix + alias) in self._found), None)

    def problems(self, *, strict: bool, beside: Mapping[str, Any]) -> str:
        """What does not fit, as part of a sentence."""
        shapes = [
            f"{self._names[aliases]}: {has} in the file, {list(described[0])} in the model"
            for aliases, has, described in self._tensors()
            if not _fits(has, *described[:2])
        ]
        texts = [_listed("tensors have other shapes", shapes)]
        if strict:
            known = {*self._names.values(), *beside}
            missing = [
                self._prefix + aliases[0]
                for aliases, name in self._names.items()
                if name is None and self._whole[aliases] is not None
            ]
            unexpected = [
                name for name in self._found if name not in known and not names.is_extra_state(name)
            ]
            texts += [
                _listed("names of the model are missing in the file", missing),
                _listed("names of the file are not in the model", unexpected),
            ]
        return "; ".join(text for text in texts if text)

    def notes(self) -> list[str]:
        """What was converted."""
        padded, cast = [], []
        for aliases, has, (shape, _, dtype) in self._tensors():
            value = self._found[str(self._names[aliases])]
            if has != list(shape):
                padded.append(f"{self._names[aliases]}: {has} becomes {list(shape)}")
            if value.dtype != dtype:
                cast.append(f"{self._names[aliases]}: {value.dtype} becomes {dtype}")
        return [
            text
            for text in (
                _listed("tensors are cut or filled up with zeros (vocabulary padding)", padded),
                _listed("tensors are converted", cast, most=3),
            )
            if text
        ]

    def _tensors(self) -> Iterable[tuple[tuple[str, ...], list[int], tuple[Any, ...]]]:
        for aliases, described in self._whole.items():
            name = self._names[aliases]
            if described is not None and name is not None:
                value = self._found[name]
                yield aliases, list(value.shape) if isinstance(value, Tensor) else [], described

    def value(self, wanted: _Wanted) -> Any:
        """This rank's part of a tensor, or an object; ``None`` to leave it as it is."""
        name = self._names[wanted.names]
        if name is None:
            return None
        whole = self._found[name]
        if wanted.first is None:
            return None if names.is_extra_state(name) else whole
        return slices.take(wanted.leaf, lambda part: _cut(whole, part))


def _fits(has: list[int], shape: tuple[int, ...], may_differ: bool) -> bool:
    return has == list(shape) or (
        may_differ and len(has) == len(shape) and has[1:] == list(shape[1:])
    )


def _cut(whole: Tensor, part: Slice) -> Tensor:
    """The part of a whole tensor; zeros where a padded vocabulary goes on after its end."""
    place = tuple(slice(o, o + s) for o, s in zip(part.offset, part.size, strict=True))
    found = whole[place]
    if tuple(found.shape) == part.size:
        return found
    padded = torch.zeros(part.size, dtype=whole.dtype)
    padded[tuple(slice(0, s) for s in found.shape)] = found
    return padded


def _listed(what: str, entries: Sequence[str], most: int = 20) -> str:
    if not entries:
        return ""
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return f"{len(entries)} {what}: {', '.join(sorted(entries)[:most])}{more}"
