"""Which part of a batch a context-parallel rank gets."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from lightning_mcore.context import (
    SequenceShard,
    check_model_call,
    gather_sequences,
    position_ids,
    sequence_length,
    zigzag_positions,
)
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks

B, S = 3, 16


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(B * S).view(B, S)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.rand(B, S, generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.arange(B * S * S).view(B, 1, S, S) % 3 == 0,
        "features": torch.arange(B * S * 2.0).view(B, S, 2),
    }


class Pair(NamedTuple):
    tokens: Tensor
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class Packed:
    tokens: Tensor
    name: str


class TestShard:
    @pytest.mark.parametrize(
        ("cp", "rank", "expected"),
        [
            (2, 0, [0, 1, 2, 3, 12, 13, 14, 15]),
            (2, 1, [4, 5, 6, 7, 8, 9, 10, 11]),
            (4, 0, [0, 1, 14, 15]),
            (4, 3, [6, 7, 8, 9]),
            (1, 0, list(range(16))),
        ],
    )
    def test_positions(self, cp, rank, expected):
        assert zigzag_positions(16, cp, rank).tolist() == expected
        tokens = torch.zeros(2, 16 // cp, dtype=torch.int64)
        assert position_ids(tokens, cp, rank).tolist() == [expected, expected]

    @pytest.mark.parametrize("cp", [2, 4])
    def test_ranks_hold_every_token_once(self, cp):
        held = torch.cat([zigzag_positions(32, cp, rank) for rank in range(cp)])
        assert held.sort().values.tolist() == list(range(32))

    def test_tensors_without_a_sequence_stay_whole(self):
        given = {**batch(), "id": torch.arange(B), "scale": torch.tensor(2.0), "name": "x",
                 "classes": torch.rand(B, 7), "none": None}  # fmt: skip
        shard = SequenceShard(2, 1)(given)
        for key in ("id", "scale", "name", "classes", "none"):
            assert shard[key] is given[key]
        assert shard["tokens"].shape == (B, S // 2)
        assert shard["attention_mask"].shape == (B, 1, S // 2, S)
        assert given["tokens"].shape == (B, S)

    def test_containers_keep_their_type(self):
        tokens = batch()["tokens"]
        shard = SequenceShard(2, 0)
        assert isinstance(shard(Pair(tokens, torch.ones(B))), Pair)
        assert shard(Packed(tokens, "a")).tokens.shape == (B, S // 2)
        assert shard([tokens, (tokens,)])[1][0].shape == (B, S // 2)

    def test_told_length_without_token_ids(self):
        embeddings = torch.rand(B, S, 5)
        cut = SequenceShard(2, 1, seq_length=S)((embeddings, torch.rand(B, 4)))
        assert torch.equal(cut[0], embeddings[:, 4:12])
        assert cut[1].shape == (B, 4)

    def test_the_users_hook(self):
        hook = lambda data, cp, rank: (data, cp, rank)  # noqa: E731
        assert SequenceShard(4, 2, None, hook)("data") == ("data", 4, 2)

    def test_one_rank_keeps_the_object(self):
        given = batch()
        assert SequenceShard(1, 0)(given) is given

    @pytest.mark.parametrize(
        ("given", "told", "message"),
        [
            (torch.zeros(2, 10, dtype=torch.long), None,
             r"length of the batch \(10\) must be a multiple of 2 x `cp` \(2\) = 4.*8 or 12"),
            (torch.zeros(2, 16), None, r"have sizes \[\] in dim 1; set MCoreStrategy\(seq_length"),
            ([torch.zeros(2, 16).long(), torch.zeros(2, 3).long()], None, r"sizes \[3, 16\]"),
            (torch.zeros(2, 16).long(), 32, r"No tensor of the batch has `seq_length` \(32\)"),
        ],
    )  # fmt: skip
    def test_refused(self, given, told, message):
        with pytest.raises(ConfigurationError, match=message):
            SequenceShard(2, 0, told)(given)


class TestModelCall:
    def shard(self) -> Any:
        return SequenceShard(2, 0)(batch())

    def test_good(self):
        shard = self.shard()
        positions = position_ids(shard["tokens"], 2, 0)
        check_model_call((shard["tokens"], positions, None), {"labels": shard["labels"]}, shard)

    def test_positions_counted_within_the_shard(self):
        shard = self.shard()
        positions = torch.arange(S // 2).expand(B, -1)
        with pytest.raises(ConfigurationError, match=r"position ids 0 to 7.*position_ids\(tokens"):
            check_model_call((shard["tokens"] + 5, positions), {}, shard)

    def test_labels_shifted_in_the_step(self):
        shard = self.shard()
        with pytest.raises(ConfigurationError, match="shift them in the dataset"):
            check_model_call((shard["tokens"][:, :-1],), {}, shard)


def test_length_is_read_from_token_ids():
    assert sequence_length(batch(), None) == S


def engine_shards() -> Any:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    group = parallel_state.get_context_parallel_group()
    rank = dist.get_rank(group)
    # 0.19.2 has a further argument without a default.
    further = {"is_hybrid_cp": False} if "is_hybrid_cp" in _parameters() else {}
    theirs = get_batch_on_this_cp_rank(batch(), cp_group=group, **further)
    ours = SequenceShard(2, rank)(batch())
    output = {
        "logits": ours["features"],
        "kept": ours["tokens"] % 2 == 0,
        "id": torch.arange(B),
        "all": ours["attention_mask"],
    }
    return theirs, ours, gather_sequences(output, S // 2, group)


def _parameters() -> Any:
    import inspect

    return inspect.signature(get_batch_on_this_cp_rank).parameters


def test_as_the_engine_cuts_and_back():
    """Our cut is the engine's ``get_batch_on_this_cp_rank``, and gathering undoes it."""
    whole = batch()
    for theirs, ours, gathered in run_ranks(engine_shards, 2):
        assert set(theirs) == set(ours)
        for key, expected in theirs.items():
            assert torch.equal(ours[key], expected), key
        assert torch.equal(gathered["logits"], whole["features"])
        assert torch.equal(gathered["kept"], whole["tokens"] % 2 == 0)
        assert gathered["id"].tolist() == list(range(B))
        assert gathered["all"].shape == (B, 1, S // 2, S)
