"""Two hosts: network namespaces with addresses of their own, and a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.test_launchers import environment

SCRIPT = """
import os, sys, time
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from lightning_mcore import MCoreStrategy
from tests.ranks.trainers import Blocks, numbered_rows

class Slow(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        print(f"RANK {trainer.global_rank} STEP {trainer.global_step}", flush=True)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if mode == "die" and first and trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), 9)
        if mode == "slow":
            time.sleep(0.2)

if __name__ == "__main__":
    folder, mode = sys.argv[1:]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2,
        strategy=MCoreStrategy(pp=2, peer_timeout_s=3.0),
        max_steps=200 if mode == "slow" else 8, max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[Slow(), ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
    )
    saved = sorted((p for p in os.listdir(folder) if p.endswith(".ckpt")),
                   key=lambda name: int(name.split("step=")[1][:-5]))
    print("RESUMING", saved[-1:], flush=True)
    data = DataLoader(numbered_rows(32), batch_size=4)
    trainer.fit(Blocks(), data, ckpt_path=os.path.join(folder, saved[-1]) if saved else None)
    print(f"RESULT {trainer.global_step} {float(trainer.callback_metrics['train_loss']):.6f}",
          flush=True)
"""
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that are joined by a pair of virtual interfaces."""
    names = (f"mcore{os.getpid()}a", f"mcore{os.getpid()}b")
    try:
        if shutil.which("ip") is None:
            pytest.skip("needs the `ip` command")
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "vb", "netns", names[1])
        for name, device, address in zip(names, ("va", "vb"), ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", name)


def start(host: str, device: str, log: Path, command: list[str], **env: str) -> subprocess.Popen:
    # Gloo picks its interface by the host's name, which both namespaces share.
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        env=environment(GLOO_SOCKET_IFNAME=device, TP_SOCKET_IFNAME=device, **env),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(pattern: str, log: Path, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < until_s, log.read_text()[-3000:]
        time.sleep(0.1)


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_a_short_cut_is_survived_and_a_long_one_ends_both_hosts(hosts, tmp_path):
    """Started by environment variables; no packet tells either side what has happened."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    logs = [tmp_path / "host0", tmp_path / "host1"]
    nodes = [
        start(
            hosts[node],
            "va" if node == 0 else "vb",
            logs[node],
            [sys.executable, str(script), str(tmp_path / "run"), "slow"],
            NODE_RANK=str(node),
            LOCAL_RANK="0",
            MASTER_ADDR=ADDRESSES[0],
            MASTER_PORT="29871",
        )
        for node in range(2)
    ]
    with ended(nodes):
        wait_for(r"RANK 1 STEP 3", logs[1], 120)
        ip("-n", hosts[0], "link", "set", "va", "down")
        time.sleep(1.0)
        ip("-n", hosts[0], "link", "set", "va", "up")
        steps = max(int(step) for step in re.findall(r"RANK 1 STEP (\d+)", logs[1].read_text()))
        wait_for(rf"RANK 1 STEP {steps + 10}", logs[1], 60)
        ip("-n", hosts[0], "link", "set", "va", "down")
        cut_s = time.monotonic()
        codes = [node.wait(timeout=60) for node in nodes]
        took_s = time.monotonic() - cut_s
    texts = [log.read_text() for log in logs]
    assert took_s < 12.0, texts
    assert all(code in (1, 75) for code in codes), codes
    for node, text in enumerate(texts):
        assert f"Rank {1 - node} (stage {1 - node}, tp 0, dp 0; host" in text, text[-3000:]
        assert "has not been heard of for 3 s" in text, text[-3000:]
        assert "Resume with ckpt_path=" in text, text[-3000:]


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = {}
    for mode in ("die", "whole"):
        folder = tmp_path / mode
        folder.mkdir()
        logs = [tmp_path / f"{mode}0", tmp_path / f"{mode}1"]
        nodes = [
            start(
                hosts[node],
                "va" if node == 0 else "vb",
                logs[node],
                [
                    *[sys.executable, "-m", "torch.distributed.run"],
                    *["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1"],
                    *["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29872"],
                    *["--rdzv-id", mode, "--local-addr", ADDRESSES[node]],
                    *["--rdzv-conf", f"is_host={node == 0}"],
                    *[str(script), str(folder), mode],
                ],
                # With the store that agents share by default, the second attempt was seen to
                # read gloo addresses of the first (torch 2.13) and to fail before our code runs.
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            )
            for node in range(2)
        ]
        with ended(nodes):
            codes = [node.wait(timeout=120) for node in nodes]
        texts = [log.read_text() for log in logs]
        assert codes == [0, 0], [text[-3000:] for text in texts]
        results[mode] = [re.findall(r"RESULT .*", text) for text in texts]
        if mode == "die":
            assert "step=4.ckpt" in texts[0].split("RESUMING")[2]
            assert any("died without an exception" in text for text in texts)
    assert results["die"] == results["whole"]
