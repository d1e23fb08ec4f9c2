"""The command ``lightning-mcore``: looks into checkpoints and brings them in and out.

One process on any machine; no GPU, no process groups, no model code.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence

from lightning_mcore.errors import ConfigurationError, MCoreError
from lightning_mcore.version import __version__

__all__ = ["main"]

_BRIDGE = "megatron.bridge"
_HUGGING_FACE = """\
Hugging Face weights are converted by Megatron-Bridge, not by lightning-mcore.
{state}
To bring weights in, in one process:
  bridge = AutoBridge.from_hf_pretrained("ORG/MODEL")
  models = bridge.to_megatron_model(wrap_with_ddp=False)
  torch.save(models[0].state_dict(), "weights.pt")
  MCoreStrategy(init_from="weights.pt") then loads them in any layout, into a model of the same
  configuration; strategy.build takes a factory that makes it.
To take weights out:
  lightning-mcore export NAME.ckpt weights.safetensors
  load these into such a model, then bridge.save_hf_pretrained(models, "DIR")
Neither way is tested here; AutoBridge is that of megatron.bridge."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Exit code: 0, 1 if a checkpoint cannot be used, 2 for wrong arguments.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        text = _run(asked)
    except MCoreError as error:
        print(f"lightning-mcore: {error}", file=sys.stderr)
        return 1
    if text:
        print(text)
    return 0


def _run(asked: argparse.Namespace) -> str:
    if asked.command in ("import-hf", "export-hf"):
        return _hugging_face()
    if asked.command == "tune":
        from lightning_mcore.tune_command import tune

        tune(asked)
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Late, because it loads torch and the engine, which --help does not need.
        from lightning_mcore import export, import_plain
    if asked.command == "inspect":
        return export.inspect_checkpoint(asked.checkpoint, tensors=asked.tensors)
    if asked.command == "import":
        return import_plain.import_checkpoint(asked.plain, asked.checkpoint, kind=asked.kind)
    return export.export_checkpoint(
        asked.checkpoint,
        asked.out,
        format=asked.format,
        weights_only=asked.weights_only,
        prefix=asked.prefix,
        fused_norms=None if asked.norms == "auto" else asked.norms == "fused",
        overwrite=asked.overwrite,
    )


def _hugging_face() -> str:
    try:
        found = importlib.util.find_spec(_BRIDGE) is not None
    except ImportError:
        found = False
    if not found:
        state = (
            "It is not installed: pip install megatron-bridge (requires megatron-core[dev,mlm],"
            "\nflashinfer and more, which are made for machines with NVIDIA GPUs)."
        )
        raise ConfigurationError(_HUGGING_FACE.format(state=state))
    return _HUGGING_FACE.format(state="It is installed.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-mcore",
        description="Looks into checkpoints, brings them in and out, and tunes jobs.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-mcore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="say what a checkpoint holds; check its files")
    inspect.add_argument("checkpoint", metavar="NAME.ckpt")
    inspect.add_argument("--tensors", action="store_true", help="list the model's tensors")

    export = commands.add_parser("export", help="write the whole model into one plain file")
    export.add_argument("checkpoint", metavar="NAME.ckpt")
    export.add_argument("out", metavar="OUT")
    export.add_argument(
        "--format",
        choices=("lightning", "safetensors"),
        help="default: safetensors if OUT ends so, else lightning",
    )
    export.add_argument(
        "--weights-only",
        action="store_true",
        help="leave out callbacks and schedulers, as save_weights_only=True does",
    )
    export.add_argument(
        "--prefix",
        help="in front of every name; default: what the LightningModule has on one process"
        " (lightning), nothing (safetensors)",
    )
    export.add_argument(
        "--norms",
        choices=("auto", "fused", "separate"),
        default="auto",
        help="how layers name their norms: fused as in TransformerEngine layers, or separate",
    )
    export.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")

    plain = commands.add_parser("import", help="write a plain file's weights as a checkpoint")
    plain.add_argument("plain", metavar="PLAIN")
    plain.add_argument("checkpoint", metavar="NAME.ckpt")
    plain.add_argument(
        "--kind",
        choices=("megatron", "sequential", "plain"),
        help="of the model that will load it; default: by the names in PLAIN",
    )
    tune = commands.add_parser(
        "tune", help="try the communication switches on a job and check that its loss stays"
    )
    tune.add_argument("--config", required=True, help="YAML file of the job's LightningCLI")
    for name in ("model", "data"):
        tune.add_argument(
            f"--{name}",
            metavar="FILE.py:CLASS",
            help="or MODULE:CLASS; not needed where the file gives a class_path",
        )
    tune.add_argument("--out", default="tune", help="folder for the report; default: tune")
    tune.add_argument("--steps", type=int, default=10, help="optimizer steps per window")
    tune.add_argument("--warmup", type=int, default=3, help="steps before each window")
    tune.add_argument("--rounds", type=int, default=3, help="windows per trial")
    tune.add_argument("--only", nargs="+", metavar="TRIAL", help="these trials beside the baseline")
    for name, text in (("import-hf", "from"), ("export-hf", "to")):
        bridge = commands.add_parser(name, help=f"how to convert {text} Hugging Face")
        bridge.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    return parser
