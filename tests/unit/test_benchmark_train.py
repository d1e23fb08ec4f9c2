"""What train_gpt.py leaves behind, also when it is killed."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch, tmp_path_factory):
    """The script, without what its imports do to the environment."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    return importlib.import_module("train_gpt")


def backend(name: str, **found: Any) -> dict[str, Any]:
    return {"backend": name, "status": "not run", "error": "", "strategy": {}, **found}


def unfinished() -> dict[str, Any]:
    """One backend has had two turns, one has started, one is to come."""
    started = {
        "status": "ok",
        "memory_gib": {"peak": 12.3},
        "startup_s": {"built": 1.0, "first_step": 2.0, "warm": 3.0},
    }
    return {
        "about": {
            "date": "now",
            "command": "a command",
            "device": "NVIDIA H200",
            "devices": 1,
            "peak_tflops": 989.4,
            "layers": "TransformerEngine",
            "versions": {"torch": "2.11"},
            "model": {"name": "a model", "batch": 1, "seq": 1000},
            "parameters": 1e9,
            "flops_per_step": 494.7e12 * 0.1,
            "tokens_per_step": 1000,
            "microbatches": 1,
        },
        "reference": "mcore-raw",
        "backends": {
            "lightning-mcore": backend("lightning-mcore", **started),
            "mcore-raw": backend("mcore-raw", **started),
            "lightning-ddp": backend("lightning-ddp"),
        },
        "groups": [
            {"members": ["lightning-mcore"], "ms": {"lightning-mcore": [99.0, 101.0]}},
            {"members": ["mcore-raw"], "ms": {"mcore-raw": []}},
        ],
        "checks": [],
    }


def test_figures_and_table_are_whole_before_the_end(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.dist, "get_rank", lambda: 0)
    options = SimpleNamespace(out=tmp_path / "a.json", markdown=tmp_path / "a.md", top=3)
    result = unfinished()
    run: Any = SimpleNamespace(result=result, _options=options)
    script.Run.write(run)
    kept = json.loads(options.out.read_text())
    found = kept["backends"]["lightning-mcore"]
    assert found["step_ms"][0] == 100.0
    assert found["mfu"] == pytest.approx(0.5)
    assert "step_ms" not in result["backends"]["lightning-mcore"]
    table = options.markdown.read_text()
    assert "| lightning-mcore | 100.00 [99.50, 100.50] | 10,000 | 494.7 | 50.0 | 12.3 |" in table
    assert "| mcore-raw | ok: no turn of it |" in table
    assert "| lightning-ddp | not run:  |" in table

    # A second time, with another turn; and no other files.
    result["groups"][1]["ms"]["mcore-raw"].append(50.0)
    script.Run.write(run)
    assert "| mcore-raw | 50.00 [50.00, 50.00] |" in options.markdown.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.md"]


def test_tables_are_made_from_finished_files(script, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(unfinished()))
    files = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    table = tmp_path / "both.md"
    # 1: not all were run.
    assert script.main(["--from-json", *files, "--markdown", str(table)]) == 1
    assert table.read_text().count("## a model: 1.00B parameters") == 2
    assert table.read_text() in capsys.readouterr().out


def test_a_direct_loop_ends_with_its_backend(script):
    """Else captured layers, and the whole loop by its config, would outlive it."""
    backends, loops = map(importlib.import_module, ("backends", "loops"))
    ended = []

    class Loop(loops.DirectLoop):
        def __init__(self) -> None:
            pass

        def end(self) -> None:
            ended.append(self)

    for end in (backends.Live.free, backends.Live.abandon):
        loop = Loop()
        live = backends.Live(backends.Entry("mcore-raw"), loop, {}, {}, backends.ExitStack())
        end(live)
        assert ended.pop() is loop
        assert live.loop is None
    assert not ended
