"""``lightning-mcore tune``: the tuner on a job that a LightningCLI file describes.

Launched like training: alone, where it starts the ranks itself, or under torchrun or SLURM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.tuning import MCoreTuner
from lightning_mcore.tuning.report import as_text, save_report

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

__all__ = ["tune"]

_FROM_TRAINER = (
    "accelerator",
    "devices",
    "num_nodes",
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "use_distributed_sampler",
    "deterministic",
    "benchmark",
)
"""What a trial takes over from the job's Trainer."""


def tune(asked: argparse.Namespace) -> None:
    """Runs the tuner and shows its report; every rank calls it.

    Raises:
        ConfigurationError: If the file or a class cannot be read, or the baseline cannot run.
    """
    reader = _read(asked)
    config = reader.config
    strategy, kind = _strategy(config.trainer.strategy)
    if kind is not None and not kind.endswith("MCoreStrategy"):
        raise ConfigurationError(
            f"The file's strategy ({kind}) is not MCoreStrategy, whose switches are to be tuned;"
            " set trainer.strategy to lightning_mcore.MCoreStrategy."
        )
    trainer = {name: config.trainer.get(name) for name in _FROM_TRAINER}
    tuner = MCoreTuner(
        lambda: _instance(reader).model,
        lambda: _instance(reader).data,
        strategy=strategy,
        trainer={name: value for name, value in trainer.items() if value is not None},
        steps=asked.steps,
        warmup=asked.warmup,
        rounds=asked.rounds,
        only=asked.only,
        seed=config.get("seed_everything") if type(config.get("seed_everything")) is int else 1,
    )
    report = tuner.run()
    _show(report, asked.out)


@rank_zero_only
def _show(report: Any, folder: str) -> None:
    print(f"\n{as_text(report)}\n")
    for path in save_report(report, folder).values():
        print(f"wrote {path}")


def _read(asked: argparse.Namespace) -> LightningCLI:
    """Parses the file as the job's own LightningCLI would, but makes nothing yet."""
    try:
        from lightning.pytorch.cli import LightningCLI
    except ImportError as error:  # jsonargparse is missing
        raise ConfigurationError(
            "`tune` reads the file with LightningCLI, which needs jsonargparse;"
            " pip install 'lightning-mcore[cli]'."
        ) from error

    class Reader(LightningCLI):
        def instantiate_classes(self) -> None:
            """Every trial makes its own."""

    if not Path(asked.config).is_file():
        raise ConfigurationError(f"There is no file `{asked.config}`; give the job's YAML file.")
    model, data = _load_class(asked.model), _load_class(asked.data)
    text = Path(asked.config).read_text()
    return Reader(
        model,
        data,
        subclass_mode_model=model is None,
        subclass_mode_data=data is None,
        auto_configure_optimizers="\noptimizer:" in f"\n{text}",
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        args=[f"--config={asked.config}"],
    )


def _instance(reader: LightningCLI) -> Any:
    """A fresh module and datamodule, without callbacks and loggers, which may start things."""
    config = reader.config.clone()
    config.trainer.logger = False
    config.trainer.callbacks = None
    config.trainer.strategy = "auto"
    config.trainer.plugins = None
    return reader.parser.instantiate(config)


def _strategy(found: Any) -> tuple[dict[str, Any], str | None]:
    """Arguments and class of the file's strategy; a short name has none."""
    if isinstance(found, str):
        return {}, None
    return found.init_args.as_dict() if found.get("init_args") else {}, found.class_path


def _load_class(where: str | None) -> Callable[..., Any] | None:
    if where is None:
        return None
    place, _, name = where.rpartition(":")
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
        return getattr(module, name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"`{where}` names no class ({error}); use FILE.py:CLASS or MODULE:CLASS."
        ) from error


def _load_file(path: Path) -> Any:
    """Imports a script under its own name, so that what it defines can be pickled by workers."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
