"""Names the process group of collectives over gloo in a profile, and the waits for them.

For NCCL the profiler records both; for gloo neither (torch 2.11 and 2.13). Part of running the
engine on CPU: never in use with a GPU, and only while a profile is recorded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from lightning_mcore._mcore.patching import Patches

_CALLS = re.compile(
    r"_?(all_?reduce|all_?gather|reduce_?scatter|broadcast|reduce|gather|scatter|all_?to_?all)"
    r"(_\w+)?|barrier|send|recv|recv_anysource"
)
"""Methods of ``ProcessGroup`` that communicate. Their names differ between versions of torch: the
coalesced ones end in ``_tensor_coalesced`` in 2.11, in ``_single_coalesced`` in 2.13."""


@contextmanager
def gloo_ranges() -> Iterator[None]:
    """Opens profiler ranges around collectives (``mcore:comm NAME``) and waits (``mcore:wait``).

    ``NAME`` is torch's name of the process group. The methods of torch's own classes are replaced,
    which every caller in this process goes through, and put back at the end.
    """
    with ExitStack() as stack:
        patches = Patches(stack)
        for name in list(vars(dist.ProcessGroup)):
            if _CALLS.fullmatch(name):
                method = getattr(dist.ProcessGroup, name)
                patches.set(dist.ProcessGroup, name, _in_range_of_group(method))
        patches.replace(dist.Work, "wait", _in_wait(dist.Work.wait))
        yield


def _in_range_of_group(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"mcore:comm {group.group_name}"):
            return method(group, *args, **kwargs)

    return call


def _in_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with record_function("mcore:wait"):
            return method(work, *args, **kwargs)

    return call
