"""What is read through NVML and from a launcher's variables, and what a topology makes of it."""

import inspect

import pytest
import torch

from lightning_mcore.topology import Topology
from lightning_mcore.topology_probe import (
    Hardware,
    Launch,
    nvlink_domain,
    probe_topology,
    read_hardware,
    read_launch,
    topology_of,
)
from tests.unit.nvml import FabricInfo, FakeNvml


def test_the_stand_in_is_like_the_real_module():
    real = pytest.importorskip("pynvml")
    for name in dir(FakeNvml):
        if name.startswith("nvml"):
            own = list(inspect.signature(getattr(FakeNvml, name)).parameters)[1:]
            assert own == list(inspect.signature(getattr(real, name)).parameters), name
        elif name.startswith("NVML"):
            assert getattr(FakeNvml, name) == getattr(real, name), name
    assert [name for name, _ in FabricInfo._fields_] == [
        name for name, _ in real.c_nvmlGpuFabricInfoV_t._fields_
    ]


def test_the_real_module_or_its_absence_is_told():
    hardware = read_hardware({})
    assert bool(hardware.gpus) != bool(hardware.notes)
    assert not torch.cuda.is_initialized(), "probing must leave CUDA alone"


def test_a_server_with_an_nvlink_switch():
    nvml = FakeNvml()
    hardware = read_hardware({}, nvml)
    assert nvml.open == 0, "what was opened must be closed"
    assert len(hardware.gpus) == 8
    gpu = hardware.gpus[3]
    assert (gpu.index, gpu.name, gpu.capability) == (3, "NVIDIA H200", (9, 0))
    assert (gpu.nvlinks, gpu.clique, gpu.memory_bytes) == (18, None, 143771 * 2**20)
    assert hardware.links[0][:3] == ("self", "NVLink", "NVLink")
    assert (hardware.driver, hardware.cuda) == ("580.95.05", "13.0")
    assert hardware.visible == tuple(range(8))
    assert hardware.notes == ()


@pytest.mark.parametrize(
    ("islands", "domain"),
    [
        ([set(range(8))], 8),
        ([{0, 1, 2, 3}, {4, 5, 6, 7}], 4),
        ([{0, 1}, {2, 3}, {4, 5}, {6, 7}], 2),
        ([{0, 1}, {2, 3}, {4, 5}], 1),  # two GPUs are left out
        ([{0, 4}, {1, 5}, {2, 6}, {3, 7}], 1),  # NVLink, but not between neighbours
        # A hybrid cube mesh: four neighbours all linked, and each to one of the other four.
        ([{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}], 4),
        ([], 1),
    ],
)
def test_nvlink_domains(islands, domain):
    hardware = read_hardware({}, FakeNvml(islands=islands))
    assert nvlink_domain(hardware.links) == domain
    topology, notes = topology_of(hardware, Launch(), {})
    assert topology.gpus_per_nvlink_domain == domain
    assert bool(notes) == (domain < 8)


@pytest.mark.parametrize(
    ("level", "word"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (77, "?")]
)
def test_pcie_between_gpus(level, word):
    hardware = read_hardware({}, FakeNvml(2, islands=[], links=0, pcie=level))
    assert hardware.links == (("self", word), (word, "self"))
    assert hardware.gpus[0].nvlinks == 0


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("0,1", (0, 1)),
        ("3, 1", (3, 1)),
        ("GPU-00000002,GPU-00000000-1111", (2, 0)),
        ("1,9,0", (1,)),  # as in CUDA, nothing counts behind an entry that does not exist
        ("", ()),
        ("-1", ()),
        ("GPU-0", ()),  # fits several
        ("MIG-1", ()),
    ],
)
def test_visible_devices(value, visible):
    hardware = read_hardware({"CUDA_VISIBLE_DEVICES": value}, FakeNvml(4))
    assert hardware.visible == visible
    assert len(hardware.gpus) == 4
    assert f"CUDA_VISIBLE_DEVICES={value}" in hardware.notes[0]


@pytest.mark.parametrize(
    "refused", [name for name in dir(FakeNvml) if name.startswith("nvml")], ids=str
)
def test_no_refusal_of_nvml_raises(refused):
    hardware = read_hardware({}, FakeNvml(2, lacks=(refused,)))
    topology, _ = topology_of(hardware, Launch(), {})
    essential = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    assert (topology.arch == "cpu") == (refused in essential)
    if refused in essential:
        assert "Not Supported" in topology.source


def test_without_nvml():
    hardware = read_hardware({}, FakeNvml(starts=False))
    assert hardware.notes == (
        "no GPU: NVML does not start (NVMLError: NVML Shared Library Not Found)",
    )
    topology, notes = topology_of(hardware, Launch(), {}, nodes=2, ranks_per_node=4)
    assert (topology.arch, topology.num_gpus, notes) == ("cpu", 8, ())
    assert topology.source == hardware.notes[0]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        *(((major, minor), "ampere") for major, minor in ((7, 0), (8, 0), (8, 9))),
        *(((9, 0), "hopper"), ((10, 0), "blackwell"), ((12, 0), "blackwell")),
    ],
)
def test_architecture(capability, arch):
    hardware = read_hardware({}, FakeNvml(capability=capability))
    assert topology_of(hardware, Launch(), {})[0].arch == arch


def h200(**settings):
    return read_hardware({}, FakeNvml(**settings))


def topology(hardware, environ=None, **settings):
    return topology_of(hardware, Launch(), environ or {}, **settings)


def test_ranks_take_part_of_the_gpus():
    found, notes = topology(h200(), nodes=2, ranks_per_node=4)
    assert (found.gpus_per_nvlink_domain, found.gpus_per_node, found.nodes) == (4, 4, 2)
    assert notes == ()


def test_a_rank_that_sees_only_its_own_gpu():
    """As with SLURM's --gpus-per-task=1, first by variable, then by cgroup."""
    hardware = read_hardware({"CUDA_VISIBLE_DEVICES": "5"}, FakeNvml())
    assert topology(hardware, ranks_per_node=8)[0].gpus_per_nvlink_domain == 8
    found, (note,) = topology(h200(count=1), ranks_per_node=8)
    assert found.gpus_per_nvlink_domain == 8
    assert "one of 8 GPUs is visible" in note
    found, (note,) = topology(h200(count=1, links=0), ranks_per_node=8)
    assert found.gpus_per_nvlink_domain == 1
    assert "8 ranks share 1 GPUs" in note


def test_domains_and_nodes_that_do_not_line_up_are_no_error():
    hardware = h200(islands=[{0, 1}, {2, 3}, {4, 5}, {6, 7}])
    found, notes = topology(hardware, nodes=2, ranks_per_node=3)
    assert found.gpus_per_nvlink_domain == 1
    assert notes


def test_nvlink_beyond_the_machine():
    hardware = h200(count=4, name="NVIDIA GB200", capability=(10, 0), cluster=bytes([1] * 16))
    assert hardware.gpus[0].clique == "01" * 16 + "/7"
    found, (note,) = topology(hardware, nodes=18)
    assert (found.gpus_per_nvlink_domain, found.gpus_per_node) == (4, 4)
    assert "NVLINK_DOMAIN_SIZE" in note
    found, _ = topology(hardware, {"NVLINK_DOMAIN_SIZE": "72"}, nodes=18)
    assert (found.gpus_per_nvlink_domain, found.num_gpus, found.arch) == (72, 72, "blackwell")


def test_gpus_that_differ_are_noted():
    hardware = h200(count=2, name=["NVIDIA A100", "NVIDIA H100"])
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in hardware.notes[0]


def test_network_and_multicast(tmp_path):
    empty, devices = tmp_path / "none", tmp_path / "some"
    (devices / "mlx5_0").mkdir(parents=True)

    def network(environ=None, nodes=2, infiniband=devices):
        return topology(h200(), environ, nodes=nodes, infiniband=infiniband)[0].network

    assert network(nodes=1) == "none"
    assert network() == "infiniband"
    assert network(infiniband=empty) == "unknown"
    assert network({"NCCL_IB_DISABLE": "1"}) == network({"NCCL_NET": "Socket"}) == "ethernet"
    assert topology(h200())[0].multicast is True
    assert topology(h200(), {"NCCL_NVLS_ENABLE": "0"})[0].multicast is False


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch()),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch()),  # Lightning's own; the Trainer knows
        (
            {
                "TORCHELASTIC_RUN_ID": "none",
                "LOCAL_WORLD_SIZE": "8",
                "GROUP_WORLD_SIZE": "2",
                "WORLD_SIZE": "16",
            },
            Launch(launcher="torchrun", nodes=2, ranks_per_node=8),
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32"},
            Launch(launcher="torchrun", nodes=4, ranks_per_node=8),
        ),
        (
            {"SLURM_NTASKS": "32", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8"},
            Launch(launcher="SLURM", nodes=4, ranks_per_node=8),
        ),
        (
            {"SLURM_NTASKS": "32", "SLURM_JOB_NUM_NODES": "4"},
            Launch(launcher="SLURM", nodes=4, ranks_per_node=8),
        ),
        (  # uneven: nothing is made up
            {"SLURM_NTASKS": "7", "SLURM_NNODES": "2"},
            Launch(launcher="SLURM", nodes=2),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Launch(launcher="Open MPI", nodes=4, ranks_per_node=4),
        ),
        (
            {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "many"},
            Launch(launcher="torchrun"),
        ),
    ],
)
def test_launchers(environ, launch):
    assert read_launch(environ) == launch


def test_a_probe_is_a_topology():
    found = probe_topology({}, nodes=3, ranks_per_node=2)
    assert isinstance(found, Topology)
    assert (found.nodes, found.gpus_per_node) == (3, 2)
    assert topology(Hardware(notes=("why",)))[0].source == "why"
