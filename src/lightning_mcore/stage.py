"""The model as the user's step sees it: one call that runs this rank's part of the pipeline.

Enters: chunks built by the user's factory. Leaves: a ``Pipeline`` module; calling it in a step runs
the chunk whose turn it is, and on every stage but the last ends the step there. Each rank builds
its own chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_mcore.errors import ConfigurationError, NotInitializedError
from lightning_mcore.layout import Layout


@dataclass(frozen=True, slots=True)
class Stage:
    """Position of one model chunk in the pipeline."""

    index: int
    """0 for the chunk that takes the input, ``count - 1`` for the one that gives the output."""
    count: int
    """Chunks in the whole pipeline: ``pp * (vpp or 1)``."""
    vp_stage: int | None
    """Index of the chunk among this rank's chunks; ``None`` without interleaving."""

    @property
    def is_first(self) -> bool:
        """Whether the chunk takes the model's input (``pre_process`` in the engine)."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the chunk gives the model's output (``post_process`` in the engine)."""
        return self.index == self.count - 1


def stages_of(layout: Layout) -> list[Stage]:
    """This rank's stages in the order in which a microbatch visits them."""
    chunks = layout.vpp or 1
    return [
        Stage(
            index=chunk * layout.pp + layout.pp_rank,
            count=layout.pp * chunks,
            vp_stage=chunk if layout.vpp else None,
        )
        for chunk in range(chunks)
    ]


class StageEnd(BaseException):
    """Ends a step at the model call on a stage that is not the last.

    A ``BaseException`` so that an ``except Exception`` in the user's step does not catch it.
    """

    def __init__(self, output: Tensor | None) -> None:
        super().__init__()
        self.output = output


class ModelCall(StageEnd):
    """Ends a step at the model call without running anything, to see the call's arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(None)
        self.args_of_call = args
        self.kwargs_of_call = kwargs


Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@runtime_checkable
class ShapesActivations(Protocol):
    """A chunk that knows itself what travels between stages."""

    def activation_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """Returns the sequence length and micro-batch size that the engine allocates for."""


class Pipeline(nn.Module):
    """This rank's chunks of a model, called like the whole model.

    Within a step the call runs the chunk whose turn it is. On a stage that is not the last, the
    call does not return: its output goes to the next stage and the step's remaining code is not
    run.

    Outside a step it can be called only where the whole model is on this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module], stages: Sequence[Stage], *, native: bool):
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.stages = tuple(stages)
        self.native = native
        self._handler: Handler | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the chunk whose turn it is with the arguments of the whole model."""
        if self._handler is not None:
            return self._handler(args, kwargs)
        if self.stages[0].count > 1:
            raise NotInitializedError(
                f"The model is cut into {self.stages[0].count} stages, of which this rank holds"
                f" {[stage.index for stage in self.stages]}; call it only inside training_step,"
                " validation_step, test_step or predict_step, where the schedule runs all stages."
            )
        return self.chunks[0](*args, **kwargs)

    @contextmanager
    def handling(self, handler: Handler) -> Iterator[None]:
        """Routes calls of the model to ``handler`` for the duration of one microbatch."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def activation_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """Sequence length and micro-batch size of the tensors sent between stages."""
        chunk = self.chunks[0]
        if isinstance(chunk, ShapesActivations):
            return chunk.activation_shape(args, kwargs)
        return _shape_from_tokens(args, kwargs)


def run_chunk(
    chunk: nn.Module,
    *,
    is_last: bool,
    is_whole: bool = False,
    drop_output: bool = False,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Handler, Callable[[], bool]]:
    """A handler that runs ``chunk`` once, and a function that tells whether it did.

    Args:
        chunk: The wrapped chunk.
        is_last: Whether the code after the model call is to run.
        is_whole: Whether the chunk is the whole model, which may be called as often as wanted.
        around: Opens a context around the call of the chunk.
        drop_output: Ends the step after the call even on the last stage (for filler microbatches).
    """
    called = False

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal called
        if called and not is_whole:
            raise ConfigurationError(
                "The model is called twice in one step, but a pipeline stage runs once per"
                " microbatch; call it once and share its output, or use pp=1."
            )
        called = True
        with around():
            output = chunk(*args, **kwargs)
        if not is_last or drop_output:
            raise StageEnd(output)
        return output

    return handler, lambda: called


def observe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler that ends the step with the arguments of the model call."""
    raise ModelCall(args, kwargs)


def _shape_from_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Reads ``[b, s]`` from the token ids of the call (the first integer tensor of two dims)."""
    for value in (*args, *kwargs.values()):
        if (
            isinstance(value, Tensor)
            and value.dim() == 2
            and not value.dtype.is_floating_point
            and value.dtype != torch.bool
        ):
            return value.shape[1], value.shape[0]
    raise ConfigurationError(
        "The sequence length cannot be read from the model call, which has no integer tensor of"
        " shape [b, s] among its arguments; give it as MCoreStrategy(seq_length=...)."
    )


_LEFT_OUT_WHEN_OFF = {
    "cuda_graph_impl": ("none", "cuda_graphs={!r}"),
    "overlap_moe_expert_parallel_comm": (False, "overlap_moe='1f1b'"),
    "delay_wgrad_compute": (False, "delay_wgrad_compute=True, overlap_moe='1f1b'"),
}
"""Fields that are not among those handed on where their switch is off; off, and the switch."""


def check_fields_used(config: Any, fields: Mapping[str, Any]) -> None:
    """Checks that a chunk's config carries what the strategy decided.

    Raises:
        ConfigurationError: Naming each field with both values.
    """
    differing = {
        name: (getattr(config, name), value)
        for name, value in fields.items()
        if hasattr(config, name) and getattr(config, name) != value
    }
    for name, (off, use) in _LEFT_OUT_WHEN_OFF.items():
        value = getattr(config, name, off)
        if name not in fields and value != off:
            raise ConfigurationError(
                f"`{name}` ({value!r}) of the chunk's config needs a switch of the strategy that is"
                f" off; leave it out of the factory, and use MCoreStrategy({use.format(value)})."
            )
    if differing:
        listed = ", ".join(
            f"{n} ({has!r}, needed {want!r})" for n, (has, want) in differing.items()
        )
        raise ConfigurationError(
            f"The chunk's config differs from what the strategy decided: {listed}; pass the"
            " factory's `**fields` on to TransformerConfig(..., **fields) and set these through"
            " MCoreStrategy."
        )


_COMPLETED_BY_A_SCRIPT = {
    "qk_clip": "scales query and key weights down after every optimizer step",
    "hybrid_context_parallel": "cuts every batch for groups of several sizes",
    "fp8_param": "makes DDP and optimizer agree on parameters in 8 bits",
    "fp4_param": "makes DDP and optimizer agree on parameters in 4 bits",
    "init_model_with_meta_device": "gives parameters their memory",
    "moe_expert_rank_capacity_factor": "repeats steps in which experts overflowed",
}
"""Fields of TransformerConfig, and what Megatron-LM's training.py does where they are set."""


def check_nothing_is_missing(config: Any) -> None:
    """Checks that a chunk's config needs nothing that only Megatron-LM's training script does.

    Raises:
        ConfigurationError: Naming the field and what the script does.
    """
    for name, what in _COMPLETED_BY_A_SCRIPT.items():
        value = getattr(config, name, None)
        if value:
            raise ConfigurationError(
                f"The factory's TransformerConfig sets `{name}` ({value!r}), for which the training"
                f" script of Megatron-LM {what}; this strategy does not, and the model would train"
                " otherwise. Leave it out."
            )
    if getattr(config, "use_mup", False):
        rank_zero_warn(
            "`use_mup` (True) in TransformerConfig: Megatron-LM's training script also divides the"
            " learning rates of matrices in hidden layers by mup_width_mult"
            f" ({config.mup_width_mult}); do so in the parameter groups of configure_optimizers."
        )


def check_recomputation(config: Any) -> None:
    """Refuses a setting with which the engine's backward pass would never end.

    An MLP gives its last bias, a parameter, beside its output, to be added later. Where it is
    recomputed (tensor_parallel/random.py, CheckpointFunction), the parameter becomes an output of
    the function, whose backward pass runs the MLP, meets the parameter again, and so on.

    Raises:
        ConfigurationError: Naming the fields.
    """
    modules = getattr(config, "recompute_modules", None) or []
    recomputed = config.recompute_granularity == "selective" and "mlp" in modules
    only_experts = config.num_moe_experts is not None and config.moe_layer_freq == 1
    if recomputed and config.add_bias_linear and not only_experts:
        raise ConfigurationError(
            "`recompute_modules` with 'mlp' in the factory's TransformerConfig excludes"
            " `add_bias_linear` (True): megatron-core's backward pass would recompute the MLP for"
            " its own bias, without end; leave 'mlp' out, use recompute_granularity='full', or"
            " add_bias_linear=False."
        )


def check_token_prediction(chunk: nn.Module, *, pp: int) -> None:
    """Checks embeddings of which multi-token prediction needs a copy on the last of ``pp`` stages.

    Raises:
        ConfigurationError: On every stage alike, for those that the engine would train wrongly or
            could not save.
    """
    depth = getattr(chunk.config, "mtp_num_layers", None)
    if not depth or pp == 1:
        return
    if getattr(chunk, "position_embedding_type", None) == "learned_absolute":
        # finalize_model_grads.py, _allreduce_word_embedding_grads: of words only. Megatron-LM's
        # training script asserts it (arguments.py), the model does not.
        raise ConfigurationError(
            f"`mtp_num_layers` ({depth}) with `pp` ({pp}) excludes learned positions: the last"
            " stage has a copy of the embedding, of which the engine sums the gradients of words"
            " only, so that the positions of both stages would drift apart; use"
            " position_embedding_type='rope' or 'none' in the factory, or pp=1."
        )
    if getattr(chunk, "share_embeddings_and_output_weights", False):
        # The output layer gets a weight of its own all the same (gpt_model.py,
        # skip_weight_param_allocation), and with both, sharded_state_dict fails at the first save
        # (language_module.py, tie_embeddings_and_output_weights_state_dict).
        raise ConfigurationError(
            f"`mtp_num_layers` ({depth}) with `pp` ({pp}) excludes tied embeddings: the engine"
            " cannot save a last stage that has a copy of the embedding and a tied output layer;"
            " use share_embeddings_and_output_weights=False in the factory, or pp=1."
        )


def check_variable_lengths(config: Any, *, pp: int) -> None:
    """Checks a field that sends the shape of each tensor before it.

    Raises:
        ConfigurationError: Where that is known to deadlock.
    """
    if pp >= 4 and getattr(config, "variable_seq_lengths", False) and config.batch_p2p_comm:
        raise ConfigurationError(
            f"`variable_seq_lengths` (True) of the chunk's config with `pp` ({pp}) and batched"
            " transfers can deadlock (NVIDIA/Megatron-LM#5100); leave it out, since the strategy"
            " reads the length of every batch from the model call, or use"
            " MCoreStrategy(batch_p2p=False)."
        )
