"""The Lightning strategy as users see it: its arguments, and what they may ask it in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lightning_mcore.build import Factory
from lightning_mcore.config import ParallelSizes, SwitchRequest
from lightning_mcore.errors import ConfigurationError, NotInitializedError
from lightning_mcore.loop_hooks import LoopStrategy
from lightning_mcore.nonfinite import NonFinite
from lightning_mcore.optimizer import StepStats
from lightning_mcore.prepare import Request, build_model
from lightning_mcore.stage import Pipeline
from lightning_mcore.switches import Switches

Auto = bool | Literal["auto"]


class MCoreStrategy(LoopStrategy):
    """Trains a LightningModule on Megatron-Core with tensor, pipeline and data parallelism.

    Args:
        tp: Tensor-parallel size: ranks that share each layer.
        pp: Pipeline size: ranks that hold consecutive stages of layers.
        vpp: Chunks per pipeline rank. ``None``: one chunk, 1F1B. 2 or more: interleaved 1F1B.
        cp: Context-parallel size: ranks that share each sequence.
        ep: Expert-parallel size: ranks that hold different experts.
        etp: Tensor-parallel size of experts. ``None``: like ``tp``.
        micro_batch_size: Samples in a microbatch. ``None``: the whole batch without pipelining,
            1 with it.
        sequence_parallel: Splits activations between tensor-parallel regions along the sequence.
        overlap_grad_reduce: Reduces gradients bucket by bucket during the backward pass.
        overlap_param_gather: Gathers updated parameters during the next forward pass.
        use_distributed_optimizer: Shards optimizer state over data parallel (ZeRO-1).
        overlap_p2p: Overlaps pipeline sends and receives with compute; needs ``vpp >= 2``. ``True``
            with ``vpp=None`` picks the smallest ``vpp`` that divides ``model_dims['num_layers']``.
        bucket_size: Elements per gradient bucket. ``None``: the engine's ``max(40M, 1M x dp)``.
        seq_length: Tokens per sample, only where the model call has no token ids of shape
            ``[b, s]`` to read it from.
        ddp: Further fields of the engine's DistributedDataParallelConfig.
        optimizer: Further fields of the engine's OptimizerConfig.
        init_from: Checkpoint of ours or plain file to load weights (only) from, in any layout.
        nonfinite: What to do when the gradient holds NaN or Inf: ``"error"`` stops all ranks before
            a parameter changes, ``"skip"`` leaves the step out, with the learning rate held, and
            ``"warn"`` goes on. Overflows that fp16 loss scaling handles are not meant.
        timeout_s: Seconds without progress on a rank after which the run is taken to hang, and
            ends on all ranks with a report of where each one is.
        peer_timeout_s: Seconds of silence after which a rank counts as lost. When a rank dies or
            raises, the others know at once, and end within half of this time, at most 5 s.
        process_group_backend: Backend of the world group; by default nccl on GPUs, gloo on CPU.

    Raises:
        ConfigurationError: For sizes and switches that cannot work, as soon as it can be known: for
            the sizes alone here, with the world size, the hardware and the LightningModule's
            optional ``model_dims`` before any process group exists.
    """

    strategy_name = "mcore"

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        *,
        micro_batch_size: int | None = None,
        sequence_parallel: Auto = "auto",
        overlap_grad_reduce: Auto = "auto",
        overlap_param_gather: Auto = "auto",
        use_distributed_optimizer: Auto = "auto",
        overlap_p2p: Auto = "auto",
        bucket_size: int | None = None,
        seq_length: int | None = None,
        ddp: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        init_from: str | Path | None = None,
        nonfinite: NonFinite = "error",
        timeout_s: float = 1800.0,
        peer_timeout_s: float = 30.0,
        process_group_backend: str | None = None,
    ) -> None:
        request = Request(
            sizes=ParallelSizes(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp),
            switches=SwitchRequest(
                sequence_parallel=sequence_parallel,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
                use_distributed_optimizer=use_distributed_optimizer,
                overlap_p2p=overlap_p2p,
                bucket_size=bucket_size,
                micro_batch_size=micro_batch_size,
            ),
            ddp=ddp or {},
            optimizer=optimizer or {},
            init_from=init_from,
            seq_length=seq_length,
            nonfinite=nonfinite,
        )
        for name, value in (("timeout_s", timeout_s), ("peer_timeout_s", peer_timeout_s)):
            if not value > 0.0:
                raise ConfigurationError(
                    f"`{name}` ({value}) must be a positive number of seconds; leave it out for the"
                    " default."
                )
        super().__init__(request, process_group_backend, timeout_s, peer_timeout_s)

    @property
    def switches(self) -> Switches:
        """Effective value and reason of every switch."""
        if self._switches is None:
            raise NotInitializedError(
                "Switches are resolved once the Trainer has started processes."
            )
        return self._switches

    @property
    def step_stats(self) -> StepStats | None:
        """Gradient norm and outcome of the latest optimizer step; ``None`` before the first."""
        return self._run.stats if self._run is not None else None

    @property
    def skipped_steps(self) -> int:
        """Steps of this run that changed no parameter: fp16 overflow, or ``nonfinite="skip"``."""
        return self._run.skipped_steps if self._run is not None else 0

    def build(self, model: Factory | nn.Sequential | Sequence[nn.Module]) -> Pipeline:
        """Builds this rank's part of a model; to be called in ``configure_model`` on every rank.

        Args:
            model: ``factory(stage, **fields)``, which passes ``fields`` on to
                ``TransformerConfig(..., **fields)`` and returns the chunk that ``stage`` names; or
                an ``nn.Sequential`` (or list of blocks), which is cut into balanced stages.

        Returns:
            A module to be called like the whole model. In a step, the call ends the step on every
            stage but the last, whose remaining code computes the loss.
        """
        pipeline, self._request = build_model(
            model, self._request, self._parallel_state, self.precision_plugin, self.root_device
        )
        return pipeline

    def sync_parameters(self) -> None:
        """Makes parameters whole between steps; collective over the data-parallel groups.

        With ``overlap_param_gather`` they are stale until the next forward pass.
        """
        if self._run is not None:
            self._run.gather_parameters()
