"""The tuner on real ranks: it finds changed training, refuses what is refused, leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_mcore.testing import run_ranks
from lightning_mcore.tuning import MCoreTuner
from tests.ranks.trainers import NumberedGPT, loader, numbered_tokens, world_size

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = {"accelerator": "cpu"}


class Sensitive(NumberedGPT):
    """A job that a faulty switch would change: its loss depends on overlap_grad_reduce."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        overlapped = self.trainer.strategy.switches.overlap_grad_reduce.effective
        return loss * (1.001 if overlapped else 1.0)


def make_data():
    return loader(numbered_tokens(16), 4, shuffle=True)


def tune(folder):
    """Two ranks, dp2: three trials beside the baseline, two of which change the loss."""
    os.chdir(folder)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    environment = dict(os.environ)
    tuner = MCoreTuner(
        Sensitive,
        make_data,
        strategy={"micro_batch_size": 2},
        trainer={**QUIET, "devices": world_size(), "gradient_clip_val": 1.0},
        steps=2,
        warmup=2,
        rounds=2,
        extra={"plain": {"bucket_size": None}},
        only=["use_distributed_optimizer", "overlap_grad_reduce", "overlap_p2p", "plain"],
    )
    report = tuner.run()
    assert torch.equal(torch.random.get_rng_state(), before), "the random state changed"
    assert {k: v for k, v in os.environ.items() if k.startswith("PL_")} == {
        k: v for k, v in environment.items() if k.startswith("PL_")
    }
    return {
        "rows": {
            row.name: {
                "parity": row.parity.holds,
                "wins": row.wins,
                "losses": row.measured.losses,
                "norms": row.measured.grad_norms,
                "step_s": row.measured.step_s,
                "switches": dict(row.measured.switches),
                "bytes": row.measured.peak_bytes,
                "exposed": dict(row.measured.exposed_ms),
            }
            for row in report.rows
        },
        "refused": {refusal.trial.name: refusal.reason for refusal in report.refused},
        "recommended": report.recommended.name,
    }


def test_a_switch_that_changes_the_loss_is_found_and_nothing_is_left(tmp_path):
    first, second = run_ranks(tune, 2, str(tmp_path))
    assert first == second, "ranks disagree"
    rows = first["rows"]
    assert rows["safe"]["parity"]
    assert rows["plain"]["parity"]
    assert rows["use_distributed_optimizer"]["parity"]
    assert not rows["overlap_grad_reduce"]["parity"]
    assert first["recommended"] != "overlap_grad_reduce"
    assert "`overlap_p2p` (True) needs `pp` (1)" in first["refused"]["overlap_p2p"]
    assert rows["safe"]["switches"]["overlap_grad_reduce"] == "False"
    assert rows["overlap_grad_reduce"]["switches"]["overlap_grad_reduce"] == "True"
    for row in rows.values():
        assert len(row["step_s"]) == 2
        assert all(seconds > 0 for seconds in row["step_s"])
        assert all(len(once) == 4 for once in (*row["losses"], *row["norms"]))
        assert row["bytes"] > 2**20
        assert row["exposed"]["dp"] > 0, "two replicas reduce gradients"
    # Four different steps from the same start, in both rounds.
    assert rows["safe"]["losses"][0] == rows["safe"]["losses"][1] == rows["plain"]["losses"][0]
    assert len(set(rows["safe"]["losses"][0])) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_on_a_file(tmp_path):
    settings = yaml.safe_load((EXAMPLES / "gpt.yaml").read_text())
    settings["trainer"] |= {"accelerator": "cpu", "devices": 2}
    settings["trainer"]["strategy"]["init_args"] |= {"tp": 1, "vpp": 2}
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump(settings))
    train = EXAMPLES / "train.py"
    command = ["tune", "--config", config, "--model", f"{train}:GPT", "--data"]
    command += [f"{train}:SourceCode", "--steps", "1", "--warmup", "2", "--rounds", "2"]
    command += ["--only", "overlap_p2p", "--out", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_mcore", *map(str, command)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("MCoreStrategy(") == 1, "one rank reports"
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["name"] for row in found["trials"]} >= {"safe"}
    strategy = yaml.safe_load((tmp_path / "out" / "strategy.yaml").read_text())
    assert strategy["trainer"]["strategy"]["init_args"]["pp"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "out"]
