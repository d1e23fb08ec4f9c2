"""A stand-in for the module ``pynvml``, with the answers of machines we do not have here.

It has the functions, parameter names, return types and constants of nvidia-ml-py 13;
``test_topology_probe.py`` compares them with the real module where that is installed.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace


class NVMLError(Exception):
    """The real one carries a number and derives its text from it."""


class FabricInfo(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    )


class FakeNvml:
    """``islands`` are sets of GPUs that reach each other over NVLink; others go over PCIe."""

    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_GPU_FABRIC_STATE_COMPLETED = 3
    c_nvmlGpuFabricInfoV_t = FabricInfo

    def __init__(
        self,
        count=8,
        *,
        name="NVIDIA H200",
        capability=(9, 0),
        islands=None,
        links=18,
        cluster=bytes(16),
        pcie=50,
        starts=True,
        lacks=(),
    ):
        self.count, self.name, self.capability = count, name, capability
        self.islands = [set(range(count))] if islands is None else islands
        self.links, self.cluster, self.pcie = links, cluster, pcie
        self.starts, self.lacks = starts, lacks
        self.open = 0

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "lacks") if name.startswith("nvml") else False:

            def refuse(*_, **__):
                raise NVMLError("Not Supported")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        if not self.starts:
            raise NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        return SimpleNamespace(index=index)

    def nvmlDeviceGetName(self, handle):
        return self.name[handle.index] if isinstance(self.name, list) else self.name

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle.index:08x}-1111-2222-3333-444455556666"

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(total=143771 * 2**20, free=0, used=0)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self.capability

    def nvmlDeviceGetNvLinkState(self, device, link):
        if link >= self.links:
            raise NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetP2PStatus(self, device1, device2, p2pIndex):
        assert p2pIndex == self.NVML_P2P_CAPS_INDEX_NVLINK
        pair = {device1.index, device2.index}
        return 0 if any(pair <= island for island in self.islands) else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, device1, device2):
        return self.pcie

    def nvmlDeviceGetGpuFabricInfoV(self, device, gpuFabricInfo):
        info = gpuFabricInfo._obj
        info.clusterUuid[:] = self.cluster
        info.cliqueId, info.state = 7, self.NVML_GPU_FABRIC_STATE_COMPLETED
        return 0
