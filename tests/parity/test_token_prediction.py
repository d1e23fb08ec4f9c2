"""Multi-token prediction: stages with a copy of the embedding against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, HEADS, HIDDEN, LAYERS, SEQ, VOCAB, token_dataset
from tests.parity.layouts import Outcome, ParityGPT, check_steps, fit
from tests.parity.one_process import CPU_FIELDS, Reference, gpt_loss, train_plainly
from tests.parity.recipes import Training, global_batch
from tests.parity.weights import check_shards, fill, full_tensors
from tests.ranks.trainers import loader, make_trainer

TRAINING = Training()


def predicting_chunk(
    *,
    is_first: bool = True,
    is_last: bool = True,
    vp_stage: int | None = None,
    depth: int = 1,
    positions: str = "rope",
    tied: bool = False,
    **fields: Any,
) -> GPTModel:
    """One chunk of a GPT whose last stage also predicts ``depth`` tokens further."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=depth,
        # Large, so that its gradients matter.
        mtp_loss_scaling_factor=1.0,
        **fields,
    )
    layers = get_gpt_layer_local_spec()
    further = get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=False, vp_stage=vp_stage
    )
    return GPTModel(
        config,
        layers,
        VOCAB,
        SEQ,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
        mtp_block_spec=further if is_last else None,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=tied,
    )


class PredictingGPT(ParityGPT):
    """The tests' GPT with multi-token prediction and weights that do not depend on the layout."""

    def __init__(self) -> None:
        super().__init__(TRAINING)

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        chunk = chunk_of(stage, **fields)
        self.shards += fill(chunk)
        return chunk


class AnyGPT(GPT):
    """The same with other ``options`` of its chunks, as the engine starts it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        return chunk_of(stage, **self.options, **fields)


def chunk_of(stage: Any, **options: Any) -> GPTModel:
    return predicting_chunk(
        is_first=stage.is_first, is_last=stage.is_last, vp_stage=stage.vp_stage, **options
    )


def fit_on_rank(world_size: int, dp: int, strategy: dict[str, Any]) -> Outcome:
    torch.manual_seed(1)
    module = PredictingGPT()
    data = token_dataset(TRAINING.samples)
    outcome = fit(module, data, world_size, dp, MCoreStrategy(**strategy), TRAINING)
    outcome.shards = [shard.copied() for shard in module.shards]
    outcome.state = {}
    return outcome


def _train_alone() -> tuple[Reference, float]:
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    with CpuAdapter():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = predicting_chunk(**CPU_FIELDS, params_dtype=torch.float32)
        shards = fill(model)
        data = token_dataset(TRAINING.samples)
        gpt_loss(model, global_batch(data, 0)).backward()
        further = [p.grad.norm() for name, p in model.named_parameters() if "mtp" in name]
        model.zero_grad()
        losses, norms = train_plainly(model, gpt_loss, data, TRAINING)
        parameters = full_tensors(shard.copied() for shard in shards)
    return Reference(losses, norms, parameters), float(torch.stack(further).norm())


@functools.cache
def alone() -> tuple[Reference, float]:
    """In one process, and the norm of the gradients of the further layers in the first step."""
    return run_ranks(_train_alone, 1)[0]


@pytest.mark.parametrize(
    ("dp", "strategy"),
    [
        (1, {"tp": 2, "pp": 2, "micro_batch_size": 2}),
        (2, {"pp": 2, "vpp": 2, "overlap_p2p": True, "micro_batch_size": 2}),
    ],
)
def test_equals_one_process(dp, strategy):
    ranks = run_ranks(fit_on_rank, 4, 4, dp, strategy)
    reference, _ = alone()
    check_steps(ranks, reference)
    check_shards([outcome.shards for outcome in ranks], reference.parameters, 1e-5)


def test_what_is_compared_matters():
    reference, further = alone()
    assert further > 0.1 * reference.grad_norms[0]


def refusals() -> list[str]:
    """What each rank says to embeddings whose copy on the last stage would be wrong."""
    said = []
    for options in ({"positions": "learned_absolute"}, {"tied": True}):
        trainer = make_trainer({"pp": 2})
        with pytest.raises(ConfigurationError) as error:
            trainer.fit(AnyGPT(**options), loader(token_dataset(8), 8))
        said.append(str(error.value))
    return said


def test_embeddings_that_cannot_be_copied_are_refused_on_every_rank():
    first, second = run_ranks(refusals, 2)
    assert first == second
    assert "learned positions" in first[0]
    assert "tied embeddings" in first[1]


def fit_deeper() -> list[int]:
    """One Trainer after the other in this process, each model with more further layers."""
    steps = []
    for depth in (1, 2):
        trainer = make_trainer({})
        trainer.fit(AnyGPT(depth=depth), loader(token_dataset(2 * 8), 8))
        steps.append(trainer.global_step)
    return steps


def test_a_second_trainer_may_predict_further():
    assert run_ranks(fit_deeper, 1) == [[2, 2]]
