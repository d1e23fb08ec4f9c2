"""The pytest plugin of ``lightning_suite``: puts a strategy into each Trainer and records outcomes.

Each rank is a pytest process of its own that ``lightning_suite`` started, with the settings in
environment variables. Ranks meet before every test, so that one which failed does not leave the
others in another test's collectives.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

RANKS = "LIGHTNING_SUITE_RANKS"
STRATEGY = "LIGHTNING_SUITE_STRATEGY"
SHARED = "LIGHTNING_SUITE_SHARED"
NOT_OURS = "not on this strategy: "


class _Recorder:
    """Writes one line per finished test: outcome, message, and whether the strategy ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran = False
        self.outcome: dict[str, str] = {}

    def start(self, name: str) -> None:
        self.ran = False
        self.outcome = {"name": name, "outcome": "passed", "message": ""}
        self._write({"name": name, "outcome": "started"})

    def add(self, report: pytest.TestReport) -> None:
        expected = hasattr(report, "wasxfail")
        if report.outcome == "passed" and not (expected and report.when == "call"):
            return
        message = ""
        if report.outcome == "skipped" or expected:
            self.outcome["outcome"] = "skipped"
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            message = str(text).removeprefix("Skipped: ")
        elif self.outcome["outcome"] != "failed":
            self.outcome["outcome"] = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            message = f"{crash.message}" if crash is not None else str(report.longrepr)[-500:]
            if report.when != "call":
                message = f"[{report.when}] {message}"
            self.outcome["details"] = str(report.longrepr)[-6000:]
        self.outcome["message"] = self.outcome["message"] or message

    def finish(self) -> None:
        self._write({**self.outcome, "ran": self.ran})

    def _write(self, record: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _own_name(nodeid: str) -> str:
    return nodeid.split("tests_pytorch/", 1)[-1]


def pytest_configure(config: pytest.Config) -> None:
    """Injects the strategy, once per test process."""
    if SHARED not in os.environ:
        return
    shared, ranks = Path(os.environ[SHARED]), int(os.environ[RANKS])
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    recorder = _Recorder(shared / f"results.{rank}.jsonl")
    config.pluginmanager.register(_TestProcess(recorder, shared, ranks, rank), "strategy_recorder")
    if os.environ[STRATEGY] != "default":
        _inject(recorder, ranks)


def _inject(recorder: _Recorder, ranks: int) -> None:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    from lightning_mcore import MCoreStrategy

    mcore = os.environ[STRATEGY] == "mcore"
    cls = MCoreStrategy if mcore else DDPStrategy
    original = _AcceleratorConnector.__init__

    @functools.wraps(original)
    def init(self, devices="auto", num_nodes=1, accelerator="auto", strategy="auto", **kwargs):
        if strategy != "auto":
            pytest.skip(f"{NOT_OURS}the test names its own strategy")
        if accelerator not in ("auto", "cpu"):
            pytest.skip(f"{NOT_OURS}the test names its own accelerator")
        if num_nodes != 1 or devices not in ("auto", 1, "1", ranks):
            pytest.skip(f"{NOT_OURS}the test names its own number of devices or nodes")
        strategy = cls(timeout_s=30) if mcore else cls()
        original(self, devices=ranks, num_nodes=1, accelerator="cpu", strategy=strategy, **kwargs)

    _AcceleratorConnector.__init__ = init
    started = cls.setup_environment

    @functools.wraps(started)
    def setup_environment(self):
        recorder.ran = True
        started(self)

    cls.setup_environment = setup_environment
    if mcore:
        _read_checkpoints_by_torch_load()


def _read_checkpoints_by_torch_load() -> None:
    import torch

    from lightning_mcore.checkpoint_files import LIGHTNING_FILE

    original = torch.load

    @functools.wraps(original)
    def load(file, *args, **kwargs):
        if isinstance(file, (str, os.PathLike)) and Path(file).is_dir():
            file = Path(file) / LIGHTNING_FILE
        return original(file, *args, **kwargs)

    torch.load = load


class _TestProcess:
    """Hooks of one rank's pytest run."""

    def __init__(self, recorder: _Recorder, shared: Path, ranks: int, rank: int) -> None:
        self.recorder, self.shared, self.ranks, self.rank = recorder, shared, ranks, rank
        self.port = int(os.environ.get("MASTER_PORT", "0"))
        self.index = 0

    def pytest_collection_finish(self):
        gc.freeze()  # makes the collections after each test cheap

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.index += 1
        self._meet(self.index)
        # A port of its own for each test: the store of the last one may still be closing.
        os.environ["MASTER_PORT"] = str(self.port + self.index % 500)
        self.recorder.start(_own_name(item.nodeid))
        yield
        self.recorder.finish()
        # Groups that only a cycle of references keeps alive hold tens of threads each.
        gc.collect()

    def pytest_runtest_logreport(self, report):
        self.recorder.add(report)

    def _meet(self, index: int) -> None:
        """Waits until all ranks are at the same test."""
        (self.shared / f"at.{index}.{self.rank}").touch()
        deadline = time.monotonic() + 180
        while not all((self.shared / f"at.{index}.{r}").exists() for r in range(self.ranks)):
            if time.monotonic() > deadline:
                pytest.exit(f"rank {self.rank} waited 180 s for the others", returncode=3)
            time.sleep(0.01)

    @pytest.fixture
    def tmp_path(self, request):
        """A directory per test that all ranks share."""
        digest = hashlib.sha1(request.node.nodeid.encode()).hexdigest()[:10]
        path = self.shared / "tmp" / f"{request.node.originalname}-{digest}"
        path.mkdir(parents=True, exist_ok=True)
        return path
