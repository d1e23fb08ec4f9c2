"""Experts placed by load: training with it is training without it, and so are its checkpoints."""

from __future__ import annotations

import functools
import logging
import warnings
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mcore import ConfigurationError
from lightning_mcore._mcore import checkpointing, slices
from lightning_mcore._mcore.expert_exchange import moe_layers
from lightning_mcore._mcore.expert_order import expert_orders
from lightning_mcore.callbacks import ExpertPlacement, MoEStats
from lightning_mcore.export import export_checkpoint
from lightning_mcore.safetensors_file import read_safetensors
from lightning_mcore.stored import StoredCheckpoint
from lightning_mcore.testing import run_ranks
from tests.gpt import GPT, HEADS, SEQ, VOCAB, token_dataset
from tests.parity.layouts import InOrder
from tests.parity.recipes import GLOBAL_BATCH
from tests.ranks.trainers import make_trainer

EXPERTS, LAYERS, STEPS, SAVED_AT = 8, 2, 6, 4

TOLERANCE = 1e-5


def moe_chunk(stage: Any, *, layers: int = LAYERS, **fields: Any) -> nn.Module:
    """A GPT whose experts are gated, chosen with an expert bias, and balanced by a loss."""
    # Alone, a rank has no dispatcher chosen for it.
    fields = {"moe_token_dispatcher_type": "alltoall", **fields}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.02,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_z_loss_coeff=1e-3,
        **fields,
    )
    chunk = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=EXPERTS),
        VOCAB,
        SEQ,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        vp_stage=stage.vp_stage,
    )
    fill(chunk)
    for _, moe in moe_layers([chunk]):
        # The first experts are the popular ones: the engine's order puts them on one rank.
        moe.router.expert_bias.copy_(torch.linspace(0.3, -0.3, EXPERTS))
    return chunk


@torch.no_grad()
def fill(chunk: nn.Module) -> None:
    """Gives a chunk its part of weights that are the same in every layout."""
    metadata = checkpointing.sharding_metadata(
        parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    parameters = {id(param) for param in chunk.parameters()}

    def draw(part: slices.Slice) -> Tensor:
        seed = zlib.crc32(f"{part.key} {part.index}".encode())
        full = 0.2 * torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))
        place = zip(part.offset, part.size, strict=True)
        return full[tuple(slice(start, start + size) for start, size in place)]

    for leaf in checkpointing.tensors_of(checkpointing.chunk_tree(chunk, metadata)):
        if id(leaf.data) in parameters and leaf.data.dim() > 1:
            leaf.data.copy_(slices.take(leaf, draw))


class MoE(GPT):
    """The tests' LightningModule around it."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(layers=layers)

    def make_chunk(self, stage: Any, **fields: Any) -> nn.Module:
        return moe_chunk(stage, layers=self.hparams.layers, **fields)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Momentum and a large step: state in a wrong place shows at once.
        return torch.optim.AdamW(
            self.parameters(), lr=2e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
        )


@dataclass
class Seen:
    """What one rank saw of a fit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    slots: list[list[tuple[int, ...]]] = field(default_factory=list)
    """Experts by slot of this rank's layers, at the start and after each step."""
    logged: list[dict[str, float]] = field(default_factory=list)
    tokens: list[list[list[float]]] = field(default_factory=list)
    """Tokens by layer and expert of each step."""


class Watch(L.Callback):
    """Fills a ``Seen``, and saves a checkpoint after one of the steps."""

    def __init__(self, stats: MoEStats | None = None, saved: Path | None = None) -> None:
        self.stats = stats
        self.saved = saved
        self.seen = Seen()

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if not self.seen.slots:
            self.seen.slots.append(slots_of(module))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.losses.append(float(outputs["loss"]))
        stats = trainer.strategy.step_stats
        if stats is not None:  # not in the first batches of an accumulation
            self.seen.norms.append(float(stats.grad_norm))
        self.seen.slots.append(slots_of(module))
        metrics = trainer.callback_metrics
        logged = {k: float(v) for k, v in metrics.items() if "expert_placement" in k}
        self.seen.logged.append(logged)
        if self.stats is not None:
            self.seen.tokens.append(self.stats.tokens_per_expert.tolist())
        if self.saved is not None and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.saved)


def slots_of(module: nn.Module) -> list[tuple[int, ...]]:
    """Experts by slot of each layer that has an order of its own."""
    return [order.slots for order in expert_orders(module).values()]


def fit(
    world: int,
    strategy: dict[str, Any],
    callbacks: list[L.Callback],
    *,
    saved: Path | None = None,
    load: Path | None = None,
    precision: str = "32-true",
    **options: Any,
) -> Seen:
    """Trains on all ranks; every layout draws the same global batches."""
    stats = MoEStats(every_n_steps=1)
    watch = Watch(stats, saved)
    trainer = make_trainer(
        strategy,
        callbacks=[*callbacks, stats, watch],
        precision=precision,
        max_steps=STEPS,
        max_epochs=-1,
        **options,
    )
    dp = world // strategy.get("pp", 1) // strategy.get("tp", 1)
    data = InOrder(token_dataset(STEPS * GLOBAL_BATCH), GLOBAL_BATCH // dp)
    torch.manual_seed(1)
    # A layer for each chunk at least.
    module = MoE(layers=max(LAYERS, strategy.get("pp", 1) * strategy.get("vpp", 1)))
    trainer.fit(module, datamodule=data, ckpt_path=load)
    assert slots_of(module) == [], "experts are home again, and nothing is left in the model"
    return watch.seen


def _train_and_compare(
    world: int, cases: dict[str, tuple[dict[str, Any], str, str]], folder: Path
) -> dict[str, tuple[Seen, Seen]]:
    """Trains each case with and without moving experts at every step."""
    results: dict[str, tuple[Seen, Seen]] = {}
    for name, (strategy, precision, policy) in cases.items():
        one, two = folder / f"{name}-without.ckpt", folder / f"{name}-with.ckpt"
        without = fit(world, strategy, [], saved=one, precision=precision)
        placement = ExpertPlacement(1, policy, smoothing=0.0, min_gain=0.0)
        placed = fit(world, strategy, [placement], saved=two, precision=precision)
        results[name] = (without, placed)
    return results


def check_equal_training(results: list[dict[str, tuple[Seen, Seen]]]) -> None:
    """Checks losses, gradient norms and that experts did move, for every rank and case."""
    for rank in results:
        for name, (without, placed) in rank.items():
            assert len(without.losses) == STEPS
            assert len(set(without.losses)) == STEPS, "comparing constants proves nothing"
            for one, two in ((without.losses, placed.losses), (without.norms, placed.norms)):
                torch.testing.assert_close(
                    torch.tensor(two), torch.tensor(one), rtol=TOLERANCE, atol=TOLERANCE
                )
            if not name.endswith("bf16"):
                assert placed.tokens == without.tokens, f"{name}: statistics by slot, not expert"
            canonical = [tuple(range(EXPERTS))] * len(placed.slots[0])
            assert placed.slots[0] == canonical
            moves = sum(a != b for a, b in pairwise(placed.slots))
            assert moves >= 2, f"{name}: experts moved after {moves} of {STEPS} steps"
            assert placed.slots[SAVED_AT] != canonical, f"{name}: not moved when it was saved"


def check_equal_checkpoints(folder: Path, name: str, *, optimizer: list[str]) -> None:
    """Checks every tensor of the model and of the optimizer's state, in canonical order."""
    one = StoredCheckpoint(folder / f"{name}-without.ckpt")
    two = StoredCheckpoint(folder / f"{name}-with.ckpt")
    assert one.tensors.keys() == two.tensors.keys()
    of_experts = [key for key in one.tensors if "mlp.experts." in key]
    for entry in ["", *(f"optimizer.state.{entry}." for entry in optimizer)]:
        for layer in ("linear_fc1", "linear_fc2"):
            assert any(k.startswith(f"{entry}decoder") and layer in k for k in of_experts), entry
    for key in one.tensors:
        a, b = one.read(key), two.read(key)
        scale = float(a.abs().max())
        off = float((a - b).abs().max())
        assert off <= TOLERANCE * scale, f"{key} is off by {off:.2e} of {scale:.2e}"
    for key in of_experts:
        # Experts that were alike could stand in each other's place; some may have got no token.
        layer = one.read(key)[0]
        gaps = [(layer[i] - layer[j]).abs().max() for i in range(EXPERTS) for j in range(i)]
        clear = 100 * TOLERANCE * layer.abs().max()
        assert sum(gap > clear for gap in gaps) > 0.8 * len(gaps), key


DISTRIBUTED = {"ep": 2, "use_distributed_optimizer": True}
PLAIN = {"ep": 2, "use_distributed_optimizer": False, "overlap_param_gather": False}


def test_two_ranks_train_as_without_placement(tmp_path):
    cases = {
        "plain": (PLAIN, "32-true", "serpentine"),
        "plain-bf16": (PLAIN, "bf16-mixed", "lpt"),
    }
    check_equal_training(run_ranks(_train_and_compare, 2, 2, cases, tmp_path))
    check_equal_checkpoints(tmp_path, "plain", optimizer=["exp_avg", "exp_avg_sq"])
    check_equal_checkpoints(
        tmp_path, "plain-bf16", optimizer=["exp_avg", "exp_avg_sq", "fp32_param"]
    )


def _resume(folder: Path) -> dict[str, Seen]:
    """Goes on from a checkpoint of moved experts, in its own layout and in others."""
    saved = folder / "pipeline-with.ckpt"
    moving = functools.partial(ExpertPlacement, 1, smoothing=0.0, min_gain=0.0)
    same = {**DISTRIBUTED, "pp": 2, "micro_batch_size": 1}
    spread = {"ep": 4, "use_distributed_optimizer": False, "micro_batch_size": 1}
    go_on = functools.partial(fit, 4, load=saved)
    return {
        "same layout": go_on(same, [moving()]),
        "same layout, without": go_on(same, []),
        "ep=4, moving": go_on(spread, [moving("lpt")]),
        "ep=1": go_on({**spread, "ep": 1}, []),
    }


def _four_ranks(
    cases: dict[str, tuple[dict[str, Any], str, str]], folder: Path
) -> tuple[dict[str, tuple[Seen, Seen]], dict[str, Seen]]:
    return _train_and_compare(4, cases, folder), _resume(folder)


def test_four_ranks_with_sharded_state_and_pipeline(tmp_path):
    cases = {
        # Two ranks share each expert and hold half of its state; small buckets, so that shards end
        # inside of parameters.
        "sharded": (
            {**DISTRIBUTED, "overlap_param_gather": True, "bucket_size": 1000},
            "32-true",
            "serpentine",
        ),
        "sharded-bf16": ({**DISTRIBUTED, "bucket_size": 1000}, "bf16-mixed", "lpt"),
        "tensor": ({**PLAIN, "tp": 2, "etp": 1}, "32-true", "lpt"),
        "pipeline": ({**DISTRIBUTED, "pp": 2, "micro_batch_size": 1}, "32-true", "serpentine"),
        "pipeline-bf16": ({**PLAIN, "pp": 2}, "bf16-mixed", "lpt"),
        # Two chunks on a rank, whose parameters are gathered while the schedule runs.
        "interleaved": (
            {**DISTRIBUTED, "pp": 2, "vpp": 2, "overlap_p2p": True, "micro_batch_size": 1}
            | {"overlap_param_gather": True},
            "32-true",
            "serpentine",
        ),
    }
    ranks = run_ranks(_four_ranks, 4, cases, tmp_path)
    check_equal_training([trained for trained, _ in ranks])
    for name in ("sharded", "tensor", "pipeline", "interleaved"):
        check_equal_checkpoints(tmp_path, name, optimizer=["exp_avg", "exp_avg_sq"])
    adam = ["exp_avg", "exp_avg_sq"]
    check_equal_checkpoints(tmp_path, "sharded-bf16", optimizer=[*adam, "param"])
    check_equal_checkpoints(tmp_path, "pipeline-bf16", optimizer=[*adam, "fp32_param"])
    for trained, resumed in ranks:
        without, placed = trained["pipeline"]
        for name, seen in resumed.items():
            expected = torch.tensor(without.losses[SAVED_AT:])
            off = (torch.tensor(seen.losses) - expected).abs().max()
            assert off <= TOLERANCE, f"{name}: loss off by {off:.2e}"
        assert resumed["same layout"].slots[0] == placed.slots[SAVED_AT]
        assert resumed["ep=4, moving"].slots[0] == [tuple(range(EXPERTS))] * 2
        assert resumed["ep=4, moving"].slots[1] != resumed["ep=4, moving"].slots[0]
    for name in ("with", "without"):
        source = tmp_path / f"pipeline-{name}.ckpt"
        export_checkpoint(source, tmp_path / f"{name}.safetensors")
    one = read_safetensors(tmp_path / "without.safetensors")
    two = read_safetensors(tmp_path / "with.safetensors")
    assert one.keys() == two.keys()
    assert any("local_experts.7" in key for key in one), list(one)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------------------ what it says


def _refuse_or_warn(folder: Path) -> dict[str, Any]:
    """What happens where experts cannot be moved, or moving gains nothing."""
    said: dict[str, Any] = {}

    def attempt(name: str, strategy: dict[str, Any], *callbacks: L.Callback, **options: Any):
        torch.manual_seed(1)
        module = options.pop("module", None) or MoE()
        trainer = make_trainer(strategy, callbacks=[*callbacks], max_steps=2, **options)
        data = InOrder(token_dataset(2 * GLOBAL_BATCH), GLOBAL_BATCH // 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(module, datamodule=data)
            except ConfigurationError as error:
                said[name] = str(error)
                return
        said[name] = [str(w.message) for w in caught if "ExpertPlacement" in str(w.message)]

    attempt("ep=1", {"ep": 1}, ExpertPlacement(1))
    attempt("dense", {}, ExpertPlacement(1), module=GPT())
    attempt("rmsprop", PLAIN, ExpertPlacement(1), module=WithOptimizer("rmsprop"))
    attempt("groups", PLAIN, ExpertPlacement(1), module=WithOptimizer("groups"))

    # A threshold that nothing reaches: nothing moves.
    placement = ExpertPlacement(2, smoothing=0.0, min_gain=0.9)
    seen = fit(2, PLAIN, [placement])
    said["kept"] = seen
    # Every third step only, with accumulation: steps are of the optimizer.
    placement = ExpertPlacement(3, "lpt", smoothing=0.0, min_gain=0.0)
    data = token_dataset(STEPS * GLOBAL_BATCH)
    watch, lines = Watch(), Lines()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(lines)
    trainer = make_trainer(
        PLAIN, callbacks=[placement, watch], max_steps=3, accumulate_grad_batches=2
    )
    trainer.fit(MoE(), datamodule=InOrder(data, GLOBAL_BATCH // 2))
    logger.removeHandler(lines)
    said["accumulated"] = watch.seen
    said["lines"] = [line for line in lines.kept if "Expert placement" in line]
    return said


class WithOptimizer(MoE):
    """With an optimizer, or groups of one, that do not go with moving experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "rmsprop":
            return torch.optim.RMSprop(self.parameters())
        named = list(self.named_parameters())
        first = [param for name, param in named if "local_experts.0" in name]
        rest = [param for name, param in named if "local_experts.0" not in name]
        return torch.optim.AdamW([{"params": first, "lr": 1e-4}, {"params": rest}])


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def test_what_it_refuses_and_what_it_reports(tmp_path):
    ranks = run_ranks(_refuse_or_warn, 2, tmp_path)
    for rank, said in enumerate(ranks):
        assert "it has no MoE layers; leave the callback out." in said["dense"]
        assert "keeps state in a form of its own; use Adam, AdamW or SGD." in said["rmsprop"]
        assert "in different groups of the optimizer; put them in one." in said["groups"]
        assert len(said["ep=1"]) == (rank == 0)
        canonical = tuple(range(EXPERTS))
        assert all(slots == [canonical] * 2 for slots in said["kept"].slots)
        seen = said["accumulated"]
        # Six batches are three steps; experts move after the last.
        assert [slots != [canonical] * 2 for slots in seen.slots] == [False] * 6 + [True]
        assert all(not logged for logged in seen.logged[:-1])
        assert seen.logged == ranks[0]["accumulated"].logged
        assert said["kept"].logged == ranks[0]["kept"].logged
    logged = ranks[0]["accumulated"].logged[-1]
    measured = logged["expert_placement/imbalance_measured"]
    predicted = logged["expert_placement/imbalance_predicted"]
    assert 1.0 <= predicted < measured <= 2.0
    # Nothing moved: what was predicted for the average of one interval is what it measured.
    kept = ranks[0]["kept"].logged[-1]
    assert kept["expert_placement/imbalance_predicted"] == pytest.approx(
        kept["expert_placement/imbalance_measured"]
    )
    assert len(ranks[0]["lines"]) == 1
    assert f"was {measured:.3f}; moved" in ranks[0]["lines"][0]
    assert f"predicted {predicted:.3f} (lower bound" in ranks[0]["lines"][0]
    assert "does nothing: with `ep` (1) every rank holds all experts" in ranks[0]["ep=1"][0]
