"""Reads what a LightningCLI configuration asks for, without starting or importing what it names.

Enters: YAML files and overrides as on the command line of a LightningCLI script. Leaves: the
strategy's request and the few settings of Trainer, model and data that decide on it, with a finding
for each argument that cannot be read. Only a strategy class of the user's own is imported.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from lightning.pytorch.strategies import StrategyRegistry

from lightning_mcore.config import ModelDims
from lightning_mcore.errors import ConfigurationError, MCoreError
from lightning_mcore.findings import Finding, Findings
from lightning_mcore.prepare import Request
from lightning_mcore.strategy import MCoreStrategy

__all__ = ["RunConfig", "UsageError", "apply_overrides", "read_config", "read_yaml"]

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_DOCS = "docs/check.md#configuration"
_PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed", "64": "64-true"}


class UsageError(MCoreError):
    """The command was called with something it cannot read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What a configuration asks for, as far as it decides on the strategy."""

    request: Request
    """The strategy's arguments, without those that cannot be read."""
    unread: frozenset[str] = frozenset()
    """Arguments of the strategy that cannot be read: what follows from them is not known."""
    devices: int | None
    """Ranks on each node; ``None`` if left to Lightning."""
    num_nodes: int
    """Nodes."""
    accelerator: str
    """``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``."""
    precision: str
    """``Trainer(precision=...)``, in its long form."""
    accumulate_grad_batches: int
    """Batches per optimizer step."""
    dims: ModelDims
    """Dimensions that arguments of the model or data of the same name state."""
    batch_size: int | None
    """Argument ``batch_size`` of the data: samples in one batch of a data-parallel rank."""


def read_yaml(paths: Sequence[Path]) -> dict[str, Any]:
    """Reads files and merges them, later ones over earlier ones; only plain YAML, no Python tags.

    Raises:
        UsageError: If a file cannot be read, is no YAML, or is not a mapping.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(loaded, dict):
            raise UsageError(f"{path} must hold a mapping (trainer:, model:, data:)")
        for name in _SUBCOMMANDS:
            # A file may keep its settings under the subcommand's name.
            if isinstance(loaded.get(name), dict):
                loaded = loaded[name]
                break
        _merge(merged, loaded)
    return merged


def apply_overrides(config: dict[str, Any], arguments: Sequence[str]) -> None:
    """Puts ``--trainer.strategy.init_args.tp 4`` and the like into ``config``.

    Raises:
        UsageError: If an argument has another form.
    """
    remaining = list(arguments)
    while remaining:
        name, equals, value = remaining.pop(0).partition("=")
        if not re.fullmatch(r"--(trainer|model|data)(\.\w+)*", name):
            raise UsageError(f"unknown argument {name}")
        if not equals:
            if not remaining:
                raise UsageError(f"{name} needs a value")
            value = remaining.pop(0)
        place: Any = config
        *above, last = name[2:].split(".")
        for key in above:
            place = _arguments_of(place, key)
            if not isinstance(place.get(key), dict):
                # "strategy: mcore" in the file, and "strategy.tp" here.
                old = place.get(key)
                place[key] = {"class_path": old} if isinstance(old, str) else {}
            place = place[key]
        place = _arguments_of(place, last)
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"{name}: {value!r} is no YAML value") from error


def read_config(config: Mapping[str, Any], findings: Findings) -> RunConfig:
    """Takes a run's settings out of ``config``, and notes what cannot be read."""
    trainer = _section(config, "trainer", findings)
    model, data = _arguments(config, "model", findings), _arguments(config, "data", findings)
    precision = str(trainer.get("precision") or "32-true")
    request, unread = _read_strategy(trainer.get("strategy"), findings)
    return RunConfig(
        request=request,
        unread=unread,
        devices=_devices(trainer.get("devices"), findings),
        num_nodes=_count(trainer, "num_nodes", 1, findings),
        accelerator=str(trainer.get("accelerator") or "auto"),
        precision=_PRECISIONS.get(precision, precision),
        accumulate_grad_batches=_count(trainer, "accumulate_grad_batches", 1, findings),
        dims=_dims({**data, **model}),
        batch_size=_positive(data.get("batch_size")),
    )


def _arguments_of(place: dict[str, Any], key: str) -> Any:
    """Where ``key`` belongs: a class takes arguments also without ``init_args`` in their path."""
    if "class_path" in place and key not in ("class_path", "init_args", "dict_kwargs"):
        return place.setdefault("init_args", {})
    return place


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _section(config: Mapping[str, Any], name: str, findings: Findings) -> dict[str, Any]:
    section = config.get(name)
    if section is None or isinstance(section, dict):
        return section or {}
    relation = f"`{name}` ({section!r}) must be a mapping"
    _note(findings, "config-section", relation, "indent its settings below it")
    return {}


def _arguments(config: Mapping[str, Any], name: str, findings: Findings) -> dict[str, Any]:
    """Arguments of a class, written directly or behind ``class_path``."""
    value = config.get(name)
    if isinstance(value, str):
        return {}
    section = _section(config, name, findings)
    inner = section.get("init_args")
    return {**section, **(inner if isinstance(inner, dict) else {})}


def _read_strategy(value: Any, findings: Findings) -> tuple[Request, frozenset[str]]:
    """Builds the strategy from every argument that can be read; constructing it starts nothing."""
    if isinstance(value, str):
        value = {"class_path": value}
    elif not isinstance(value, dict):
        value = {"class_path": None if value is None else str(value)}
    cls, given, readable = _strategy_class(value.get("class_path", "mcore"), findings)
    inner = value.get("init_args")
    given |= {k: v for k, v in value.items() if k not in ("class_path", "init_args", "dict_kwargs")}
    given |= inner if isinstance(inner, dict) else {}
    parser = _parser(cls)
    arguments = _readable(cls, parser, given, findings)
    while True:
        parsed = parser.parse_object({"strategy": arguments}, defaults=False)
        try:
            request: Request = parser.instantiate(parsed)["strategy"]._request
            unread = given.keys() - arguments.keys()
            return request, frozenset(unread if readable else {*unread, "strategy"})
        except ConfigurationError as error:
            culprits = _named_in(str(error), arguments)
            if not any(f"`{name}`" in str(error) for name in given.keys() - arguments.keys()):
                # Otherwise it may only follow from what could not be read.
                shown = {name: arguments[name] for name in culprits}
                relation, _, fix = str(error).removesuffix(".").partition("; ")
                _note(findings, "config-argument", relation, fix or "correct it", **shown)
            # The first that is named; without it, the next mistake shows.
            for name in culprits[:1] or list(arguments):
                del arguments[name]


def _named_in(message: str, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments that a message names, or that hold a field which it names."""
    named = re.findall(r"`(\w+)`", message)
    found = [name for name in named if name in arguments]
    return found or [
        name
        for name, value in arguments.items()
        if isinstance(value, dict) and any(field in value for field in named)
    ]


def _parser(cls: type[MCoreStrategy]) -> Any:
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise UsageError(
            "reading a configuration needs jsonargparse: pip install 'lightning-mcore[cli]'"
        ) from error
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "strategy")
    return parser


def _strategy_class(
    path: Any, findings: Findings
) -> tuple[type[MCoreStrategy], dict[str, Any], bool]:
    """The class, the arguments that its registered name implies, and whether it was found."""
    if path in StrategyRegistry:
        entry = StrategyRegistry[path]
        if issubclass(entry["strategy"], MCoreStrategy):
            return entry["strategy"], dict(entry["init_params"]), True
    elif isinstance(path, str) and "." in path:
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            relation = (
                f"`trainer.strategy` ({path}) cannot be imported ({type(error).__name__}: {error})"
            )
            _note(findings, "config-strategy", relation, "correct class_path, or set PYTHONPATH")
            return MCoreStrategy, {}, False
        if inspect.isclass(found) and issubclass(found, MCoreStrategy):
            return found, {}, True
    relation = f"`trainer.strategy` ({path}) is not an MCoreStrategy"
    _note(findings, "config-strategy", relation, "use class_path: lightning_mcore.MCoreStrategy")
    return MCoreStrategy, {}, False


def _readable(
    cls: type[MCoreStrategy], parser: Any, given: Mapping[str, Any], findings: Findings
) -> dict[str, Any]:
    """Arguments that exist and have the type of the signature."""
    known = [name for name in inspect.signature(cls).parameters if name != "kwargs"]
    hints = get_type_hints(cls.__init__)
    found = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = (
                f"use `{close[0]}`" if close else "remove it; engine fields go under ddp, optimizer"
            )
            relation = f"`{name}` is not an argument of {cls.__name__}"
            _note(findings, "config-argument", relation, fix, **{name: value})
            continue
        try:
            parser.parse_object({"strategy": {name: value}}, defaults=False)
        except Exception:
            kind = _words(hints[name]) if name in hints else "what it must be"
            relation = f"`{name}` ({value!r}) cannot be read as {kind}"
            _note(findings, "config-argument", relation, "correct the value", **{name: value})
            continue
        found[name] = value
    return found


def _words(hint: Any) -> str:
    """A type as it is written in a signature."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_words(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(repr(value) for value in get_args(hint))
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _devices(value: Any, findings: Findings) -> int | None:
    """The number that ``Trainer(devices=...)`` means; ``None`` for all."""
    if value in (None, "auto", -1, "-1"):
        return None
    if isinstance(value, list):
        return len(value)
    if isinstance(value, str) and "," in value:
        return len([part for part in value.split(",") if part.strip()])
    number = _positive(int(value) if isinstance(value, str) and value.isdigit() else value)
    if number is None:
        relation = f"`trainer.devices` ({value!r}) must be a number, a list or auto"
        _note(findings, "config-trainer", relation, "use devices: auto", devices=value)
    return number


def _count(trainer: Mapping[str, Any], name: str, default: int, findings: Findings) -> int:
    value = trainer.get(name)
    if value is None:
        return default
    number = _positive(value)
    if number is None:
        relation = f"`trainer.{name}` ({value!r}) must be an integer of at least 1"
        _note(findings, "config-trainer", relation, f"use {name}: {default}", **{name: value})
    return number or default


def _positive(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value if good else None


def _dims(arguments: Mapping[str, Any]) -> ModelDims:
    """Arguments whose names are those of dimensions; others of that name are left out."""
    dims = ModelDims()
    for field in fields(ModelDims):
        if field.name in arguments:
            # A dimension of the wrong type is the model's to refuse.
            with suppress(ConfigurationError):
                dims = replace(dims, **{field.name: arguments[field.name]})
    return dims


def _note(findings: Findings, code: str, relation: str, fix: str, **values: object) -> None:
    findings.add(
        Finding(code=code, severity="error", relation=relation, fix=fix, values=values, docs=_DOCS)
    )
