"""The Lightning strategy as users see it: its arguments, and what they may ask it in a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_mcore.build import Factory
from lightning_mcore.config import (
    Auto,
    Comm,
    CpCommType,
    CudaGraphs,
    Fsdp,
    ParallelSizes,
    SwitchRequest,
)
from lightning_mcore.context import position_ids
from lightning_mcore.errors import ConfigurationError, NotInitializedError
from lightning_mcore.experts import (
    ExpertRequest,
    ExpertSwitches,
    MoEDispatcher,
    OverlapMoE,
)
from lightning_mcore.loop_hooks import LoopStrategy
from lightning_mcore.nonfinite import NonFinite
from lightning_mcore.optimizer import StepStats
from lightning_mcore.prepare import Request, build_model
from lightning_mcore.stage import Pipeline
from lightning_mcore.switches import Switches, communicator_settings
from lightning_mcore.topology import Topology
from lightning_mcore.userbuffers import TPCommOverlap


class MCoreStrategy(LoopStrategy):
    """Trains a LightningModule on Megatron-Core, cut by tensor, layer, sequence, expert, data.

    Switches take ``True``, ``False`` (obeyed or refused, never changed) or ``"auto"``. What each
    needs, excludes and gains, and how to see it working, is in docs/switches.md.

    Args:
        tp: Tensor-parallel size: ranks that share each layer. Keep it inside an NVLink domain.
        pp: Pipeline size: ranks that hold consecutive stages of layers.
        vpp: Chunks per pipeline rank. ``None``: one chunk, 1F1B. 2 or more: interleaved 1F1B.
        cp: Context-parallel size: ranks that share each sequence.
        ep: Expert-parallel size: ranks that hold different experts.
        etp: Tensor-parallel size of experts. ``None``: like ``tp``.
        comm: What ``"auto"`` means for switches that overlap communication. ``"safe"``: none, the
            baseline to compare with. ``"auto"``: what published recipes have on. ``"max"``: all
            that can work.
        topology: The machines, for placing groups. ``None``: unknown, or found by a probe.
        micro_batch_size: Samples in a microbatch. ``None``: the whole batch without pipelining,
            1 with it.
        sequence_parallel: Splits activations between tensor-parallel regions along the sequence.
            Needs ``tp >= 2`` and Megatron layers; must be on with ``ep > 1``. Saves memory; the
            header shows it.
        tp_comm_overlap: Hides tensor-parallel transfers under matrix products (userbuffers):
            ``True`` for rings everywhere, ``TPCommOverlap()`` for TransformerEngine's own methods,
            or one with others. Needs GPUs, layers of TransformerEngine, ``tp >= 2`` in one NVLink
            domain, ``sequence_parallel``, ``micro_batch_size``, ``model_dims['hidden_size']`` and
            the sequence length (here or there); every microbatch then has that shape.
        overlap_grad_reduce: Reduces gradients bucket by bucket during the backward pass. Needs a
            gradient for every parameter in every step. Helps with ``dp x cp > 1``; in a profile,
            reduce-scatters run beside the backward pass, from the second step on.
        overlap_param_gather: Gathers updated parameters during the next forward pass. Needs
            ``use_distributed_optimizer``, ``overlap_grad_reduce`` and Megatron layers.
        use_distributed_optimizer: Shards optimizer state over data parallel (ZeRO-1). Needs Adam or
            AdamW, and not ``precision="bf16-true"``.
        num_distributed_optimizer_instances: Copies of the optimizer's shards. ``None``: 1. More
            gather nearby and cost memory; must divide ``dp x cp``; excludes ``overlap_grad_reduce``
            before megatron-core 0.17.
        bucket_size: Elements per gradient bucket. ``None``: the engine's ``max(40M, 1M x dp)``.
            Needs ``overlap_grad_reduce``; splits the first stage only.
        grad_reduce_in_fp32: Accumulates and reduces gradients in fp32. ``"auto"``: with the mixed
            precisions. Needs fp32 main parameters.
        average_in_collective: Lets NCCL divide the sum of gradients. Needs GPUs, or torch 2.11
            on CPU; excludes ``per_token_loss``.
        nccl_ub: Registers gradient and parameter buffers with NCCL, which then takes fewer SMs.
            Switches NVLink multicast on, so it is refused with ``NCCL_NVLS_ENABLE=0``.
        fsdp: Megatron-FSDP. Refused, with the reason.
        overlap_p2p: Overlaps pipeline sends and receives with compute; needs ``vpp >= 2``. ``True``
            with ``vpp=None`` picks the smallest ``vpp`` that divides ``model_dims['num_layers']``.
        overlap_p2p_warmup_flush: Does so while the pipeline fills and drains. Needs
            ``overlap_p2p``.
        batch_p2p: Sends and receives in one batch. Excludes ``overlap_p2p``; refused at ``pp=2``
            with ``vpp``, where the engine mixes up its messages.
        batch_p2p_sync: Waits for the whole device after each batch, as the engine does by default
            on GPUs, for torch before 1.13. Off unless ``comm="safe"``: the host then runs ahead;
            see it in a profile, where ``cudaDeviceSynchronize`` disappears.
        microbatch_group_size_per_vp_stage: Microbatches that a chunk runs in a row. ``None``:
            ``pp``. Between ``pp`` and the number of microbatches; more hides more and keeps more
            activations.
        defer_embedding_wgrad: Computes the output layer's weight gradient while the pipeline
            drains. Needs ``pp >= 2`` and Apex.
        gradient_accumulation_fusion: Adds weight gradients to the gradient buffer inside the matrix
            product, without a tensor between. Needs GPUs, Megatron layers, and Apex or
            TransformerEngine. ``"auto"``: with Apex.
        cuda_graphs: Replays each layer's kernels from CUDA graphs in training, so that the host
            need not launch them one by one: ``"transformer_engine"`` captures by TransformerEngine
            after a few steps, ``"local"`` by the engine after the first. Needs GPUs, Megatron
            layers and microbatches of one shape. ``"full_iteration"`` is refused, with the reason.
        cp_comm_type: How context-parallel ranks exchange keys and values: a ring (``"p2p"``),
            ``"all_gather"``, all-to-all over heads (``"a2a"``), or both (``"a2a+p2p"``).
        nccl_communicators: NCCL settings by process group, ``{"dp_cp": {"max_ctas": 16}}``, or the
            path of a YAML file with them.
        high_priority_streams: Process groups whose kernels go first, ``["tp", "dp_cp"]``.
        moe_dispatcher: What moves tokens to their experts: ``"allgather"``, ``"alltoall"``,
            ``"deepep"`` or ``"hybridep"``, or ``"auto"`` to go by the topology.
        overlap_moe: ``"1f1b"`` moves tokens during the compute of another microbatch,
            ``"shared_experts"`` during that of shared experts; ``False`` does not.
        delay_wgrad_compute: Computes weight gradients apart, with ``overlap_moe="1f1b"``.
        seq_length: Tokens per sample, only where the model call has no token ids of shape
            ``[b, s]`` to read it from.
        per_token_loss: Weights the loss by tokens rather than by microbatches: steps return
            ``{"loss": mean over the tokens that count, "num_tokens": their number}``, and loss,
            gradients and logged means are those over all tokens of the global batch. Needed where
            a loss mask is uneven and ``cp``, ``dp`` or microbatches must not change the result.
        ddp: Further fields of the engine's DistributedDataParallelConfig.
        optimizer: Further fields of the engine's OptimizerConfig.
        init_from: Checkpoint of ours or plain file to load weights (only) from, in any layout.
        async_save: Writes checkpoints while training goes on, from a copy (on the host) of the step
            that asked for one. A failure is raised at a later step, save or the end of training.
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
            optional ``model_dims`` before any process group exists. All errors are told at once.
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
        comm: Comm = "auto",
        topology: Topology | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: Auto = "auto",
        tp_comm_overlap: Auto | TPCommOverlap = "auto",
        overlap_grad_reduce: Auto = "auto",
        overlap_param_gather: Auto = "auto",
        use_distributed_optimizer: Auto = "auto",
        num_distributed_optimizer_instances: int | None = None,
        bucket_size: int | None = None,
        grad_reduce_in_fp32: Auto = "auto",
        average_in_collective: Auto = "auto",
        nccl_ub: Auto = "auto",
        fsdp: Fsdp | None = None,
        overlap_p2p: Auto = "auto",
        overlap_p2p_warmup_flush: Auto = "auto",
        batch_p2p: Auto = "auto",
        batch_p2p_sync: Auto = "auto",
        microbatch_group_size_per_vp_stage: int | None = None,
        defer_embedding_wgrad: Auto = "auto",
        gradient_accumulation_fusion: Auto = "auto",
        cuda_graphs: CudaGraphs = "auto",
        cp_comm_type: CpCommType | None = None,
        nccl_communicators: dict[str, dict[str, Any]] | str | Path | None = None,
        high_priority_streams: list[str] | None = None,
        moe_dispatcher: MoEDispatcher = "auto",
        overlap_moe: OverlapMoE = "auto",
        delay_wgrad_compute: bool = False,
        seq_length: int | None = None,
        per_token_loss: bool = False,
        ddp: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        init_from: str | Path | None = None,
        async_save: bool = False,
        nonfinite: NonFinite = "error",
        timeout_s: float = 1800.0,
        peer_timeout_s: float = 30.0,
        process_group_backend: str | None = None,
    ) -> None:
        request = Request(
            sizes=ParallelSizes(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp),
            switches=SwitchRequest(
                comm=comm,
                sequence_parallel=sequence_parallel,
                tp_comm_overlap=tp_comm_overlap,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
                use_distributed_optimizer=use_distributed_optimizer,
                num_distributed_optimizer_instances=num_distributed_optimizer_instances,
                bucket_size=bucket_size,
                grad_reduce_in_fp32=grad_reduce_in_fp32,
                average_in_collective=average_in_collective,
                nccl_ub=nccl_ub,
                fsdp=fsdp,
                overlap_p2p=overlap_p2p,
                overlap_p2p_warmup_flush=overlap_p2p_warmup_flush,
                batch_p2p=batch_p2p,
                batch_p2p_sync=batch_p2p_sync,
                microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
                defer_embedding_wgrad=defer_embedding_wgrad,
                gradient_accumulation_fusion=gradient_accumulation_fusion,
                cuda_graphs=cuda_graphs,
                cp_comm_type=cp_comm_type,
                nccl_communicators=communicator_settings(nccl_communicators),
                high_priority_streams=tuple(high_priority_streams or ()),
                micro_batch_size=micro_batch_size,
                ddp=ddp or {},
                optimizer=optimizer or {},
            ),
            experts=ExpertRequest(
                moe_dispatcher=moe_dispatcher,
                overlap_moe=overlap_moe,
                delay_wgrad_compute=delay_wgrad_compute,
            ),
            topology=topology,
            init_from=init_from,
            async_save=async_save,
            seq_length=seq_length,
            per_token_loss=per_token_loss,
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
    def expert_switches(self) -> ExpertSwitches:
        """Effective dispatcher and overlap of expert layers, with their reasons."""
        if self._experts is None:
            raise NotInitializedError("Settings of expert layers are final once a model is built.")
        return self._experts

    @property
    def step_stats(self) -> StepStats | None:
        """Gradient norm and outcome of the latest optimizer step; ``None`` before the first."""
        return self._run.stats if self._run is not None else self._outcome[0]

    @property
    def skipped_steps(self) -> int:
        """Steps of this run that changed no parameter: fp16 overflow, or ``nonfinite="skip"``."""
        return self._run.skipped_steps if self._run is not None else self._outcome[1]

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

    def position_ids(self, tokens: Tensor) -> Tensor:
        """Positions ``[b, s / cp]`` in their whole sequences of ``tokens`` ``[b, s / cp]``.

        With ``cp > 1`` a step gets a part of each sequence from its beginning and one from its end;
        with ``cp=1`` positions are 0 to ``s - 1``. To be called in a step, on every rank.
        """
        return position_ids(tokens, self.layout.cp, self.layout.cp_rank)

    def sync_parameters(self) -> None:
        """Makes parameters whole between steps; collective over the data-parallel groups.

        With ``overlap_param_gather`` they are stale until the next forward pass.
        """
        if self._run is not None:
            self._run.gather_parameters()
