"""Makes torchmetrics objects of a module give one process's value under every layout.

In a step, code behind the model call runs on the last stage only, so that is where metrics are
updated. ``metric.compute()`` sums the states of data-parallel ranks there and hands the result to
every other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_mcore.parallel_state import ParallelState


@contextmanager
def replicated_metrics(module: nn.Module, state: ParallelState) -> Iterator[None]:
    """Adapts the metrics found in ``module`` for one run, and restores them afterwards.

    Within the context ``compute()`` of a metric is collective over the world, as it is over all
    ranks under Lightning's other strategies.
    """
    with ExitStack() as stack:
        for metric in module.modules():
            if isinstance(metric, Metric):
                stack.callback(_adapt(metric, state))
        yield


def _adapt(metric: Metric, state: ParallelState) -> Callable[[], None]:
    group, compute = metric.process_group, metric.compute
    # Context-parallel peers see different tokens of the same samples.
    metric.process_group = state.groups.dp_cp

    def compute_everywhere(*args: Any, **kwargs: Any) -> Any:
        if not _is_synchronised(metric):
            return compute(*args, **kwargs)
        value = compute(*args, **kwargs) if state.layout.is_last_stage else None
        box = [value]
        source = dist.get_process_group_ranks(state.groups.pp)[-1]
        dist.broadcast_object_list(box, source, group=state.groups.pp, device=metric.device)
        return box[0]

    def restore() -> None:
        metric.process_group = group
        metric.compute = compute

    if state.layout.pp > 1:
        # Metric sets this attribute on the instance itself, to wrap the class's method.
        metric.compute = compute_everywhere
    return restore


def _is_synchronised(metric: Metric) -> bool:
    """Whether this call of ``compute`` is for all ranks.

    ``Metric.forward`` calls ``compute`` for the value of one batch with ``_to_sync`` off, which
    happens on the last stage alone. Private in torchmetrics; watched by
    tests/ranks/test_metrics.py.
    """
    return bool(getattr(metric, "_to_sync", True))


def batch_value(metric: Metric) -> Tensor | None:
    """The value of the latest batch, where the metric was called rather than only updated.

    What Lightning logs ``on_step``. Private in torchmetrics.
    """
    value = getattr(metric, "_forward_cache", None)
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def set_batch_value(metric: Metric, value: Tensor | None) -> None:
    """Gives the metric of a rank without updates the value that the last stage has."""
    metric._forward_cache = value


class MetricPaths:
    """Attribute paths of metrics in a module; remembers them, since large models have many modules.

    Args:
        module: In which metrics are attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[int, tuple[str, nn.Module]] = {}

    def __call__(self, metric: nn.Module) -> str:
        """Path of a metric; empty if it is no attribute, which Lightning's own check explains."""
        known = self._known.get(id(metric))
        if known is not None and known[1] is metric:
            return known[0]
        for path, candidate in self._module.named_modules():
            if candidate is metric:
                self._known[id(metric)] = str(path), metric
                return str(path)
        return ""
