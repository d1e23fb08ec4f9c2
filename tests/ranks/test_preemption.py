"""A signal to any one rank leads to one checkpoint on all ranks and a clean exit."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.plugins.environments import SLURMEnvironment

from tests.ranks.failing import run_failing
from tests.ranks.test_dead_ranks import Case, arm, fit, losses, with_folders

STEP = "tests.ranks.trainers:Blocks.training_step"
SIGNALS = [
    Case("pp2", 1, STEP, 10, action="SIGTERM", async_save=True),
    Case("dp2", 0, "tests.ranks.test_dead_ranks:Points.on_train_batch_start", 3, action="SIGUSR1"),
    Case("dp2", 1, STEP, 6, action="SIGTERM"),
    Case("pp2", 1, "tests.ranks.trainers:Blocks.validation_step", 2, action="SIGTERM"),
    Case("pp2", 0, STEP, 10, action="SIGUSR1", async_save=True),
]
"""In a step, before a step, in the step before validation, in validation, and under SLURM."""
UNDER_SLURM = 4


def interrupted(case: Case) -> None:
    slurm = case is not None and case.folder.endswith("slurm")
    options = {}
    if slurm:
        rank = os.environ["RANK"]
        os.environ.update(
            SLURM_NTASKS="2",
            SLURM_JOB_ID="77",
            SLURM_JOB_NAME="train",
            SLURM_PROCID=rank,
            SLURM_LOCALID=rank,
            SLURM_NODEID="0",
            SLURM_NNODES="1",
            SLURM_NODELIST="localhost",
            SLURM_NTASKS_PER_NODE="2",
        )
        os.environ["PATH"] = case.folder + os.pathsep + os.environ["PATH"]
        options["plugins"] = [SLURMEnvironment()]
    if int(os.environ["RANK"]) == case.rank and case.action != "none":
        arm(case)
    fit(case, **options)


def test_a_signal_to_one_rank_saves_once_and_exits_cleanly(tmp_path):
    cases = with_folders(SIGNALS, tmp_path)
    slurm = Path(f"{cases[UNDER_SLURM].folder}-slurm")
    cases[UNDER_SLURM] = replace(cases[UNDER_SLURM], folder=str(slurm))
    slurm.mkdir()
    scontrol = slurm / "scontrol"
    asked = f'echo "$@" $(ls -d {slurm}/hpc_ckpt_1.ckpt) >> {slurm}/calls'
    scontrol.write_text(f"#!/bin/sh\n{asked}\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)

    runs = run_failing(interrupted, 2, cases)
    for case, outcomes in zip(cases, runs, strict=True):
        for outcome in outcomes:
            assert outcome.status == 0, f"{case}\n{outcome.output[-3000:]}"
            assert "SystemExit None" in outcome.output, f"{case}\n{outcome.output[-3000:]}"
        saved = [path.name for path in Path(case.folder).iterdir() if "hpc" in path.name]
        assert saved == ["hpc_ckpt_1.ckpt"]
        assert "Stopped for a signal after step 3; resume with" in outcomes[0].output
    calls = (slurm / "calls").read_text()
    assert calls == f"requeue 77 {slurm}/hpc_ckpt_1.ckpt\n", "one rank, once, with a checkpoint"

    # Under SLURM the checkpoint is found without being named.
    resumed = [replace(case, action="none", ckpt_path="hpc") for case in cases]
    resumed[UNDER_SLURM] = replace(resumed[UNDER_SLURM], ckpt_path=None)
    whole = [replace(case, action="none", folder=f"{case.folder}-whole") for case in cases[:2]]
    ends = run_failing(interrupted, 2, [*resumed, *whole])
    expected = {case.layout: losses(end[0]) for case, end in zip(whole, ends[-2:], strict=True)}
    for case, (first, second) in zip(resumed, ends[: len(resumed)], strict=True):
        assert losses(first) == losses(second) == expected[case.layout][3:], case
