"""Why ``vpp`` at ``pp=2`` needs overlapped transfers: batched ones give wrong gradients silently.

Both neighbours of a rank are then the same rank, and sends meet receives in the order in which they
were posted: activations arrive where gradients are awaited.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore.cpu import CpuAdapter
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.gpt import SEQ, call_gpt, gpt_chunk, token_dataset
from tests.parity.layouts import ParityGPT
from tests.parity.one_process import CPU_FIELDS, gpt_loss
from tests.parity.recipes import GLOBAL_BATCH, Training
from tests.parity.weights import Shard, fill, full_tensors

MICROBATCHES = 4


def _gradients(overlapped: bool) -> list[Shard]:
    """The engine's own schedule, without any of ours: gradients of one global batch."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    whole = int(dist.get_world_size()) == 1
    pp, vpp = (1, None) if whole else (2, 2)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    samples = token_dataset(GLOBAL_BATCH)
    if whole:
        model = gpt_chunk(**CPU_FIELDS)
        shards = fill(model)
        gpt_loss(model, samples).backward()
        return _of_gradients(shards)

    rank = dist.get_rank()
    chunks = [
        gpt_chunk(
            is_first=rank == 0 and chunk == 0,
            is_last=rank == 1 and chunk == 1,
            vp_stage=chunk,
            **CPU_FIELDS,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=overlapped,
            batch_p2p_comm=not overlapped,
            # Not the cause: the engine would else free tensors that gloo is still sending.
            deallocate_pipeline_outputs=False,
        )
        for chunk in range(vpp)
    ]
    shards = [shard for chunk in chunks for shard in fill(chunk)]
    size = GLOBAL_BATCH // MICROBATCHES
    cuts = [samples[i : i + size] for i in range(0, GLOBAL_BATCH, size)]

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, labels = (torch.stack(column) for column in zip(*next(iterator), strict=True))
        return call_gpt(chunk, tokens, labels), lambda losses: (losses.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(cuts) for _ in chunks],
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=size,
        forward_only=False,
    )
    return _of_gradients(shards)


def _of_gradients(shards: list[Shard]) -> list[Shard]:
    return [Shard(s.key, s.global_shape, s.place, s.value.grad.clone()) for s in shards]


def _run_engine(overlapped: bool) -> list[Shard]:
    dist.init_process_group("gloo")
    with CpuAdapter():
        return _gradients(overlapped)


def _relative_error(overlapped: bool) -> float:
    expected = full_tensors(run_ranks(_run_engine, 1, overlapped)[0])
    ranks = run_ranks(_run_engine, 2, overlapped)
    seen = full_tensors(shard for shards in ranks for shard in shards)
    assert set(seen) == set(expected)
    return max(_off(seen[key], expected[key]) for key in expected)


def _off(seen: Tensor, expected: Tensor) -> float:
    return ((seen - expected).abs().max() / expected.abs().max()).item()


def test_the_engine_is_right_with_overlapped_transfers():
    assert _relative_error(overlapped=True) < 1e-4


def test_the_engine_is_silently_wrong_with_batched_transfers():
    """If this fails, the engine has been mended and the refusal can go."""
    assert _relative_error(overlapped=False) > 0.1


def _fit_without_overlap() -> None:
    assert not dist.is_initialized()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MCoreStrategy(pp=2, vpp=2, overlap_p2p=False),
        logger=False,
        enable_checkpointing=False,
        barebones=False,
    )
    with pytest.raises(ConfigurationError, match=r"`overlap_p2p` \(False\) with `pp` \(2\)"):
        trainer.fit(ParityGPT(Training()), token_dataset(8))
    assert not dist.is_initialized()


def test_the_strategy_refuses_it_before_any_process_group_exists():
    run_ranks(_fit_without_overlap, 2)
