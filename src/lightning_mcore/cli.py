"""The command ``lightning-mcore``: checks and tunes jobs, checkpoints in and out, traces drawn.

All but ``tune`` are one process on any machine; no GPU, no process groups, no model code.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

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


_Parser: TypeAlias = argparse.ArgumentParser
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class _Formatter(argparse.HelpFormatter):
    """Leaves room for the names of commands and options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        Exit code: 0, 1 if a file cannot be used or ``check`` found an error, 2 for wrong arguments.
    """
    parser = _parser()
    asked, others = parser.parse_known_args(arguments)
    if asked.command == "check":
        return _check(asked, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
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
    if asked.command == "timeline":
        from lightning_mcore.timeline import draw

        return draw.draw_traces(asked.traces, asked.out, steps=asked.steps, ranks=asked.ranks)
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


def _check(asked: argparse.Namespace, overrides: Sequence[str]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning_mcore import check
    machines = check.Machines(
        devices=asked.devices,
        num_nodes=asked.num_nodes,
        gpus_per_nvlink_domain=asked.gpus_per_nvlink_domain,
        arch=asked.arch,
        network=asked.network,
    )
    try:
        config: dict[str, Any] | None = None
        if asked.config or overrides or machines != check.Machines():
            config = {"trainer": {"strategy": "mcore"}}
            if asked.config:
                config = check.read_yaml(asked.config)
            check.apply_overrides(config, overrides)
        report = check.make_report(config, machines, os.environ)
    except (check.UsageError, ConfigurationError) as error:
        print(f"lightning-mcore check: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=2) if asked.json else check.format_report(report))
    return report.exit_code


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
        description="Checks configurations before they run and tunes jobs; looks into checkpoints,"
        " exports and imports them; draws traces. No GPU is needed.",
        epilog="lightning-mcore COMMAND --help tells about each command.",
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-mcore {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_check(commands)

    inspect = _command(
        commands,
        "inspect",
        "show what a checkpoint holds, and whether its files are complete",
        "Tells step, layout, optimizer and size of a checkpoint directory without reading tensors."
        " Exit code 1 if files are missing or cut short.",
    )
    inspect.add_argument("checkpoint", metavar="NAME.ckpt", help="checkpoint directory")
    inspect.add_argument("--tensors", action="store_true", help="list the model's tensors too")

    export = _command(
        commands,
        "export",
        "write a checkpoint's whole model into one plain file",
        "Joins the shards of all ranks, whatever the layout, into a file that plain torch or"
        " Lightning loads. The optimizer's state is left out.",
    )
    export.add_argument("checkpoint", metavar="NAME.ckpt", help="checkpoint directory")
    export.add_argument("out", metavar="OUT", help="file to write")
    export.add_argument(
        "--format",
        choices=("lightning", "safetensors"),
        help="a Lightning checkpoint, or safetensors with tensors only; default: safetensors if OUT"
        " ends in it, else lightning",
    )
    export.add_argument(
        "--weights-only",
        action="store_true",
        help="leave out callbacks and schedulers, as save_weights_only=True does",
    )
    export.add_argument(
        "--prefix",
        help="put in front of every tensor's name; default: what the LightningModule has on one"
        " process (lightning), nothing (safetensors)",
    )
    export.add_argument(
        "--norms",
        choices=("auto", "fused", "separate"),
        default="auto",
        help="names of the layers' norms: fused into the linear layer behind them, as in"
        " TransformerEngine layers, or separate; default: as in the checkpoint",
    )
    export.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")

    plain = _command(
        commands,
        "import",
        "write a plain file's weights as a checkpoint",
        "Turns a Lightning checkpoint, a state_dict or a safetensors file into a checkpoint"
        " directory that loads in any layout; one of this name is replaced. Code in the file is not"
        " run.",
    )
    plain.add_argument("plain", metavar="PLAIN", help="file to read")
    plain.add_argument("checkpoint", metavar="NAME.ckpt", help="checkpoint directory to write")
    plain.add_argument(
        "--kind",
        choices=("megatron", "sequential", "plain"),
        help="what the model that will load it is made of: Megatron layers, an nn.Sequential cut"
        " into stages, or plain modules; default: by the names in PLAIN",
    )
    timeline = commands.add_parser("timeline", help="draw traces as a pipeline diagram")
    timeline.add_argument(
        "traces", nargs="+", metavar="TRACE", help="of TraceExport, or one a rank"
    )
    timeline.add_argument("-o", "--out", required=True, metavar="OUT.svg", help="svg, png or pdf")
    timeline.add_argument("--steps", type=int, default=1, help="steps to draw from the first one")
    timeline.add_argument("--ranks", type=int, nargs="+", help="default: one of each stage")
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
        bridge = commands.add_parser(
            name, help=f"tell how to convert weights {text} Hugging Face, with Megatron-Bridge"
        )
        bridge.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    return parser


def _command(commands: _Commands, name: str, help: str, description: str) -> _Parser:
    return commands.add_parser(name, help=help, description=description, formatter_class=_Formatter)


def _add_check(commands: _Commands) -> None:
    check = commands.add_parser(
        "check",
        formatter_class=_Formatter,
        help="show what a configuration would run, here or elsewhere, and what is wrong with it",
        description="Shows versions, GPUs and their links, environment variables and, with a"
        " configuration, the layout, the effective switches and findings. Starts nothing.",
        epilog="Settings of the configuration can be overridden as in a LightningCLI script:"
        " --trainer.strategy.init_args.tp 8. Exit code: 0 without errors, 1 with an error among the"
        " findings, 2 for wrong arguments.",
    )
    check.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="YAML",
        help="configuration of a LightningCLI script; a later one is merged over earlier ones",
    )
    check.add_argument("--devices", type=_count, metavar="N", help="ranks on each node")
    check.add_argument("--num-nodes", type=_count, metavar="N", help="nodes")
    check.add_argument(
        "--arch",
        choices=("cpu", "ampere", "hopper", "blackwell"),
        help="plan for GPUs of this generation, whatever is in this machine",
    )
    check.add_argument(
        "--gpus-per-nvlink-domain",
        type=_count,
        metavar="N",
        help="plan for GPUs of which N reach each other through NVLink",
    )
    check.add_argument(
        "--network",
        choices=("infiniband", "ethernet", "none", "unknown"),
        help="what joins the nodes; infiniband stands for RoCE too",
    )
    check.add_argument("--json", action="store_true", help="print JSON (docs/check.md)")


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return number
