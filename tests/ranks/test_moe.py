"""Expert layers in a Trainer: statistics, checkpoints under other sizes, refusals, the example."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore._mcore import moe as engine_moe
from lightning_mcore._mcore.engine import engine_version
from lightning_mcore.callbacks import MoEStats
from lightning_mcore.callbacks.moe_stats import draw_heat_map
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, LAYERS, SEQ, VOCAB, call_gpt, token_dataset
from tests.parity.layouts import ContextGPT, InOrder, ParityGPT, Watch, biased_routers
from tests.parity.recipes import GLOBAL_BATCH, STEPS, Training
from tests.parity.weights import check_shards
from tests.ranks.trainers import as_floats, make_trainer, world_size

EXPERTS, TOPK = 4, 2
BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
    "moe_router_dtype": "fp32",
}
CAPPED = {"moe_expert_capacity_factor": 0.5}
PADDED = {**CAPPED, "moe_pad_expert_input_to_capacity": True}


def training(**moe: Any) -> Training:
    return Training(experts=EXPERTS, moe=tuple(moe.items()))


# ------------------------------------------------------------------------- statistics


class Values(L.Callback):
    """What was logged with each batch, and the tokens per expert behind it."""

    def __init__(self, stats: MoEStats) -> None:
        self.stats = stats
        self.logged: list[dict[str, float]] = []
        self.tokens: list[Any] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % self.stats.every_n_steps:
            return
        found = as_floats(trainer.callback_metrics)
        self.logged.append({k: v for k, v in found.items() if k.startswith("moe/")})
        self.tokens.append(self.stats.tokens_per_expert.tolist())


def _statistics(strategy: dict[str, Any], run: Training, every: int = 1, **options: Any) -> Any:
    torch.manual_seed(1)
    stats = MoEStats(every_n_steps=every, per_layer=True)
    seen = Values(stats)
    trainer = make_trainer(
        {**strategy, "micro_batch_size": 1}, callbacks=[stats, seen], max_steps=4, **options
    )
    cp = strategy.get("cp", 1)
    dp = world_size() // (strategy.get("tp", 1) * strategy.get("pp", 1) * cp)
    module = ParityGPT(run) if cp == 1 else ContextGPT(run, masked=False)
    trainer.fit(module, datamodule=InOrder(token_dataset(64), GLOBAL_BATCH // dp))
    assert not [r for r in biased_routers(module) if r._forward_hooks]
    return seen.logged, seen.tokens


def _all_statistics(strategies: list[dict[str, Any]]) -> Any:
    run = training(**BALANCED)
    found = [_statistics(strategy, run) for strategy in strategies]
    if world_size() == 2:
        found.append(_statistics({"ep": 2}, training(**BALANCED, **CAPPED)))
        found.append(_statistics({"ep": 2}, training(**BALANCED, **PADDED)))
        found.append(_statistics({"ep": 2}, run, every=2, limit_val_batches=0))
    return found


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return run_ranks(_all_statistics, 2, [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}])


def check_alike(expected: dict[str, float], found: dict[str, float]) -> None:
    assert set(found) >= set(expected)
    for name, value in expected.items():
        if "rank_imbalance" not in name:
            assert found[name] == pytest.approx(value, abs=1e-4), name


def test_statistics_are_those_of_the_whole_job(two):
    """The same on every rank and in every layout, with microbatches, tp, pp, vpp and cp."""
    ((alone_logged, alone_tokens),) = run_ranks(_all_statistics, 1, [{}])[0]
    four = run_ranks(
        _all_statistics,
        4,
        [{"pp": 2, "vpp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"pp": 4}, {"cp": 2, "ep": 2}],
    )
    expected = torch.tensor(alone_tokens)
    assert expected.shape == (4, LAYERS, EXPERTS)
    assert (expected.sum(2) == GLOBAL_BATCH * SEQ * TOPK).all()
    assert len({tuple(row) for row in expected.view(-1, EXPERTS).tolist()}) > 1
    for by_rank, count in ((two, 2), (four, 4)):
        for index in range(count):
            for logged, tokens in (rank[index] for rank in by_rank):
                assert tokens == alone_tokens
                assert logged == by_rank[0][index][0]
                for mine, other in zip(alone_logged, logged, strict=True):
                    check_alike(mine, other)


def test_values_follow_from_tokens_per_expert(two):
    logged, tokens = two[0][0]
    for values, counts in zip(logged, torch.tensor(tokens), strict=True):
        by_expert = counts.amax(1) / counts.mean(1)
        ranks = counts.view(LAYERS, 2, -1).sum(2)
        by_rank = ranks.amax(1) / ranks.mean(1)
        assert values["moe/expert_imbalance"] == pytest.approx(by_expert.mean().item())
        assert values["moe/expert_imbalance_worst"] == pytest.approx(by_expert.max().item())
        assert values["moe/rank_imbalance"] == pytest.approx(by_rank.mean().item())
        assert values["moe/layer_03/rank_imbalance"] == pytest.approx(by_rank[3].item())
        assert values["moe/dropped_share"] == 0.0
        # 1 when all experts are used alike; a router at the start of its training is near it.
        assert 0.95 < values["moe/load_balancing_loss"] < 2.0
        assert values["moe/z_loss"] > 0.0


def test_dropped_tokens_are_counted_with_and_without_padding(two):
    for (capped, tokens), (padded, other) in (rank[2:4] for rank in two):
        assert tokens == other
        assert [v["moe/dropped_share"] for v in capped] == [v["moe/dropped_share"] for v in padded]
        for values, counts in zip(capped, torch.tensor(tokens), strict=True):
            share = 1.0 - counts.sum(1) / (GLOBAL_BATCH * SEQ * TOPK)
            assert values["moe/dropped_share"] == pytest.approx(share.mean().item(), abs=1e-6)
            # Half of what even use would need: half of all choices at least are dropped.
            assert 0.5 <= values["moe/dropped_share"] < 0.9


def test_steps_between_are_not_counted(two):
    every, some = two[0][0], two[0][4]
    assert len(some[1]) == 2
    assert some[1] == every[1][1::2]
    for mine, other in zip(every[0][1::2], some[0], strict=True):
        check_alike(mine, other)


def test_heat_map_has_a_column_for_each_expert():
    pytest.importorskip("matplotlib")
    even, skewed = torch.ones(3, 8), torch.ones(3, 8)
    skewed[:, 2] = 5.0
    first, second = (draw_heat_map(loads, title="layer 0") for loads in (even, skewed))
    assert first.shape == second.shape
    assert first.dtype == second.dtype == "uint8"
    assert (first != second).any()


def _images(folder: str) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(folder)
    stats = MoEStats(every_n_steps=2, heat_map=True)
    trainer = make_trainer({"ep": 2}, callbacks=[stats], max_steps=4, logger=logger)
    trainer.fit(ParityGPT(training()), datamodule=InOrder(token_dataset(64), 4))
    if not trainer.is_global_zero:
        return []
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    return [f"{tag} {e.step}" for tag in events.Tags()["images"] for e in events.Images(tag)]


def test_heat_maps_reach_tensorboard(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    first, second = run_ranks(_images, 2, str(tmp_path))
    assert first == [f"moe/layer_{n:02d} {step}" for n in range(LAYERS) for step in (2, 4)]
    assert second == []


# ------------------------------------------------------------------------- the step's contract


class Noisy(ParityGPT):
    """Draws a number and logs before its model call, and notes what it drew."""

    def __init__(self, run: Training) -> None:
        super().__init__(run)
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        noise = torch.rand(())
        self.drawn.append(noise.item())
        self.log("before", noise, reduce_fx="sum")
        loss = call_gpt(self.model, tokens, labels).mean() * (1.0 + noise)
        self.log("after", noise, reduce_fx="sum")
        self.log("train_loss", loss)
        return loss


class Metrics(L.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append(as_floats(trainer.callback_metrics))


def _noisy() -> Any:
    seen = Metrics()
    trainer = make_trainer(
        {"ep": 2, "overlap_moe": "1f1b", "micro_batch_size": 2},
        callbacks=[seen],
        max_steps=2,
        precision="bf16-mixed",
    )
    module = Noisy(training())
    trainer.fit(module, datamodule=InOrder(token_dataset(64), 4))
    return module.drawn, seen.seen


def test_a_step_under_1f1b_draws_the_same_twice_and_logs_once():
    for drawn, seen in run_ranks(_noisy, 2):
        assert len(drawn) == 2 * 2 * 2  # steps x microbatches x runs
        assert len(set(drawn)) == 4
        assert all(drawn.count(number) == 2 for number in drawn)
        assert all(values["before"] == pytest.approx(values["after"]) for values in seen)
        assert all(0.0 < values["before"] < 4.0 for values in seen)


# ------------------------------------------------------------------------- checkpoints

BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_router_score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 48,
}


def _part(folder: str, start: int, until: int, strategy: dict[str, Any]) -> Any:
    """Trains from step ``start`` to ``until``, with a checkpoint after every step."""
    torch.serialization.add_safe_globals([Training])  # among the module's hyperparameters
    run = training(**BIASED)
    watch = Watch()
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = make_trainer(
        {**strategy, "micro_batch_size": 1},
        callbacks=[watch, keep],
        max_steps=until,
        enable_checkpointing=True,
    )
    dp = world_size() // (strategy.get("tp", 1) * strategy.get("pp", 1))
    module = ParityGPT(run)
    data = InOrder(token_dataset(run.samples), GLOBAL_BATCH // dp)
    trainer.fit(module, datamodule=data, ckpt_path=f"{folder}/step={start}.ckpt" if start else None)
    watch.outcome.shards = [shard.copied() for shard in module.shards]
    watch.outcome.biases = {r.layer_number: r.expert_bias.clone() for r in biased_routers(module)}
    watch.outcome.state = {}
    return watch.outcome


def test_training_goes_on_under_other_expert_parallel_sizes(tmp_path):
    """ep2 -> ep1 -> ep4 -> tp2 ep2: losses, norms, parameters as if nothing had happened.

    Adam's moments decide all steps but the first, and biases decide where tokens go.
    """
    whole = run_ranks(_part, 1, str(tmp_path / "whole"), 0, STEPS, {})[0]
    parts = [
        run_ranks(_part, world, str(tmp_path / "cut"), start, until, strategy)
        for world, start, until, strategy in (
            (2, 0, 2, {"ep": 2}),
            (1, 2, 3, {}),
            (4, 3, 4, {"ep": 4}),
            (2, 4, STEPS, {"tp": 2, "ep": 2, "etp": 1}),
        )
    ]
    losses = [loss for ranks in parts for loss in ranks[0].losses]
    norms = [norm for ranks in parts for norm in ranks[0].grad_norms]
    assert losses == pytest.approx(whole.losses, abs=1e-5)
    assert norms == pytest.approx(whole.grad_norms, rel=1e-4)
    expected = {shard.key: torch.zeros(shard.global_shape) for shard in whole.shards}
    for shard in whole.shards:
        expected[shard.key][shard.place] = shard.value
    check_shards([rank.shards for rank in parts[-1]], expected, 1e-5)
    for rank in parts[-1]:
        for layer, bias in rank.biases.items():
            torch.testing.assert_close(bias, whole.biases[layer], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------- refusals


class DeclaredExperts(ParityGPT):
    model_dims = {"num_moe_experts": 3}  # noqa: RUF012


class Balanced(ParityGPT):
    """Its experts are balanced by losses."""

    def __init__(self, run: Training) -> None:
        super().__init__(training(**BALANCED))


class OwnDispatcher(ParityGPT):
    """Sets what the strategy decides."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        return dict(moe_token_dispatcher_type="alltoall", **fields)


class Grouped(ParityGPT):
    """Asks the engine's own layers for what only TransformerEngine's have."""

    def make_chunk(self, stage: Any, **fields: Any) -> Any:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_moe_experts=EXPERTS,
            moe_grouped_gemm=True,
            add_bias_linear=False,
            **fields,
        )
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=True)
        return GPTModel(config, spec, VOCAB, SEQ)


REFUSALS = {
    # First, since it fails late: the world group stays for the others.
    "stats": (GPT, {}, "`MoEStats` needs expert layers"),
    "experts": (DeclaredExperts, {"ep": 2}, "`num_moe_experts` (3) must be a multiple of `ep` (2)"),
    "no experts": (GPT, {"ep": 2}, "Set num_moe_experts in the factory"),
    "whole sequences": (ParityGPT, {"tp": 2, "sequence_parallel": False},
                        "use sequence_parallel=True"),
    "deepep": (ParityGPT, {"ep": 2, "moe_dispatcher": "deepep"}, "sends bf16"),
    "1f1b": (ParityGPT, {"ep": 2, "overlap_moe": "1f1b"}, "needs bf16 or fp16"),
    "own": (OwnDispatcher, {"ep": 2}, "set it through MCoreStrategy"),
    "grouped": (Grouped, {"ep": 2}, "moe_grouped_gemm=False"),
}  # fmt: skip
if engine_version() < (0, 19):  # tests/parity/test_moe.py trains so with newer ones
    REFUSALS["per token"] = (
        Balanced,
        {"tp": 2, "etp": 1, "per_token_loss": True},
        "divide the gradients of moe_aux_loss_coeff and moe_z_loss_coeff by 2 too much",
    )


def _refusals() -> dict[str, str]:
    said = {}
    for name, (module, strategy, _) in REFUSALS.items():
        callbacks = [MoEStats()] if name == "stats" else []
        made = module() if module is GPT else module(training())
        trainer = make_trainer(strategy, callbacks=callbacks, max_steps=1)
        try:
            trainer.fit(made, datamodule=InOrder(token_dataset(64), 2))
        except ConfigurationError as error:
            said[name] = str(error)
    return said


def test_every_rank_refuses_alike():
    first, second = run_ranks(_refusals, 2)
    assert first == second
    for name, (_, _, words) in REFUSALS.items():
        assert words in first[name], first.get(name)


@pytest.mark.parametrize(
    ("version", "parts", "fields", "wrong"),
    [
        ((0, 18, 0), {"tp": 2, "cp": 1}, {}, True),
        ((0, 18, 0), {"tp": 1, "cp": 2}, {"moe_aux_loss_coeff": [0.0, 0.1]}, True),
        ((0, 18, 0), {"tp": 1, "cp": 2}, {"moe_aux_loss_coeff": 0, "moe_z_loss_coeff": 0.1}, True),
        ((0, 18, 0), {"tp": 1, "cp": 1}, {}, False),
        ((0, 18, 0), {"tp": 2, "cp": 1}, {"moe_aux_loss_coeff": [0.0, 0.0]}, False),
        ((0, 18, 0), {"tp": 2, "cp": 1}, {"calculate_per_token_loss": False}, False),
        ((0, 18, 0), {"tp": 2, "cp": 1}, {"num_moe_experts": None}, False),
        ((0, 19, 0), {"tp": 2, "cp": 2}, {}, False),
    ],
)
def test_losses_per_token_are_wrong_for_parts_of_sequences_before_0_19(
    monkeypatch, version, parts, fields, wrong
):
    monkeypatch.setattr(engine_moe, "engine_version", lambda: version)
    config = {
        "calculate_per_token_loss": True,
        "num_moe_experts": 4,
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": None,
    }
    assert engine_moe.weakens_losses_per_token(SimpleNamespace(**config | fields), **parts) == wrong


# ------------------------------------------------------------------------- the example


def _example(arguments: list[str]) -> dict[str, float]:
    path = Path(__file__).parents[2] / "examples" / "moe.py"
    spec = importlib.util.spec_from_file_location("moe_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = ["moe.py", *arguments]
    return module.main()


def test_the_example_trains_alike_in_both_layouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--steps", "10"]
    flat = run_ranks(_example, 2, short)
    piped = run_ranks(_example, 4, [*short, "--pp", "2"])
    for values in (*flat, *piped):
        assert values["train_loss"] < 4.5  # of ln 256 = 5.5
        assert values["moe/expert_imbalance"] >= 1.0
    assert len({values["train_loss"] for values in piped}) == 1
