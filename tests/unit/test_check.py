"""``lightning-mcore check``: what it reads, what it finds, what it prints, how it exits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from lightning_mcore import check
from lightning_mcore.check.config import read_config
from lightning_mcore.check.installation import Package
from lightning_mcore.cli import main
from lightning_mcore.findings import Findings
from lightning_mcore.switches import PRECISIONS
from tests.unit.nvml import FakeNvml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gpt.yaml"
STRATEGY = "--trainer.strategy.init_args"
COMMUNICATION = ("NCCL_", "NVTE_", "TORCH_NCCL_", "UB_", "CUDA_", "SLURM_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(COMMUNICATION):
            monkeypatch.delenv(name)


@pytest.fixture
def run(capsys):
    """Runs the command in this process; returns exit code, output and errors."""

    def run(*arguments):
        try:
            code = main(["check", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture
def answer(run):
    """The JSON answer, and the exit code."""

    def answer(*arguments):
        code, out, err = run("--json", *arguments)
        assert not err
        found = json.loads(out)
        assert found["exit_code"] == code
        return found

    return answer


@pytest.fixture
def config(tmp_path):
    """Writes a configuration of an MCoreStrategy with these arguments."""

    def config(trainer=None, data=None, model=None, **arguments):
        path = tmp_path / "config.yaml"
        strategy = {"class_path": "lightning_mcore.MCoreStrategy", "init_args": arguments}
        written = {
            "trainer": {
                "accelerator": "cpu",
                "devices": 4,
                "strategy": strategy,
                **(trainer or {}),
            },
            "data": data or {},
            "model": model or {},
        }
        path.write_text(yaml.safe_dump(written))
        return path

    return config


def codes(found, severity=None):
    return [f["code"] for f in found["findings"] if severity in (None, f["severity"])]


def switch(found, name):
    return found["run"]["switches"][name]["effective"]


# ------------------------------------------------------------------------------ configurations


def test_the_example_is_clean(answer):
    found = answer("--config", EXAMPLE, "--trainer.accelerator", "cpu")
    assert found["exit_code"] == 0
    assert codes(found, "error") == codes(found, "warning") == []
    run = found["run"]
    assert run["layout"] == {
        **{"tp": 2, "pp": 2, "vpp": 2, "cp": 1, "dp": 1},
        **{"ep": 1, "etp": 2, "edp": 1},
    }
    assert (run["batch_size"], run["micro_batch_size"], run["num_microbatches"]) == (16, 4, 4)
    assert run["bubble"] == pytest.approx(1 / 8)
    assert switch(found, "overlap_p2p") is True
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()


def test_two_mistakes_are_both_shown(run, answer, config):
    path = config(tp=3, overlap_grad_reduced=True)
    found = answer("--config", path)
    assert found["exit_code"] == 1
    first, second = found["findings"]
    assert first["relation"] == "`overlap_grad_reduced` is not an argument of MCoreStrategy"
    assert first["fix"] == "use `overlap_grad_reduce`"
    assert second["relation"].startswith("`world_size` (4) must be a multiple of `tp` (3)")
    code, out, err = run("--config", path)
    assert (code, err) == (1, "")
    assert "findings: 2 errors" in out
    assert "overlap_grad_reduced" in out
    assert "must be a multiple of `tp` (3)" in " ".join(out.split())


def test_mistakes_in_relations_are_all_shown(answer, config):
    path = config(sequence_parallel=True, overlap_p2p=True, trainer={"precision": "64-true"})
    found = answer("--config", path)
    told = " ".join(f["relation"] for f in found["findings"])
    for name in ("`sequence_parallel` (True)", "`overlap_p2p` (True)", "`precision` ('64-true')"):
        assert name in told
    assert found["run"]["switches"] is None


@pytest.mark.parametrize(
    ("arguments", "relation"),
    [
        ({"tp": 0}, "`tp` (0) must be an integer of at least 1"),
        ({"tp": "two"}, "`tp` ('two') cannot be read as int"),
        (
            {"overlap_p2p": "maybe"},
            "`overlap_p2p` ('maybe') cannot be read as bool | 'auto'",
        ),
        ({"vpp": 2}, "`vpp` (2) chunks per rank need `pp` (1)"),
        ({"xyz": 1}, "`xyz` is not an argument of MCoreStrategy"),
        ({"ddp": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_arguments_that_cannot_be_read(answer, config, arguments, relation):
    found = answer("--config", config(**arguments))
    (finding,) = [f for f in found["findings"] if f["severity"] == "error"]
    assert relation in finding["relation"]
    assert found["exit_code"] == 1


def test_what_follows_from_an_unreadable_argument_is_not_told(answer, config):
    """pp=2 would make vpp=2 right, and tp=2 sequence_parallel."""
    found = answer("--config", config(pp="two", vpp=2, tp="two", sequence_parallel=True))
    told = [f["relation"] for f in found["findings"] if f["severity"] == "error"]
    assert told == ["`pp` ('two') cannot be read as int", "`tp` ('two') cannot be read as int"]


def test_overrides_as_in_a_script(answer, config):
    path = config(tp=2)
    for form in ([f"{STRATEGY}.tp", "4"], [f"{STRATEGY}.tp=4"], ["--trainer.strategy.tp=4"]):
        assert answer("--config", path, *form)["run"]["layout"]["tp"] == 4
    found = answer("--config", path, "--trainer.devices=8", "--json", f"{STRATEGY}.pp", "2")
    assert found["run"]["world_size"] == 8
    assert found["run"]["layout"]["pp"] == 2


def test_later_files_are_merged_over_earlier_ones(answer, config, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text("fit: {trainer: {strategy: {init_args: {pp: 2}}}}")
    found = answer("--config", config(tp=2), "--config", more)
    assert (found["run"]["layout"]["tp"], found["run"]["layout"]["pp"]) == (2, 2)


@pytest.mark.parametrize("name", ["mcore", "mcore_cpu"])
def test_short_names(answer, config, name):
    path = config(trainer={"strategy": name, "devices": 2})
    assert answer("--config", path, "--trainer.strategy.tp=2")["run"]["layout"]["tp"] == 2


@pytest.mark.parametrize("strategy", ["ddp", None, "no.such.Class", "torch.nn.Linear", [1]])
def test_other_strategies(answer, config, strategy):
    found = answer("--config", config(trainer={"strategy": strategy}))
    assert codes(found, "error") == ["config-strategy"]
    assert found["run"]["switches"] is None


def test_a_class_of_the_users_own(answer, config, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from lightning_mcore import MCoreStrategy\n"
        "class Mine(MCoreStrategy):\n"
        "    def __init__(self, tp: int = 4):\n"
        "        super().__init__(tp=tp)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = config(trainer={"strategy": {"class_path": "mine.Mine"}})
    assert answer("--config", mine)["run"]["layout"]["tp"] == 4


@pytest.mark.parametrize(
    ("devices", "world_size"),
    [(2, 2), ("2", 2), ([0, 1, 2], 3), ("0,1", 2), ("auto", 1), (-1, 1)],
)
def test_devices(answer, config, devices, world_size):
    found = answer("--config", config(trainer={"devices": devices}))
    assert found["run"]["world_size"] == world_size


@pytest.mark.parametrize(
    "trainer",
    [{"devices": "many"}, {"devices": 0}, {"num_nodes": 0}, {"accumulate_grad_batches": 1.5}],
)
def test_settings_of_the_trainer_that_cannot_be_read(answer, config, trainer):
    assert codes(answer("--config", config(trainer=trainer)), "error") == ["config-trainer"]


def test_sections_that_are_no_mappings(answer, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("trainer: {strategy: mcore}\nmodel: some.Class\ndata: [1]\n")
    assert codes(answer("--config", path), "error") == ["config-section"]
    path.write_text("trainer: 3\n")
    assert codes(answer("--config", path), "error") == ["config-section", "config-strategy"]


def test_dimensions_that_the_model_states(answer, config):
    model = {"class_path": "a.B", "init_args": {"num_layers": 6, "seq_length": "long"}}
    found = answer("--config", config(tp=1, pp=4, model=model))
    assert "`num_layers` (6) must be a multiple of `pp` (4)" in found["findings"][0]["relation"]
    trainer = {"strategy": "mcore"}
    asked = read_config(
        {"trainer": trainer, "model": model, "data": {"init_args": {"batch_size": 8}}}, Findings()
    )
    assert (asked.dims.num_layers, asked.dims.seq_length, asked.batch_size) == (6, None, 8)


def test_a_batch_that_does_not_divide(answer, config):
    found = answer("--config", config(pp=2, vpp=2, micro_batch_size=2, data={"batch_size": 6}))
    assert codes(found, "error") == ["batch"]
    assert "must be a multiple of `pp` (2)" in found["findings"][0]["relation"]
    assert found["run"]["bubble"] is None


@pytest.mark.parametrize("name", ["bf16", "16", 32, *PRECISIONS])
def test_precision(answer, config, name):
    found = answer("--config", config(trainer={"precision": name}))
    assert codes(found, "error") == []
    long = {"bf16": "bf16-mixed", "16": "bf16-mixed", 32: "32-true", "16-mixed": "bf16-mixed"}
    assert found["run"]["precision"] == long.get(name, name), "fp16 becomes bf16 on CPU"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("a: [", "is no YAML"),
        ("- 1", "must hold a mapping"),
        ("a: !!python/object/apply:os.getpid []", "is no YAML"),
    ],
)
def test_files_that_cannot_be_read(run, tmp_path, text, told):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    code, out, err = run("--config", path)
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--devices", "0"],
        ["--devices", "x"],
        ["--arch", "volta"],
        ["--trainer.devices"],
        ["--optimizer.lr=1"],
        ["stray"],
        ["--trainer.devices={"],
        ["--num-nodes", "2", "--devices", "8", "--gpus-per-nvlink-domain", "3"],
    ],
)
def test_wrong_usage(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err


# ------------------------------------------------------------------------------ machines


def test_a_plan_for_1024_gpus(run, answer):
    arguments = [
        *("--arch", "hopper", "--gpus-per-nvlink-domain", "8", "--num-nodes", "128"),
        *("--network", "infiniband", "--trainer.precision=bf16-mixed", "--data.batch_size=32"),
        *("--trainer.strategy.tp=8", "--trainer.strategy.pp=8", "--trainer.strategy.vpp=2"),
    ]
    found = answer(*arguments)
    assert found["exit_code"] == 0
    run_ = found["run"]
    assert run_["world_size"] == 1024
    assert (run_["layout"]["tp"], run_["layout"]["dp"], run_["layout"]["pp"]) == (8, 16, 8)
    assert run_["num_microbatches"] == 32
    assert run_["bubble"] == pytest.approx(7 / 64)
    groups = run_["groups"]
    assert groups["tp"] == {**groups["tp"], "size": 8, "count": 128, "reach": "nvlink", "nodes": 1}
    assert groups["dp"] == {**groups["dp"], "size": 16, "count": 64, "reach": "network"}
    assert groups["dp"]["nodes"] == 16
    assert found["environment"]["wanted"][0]["name"] == "CUDA_DEVICE_MAX_CONNECTIONS"
    assert found["environment"]["wanted"][0]["value"] == "1"
    code, out, _ = run(*arguments)
    text = " ".join(out.split())
    assert code == 0
    assert "tp 8 128 inside the NVLink domain" in text
    assert "dp 16 64 crosses nodes (16)" in text
    assert "7 / (2 x 32) = 10.9% of the compute time" in text
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in text
    assert max(map(len, out.splitlines())) <= 100


def test_larger_domains(answer):
    arguments = ["--arch=blackwell", "--devices=4", "--num-nodes=16", "--trainer.strategy.tp=8"]
    assert answer(*arguments)["run"]["groups"]["tp"]["reach"] == "network"
    found = answer(*arguments, "--gpus-per-nvlink-domain=64")
    assert found["run"]["groups"]["tp"]["reach"] == "nvlink"
    assert found["environment"]["wanted"][0]["value"] == "32"


def test_the_bubble_without_a_batch_size(run):
    _, out, _ = run("--arch=hopper", "--trainer.strategy.pp=4")
    assert "75.0% at 4, 37.5% at 8, 18.8% at 16, 9.4% at 32" in " ".join(out.split())


def test_a_configuration_for_gpus_on_a_machine_without(answer, config):
    gpus = config(tp=4, trainer={"accelerator": "gpu"})
    found = answer("--config", gpus)
    if found["hardware"]["gpus"]:
        pytest.skip("there are GPUs here")
    assert found["topology"]["arch"] == "hopper"
    assert any("are assumed" in finding["relation"] for finding in found["findings"])
    stated = answer("--config", gpus, "--arch=ampere")
    assert "topology" not in codes(stated)
    works = stated["packages"]["TransformerEngine"]["state"] == "works"
    assert ("packages-here" in codes(stated)) != works


def report(config, nvml, machines=None, environ=None, packages=()):
    machines = machines or check.Machines()
    return check.make_report(config, machines, environ or {}, nvml=nvml, packages=packages)


def test_gpus_of_this_machine():
    found = report({"trainer": {"strategy": {"tp": 8}}}, FakeNvml())
    assert found.topology.source == "NVML"
    assert found.run.world_size == 8
    assert found.run.groups["tp"].reach == "nvlink"
    text = check.format_report(found)
    assert "GPU 7  NVIDIA H200  140 GiB  compute capability 9.0  18 NVLinks" in text
    assert "NVLink between all GPUs" in text
    assert "driver" in text
    json.dumps(found.as_dict())


def test_links_that_differ_are_a_table():
    nvml = FakeNvml(4, islands=[{0, 1}, {2, 3}], pcie=40)
    found = report({"trainer": {"devices": 4, "strategy": {"tp": 4}}}, nvml)
    text = check.format_report(found)
    assert "GPU 0  self    NVLink  NODE    NODE" in text
    assert found.run.groups["tp"].reach == "node"
    assert any("joins 2 of 4" in finding.relation for finding in found.findings)


def test_the_machine_alone():
    environ = {"NCCL_DEBUG": "INFO", "NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    found = report(None, FakeNvml(), environ=environ)
    assert found.run is None
    assert found.environment.to_set == {"UB_SKIPMC": "1"}
    assert [finding.code for finding in found.findings] == ["env-nccl-debug"]
    text = check.format_report(found)
    assert "hidden by CUDA_VISIBLE_DEVICES" in text
    assert "1 node x 2 Hopper GPUs" in text


def test_the_cpu_is_asked_for_where_there_are_gpus():
    found = report(
        {"trainer": {"accelerator": "cpu", "devices": 2, "strategy": "mcore"}}, FakeNvml()
    )
    assert (found.topology.arch, found.run.world_size) == ("cpu", 2)


def test_environment_errors_decide_on_the_exit_code():
    config = {"trainer": {"num_nodes": 2, "strategy": "mcore"}}
    assert report(config, FakeNvml()).exit_code == 0
    found = report(config, FakeNvml(), environ={"NCCL_SOCKET_IFNAME": "lo"})
    assert found.exit_code == 1


def test_a_launcher_around_the_command():
    environ = {"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}
    found = report(None, FakeNvml(), environ=environ)
    assert (found.topology.nodes, found.topology.gpus_per_node) == (2, 8)
    assert "SLURM: 2 nodes x 8 ranks" in check.format_report(found)


# ------------------------------------------------------------------------------ packages


def test_packages_are_imported_elsewhere(tmp_path, monkeypatch):
    modules = {
        "good_one": "import os\nVALUE = 1\n",
        "raises": "import warnings\nraise ImportError('libnothing.so: cannot open')\n",
        "aborts": "import os\nos.abort()\n",
        "hangs": "import time\ntime.sleep(600)\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = {name: name for name in [*modules, "not_there"]}
    hanging = {"hangs": names.pop("hangs")}
    found = {p.name: p for p in check.probe_packages(names)}
    found |= {p.name: p for p in check.probe_packages(hanging, timeout_s=1.0)}
    states = {name: package.state for name, package in found.items()}
    assert states == {
        "good_one": "works",
        "raises": "broken",
        "aborts": "broken",
        "hangs": "broken",
        "not_there": "missing",
    }
    assert found["raises"].detail.endswith("ImportError: libnothing.so: cannot open")
    assert found["aborts"].detail.endswith(f"ended by {signal.SIGABRT.name}")
    assert found["hangs"].detail.endswith("takes more than 1 s")
    assert not modules.keys() & sys.modules.keys()


def test_a_broken_package_is_a_warning():
    packages = (
        Package(name="DeepEP", state="broken", version="1.2.1", detail="`import deep_ep`: no"),
        Package(name="Apex", state="missing"),
    )
    found = report(None, FakeNvml(), packages=packages)
    assert found.exit_code == 0
    (finding,) = [f for f in found.findings if f.severity == "warning"]
    assert finding.code == "package-broken"
    text = check.format_report(found)
    assert "1.2.1 (does not import)" in text
    assert "not installed" in text


# ------------------------------------------------------------------------------ the command


def test_the_command_in_a_process_of_its_own(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "lightning_mcore", "check", "--json"),
            *(f"--config={EXAMPLE}", "--trainer.accelerator=cpu", "--trainer.devices=6"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "use 4 or 8 devices" in found["findings"][0]["fix"]
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_plan_for_experts(run, answer, config):
    """128 experts with 8 of them chosen, as in a 235B model, over 32 nodes."""
    gpus = {"accelerator": "gpu", "devices": 8, "num_nodes": 64, "precision": "bf16-mixed"}
    model = {"num_layers": 96, "num_moe_experts": 128, "hidden_size": 4096}
    machines = ["--arch", "hopper", "--gpus-per-nvlink-domain", "8", "--network", "infiniband"]

    def plan(ep, **arguments):
        sizes = {"tp": 2, "pp": 8, "vpp": 4, "etp": 1, "ep": ep, "micro_batch_size": 1}
        return config(gpus, model=model, **sizes, **arguments)

    inside = answer("--config", plan(8), *machines)["run"]["experts"]
    assert inside["experts_per_rank"] == 16
    assert inside["moe_dispatcher"]["effective"] == "alltoall"
    across = answer("--config", plan(32), *machines)
    assert across["run"]["experts"]["moe_dispatcher"]["effective"] == "deepep"
    assert "ep-crosses-nodes" in codes(across, "info")
    few = answer("--config", plan(64), *machines)
    assert few["run"]["experts"]["experts_per_rank"] == 2
    assert "placement-useless" in codes(few)
    code, out, _ = run("--config", plan(8), *machines)
    assert code == 0
    assert "experts: 128 over ep 8 = 16 on a rank" in out
    code, out, _ = run("--config", plan(8, moe_dispatcher="deepep"), *machines)
    assert code == 1, "an explicit request that cannot be met here"
    assert "deep_ep" in out


def test_the_json_keys_are_documented(answer):
    text = (ROOT / "docs" / "check.md").read_text()
    found = answer("--config", EXAMPLE, "--trainer.accelerator=cpu")
    keys = {*found, *found["run"], *found["topology"], *found["hardware"], *found["launch"]}
    keys |= {*found["environment"], *found["run"]["groups"]["tp"]}
    keys |= {*found["run"]["switches"]["overlap_p2p"], *found["packages"]["Apex"]}
    assert not [key for key in sorted(keys) if f"`{key}`" not in text]
