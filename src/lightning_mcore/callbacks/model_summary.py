"""Lightning's model summary with totals of the whole model instead of one rank's part.

What enters: the strategy's chunks. What leaves: the table that global rank zero prints. Every rank
calls it, since the parts are counted together: one collective over gloo, at the start of ``fit``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import callbacks
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_mcore.build import count_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer

    from lightning_mcore.run import ModelRun

__all__ = ["ModelSummary"]


class ModelSummary(callbacks.ModelSummary):
    """Prints the modules of global rank zero, and the parameters of the whole model.

    A rank holds some stages of the model, and its share of their tensor-parallel layers, and
    Lightning's own summary, which the Trainer adds by itself, counts just those. Here the totals,
    trainable or not, and the size in MB are over all pipeline stages and tensor- and
    expert-parallel ranks, each parameter counted once. The table's rows, its modes and FLOPs are
    those of rank zero, and say so.

    Takes the place of Lightning's summary when it is among the Trainer's callbacks, and equals it
    under any other strategy.

    Args:
        max_depth: Levels of modules in the table; 0 prints no summary.
        **summarize_kwargs: As for Lightning's callback.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth, **summarize_kwargs)
        self._count: Callable[[int, bool], int] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run: ModelRun | None = getattr(trainer.strategy, "_model_run", None)
        if run is None or not self._max_depth:
            super().on_fit_start(trainer, pl_module)
            return
        in_chunks = [param for chunk in run.inner for param in chunk.parameters()]
        trainable = [param for param in in_chunks if param.requires_grad]
        total, _ = count_parameters(run.inner, run.state)
        total_trainable, _ = count_parameters([nn.ParameterList(trainable)], run.state)
        here = sum(param.numel() for param in in_chunks)
        here_trainable = sum(param.numel() for param in trainable)

        def count(counted_here: int, only_trainable: bool) -> int:
            # What Lightning counted beyond the chunks, such as a frozen teacher, is on all ranks.
            if only_trainable:
                return counted_here - here_trainable + total_trainable
            return counted_here - here + total

        self._count = count
        if run.state.layout.world_size > run.state.layout.dp:
            rank_zero_info(
                "Model summary: the table shows what rank 0 holds; the totals below it are of the"
                " whole model, without copies."
            )
        super().on_fit_start(trainer, pl_module)

    @override
    def summarize(  # type: ignore[override]  # a static method there, called on the instance
        self,
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self._count is not None:
            total = self._count(total_parameters, False)
            trainable_parameters = self._count(trainable_parameters, True)
            if total != total_parameters:
                summary_data = [
                    ("Params on rank 0" if name == "Params" else name, column)
                    for name, column in summary_data
                ]
                model_size *= total / total_parameters
            total_parameters = total
        super().summarize(
            summary_data, total_parameters, trainable_parameters, model_size, *args, **kwargs
        )
