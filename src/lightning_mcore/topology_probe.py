"""What this machine has: GPUs and their links by NVML, nodes and ranks by the launcher's variables.

Enters: the NVML module (``nvidia-ml-py``, optional) and a mapping of environment variables. Leaves:
frozen values. Starts no CUDA context, so that ``CUDA_DEVICE_MAX_CONNECTIONS`` can still be set
afterwards, and never raises: what could not be read is ``None`` or missing, and a note says why.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_mcore.topology import Arch, Network, Topology

__all__ = [
    "FOUND",
    "Gpu",
    "Hardware",
    "Launch",
    "nvlink_domain",
    "probe_topology",
    "read_hardware",
    "read_launch",
    "topology_of",
]

FOUND = "NVML"
"""The source of a topology that a probe has found."""

_INFINIBAND = Path("/sys/class/infiniband")
"""Where Linux lists RDMA devices, InfiniBand and RoCE alike."""

_PCIE_LEVELS = {0: "on one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's nearest common ancestor of two GPUs, in the words of ``nvidia-smi topo -m``."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    index: int
    """Its number on the machine, as NVML counts."""
    name: str
    """As the driver calls it, for example ``"NVIDIA H200"``."""
    capability: tuple[int, int] | None = None
    """Compute capability, for example ``(9, 0)``."""
    memory_bytes: int | None = None
    """Device memory in bytes."""
    nvlinks: int = 0
    """NVLink links that are up."""
    clique: str | None = None
    """NVLink partition that reaches beyond this machine, as ``cluster/clique``; ``None`` without
    one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The GPUs of this machine and how they are connected."""

    gpus: tuple[Gpu, ...] = ()
    """In NVML's order; empty on a machine without."""
    visible: tuple[int, ...] = ()
    """Positions in ``gpus`` that ``CUDA_VISIBLE_DEVICES`` leaves to a process started here."""
    links: tuple[tuple[str, ...], ...] = ()
    """``links[i][j]`` is how GPU ``i`` reaches ``j``: ``"NVLink"``, or over PCIe ``"PIX"``,
    ``"PXB"``, ``"PHB"`` (one host bridge), ``"NODE"`` (one NUMA node) or ``"SYS"`` (between
    sockets); ``"self"`` on the diagonal, ``"?"`` if NVML did not tell."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    cuda: str | None = None
    """Newest CUDA version that the driver can run, for example ``"13.0"``."""
    notes: tuple[str, ...] = ()
    """Why there are no GPUs, and what could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How many processes a launcher has started, by its environment variables."""

    launcher: str | None = None
    """``"torchrun"``, ``"SLURM"``, ``"Open MPI"`` or ``"Lightning"``; ``None`` outside of one."""
    nodes: int | None = None
    """Machines in the job."""
    ranks_per_node: int | None = None
    """Processes on each machine."""


def read_hardware(environ: Mapping[str, str], nvml: Any = None) -> Hardware:
    """Reads the GPUs of this machine, and which of them a process started here would see.

    Args:
        environ: Environment variables, usually ``os.environ``.
        nvml: A module with the functions of ``pynvml``; ``None`` imports that one.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Hardware(
                notes=("GPUs were not looked for: pip install nvidia-ml-py to let them be read",)
            )
    try:
        nvml.nvmlInit()
    except Exception as error:
        return Hardware(notes=(f"no GPU: NVML does not start ({_text(error)})",))
    try:
        return _read(environ, nvml)
    except Exception as error:
        return Hardware(notes=(f"GPUs could not be read: NVML failed ({_text(error)})",))
    finally:
        _try(nvml.nvmlShutdown)


def _read(environ: Mapping[str, str], nvml: Any) -> Hardware:
    notes = []
    driver = _try(nvml.nvmlSystemGetDriverVersion)
    number = _try(nvml.nvmlSystemGetCudaDriverVersion)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [_as_str(_try(partial(nvml.nvmlDeviceGetUUID, handle), "")) for handle in handles]
    visible, note = _visible(environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    notes += note
    if not handles:
        notes.append("no GPU: NVML finds none")
    gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles))
    links = tuple(tuple(_link(nvml, a, b) for b in handles) for a in handles)
    if len({gpu.name for gpu in gpus}) > 1:
        notes.append("GPUs differ: NVML's order may not be CUDA's (CUDA_DEVICE_ORDER=PCI_BUS_ID)")
    return Hardware(
        gpus=gpus,
        visible=tuple(visible),
        links=links,
        driver=None if driver is None else _as_str(driver),
        cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
        notes=tuple(notes),
    )


def _visible(value: str | None, uuids: list[str]) -> tuple[list[int], list[str]]:
    """Positions that ``CUDA_VISIBLE_DEVICES`` leaves; like CUDA, up to the first entry it lacks."""
    if value is None:
        return list(range(len(uuids))), []
    found: list[int] = []
    for raw in value.split(","):
        entry = raw.strip()
        if entry.startswith("MIG-"):
            return found, [f"CUDA_VISIBLE_DEVICES={value}: MIG instances are not looked into"]
        fits = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            fits = [int(entry)]
        if len(fits) != 1:
            break
        found += fits
    if len(found) == len(uuids):
        return found, []
    return found, [f"CUDA_VISIBLE_DEVICES={value} leaves {len(found)} of {len(uuids)} GPUs visible"]


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _try(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    capability = _try(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return Gpu(
        index=index,
        name=_as_str(_try(lambda: nvml.nvmlDeviceGetName(handle), "unknown GPU")),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_bytes=None if memory is None else int(memory),
        nvlinks=sum(
            # Links that the GPU does not have are errors, not zeros.
            _try(partial(nvml.nvmlDeviceGetNvLinkState, handle, link), 0) == 1
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        ),
        clique=_try(lambda: _clique(nvml, handle)),
    )


def _clique(nvml: Any, handle: Any) -> str | None:
    """The multi-node NVLink partition; inside one machine the cluster's id is all zeros."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    cluster = bytes(info.clusterUuid).hex()
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not cluster.strip("0"):
        return None
    return f"{cluster}/{info.cliqueId}"


def _link(nvml: Any, one: Any, other: Any) -> str:
    if one is other:
        return "self"
    status = _try(lambda: nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    if status == nvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = _try(lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
    return "?" if level is None else _PCIE_LEVELS.get(level, "?")


def nvlink_domain(links: tuple[tuple[str, ...], ...]) -> int:
    """GPUs per NVLink domain, as ranks see it that are numbered like the GPUs.

    Returns:
        The largest number that divides the GPUs into blocks of neighbours in which every GPU
        reaches every other over NVLink; 1 without NVLink or GPUs.
    """
    count = len(links)
    for size in range(count, 1, -1):
        if count % size == 0 and all(
            links[a][b] == "NVLink"
            for start in range(0, count, size)
            for a in range(start, start + size)
            for b in range(start, start + size)
            if a != b
        ):
            return size
    return 1


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Reads what a launcher says about the job's size; nothing outside of one."""

    def number(name: str) -> int | None:
        text = environ.get(name, "")
        return int(text) if text.isdigit() and int(text) else None

    def share(total: int | None, part: int | None) -> int | None:
        return total // part if total and part and total % part == 0 else None

    if "TORCHELASTIC_RUN_ID" in environ:
        ranks = number("LOCAL_WORLD_SIZE")
        nodes = number("GROUP_WORLD_SIZE") or share(number("WORLD_SIZE"), ranks)
        return Launch(launcher="torchrun", nodes=nodes, ranks_per_node=ranks)
    if "SLURM_NTASKS" in environ:
        nodes = number("SLURM_NNODES") or number("SLURM_JOB_NUM_NODES")
        ranks = number("SLURM_NTASKS_PER_NODE") or share(number("SLURM_NTASKS"), nodes)
        return Launch(launcher="SLURM", nodes=nodes, ranks_per_node=ranks)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        ranks = number("OMPI_COMM_WORLD_LOCAL_SIZE")
        nodes = share(number("OMPI_COMM_WORLD_SIZE"), ranks)
        return Launch(launcher="Open MPI", nodes=nodes, ranks_per_node=ranks)
    return Launch()


def probe_topology(
    environ: Mapping[str, str], *, nodes: int | None = None, ranks_per_node: int | None = None
) -> Topology:
    """The machines of a run that starts here, taking every node to be like this one.

    Args:
        environ: Environment variables, usually ``os.environ``.
        nodes: Hosts, where they are known; ``None``: what the launcher says, or 1.
        ranks_per_node: Processes on each; ``None``: what the launcher says, or one for each GPU.
    """
    hardware, launch = read_hardware(environ), read_launch(environ)
    return topology_of(hardware, launch, environ, nodes=nodes, ranks_per_node=ranks_per_node)[0]


def topology_of(
    hardware: Hardware,
    launch: Launch,
    environ: Mapping[str, str],
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    infiniband: Path = _INFINIBAND,
) -> tuple[Topology, tuple[str, ...]]:
    """Makes a topology of what was read.

    Returns:
        The topology, and notes on what it leaves out or takes for granted.
    """
    nodes = nodes or launch.nodes or 1
    multicast = environ.get("NCCL_NVLS_ENABLE") != "0"
    network = _network(nodes, environ, infiniband)
    if not hardware.gpus:
        topology = Topology(
            gpus_per_nvlink_domain=1,
            nodes=nodes,
            gpus_per_node=ranks_per_node or launch.ranks_per_node or 1,
            arch="cpu",
            network=network,
            multicast=multicast,
            source="; ".join(hardware.notes) or "no GPU",
        )
        return topology, ()
    ranks = ranks_per_node or launch.ranks_per_node or len(hardware.visible) or len(hardware.gpus)
    domain, notes = _domain(hardware, ranks, environ)
    if nodes > 1 and max(ranks, domain) % min(ranks, domain):
        notes.append(
            f"NVLink domains of {domain} GPUs do not line up with {ranks} ranks on each of {nodes}"
            " nodes; ranks are taken to have no NVLink"
        )
        domain = 1
    topology = Topology(
        gpus_per_nvlink_domain=domain,
        nodes=nodes,
        gpus_per_node=ranks,
        arch=_arch(hardware),
        network=network,
        multicast=multicast,
        source=FOUND,
    )
    return topology, tuple(notes)


def _domain(hardware: Hardware, ranks: int, environ: Mapping[str, str]) -> tuple[int, list[str]]:
    """Ranks that share an NVLink domain, and notes."""
    used = list(hardware.visible[:ranks])
    if len(used) < ranks:
        # Launchers that give each rank one GPU hide the others from it.
        used = list(range(len(hardware.gpus)))[:ranks]
    gpus = [hardware.gpus[i] for i in used]
    notes = []
    if len(used) < ranks:
        if len(used) > 1 or not gpus[0].nvlinks:
            return 1, [f"{ranks} ranks share {len(used)} GPUs; they are taken to have no NVLink"]
        notes.append(f"one of {ranks} GPUs is visible; its NVLinks are taken to reach the others")
        domain = ranks
    else:
        domain = nvlink_domain(tuple(tuple(hardware.links[a][b] for b in used) for a in used))
    if domain < ranks and any(gpu.nvlinks for gpu in gpus):
        notes.append(f"NVLink joins {domain} of {ranks} neighbouring GPUs, not all of them")
    cliques = {gpu.clique for gpu in gpus}
    if len(cliques) == 1 and None not in cliques and domain == ranks:
        stated = environ.get("NVLINK_DOMAIN_SIZE", "")
        if stated.isdigit() and int(stated) > domain:
            return int(stated), [*notes, f"NVLINK_DOMAIN_SIZE={stated} across nodes"]
        notes.append(
            "NVLink reaches beyond this machine, how far NVML does not tell; set"
            " NVLINK_DOMAIN_SIZE, or state the topology"
        )
    return domain, notes


def _arch(hardware: Hardware) -> Arch:
    """By the oldest GPU; a GPU that tells no capability counts as old."""
    major = min(gpu.capability[0] if gpu.capability else 0 for gpu in hardware.gpus)
    return "blackwell" if major >= 10 else "hopper" if major == 9 else "ampere"


def _network(nodes: int, environ: Mapping[str, str], infiniband: Path) -> Network:
    if nodes == 1:
        return "none"
    if environ.get("NCCL_IB_DISABLE") == "1" or environ.get("NCCL_NET", "").lower() == "socket":
        return "ethernet"
    return "infiniband" if _try(lambda: any(infiniband.iterdir()), False) else "unknown"


def _try(read: Callable[[], _T], otherwise: Any = None) -> Any:
    """NVML refuses single questions on many machines; each refusal costs one value only."""
    try:
        return read()
    except Exception:
        return otherwise


def _as_str(value: Any) -> str:
    """Releases of nvidia-ml-py differ in whether names are bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
