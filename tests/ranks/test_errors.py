"""What cannot work is refused on every rank alike, with the relation, the values and a way out."""

import re
import time

import lightning as L
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from lightning_mcore.errors import CheckpointError, ConfigurationError
from lightning_mcore.testing import RankError, run_ranks
from tests.ranks.trainers import (
    Blocks,
    NumberedGPT,
    Recorder,
    loader,
    make_trainer,
    numbered_rows,
    numbered_tokens,
)


class OddHeads(NumberedGPT):
    """Tells its dimensions before it is built."""

    model_dims = {"num_attention_heads": 3}  # noqa: RUF012


class ManyLayers(NumberedGPT):
    model_dims = {"num_layers": 6}  # noqa: RUF012


class Manual(Blocks):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Plain(L.LightningModule):
    """An ordinary module that knows nothing of stages."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CalledTwice(Blocks):
    def training_step(self, batch, batch_idx):
        return self.model(batch["x"]).mean() + self.model(batch["x"]).mean()


class NeverCalled(Blocks):
    def training_step(self, batch, batch_idx):
        return batch["x"].mean()


class Stray(Blocks):
    """Holds a trainable layer that the strategy did not build."""

    def configure_model(self):
        super().configure_model()
        self.head_outside = torch.nn.Linear(1, 1)


class TwoModels(Blocks):
    def configure_model(self):
        super().configure_model()
        self.second = self.trainer.strategy.build([torch.nn.Linear(6, 6) for _ in range(4)])


class Forgetful(Blocks):
    """Its optimizer leaves biases out."""

    def configure_optimizers(self):
        weights = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        return torch.optim.AdamW(weights, lr=0.1)


class VectorLoss(Blocks):
    def training_step(self, batch, batch_idx):
        return self.losses(batch).repeat(2)


class OddReduction(Blocks):
    def training_step(self, batch, batch_idx):
        loss = self.losses(batch).mean()
        self.log("x", loss, reduce_fx=torch.median)
        return loss


EARLY = {
    "world size": (3, {"tp": 2}, {}, NumberedGPT, r"`world_size` \(3\).*`tp` \(2\).*use 2 or 4"),
    "layers": (
        2,
        {"pp": 2, "vpp": 2},
        {},
        ManyLayers,
        r"`num_layers` \(6\).*`pp` \(2\) x `vpp` \(2\) = 4.*use 4 or 8",
    ),
    "heads": (2, {"tp": 2}, {}, OddHeads, r"`num_attention_heads` \(3\).*`tp` \(2\).*use 2 or 4"),
    "sequence parallel": (
        2,
        {"sequence_parallel": True},
        {},
        Blocks,
        r"`sequence_parallel` \(True\) needs `tp` \(1\).*use tp=2",
    ),
    "interleaved without overlap": (
        2,
        {"pp": 2, "vpp": 2, "overlap_p2p": False},
        {},
        Blocks,
        r"`overlap_p2p` \(False\).*wrong gradients.*use overlap_p2p=True",
    ),
    "overlap without layers": (
        2,
        {"pp": 2, "overlap_p2p": True},
        {},
        Blocks,
        r"`overlap_p2p` \(True\) needs `vpp`.*set vpp, or give.*model_dims",
    ),
    "userbuffers": (
        2,
        {"tp": 2, "tp_comm_overlap": True},
        {},
        NumberedGPT,
        r"`tp_comm_overlap` \(True\) needs GPUs.*TransformerEngine, which is not installed.*=False",
    ),
    "vpp without pp": (2, {"vpp": 2}, {}, Blocks, r"`vpp` \(2\).*`pp` \(1\)"),
    "ddp field": (2, {"ddp": {"no_such_field": 1}}, {}, Blocks, r"`ddp`.*no_such_field"),
    "ddp argument": (
        2,
        {"ddp": {"overlap_grad_reduce": True}},
        {},
        Blocks,
        r"`ddp` sets \['overlap_grad_reduce'\]",
    ),
    "optimizer field": (
        2,
        {"optimizer": {"no_such_field": 1}},
        {},
        Blocks,
        r"`optimizer`.*no_such_field",
    ),
    "optimizer argument": (2, {"optimizer": {"lr": 0.1}}, {}, Blocks, r"`optimizer` sets \['lr'\]"),
    "manual optimization": (2, {}, {}, Manual, r"`automatic_optimization` \(False\)"),
    "64-true": (2, {}, {"precision": "64-true"}, Blocks, r"`precision` \('64-true'\).*32-true"),
    "other plugin": (
        2,
        {},
        {"plugins": [L.pytorch.plugins.HalfPrecision("16-true")]},
        Blocks,
        r"`precision` \('16-true'\) must be one of.*bf16-mixed",
    ),
}
"""Ranks, arguments of the strategy and the Trainer, module and message of what is known early."""

LATE = {
    "context-parallel blocks": (
        2,
        {"cp": 2},
        {},
        Blocks,
        r"`cp` \(2\) needs Megatron layers.*cp=1",
    ),
    "context-parallel local attention": (
        2,
        {"cp": 2},
        {},
        NumberedGPT,
        r"`cp` \(2\) needs an attention.*TransformerEngine spec.*or cp=1",
    ),
    "plain module": (2, {"tp": 2}, {}, Plain, r"tp 2.*strategy\.build"),
    "split blocks": (2, {"tp": 2}, {}, Blocks, r"`tp` \(2\) cannot split plain torch blocks"),
    "more stages than blocks": (
        2,
        {"pp": 2, "vpp": 3},
        {},
        Blocks,
        r"4 blocks.*`pp` x `vpp` = 6",
    ),
    "never called": (2, {"pp": 2}, {}, NeverCalled, r"without calling the model.*call it once"),
    "stray": (2, {"pp": 2}, {}, Stray, r"head_outside\.weight.*inside the factory"),
    "two models": (2, {"pp": 2}, {}, TwoModels, r"holds 2 models"),
    "not optimized": (2, {"pp": 2}, {}, Forgetful, r"in no group of the optimizer.*bias.*add them"),
    "batch": (
        2,
        {"pp": 2, "micro_batch_size": 3},
        {},
        Blocks,
        r"batch of 4 samples.*`micro_batch_size` \(3\).*use a batch size of 3 or 6",
    ),
    "microbatches": (
        2,
        {"pp": 2, "vpp": 2, "micro_batch_size": 4},
        {},
        Blocks,
        r"`num_microbatches` \(1 =.*multiple of `pp` \(2\).*use a batch size of 8",
    ),
    "distributed sgd": (
        2,
        {"use_distributed_optimizer": True},
        {},
        Plain,
        r"`use_distributed_optimizer` \(True\) cannot work.*AdamW",
    ),
}
"""The same for what only the built model, the optimizer or the first batch can show."""


def changed_by_the_adapter():
    """Attributes that the engine needs to be different on CPU."""
    return {name: getattr(torch.Tensor, name) for name in ("cuda", "type")}


def refusal(table, case):
    """The error of one case on this rank, and what is left behind."""
    _, strategy, options, module_class, _ = table[case]
    before = changed_by_the_adapter()
    message = None
    try:
        trainer = make_trainer(strategy, **options)
        data = (
            numbered_rows(16) if issubclass(module_class, (Blocks, Plain)) else numbered_tokens(16)
        )
        trainer.fit(module_class(), loader(data, 4))
    except ConfigurationError as error:
        message = str(error)
    return {
        "message": message,
        "groups": dist.is_initialized(),
        "engine": parallel_state.model_parallel_is_initialized(),
        "restored": changed_by_the_adapter() == before,
    }


def matches(pattern, message):
    """Whether the words stand in the message in this order; shown as a whole if not."""
    return re.search(pattern, message, re.DOTALL) or pytest.fail(f"{message!r} !~ {pattern!r}")


@pytest.mark.parametrize("case", EARLY)
def test_refused_on_every_rank_before_process_groups_exist(case):
    for seen in run_ranks(refusal, EARLY[case][0], EARLY, case):
        assert seen["message"] is not None
        assert matches(EARLY[case][-1], seen["message"])
        assert not seen["groups"]
        assert seen["restored"]


@pytest.mark.parametrize("case", LATE)
def test_refused_on_every_rank_and_cleaned_up(case):
    for seen in run_ranks(refusal, LATE[case][0], LATE, case):
        assert seen["message"] is not None
        assert matches(LATE[case][-1], seen["message"])
        assert not seen["engine"]
        assert seen["restored"]


def fit_with_one_bad_rank(module_class):
    make_trainer({"pp": 2}).fit(module_class(), loader(numbered_rows(16), 4))


class FailsOnLastStage(Blocks):
    """Raises behind the model call, where only the last stage comes."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise KeyError("the user's own mistake")
        return loss


class FailsOnFirstStage(Blocks):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.strategy.layout.is_first_stage:
            raise KeyError("the user's own mistake")


@pytest.mark.parametrize(
    ("module_class", "rank", "message"),
    [
        (FailsOnLastStage, 1, "the user's own mistake"),
        (FailsOnFirstStage, 0, "the user's own mistake"),
        (CalledTwice, 1, "called twice"),
        (VectorLoss, 1, r"loss must be a scalar.*\(2,\).*return its mean"),
        (OddReduction, 1, r"`reduce_fx` .*median.*must be one of 'mean', 'sum', 'min', 'max'"),
    ],
)
def test_a_failure_on_one_rank_ends_all(module_class, rank, message):
    started_s = time.monotonic()
    with pytest.raises(RankError, match=f"(?s){message}") as caught:
        run_ranks(fit_with_one_bad_rank, 2, module_class)
    assert caught.value.rank == rank
    assert time.monotonic() - started_s < 60


class Unsaveable(NumberedGPT):
    """The last stage of its model has no place in a checkpoint."""

    def make_chunk(self, stage, **fields):
        chunk = super().make_chunk(stage, **fields)
        if stage.is_last:
            chunk.sharded_state_dict = self.no_shards
        return chunk

    def no_shards(self, *_, **__):
        raise KeyError("no shards for head")


def fit_what_cannot_be_saved(folder):
    refused = make_trainer({"pp": 2}, enable_checkpointing=True, default_root_dir=folder)
    with pytest.raises(CheckpointError) as error:
        refused.fit(Unsaveable(), loader(numbered_tokens(8), 8))
    trained = make_trainer({"pp": 2})
    trained.fit(Unsaveable(), loader(numbered_tokens(8), 8))
    return refused.global_step, str(error.value), trained.global_step


def test_a_model_that_cannot_be_saved_is_refused_at_the_start(tmp_path):
    results = run_ranks(fit_what_cannot_be_saved, 2, str(tmp_path))
    assert results[0] == results[1]
    steps, message, steps_without = results[0]
    assert (steps, steps_without) == (0, 1)
    assert re.search(r"cannot be saved.*not started.*failed on rank 1: .*no shards for", message)


class FailsEverywhere(Blocks):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyError("the user's own mistake")


def fail_and_go_on(strategy):
    """A failing fit, what it leaves behind, and a good fit in the same process."""
    before = changed_by_the_adapter()
    trainer = make_trainer(strategy)
    with pytest.raises(KeyError, match="own mistake"):
        trainer.fit(FailsEverywhere(), loader(numbered_rows(16), 4))
    left = parallel_state.model_parallel_is_initialized()
    restored = changed_by_the_adapter() == before
    recorder = Recorder()
    make_trainer(strategy, callbacks=[recorder]).fit(Blocks(), loader(numbered_rows(16), 4))
    return left, restored, len(recorder.losses), changed_by_the_adapter() == before


@pytest.mark.parametrize("strategy", [{}, {"pp": 2}, {"pp": 2, "vpp": 2}])
def test_an_exception_leaves_no_engine_state(strategy):
    for left, restored, steps, restored_again in run_ranks(fail_and_go_on, 2, strategy):
        assert not left
        assert restored
        assert steps == (4 if strategy else 2)
        assert restored_again


def call_twice_without_pipelining():
    recorder = Recorder()
    make_trainer({}, callbacks=[recorder]).fit(CalledTwice(), loader(numbered_rows(16), 4))
    return recorder.losses


def test_a_whole_model_may_be_called_as_often_as_wanted():
    first, second = run_ranks(call_twice_without_pipelining, 2)
    assert len(first) == 2
    assert first == second
