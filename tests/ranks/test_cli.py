"""LightningCLI reads the strategy, with all its arguments, from a YAML file."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_mcore import MCoreStrategy, Topology

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "gpt.yaml"
STRATEGY = "--trainer.strategy.init_args"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_example", EXAMPLES / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def read(example, monkeypatch):
    """Makes the Trainer and the module of the example without running them."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # What seeding sets, to be undone.
        monkeypatch.setenv(name, "0")

    def read(*arguments, config=CONFIG):
        return LightningCLI(
            example.GPT,
            example.SourceCode,
            auto_configure_optimizers=False,
            run=False,
            args=[f"--config={config}", "--trainer.accelerator=cpu", *arguments],
        )

    return read


def test_the_file_names_every_argument_of_the_strategy():
    settings = yaml.safe_load(CONFIG.read_text())["trainer"]["strategy"]
    assert settings["class_path"] == "lightning_mcore.MCoreStrategy"
    assert set(settings["init_args"]) == set(inspect.signature(MCoreStrategy).parameters)


def test_the_files_values_reach_the_strategy(read):
    cli = read()
    asked = cli.trainer.strategy._request
    assert isinstance(cli.trainer.strategy, MCoreStrategy)
    assert (asked.sizes.tp, asked.sizes.pp, asked.sizes.vpp, asked.sizes.etp) == (2, 2, 2, None)
    assert asked.switches.overlap_p2p is True
    assert asked.switches.sequence_parallel == "auto"
    assert asked.switches.micro_batch_size == 4
    assert dict(asked.switches.ddp) == {"check_for_nan_in_grad": True}
    assert dict(asked.switches.optimizer) == {"log_num_zeros_in_grad": False}
    assert cli.model.hparams.num_layers == 4
    assert type(cli.model.make_optimizer([torch.zeros(1)])) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("pp", "4", 4),
        ("vpp", "null", None),
        ("overlap_grad_reduce", "false", False),
        ("overlap_grad_reduce", "auto", "auto"),
        ("bucket_size", "1000", 1000),
        ("init_from", "weights.ckpt", "weights.ckpt"),
        ("ddp", "{check_for_nan_in_grad: true}", {"check_for_nan_in_grad": True}),
        ("comm", "max", "max"),
        ("average_in_collective", "true", True),
        ("num_distributed_optimizer_instances", "2", 2),
        ("cp_comm_type", "a2a+p2p", "a2a+p2p"),
        ("high_priority_streams", "[tp, dp_cp]", ("tp", "dp_cp")),
        ("nccl_communicators", "{dp_cp: {max_ctas: 8}}", {"dp_cp": {"max_ctas": 8}}),
        ("topology", "{nodes: 4, arch: ampere}", Topology(nodes=4, arch="ampere")),
    ],
)
def test_arguments_on_the_command_line(read, argument, value, expected):
    strategy = read(f"{STRATEGY}.{argument}={value}").trainer.strategy
    asked = strategy._request
    places = (asked, asked.sizes, asked.switches)
    (found,) = (getattr(place, argument) for place in places if hasattr(place, argument))
    assert found == expected


@pytest.mark.parametrize("value", ["sometimes", "3"])
def test_a_value_that_is_no_switch_is_refused_by_the_parser(read, value, capsys):
    with pytest.raises(SystemExit):
        read(f"{STRATEGY}.overlap_p2p={value}")
    assert "overlap_p2p" in capsys.readouterr().err


def test_an_impossible_size_is_refused_with_the_strategys_own_words(read, capsys):
    with pytest.raises((SystemExit, ValueError, TypeError)) as refused:
        read(f"{STRATEGY}.tp=0")
    assert "`tp` (0) must be" in f"{refused.value}{capsys.readouterr().err}"


@pytest.mark.parametrize("alias", ["mcore", "mcore_cpu"])
def test_short_names(alias, read, tmp_path):
    strategy = L.Trainer(strategy=alias, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, MCoreStrategy)
    assert strategy.process_group_backend == ("gloo" if alias == "mcore_cpu" else None)

    settings = yaml.safe_load(CONFIG.read_text())
    settings["trainer"]["strategy"] = alias
    config = tmp_path / "alias.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert isinstance(read(config=config).trainer.strategy, MCoreStrategy)


@pytest.mark.slow
def test_fit_from_the_file(tmp_path):
    """The command in the file's head, on two ranks and for a few steps."""
    arguments = [
        *("--trainer.accelerator=cpu", "--trainer.devices=2", f"{STRATEGY}.tp=1"),
        *("--trainer.max_steps=4", "--trainer.val_check_interval=2"),
        *("--trainer.limit_val_batches=1", "--data.samples=200"),
    ]
    paths = [os.path.abspath(path) for path in sys.path if path]
    run = subprocess.run(
        [sys.executable, EXAMPLES / "train.py", "fit", f"--config={CONFIG}", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (saved,) = tmp_path.rglob("last.ckpt")
    assert (saved / "lightning_mcore.json").exists()
    (config,) = tmp_path.rglob("config.yaml")
    strategy = yaml.safe_load(config.read_text())["trainer"]["strategy"]
    assert strategy["init_args"]["overlap_p2p"] is True, "what ran is written beside the logs"
    assert strategy["init_args"]["tp"] == 1
