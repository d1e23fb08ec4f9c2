"""CUDA graphs of layers in a run: when they are captured, and that every step fits them.

Enters: chunks in the engine's DDP, their optimizer, the shape of each step. The policy is here, the
engine's calls are in ``_mcore.cuda_graphs``. Every rank calls every method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_mcore._mcore import cuda_graphs
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import Layout

__all__ = ["LayerGraphs"]


class LayerGraphs:
    """Graphs of this rank's layers.

    Args:
        kind: ``"transformer_engine"`` captures once ``cuda_graph_warmup_steps`` (of the model's
            config) steps have run, at least one; ``"local"`` is captured by the schedule of the
            first step.
        chunks: Wrapped in the engine's DDP.
        config: Our copy of their config.
        optimizer: The engine's.
        layout: Sizes.
        overlap_param_gather: Whether layers wait for gathered parameters through hooks, which
            graphs do not call.
    """

    def __init__(
        self,
        kind: str,
        chunks: Sequence[nn.Module],
        config: Any,
        optimizer: Any,
        layout: Layout,
        *,
        overlap_param_gather: bool,
    ) -> None:
        self._kind = kind
        self._chunks = list(chunks)
        self._config = config
        self._optimizer = optimizer
        self._layout = layout
        self._gathers = overlap_param_gather
        self._layers = cuda_graphs.graphable_layers(chunks)
        self._shape: tuple[int, int, int] | None = None
        """Sequence length, micro-batch size and number of microbatches of all steps."""
        self._steps = 0
        self._helper: Any = None

    @property
    def count(self) -> int:
        """Graphs that were captured on this rank; 0 before."""
        return cuda_graphs.count_graphs(self._layers)

    def check_step(self, seq_length: int, micro_batch_size: int, num_microbatches: int) -> None:
        """Notes the shape of the first step, and checks that of later ones.

        Raises:
            ConfigurationError: If a step cannot be replayed; on every rank that has such a batch.
        """
        shape = (seq_length, micro_batch_size, num_microbatches)
        if self._shape is None:
            self._shape = shape
        # Without a pipeline, microbatches come one after the other and share their graphs.
        compared = 3 if self._layout.pp > 1 else 2
        if shape[:compared] != self._shape[:compared]:
            # The replay would copy into inputs of the old shape, or broadcast to it.
            names = ("sequence length", "micro-batch size", "number of microbatches")[:compared]
            raise ConfigurationError(
                f"`cuda_graphs` ({self._kind!r}) replays steps of one {', '.join(names)}"
                f" ({self._shape[:compared]}), and this one has {shape[:compared]}; pad sequences"
                " to one length, use drop_last=True in the DataLoader, or cuda_graphs=False."
            )

    def start_step(self, set_hooks: Callable[[bool], None], hooks_on: bool) -> None:
        """Before an optimizer step's first batch, gradients being zero: captures when it is time.

        Args:
            set_hooks: Switches the forward hooks that wait for gathered parameters.
            hooks_on: Whether they are on.

        Raises:
            ConfigurationError: If nothing can be captured; on every rank alike.
        """
        self._steps += 1
        if self._kind == "local":
            if self._steps == 2:
                self._check_captured()
            return
        due = 1 + max(1, int(self._config.cuda_graph_warmup_steps))
        if self._helper is not None or self._steps < due:
            return
        assert self._shape is not None, "the first step noted its shape"
        seq_length, micro_batch_size, num_microbatches = self._shape
        # TransformerEngine refuses modules with hooks (graph.py, _make_graphed_callables).
        set_hooks(False)
        self._helper = cuda_graphs.make_te_graphs(
            self._chunks,
            self._config,
            self._optimizer,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            data_parallel_size=self._layout.dp,
        )
        set_hooks(hooks_on)
        if self._gathers:
            self._helper.cuda_graph_set_manual_hooks()
        self._check_captured()

    def _check_captured(self) -> None:
        """The engine goes on without a word where there was nothing to capture."""
        # A stage of a pipeline may hold an embedding alone.
        if self.count == 0 and self._layout.pp == 1:
            raise ConfigurationError(
                f"`cuda_graphs` ({self._kind!r}) captured nothing: the model has no layer that the"
                " engine can capture, or `cuda_graph_modules` of TransformerConfig names none of"
                " their parts; leave that field out, or use cuda_graphs=False."
            )
        rank_zero_info(
            f"From step {self._steps} on, layers are replayed: {self.count} CUDA graphs on this"
            " rank."
        )

    def evaluating(self) -> AbstractContextManager[None]:
        """Around forward passes that are not training: layers run themselves."""
        return cuda_graphs.layers_themselves(self._layers)

    def delete(self) -> None:
        """Frees everything; to be called when no step follows, also after an error."""
        helper, self._helper = self._helper, None
        cuda_graphs.delete_graphs(self._layers, helper)
