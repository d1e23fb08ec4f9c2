"""benchmarks/train_gpt.py on CPU: its backends do the same work, and a failure stops nothing."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_mcore.flops import ModelShape, training_flops
from lightning_mcore.testing import run_ranks

ROOT = Path(__file__).parents[2]
FIGURES = {"step_ms", "tokens_per_s", "tflops_per_device", "mfu", "ratio", "startup_s", "losses"}


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a module of the benchmarks, which import each other by bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


# ------------------------------------------------------------------------------ the script


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run of two ranks with a backend that cannot be built and one that cannot run here."""
    folder = tmp_path_factory.mktemp("train_gpt")
    files = {name: folder / f"result.{name}" for name in ("json", "markdown")}
    run = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "train_gpt.py"),
            *("--model", "tiny", "--accelerator", "cpu", "--devices", "2"),
            *("--batch", "4", "--microbatches", "2"),
            *("--backends", "lightning-mcore", "mcore-raw", "lightning-ddp", "lightning-fsdp"),
            *("--precision", "bf16-mixed", "--blocks", "3", "--steps", "2", "--warmup", "4"),
            *("--variant", "same={}"),
            *(
                "--variant",
                'bad={"backends": ["mcore-raw"], "model": {"recompute_granularity": "no such"}}',
            ),
            *(part for name, path in files.items() for part in (f"--{name}", str(path))),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert files["json"].exists(), run.stderr
    return run, json.loads(files["json"].read_text()), files["markdown"].read_text()


def test_every_backend_that_can_run_is_measured(measured):
    run, result, markdown = measured
    for name in ("lightning-mcore:same", "mcore-raw:same", "lightning-ddp"):
        found = result["backends"][name]
        assert found["status"] == "ok", run.stdout
        assert found.keys() >= FIGURES
        assert found["blocks"] == 3
        middle, low, high = found["step_ms"]
        assert 0.0 < low <= middle <= high
        tokens = 2 * result["about"]["tokens_per_step"]
        assert found["tokens_per_s"] == pytest.approx(1e3 * tokens / middle)
        assert 0.0 < found["startup_s"]["first_step"] < found["startup_s"]["warm"]
        assert f"| {name} | {middle:.2f} [" in markdown
    assert result["backends"]["lightning-mcore:same"]["ratio"] == [1.0, 1.0, 1.0]


def test_all_split_a_step_alike(measured):
    """Two samples per microbatch: the engine splits its batch, Lightning accumulates over two."""
    _, result, markdown = measured
    assert result["about"]["microbatches"] == 2
    assert "in 2 microbatch(es)" in markdown
    found = result["backends"]
    assert found["lightning-mcore:same"]["strategy"]["micro_batch_size"] == 2
    assert len(found["lightning-ddp"]["losses"]) == 2 * len(found["mcore-raw:same"]["losses"])


def test_the_engines_loops_do_the_same_work(measured):
    _, result, _ = measured
    (check,) = result["checks"]
    assert set(check["backends"]) == {"lightning-mcore:same", "mcore-raw:same"}
    assert check["losses_agree"]
    assert check["settings_apart"] == []
    losses = result["backends"]["mcore-raw:same"]["losses"]
    assert len(losses) == 3
    assert len(set(losses)) == 3, "nothing was trained"


def test_what_cannot_run_is_told_and_the_rest_goes_on(measured):
    run, result, markdown = measured
    bad, fsdp = result["backends"]["mcore-raw:bad"], result["backends"]["lightning-fsdp"]
    assert bad["status"] == "failed"
    assert "no such" in bad["error"]
    assert fsdp["status"] == "cannot run"
    assert "failed" in markdown
    assert run.returncode == 1


def on_cpu(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What became of another script of the benchmarks."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--accelerator", "cpu"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [["lightning-mcore", "--without-room"], ["mcore-raw"]])
def test_one_backend_alone(arguments):
    sizes = ("--model", "tiny", "--microbatches", "2", "--warmup", "1", "--blocks", "3")
    run = on_cpu("alone.py", *sizes, "--steps", "2", "--backend", *arguments)
    room = ", without room for frames" if "--without-room" in arguments else ""
    form = rf"{arguments[0]}, tiny{room}: ([.\d]+) ms per step \[([.\d]+), ([.\d]+)\], processor"
    found = re.search(form, run.stdout)
    assert found, run.stderr
    middle, low, high = map(float, found.groups())
    assert 0 < low <= middle <= high


def test_what_it_takes_to_start():
    run = on_cpu("startup.py", "--devices", "2", "--strategy", '{"pp": 2}', "--fits", "2")
    assert run.returncode == 0, run.stderr
    rows = re.findall(r"^\| (\d) \| " + " \\| ".join([r"([.\d]+)"] * 5) + r" \|$", run.stdout, re.M)
    assert [row[0] for row in rows] == ["1", "2"], run.stdout
    for _, ready, first, _, whole, outside in rows:
        assert 0 < float(first) < float(whole)
        assert 0 < float(ready) < float(whole)
        assert float(outside) == 0, "there is no device"


def test_attention_prints_its_table():
    """What cannot run here is told, and the rest goes on."""
    sizes = ("--heads", "4", "--groups", "2", "--dim", "16", "--seq", "32", "--calls", "2")
    run = on_cpu("attention.py", *sizes)
    assert run.returncode == 0, run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines() if line.startswith("| sdpa")]
    assert len(rows) == 4
    assert float(rows[-1][1]) > 0.0
    assert any("cannot" in row[1] for row in rows)


# ------------------------------------------------------------------------------ its parts


def _losses_of_twins(llama: bool) -> tuple[int, int, float, float, float, float]:
    """Parameters as counted and as built, losses of both models, FLOPs by shape and by config."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import models
    from megatron.core import parallel_state, tensor_parallel

    from lightning_mcore._mcore.cpu import CpuAdapter

    tiny = models.MODELS["tiny"]
    size = tiny if llama else dataclasses.replace(tiny, llama=False, groups=None)
    dist.init_process_group("gloo")
    with CpuAdapter():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        chunk = models.mcore_chunk(size, use_cpu_initialization=True)
        torch.manual_seed(0)
        for param in chunk.parameters():
            if param.dim() == 1:
                # Biases of 0 and norms of 1 would hide a mistake.
                param.data.add_(0.3 * torch.randn_like(param))
        tokens, labels = torch.randint(0, size.vocab, (2, 2, size.seq)).unbind()
        loss = float(models.call_gpt(chunk, tokens, labels).mean())
        shape = ModelShape.from_config(chunk.config, size.vocab)
    twin = models.TorchGPT(size)
    twin.load_state_dict(models.torch_weights(size, chunk.state_dict()))
    built = sum(param.numel() for param in chunk.parameters())
    flops = training_flops(shape, tokens=size.tokens, seq_length=size.seq)
    dist.destroy_process_group()
    counted = models.parameter_count(size)
    return counted, built, loss, float(twin(tokens, labels)), models.model_flops(size), flops


@pytest.mark.parametrize("llama", [True, False], ids=["llama", "gpt2"])
def test_the_plain_model_is_the_engines(llama):
    ((counted, built, loss, twin_loss, flops, flops_of_config),) = run_ranks(
        _losses_of_twins, 1, llama
    )
    assert counted == built
    # fp32: sums of some dozens of terms in another order.
    assert twin_loss == pytest.approx(loss, rel=1e-5)
    assert flops == flops_of_config


def test_backends_take_turns_as_far_as_they_fit(benchmark):
    backends, models = benchmark("backends"), benchmark("models")
    entries = [backends.Entry(name) for name in ("lightning-mcore", "mcore-raw", "lightning-ddp")]

    def groups(model, entries=entries, mode="auto", total=139.8):
        plan = backends.plan_groups(
            entries,
            mode=mode,
            reference=backends.choose_reference(entries, None),
            total_gib=total,
            model=models.MODELS[model],
            replicas=1,
        )
        return [[entry.name for entry in group] for group in plan]

    ours, raw, ddp = (entry.name for entry in entries)
    assert groups("gpt2-xl") == [[ours, raw, ddp]]
    assert groups("llama-8b-slice") == [[ours, raw], [ours, ddp]]
    assert groups("llama-70b-slice") == [[ours], [raw], [ddp]]
    assert groups("llama-70b-slice", total=None) == [[ours, raw, ddp]]
    # The engine has room for one Trainer at a time.
    several = [backends.Entry(ours, "a"), backends.Entry(ours, "b"), *entries[1:]]
    assert groups("gpt2-xl", several) == [[f"{ours}:a", raw, ddp], [f"{ours}:b", raw]]
    assert groups("gpt2-xl", several, "pairs") == [
        [f"{ours}:a", raw],
        [f"{ours}:b", raw],
        [ddp, raw],
    ]
    # So it has for captured graphs.
    graphs = {"cuda_graph_impl": "local"}
    captured = [backends.Entry(name, "graphs", model=graphs) for name in (ours, raw)]
    assert groups("gpt2-xl", [*captured, entries[2]]) == [
        [f"{ours}:graphs", ddp],
        [f"{raw}:graphs"],
    ]


def test_kernels_are_summed_and_gaps_are_what_is_left(benchmark):
    kernels = benchmark("kernels")
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 4000.0},
        {"cat": "kernel", "name": "gemm", "ts": 6000.0, "dur": 2000.0},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 3000.0, "dur": 2000.0},
        {"cat": "gpu_user_annotation", "name": "step", "ts": 0.0, "dur": 9000.0},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0.0, "dur": 500.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 5.0},
    ]
    found = kernels._from_trace(events, steps=2, step_ms=5.0)
    assert found["busy_ms"] == 3.5
    assert found["idle_ms"] == 1.5
    assert found["host_waits_ms"] == 0.25
    assert found["launches"] == 0.5
    assert [row["name"] for row in found["kernels"]] == ["gemm", "copy"]
    assert found["kernels"][0] == {"name": "gemm", "ms": 3.0, "calls": 1.0}
