"""Puts what a step returned for its microbatches back together as one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.parallel_state import ParallelState
from lightning_mcore.schedule import MicrobatchOutput
from lightning_mcore.step_output import NUM_TOKENS


def merge_outputs(outputs: Sequence[MicrobatchOutput], *, per_token_loss: bool = False) -> Any:
    """Joins outputs of the same structure, in microbatch order.

    Tensors with dimensions are concatenated along dim 0; scalars are averaged, each weighted with
    its samples; mappings, lists and tuples are joined entry by entry; anything else becomes a list.
    A single output is returned as it is, and none at all gives ``None``. With ``per_token_loss``,
    the numbers of tokens that steps return are added up.
    """
    if not outputs:
        return None
    if len(outputs) == 1:
        return outputs[0].value
    merged = _merge([output.value for output in outputs], [output.samples for output in outputs])
    if per_token_loss and isinstance(merged, Mapping) and NUM_TOKENS in merged:
        return {**merged, NUM_TOKENS: sum(output.value[NUM_TOKENS] for output in outputs)}
    return merged


def from_last_stage(output: Any, state: ParallelState, device: torch.device) -> Any:
    """Hands what the last stage has to the earlier ones; collective over the pipeline group."""
    if state.layout.pp == 1:
        return output
    box = [output if state.layout.is_last_stage else None]
    source = dist.get_process_group_ranks(state.groups.pp)[-1]
    dist.broadcast_object_list(box, source, group=state.groups.pp, device=device)
    return box[0]


def _merge(values: list[Any], samples: list[int]) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        if first.dim() > 0:
            return torch.cat(values)
        stacked = torch.stack(values).double()
        if len(set(samples)) == 1:
            return stacked.mean().to(first.dtype)
        # Weights as numbers: a tensor of them would be a copy that the host waits for.
        terms = [value * count for value, count in zip(stacked.unbind(), samples, strict=True)]
        return (torch.stack(terms).sum() / sum(samples)).to(first.dtype)
    if isinstance(first, Mapping):
        return {key: _merge([value[key] for value in values], samples) for key in first}
    if isinstance(first, tuple):
        joined = [_merge(list(items), samples) for items in zip(*values, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    if isinstance(first, list):
        if any(isinstance(item, (Tensor, Mapping)) for item in first):
            return [_merge(list(items), samples) for items in zip(*values, strict=True)]
        return [item for value in values for item in value]
    return values
