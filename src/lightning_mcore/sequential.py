"""Cuts an ``nn.Sequential`` (or a list of blocks) into balanced pipeline stages.

Enters: the same blocks on every rank. Leaves: this rank's chunks. What travels between stages is
the output of a block, flattened and padded to the largest boundary, since the engine allocates one
shape for all of them; the shapes themselves are found by running the blocks on the meta device, so
that no rank has to ask another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.errors import ConfigurationError
from lightning_mcore.stage import Stage


def cut_blocks(blocks: Sequence[nn.Module], parts: int) -> list[range]:
    """Contiguous ranges of blocks, one per stage, with the smallest possible largest stage.

    A block weighs its parameter count (at least 1, so that empty ones count too).

    Raises:
        ConfigurationError: If there are fewer blocks than stages, or two stages share a parameter.
    """
    if len(blocks) < parts:
        raise ConfigurationError(
            f"The model has {len(blocks)} blocks, which must be at least `pp` x `vpp` = {parts}"
            " stages; use fewer stages or split the blocks."
        )
    weights = [max(1, sum(p.numel() for p in block.parameters())) for block in blocks]
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[k][n]: the smallest largest part when the first n blocks make k parts.
    best = [[float("inf")] * (len(blocks) + 1) for _ in range(parts + 1)]
    cut = [[0] * (len(blocks) + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for n in range(k, len(blocks) + 1):
            for m in range(k - 1, n):
                largest = max(best[k - 1][m], total[n] - total[m])
                if largest < best[k][n]:
                    best[k][n], cut[k][n] = largest, m
    ranges, end = [], len(blocks)
    for k in range(parts, 0, -1):
        ranges.append(range(cut[k][end], end))
        end = cut[k][end]
    ranges.reverse()
    _check_not_shared(blocks, ranges)
    return ranges


def _check_not_shared(blocks: Sequence[nn.Module], ranges: Sequence[range]) -> None:
    owner: dict[int, int] = {}
    for stage, indices in enumerate(ranges):
        for index in indices:
            for name, param in blocks[index].named_parameters():
                if owner.setdefault(id(param), stage) != stage:
                    raise ConfigurationError(
                        f"Parameter `{name}` of block {index} is shared between pipeline stages"
                        f" {owner[id(param)]} and {stage}, where it would become two parameters;"
                        " untie it, or use fewer stages so that both uses fall on one."
                    )


class BoundaryShapes:
    """Shapes of what travels between stages, found on the meta device and kept per input shape."""

    def __init__(self, blocks: Sequence[nn.Module], ranges: Sequence[range]) -> None:
        self._blocks = [copy.deepcopy(block).to("meta") for block in blocks]
        self._ends = [indices[-1] for indices in ranges[:-1]]
        self._known: dict[tuple[torch.Size, torch.dtype], list[torch.Size]] = {}

    def after_stages(self, value: Tensor) -> list[torch.Size]:
        """Output shape of every stage but the last, for an input like ``value``.

        Raises:
            ConfigurationError: If a block cannot run on the meta device or gives no single tensor.
        """
        key = (value.shape, value.dtype)
        if key not in self._known:
            shapes = []
            hidden: Any = torch.empty(value.shape, dtype=value.dtype, device="meta")
            with torch.no_grad():
                for index, block in enumerate(self._blocks[: self._ends[-1] + 1]):
                    hidden = self._run(index, block, hidden)
                    if index in self._ends:
                        shapes.append(hidden.shape)
            self._known[key] = shapes
        return self._known[key]

    @staticmethod
    def _run(index: int, block: nn.Module, hidden: Tensor) -> Tensor:
        try:
            output = block(hidden)
        except Exception as error:
            raise ConfigurationError(
                f"The output shape of block {index} ({type(block).__name__}) for an input of shape"
                f" {tuple(hidden.shape)} could not be found on the meta device ({error}); build the"
                " stages with a factory instead of an nn.Sequential."
            ) from error
        if not isinstance(output, Tensor):
            raise ConfigurationError(
                f"Block {index} ({type(block).__name__}) returns {type(output).__name__}, but one"
                " tensor travels between blocks of an nn.Sequential; return a single tensor, or use"
                " a factory."
            )
        return output


class SequentialChunk(nn.Module):
    """The blocks of one stage, with the surface that the engine's schedules expect of a chunk."""

    share_embeddings_and_output_weights = False

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        indices: range,
        stage: Stage,
        config: Any,
        model_type: Any,
        shapes: BoundaryShapes | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model_type = model_type
        self.vp_stage = stage.vp_stage
        self.pre_process = stage.is_first
        self.post_process = stage.is_last
        # Named by their place in the whole model, so that names mean the same in every layout.
        self.blocks = nn.ModuleDict({str(index): blocks[index] for index in indices})
        self._stage = stage
        self._shapes = shapes
        self._boundaries: list[torch.Size] = []
        self._received: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Takes what the previous stage sent (called by the schedule)."""
        self._received = input_tensor[0]

    def activation_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """The flat length of the largest boundary, as a sequence of one sample."""
        return max(shape.numel() for shape in self._boundary_shapes(args, kwargs)), 1

    def _boundary_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size]:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise ConfigurationError(
                "A model cut from an nn.Sequential is called with exactly one tensor, but got"
                f" {len(args)} positional and {len(kwargs)} keyword arguments."
            )
        return self._shapes.after_stages(args[0]) if self._shapes is not None else []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the blocks: from the model's input on the first stage, else from what was received.

        Returns:
            The model's output on the last stage; elsewhere a padded flat tensor ``[n, 1, 1]`` in
            the pipeline's dtype.
        """
        boundaries = self._boundary_shapes(args, kwargs)
        if self.pre_process:
            hidden = args[0]
        else:
            assert self._received is not None, "the schedule sets the input of a later stage"
            shape = boundaries[self._stage.index - 1]
            hidden = self._received.reshape(-1)[: shape.numel()].view(shape)
        for block in self.blocks.values():
            hidden = block(hidden)
        assert isinstance(hidden, Tensor), "a block returned no tensor"
        if self.post_process:
            return hidden
        capacity = max(shape.numel() for shape in boundaries)
        flat = hidden.to(self.config.pipeline_dtype).reshape(-1, 1, 1)
        # Padding makes a fresh tensor even when it adds nothing: the engine frees its storage after
        # sending, which must not be shared with an activation that the backward pass still needs.
        return functional.pad(flat, (0, 0, 0, 0, 0, capacity - flat.shape[0]))
