"""What a thread is doing, seen from another one: its Python stack and the collective it is in."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

_KNOWN_WAITS = {
    ("pipeline_parallel/p2p_communication.py", ""): ("a pipeline send or receive", "pp"),
    ("distributed/param_and_grad_buffer.py", ""): ("the reduction of gradients", "dp_cp"),
    ("lightning_mcore/step_log.py", "__call__"): ("the exchange of logs", "world_cpu"),
}
"""Waits on the handle of an earlier call, which show no frame of torch.distributed."""
_LAST_FRAMES = 16


def stack_of(thread_id: int) -> str:
    """The end of a thread's Python stack, most recent call last."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "(the thread has ended)"
    return "".join(traceback.format_stack(frame)[-_LAST_FRAMES:])


def is_inside(thread_id: int, function: str) -> bool:
    """Whether a thread is in a function of this name."""
    frame = sys._current_frames().get(thread_id)
    return any(f.f_code.co_name == function for f in _outwards(frame))


def waiting_in(thread_id: int, groups: Mapping[str, Any]) -> dict[str, Any] | None:
    """The collective that a thread is in: ``op``, ``group`` (name) and ``ranks``.

    Args:
        thread_id: Of a thread of this process.
        groups: Process groups by name; the first name of a group is told.
    """
    found: tuple[str, Any] | None = None
    for frame in _outwards(sys._current_frames().get(thread_id)):
        path = frame.f_code.co_filename.replace("\\", "/")
        if path.endswith("torch/distributed/distributed_c10d.py"):
            # The outermost call is the one that was asked for (all_gather_object, not all_gather).
            found = (frame.f_code.co_name, frame.f_locals.get("group"))
        elif found is None:
            for (suffix, function), (op, group) in _KNOWN_WAITS.items():
                if path.endswith(suffix) and function in ("", frame.f_code.co_name):
                    return _named(op, groups.get(group), groups)
        elif not path.endswith("torch/distributed/c10d_logger.py"):
            break
    return None if found is None else _named(*found, groups)


def unfinished_on_device(most: int = 8) -> list[str]:
    """Collectives that NCCL has started and not finished, from PyTorch's flight recorder.

    Empty without NCCL, or where ``TORCH_FR_BUFFER_SIZE=0`` has switched the recorder off. Reading
    it waits for no device.
    """
    bindings: Any = torch._C._distributed_c10d
    dump = getattr(bindings, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    return [
        f"{entry.get('profiling_name')} {entry.get('collective_seq_id')} of"
        f" {entry.get('process_group')} ({entry.get('state')})"
        for entry in entries[:most]
    ]


def _named(op: str, group: Any, groups: Mapping[str, Any]) -> dict[str, Any]:
    if group is None or group is dist.group.WORLD:
        return {"op": op, "group": "world", "ranks": list(range(dist.get_world_size()))}
    name = next((name for name, known in groups.items() if known is group), "a group of its own")
    return {"op": op, "group": name, "ranks": dist.get_process_group_ranks(group)}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
