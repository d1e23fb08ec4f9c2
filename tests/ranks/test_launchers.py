"""Processes started by Lightning, torchrun, SLURM or by hand on two nodes find their place."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_mcore import ConfigurationError, MCoreStrategy
from lightning_mcore.checkpoint import read_manifest
from tests.ranks.trainers import Blocks, numbered_rows

SCRIPT = """
import sys
import torch, lightning as L
from torch.utils.data import DataLoader
from lightning_mcore import MCoreStrategy
from tests.ranks.trainers import Blocks, numbered_rows

if __name__ == "__main__":
    devices, nodes, plugin = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    options = {}
    if plugin == "slurm":
        from lightning.pytorch.plugins.environments import SLURMEnvironment
        options["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, num_nodes=nodes, strategy=MCoreStrategy(pp=2),
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )
    trainer.fit(Blocks(), DataLoader(numbered_rows(12), batch_size=4))
    layout = trainer.strategy.layout
    loss = float(trainer.callback_metrics["train_loss"])
    # Another entry point of the same Trainer runs on the ranks that there are.
    trainer.validate(trainer.lightning_module, DataLoader(numbered_rows(4), batch_size=4))
    assert float(trainer.callback_metrics["val_loss"]) > 0
    print(f"RESULT rank {layout.rank} of {layout.world_size} stage {layout.pp_rank} {loss:.6f}")
"""

RESULT = re.compile(r"RESULT rank \d+ of \d+ stage \d+ \d+\.\d{6}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.path.join(root, "src"), kept.get("PYTHONPATH", "")])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more}


def results(processes: list[subprocess.Popen[str]]) -> list[str]:
    """The RESULT lines of all ranks, sorted by rank."""
    lines = []
    for process in processes:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-3000:]
        # Ranks that share a pipe may write two results into one line.
        lines += RESULT.findall(output)
    return sorted(lines)


def start(command: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def check_two_stages(lines: list[str]) -> None:
    assert len(lines) == 2
    assert lines[0].startswith("RESULT rank 0 of 2 stage 0 ")
    assert lines[1].startswith("RESULT rank 1 of 2 stage 1 ")
    assert lines[0].split()[-1] == lines[1].split()[-1], "both ranks log the same loss"


@pytest.mark.slow
def test_lightning_starts_the_ranks_of_a_script(script):
    check_two_stages(results([start([sys.executable, script, "2", "1", "none"])]))


KILLED = """
import os, sys
import torch, lightning as L
from torch.utils.data import DataLoader
from lightning_mcore import MCoreStrategy, _launchers
from tests.ranks.trainers import Blocks, numbered_rows

# Rank 0 sees the end of rank 1 before the monitors can have told anything.
_launchers.OBSERVE_S = 0.02

class Kill(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == int(sys.argv[1]):
            print("KILLED", flush=True)
            os.kill(os.getpid(), 9)

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=MCoreStrategy(pp=2), max_steps=9, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Kill()],
    )
    trainer.fit(Blocks(), DataLoader(numbered_rows(36), batch_size=4))
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_one(tmp_path):
    """Rank 0 is the parent of rank 1, and Lightning looks after children only."""
    path = tmp_path / "killed.py"
    path.write_text(KILLED)
    runs = [start([sys.executable, str(path), str(rank)]) for rank in range(2)]
    for rank, process in enumerate(runs):
        # The output ends when the last process that holds it has ended.
        output, _ = process.communicate(timeout=100)
        assert process.returncode != 0
        assert "KILLED" in output
        assert f"Rank {rank} (stage {rank}, tp 0, dp 0; host" in output, output[-3000:]
        assert "died without an exception" in output
        assert "Last step completed: 2." in output


SAVING = """
import sys, threading
import torch, lightning as L
from torch.utils.data import DataLoader
from lightning_mcore import MCoreStrategy, _launchers, checkpoint_files
from tests.ranks.trainers import Blocks, numbered_rows

_launchers.OBSERVE_S = 0.02

class FailWhileSaving(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(sys.argv[1])
        if trainer.global_step == 3 and trainer.global_rank == 1:
            raise ValueError("THE REASON")

def write_slowly(point):
    if point == "writing in the background" and trainer.global_rank == 0:
        threading.Event().wait(4.0)

if __name__ == "__main__":
    checkpoint_files.fault_hook = write_slowly
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=MCoreStrategy(async_save=True), max_steps=9,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[FailWhileSaving()],
    )
    trainer.fit(Blocks(), DataLoader(numbered_rows(72), batch_size=4))
"""


@pytest.mark.slow
def test_rank_0_completes_a_save_after_another_rank_has_ended(tmp_path):
    path, saved = tmp_path / "saving.py", tmp_path / "saved.ckpt"
    path.write_text(SAVING)
    process = start([sys.executable, str(path), str(saved)])
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "THE REASON" in output
    assert read_manifest(saved)["global_step"] == 2, output[-3000:]


@pytest.mark.slow
def test_torchrun(script):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    check_two_stages(results([start([*launcher, *port, script, "2", "1", "none"])]))


@pytest.mark.slow
def test_slurm_variables(script):
    port = str(free_port())
    ranks = [
        start(
            [sys.executable, script, "2", "1", "slurm"],
            SLURM_NTASKS="2",
            SLURM_JOB_ID="77",
            SLURM_JOB_NAME="train",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_NNODES="1",
            SLURM_NODELIST="localhost",
            SLURM_NTASKS_PER_NODE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    check_two_stages(results(ranks))


@pytest.mark.slow
def test_two_nodes_on_one_machine(script):
    port = str(free_port())
    nodes = [
        start(
            [sys.executable, script, "1", "2", "none"],
            NODE_RANK=str(node),
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for node in range(2)
    ]
    check_two_stages(results(nodes))


def test_nodes_that_could_not_find_each_other_are_refused(monkeypatch):
    """Each would wait for the others at a port of its own, for as long as a rendezvous may take."""
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    rows = DataLoader(numbered_rows(8), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy=MCoreStrategy(), logger=False
    )
    with pytest.raises(ConfigurationError, match=r"`num_nodes` \(2\) needs .* MASTER_PORT .* set"):
        trainer.fit(Blocks(), rows)
    assert "LOCAL_RANK" not in os.environ, "nothing was started"


def test_an_interactive_session_is_refused_with_the_reason(monkeypatch):
    # What Lightning looks at to recognise a notebook.
    monkeypatch.setattr("lightning.fabric.utilities.imports._IS_INTERACTIVE", True)
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True
    )
    with pytest.raises(Exception, match="not compatible with an interactive environment"):
        L.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(pp=2), logger=False)
