"""Builds this rank's chunks from a factory, a list of blocks or a plain LightningModule.

Enters: the user's model and what the strategy decided. Leaves: chunks with the surface that the
engine expects. Every rank builds its own; nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mcore._mcore import engine, moe
from lightning_mcore.errors import ConfigurationError, SequenceParallelRefused
from lightning_mcore.layout import Layout
from lightning_mcore.parallel_state import ParallelState, seed_stage
from lightning_mcore.sequential import BoundaryShapes, SequentialChunk, cut_blocks
from lightning_mcore.stage import (
    Pipeline,
    Stage,
    check_fields_used,
    check_nothing_is_missing,
    check_recomputation,
    check_token_prediction,
    check_variable_lengths,
    stages_of,
)

Factory = Callable[..., nn.Module]
"""``factory(stage, **fields) -> chunk``: builds the part of the model that ``stage`` names."""


def build_pipeline(
    model: Factory | nn.Sequential | Sequence[nn.Module],
    state: ParallelState,
    fields: Mapping[str, Any],
) -> Pipeline:
    """Builds this rank's chunks.

    Args:
        model: A factory of Megatron chunks, or blocks that are run one after the other.
        state: Parallel state of the run.
        fields: What ``model_fields`` gave.

    Raises:
        ConfigurationError: If the model cannot be cut, or ignores ``fields``.
    """
    stages = stages_of(state.layout)
    if isinstance(model, (nn.Sequential, nn.ModuleList, list, tuple)):
        chunks = _cut_sequential(list(model), stages, state.layout, fields)
        return _remember(Pipeline(chunks, stages, native=True), state, None)
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigurationError(
            f"strategy.build takes a factory, an nn.Sequential or a list of blocks, but got"
            f" {type(model).__name__}; give a function factory(stage, **fields) that builds one"
            " stage, or assign the module directly when tp = pp = 1."
        )
    chunks = _call_factory(model, stages, state, fields)
    return _remember(Pipeline(chunks, stages, native=False), state, model)


def _remember(pipeline: Pipeline, state: ParallelState, factory: Factory | None) -> Pipeline:
    """Keeps, outside the module's state, what a later run of the same module needs."""
    object.__setattr__(pipeline, "state", state)
    object.__setattr__(pipeline, "factory", factory)
    return pipeline


def _call_factory(
    factory: Factory, stages: Sequence[Stage], state: ParallelState, fields: Mapping[str, Any]
) -> list[nn.Module]:
    chunks = []
    for stage in stages:
        # Each stage has its own stream: with one seed for all, the layers of one stage would start
        # with the weights of another.
        seed_stage(state, stage.index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state.seed + stage.index)
            try:
                with engine.without_notice_of_defaults():
                    chunk = factory(stage, **fields)
            except TypeError as error:
                if "multiple values for keyword argument" not in str(error):
                    raise
                raise ConfigurationError(
                    f"The factory sets a field of TransformerConfig that the strategy decides"
                    f" ({error}); leave it to `**fields`, and set it through MCoreStrategy (expert"
                    " layers: moe_dispatcher, overlap_moe)."
                ) from error
            except (ValueError, AssertionError) as error:
                # megatron/core/transformer/torch_norm.py, WrappedTorchNorm.
                refused = "sequence parallel not supported by torch" in str(error)
                # megatron/core/transformer/dot_product_attention.py.
                if "only supported by TEDotProductAttention" in str(error):
                    raise ConfigurationError(
                        f"`cp` ({state.layout.cp}) needs an attention that exchanges keys and"
                        " values between ranks, and the layer spec names the engine's local"
                        " DotProductAttention; use a TransformerEngine spec (its"
                        " TEDotProductAttention needs GPUs and the extra lightning-mcore[te]), or"
                        " cp=1."
                    ) from error
                raise (SequenceParallelRefused if refused else ConfigurationError)(
                    f"megatron-core {engine.ENGINE_VERSION} refuses stage {stage.index} of the"
                    f" model under {_sizes(state.layout)}: {error}{_fix(str(error))}"
                ) from error
        if not isinstance(chunk, nn.Module) or not hasattr(chunk, "set_input_tensor"):
            raise ConfigurationError(
                f"The factory returned {type(chunk).__name__} for stage {stage.index}, which has no"
                " `set_input_tensor`; return a Megatron model chunk such as GPTModel, or hand"
                " strategy.build an nn.Sequential."
            )
        check_fields_used(chunk.config, fields)
        check_nothing_is_missing(chunk.config)
        check_recomputation(chunk.config)
        _check_balancing_losses(chunk.config, state.layout)
        check_token_prediction(chunk, pp=state.layout.pp)
        check_variable_lengths(chunk.config, pp=state.layout.pp)
        chunks.append(chunk)
    seed_stage(state)
    return chunks


def _check_balancing_losses(config: Any, layout: Layout) -> None:
    if moe.weakens_losses_per_token(config, tp=layout.tp, cp=layout.cp):
        parts = layout.tp * layout.cp
        raise ConfigurationError(
            f"`per_token_loss` (True) with `tp` ({layout.tp}) x `cp` ({layout.cp}) makes"
            f" megatron-core {engine.ENGINE_VERSION}, before 0.19, divide the gradients of"
            f" moe_aux_loss_coeff and moe_z_loss_coeff by {parts} too much; use megatron-core 0.19"
            " or newer, per_token_loss=False, or coefficients of 0."
        )


def _fix(said: str) -> str:
    """A way out for refusals of the engine that do not name one."""
    # megatron/core/transformer/transformer_config.py, __post_init__.
    if "num_moe_experts must be non" in said:
        return " Set num_moe_experts in the factory's TransformerConfig, or use ep=1."
    # megatron/core/transformer/moe/grouped_gemm_util.py, until 0.18.
    if "Grouped GEMM is not available" in said:
        return (
            " Build the layers with get_gpt_layer_with_transformer_engine_spec on GPUs, or use"
            " moe_grouped_gemm=False."
        )
    return ""


def rebuild_pipeline(pipeline: Pipeline, state: ParallelState, fields: Mapping[str, Any]) -> None:
    """Builds the chunks anew under the groups of this run and gives them their old weights.

    Megatron layers hold process groups, and those of an earlier ``fit`` of the same module are
    gone.

    Raises:
        ConfigurationError: If the module was built for other stages.
    """
    stages = tuple(stages_of(state.layout))
    if stages != pipeline.stages:
        raise ConfigurationError(
            f"The model was built as stages {[s.index for s in pipeline.stages]} of"
            f" {pipeline.stages[0].count} on this rank, but this run has stages"
            f" {[s.index for s in stages]} of {stages[0].count}; create a new LightningModule and"
            " load its weights with MCoreStrategy(init_from=...) or ckpt_path=...."
        )
    factory = getattr(pipeline, "factory", None)
    if factory is None:
        return
    old = [chunk.state_dict() for chunk in pipeline.chunks]
    chunks = _call_factory(factory, stages, state, fields)
    for chunk, weights in zip(chunks, old, strict=True):
        chunk.load_state_dict(weights)
    pipeline.chunks = nn.ModuleList(chunks)


def _cut_sequential(
    blocks: list[nn.Module], stages: Sequence[Stage], layout: Layout, fields: Mapping[str, Any]
) -> list[nn.Module]:
    parallel = [
        n
        for b in blocks
        for n, p in b.named_parameters()
        if getattr(p, "tensor_model_parallel", False)
    ]
    if layout.tp > 1 and not parallel:
        raise ConfigurationError(
            f"`tp` ({layout.tp}) cannot split plain torch blocks; use tp=1 for an nn.Sequential, or"
            " build the stages from Megatron layers with a factory."
        )
    count = stages[0].count
    ranges = cut_blocks(blocks, count)
    shapes = BoundaryShapes(blocks, ranges) if count > 1 else None
    config = engine.native_config(max(count, layout.pp), {**fields, "sequence_parallel": False})
    return [
        SequentialChunk(blocks, ranges[stage.index], stage, config, engine.MODEL_TYPE, shapes)
        for stage in stages
    ]


class PlainChunk(nn.Module):
    """A whole LightningModule as the single chunk of an unsplit model.

    The wrapped module is not called through this chunk; the schedule runs its step, and the
    engine's DDP finds its parameters.
    """

    share_embeddings_and_output_weights = False
    pre_process = True
    post_process = True
    vp_stage = None

    def __init__(self, inner: nn.Module, fields: Mapping[str, Any]) -> None:
        super().__init__()
        # Not `module`: the engine looks through attributes of that name for its own layers.
        self.inner = inner
        self.config = engine.native_config(1, {**fields, "sequence_parallel": False})
        self.model_type = engine.MODEL_TYPE

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Nothing is received: there is no earlier stage."""


def check_no_stray_parameters(module: nn.Module, pipeline: Pipeline) -> None:
    """Checks that all trainable parameters are in the chunks.

    Raises:
        ConfigurationError: Naming those that the schedule and the engine's DDP would not see.
    """
    inside = {id(param) for param in pipeline.parameters()}
    outside = [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in inside
    ]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} trainable parameters are outside the model that strategy.build gave:"
            f" {outside[:8]}; build them inside the factory (on the stage that uses them), or"
            " freeze them with requires_grad_(False)."
        )


def find_model(
    module: nn.Module, state: ParallelState, fields_of: Callable[[bool], Mapping[str, Any]]
) -> tuple[Pipeline | None, list[nn.Module]]:
    """Finds what ``strategy.build`` gave in a LightningModule, or takes the module as one chunk.

    Args:
        module: The LightningModule after ``configure_model``.
        state: Parallel state of this run.
        fields_of: The strategy's model fields, for plain torch modules (``True``) or Megatron ones.

    Returns:
        The pipeline (``None`` for a plain module) and this rank's chunks.

    Raises:
        ConfigurationError: If there are several models, or a plain module cannot be split as asked.
    """
    found = [m for m in module.modules() if isinstance(m, Pipeline)]
    if len(found) > 1:
        raise ConfigurationError(
            f"The LightningModule holds {len(found)} models from strategy.build, but one schedule"
            " runs one model; build them as one."
        )
    if not found:
        layout = state.layout
        if layout.tp * layout.pp * layout.cp * layout.ep > 1:
            raise ConfigurationError(
                f"A LightningModule without Megatron layers runs at tp = pp = cp = ep = 1, but the"
                f" layout is {_sizes(layout)}; in configure_model, set self.model ="
                " self.trainer.strategy.build(...) with a factory of Megatron chunks (tp, pp, ep)"
                " or an nn.Sequential (pp)."
            )
        return None, [PlainChunk(module, fields_of(True))]
    pipeline = found[0]
    if getattr(pipeline, "state", None) is not state:
        rebuild_pipeline(pipeline, state, fields_of(pipeline.native))
        object.__setattr__(pipeline, "state", state)
    check_no_stray_parameters(module, pipeline)
    return pipeline, list(pipeline.chunks)


def _sizes(layout: Layout) -> str:
    vpp = f" x vpp {layout.vpp}" if layout.vpp else ""
    return (
        f"tp {layout.tp} x pp {layout.pp}{vpp} x cp {layout.cp} x dp {layout.dp} (ep {layout.ep})"
    )
