"""Places experts on expert-parallel ranks by their load, while training goes on unchanged.

What enters: tokens per expert, counted behind each router. What leaves: experts on other ranks, two
logged values, and a line on the console. Every rank calls it. Collectives: one over the world at
each interval; where experts move, one all-to-all per layer over the expert-parallel group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_mcore import placement
from lightning_mcore._mcore import expert_exchange as engine
from lightning_mcore._mcore.expert_order import ExpertOrder
from lightning_mcore.callbacks._periodic import PeriodicCallback
from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning.pytorch import LightningModule, Trainer

    from lightning_mcore.run import ModelRun

__all__ = ["ExpertPlacement"]

Slots = tuple[int, ...]


class ExpertPlacement(PeriodicCallback):
    """Moves experts between ranks so that ranks get similar numbers of tokens.

    The engine gives expert ``i`` of a layer to rank ``i // (num_experts // ep)``, however many
    tokens it gets; the rank with the popular experts is waited for. Every ``every_n_steps``
    optimizer steps, this callback reads how many tokens each expert of each layer got, updates a
    moving average, plans where experts should be, and moves them where that gains enough: weights,
    main parameters and optimizer state, by one all-to-all per layer. Loss and gradients are those
    of training without it, but for the order in which numbers are added.

    Checkpoints and exports hold the experts in canonical order, so any layout loads them. At the
    end of ``fit`` the experts are home again.

    Logs ``expert_placement/imbalance_measured``, of the tokens since the last interval in the order
    they were trained in, and ``expert_placement/imbalance_predicted``, of the moving average in the
    order chosen. Both are the load of the fullest expert-parallel rank over the mean, averaged over
    layers: 1 is even, ``ep`` is the worst. They are logged from the first interval on, and are the
    same on every rank.

    Cost: a sum over the routing map and, once experts have moved, a permutation of the router's two
    outputs ``[tokens, num_experts]`` in each layer; at an interval the counts are reduced and read.

    Args:
        every_n_steps: Optimizer steps between two intervals, at least 1.
        policy: ``serpentine`` deals experts to ranks in the order of their load, forth and back;
            ``lpt`` gives each to the least loaded rank with room, which is more even.
        smoothing: Weight of the past in the moving average: 0 plans for the last interval alone.
        min_gain: Least part by which a plan must lower a layer's predicted imbalance for its
            experts to be moved; 0.02 is 2 %.

    Raises:
        ValueError: For arguments out of their range.
        ConfigurationError: On every rank, at the start of ``fit``: if the strategy is not ours, the
            model has no experts, or experts cannot be moved in it, with the reason.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        policy: Literal["serpentine", "lpt"] = "serpentine",
        *,
        smoothing: float = 0.5,
        min_gain: float = 0.02,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` ({every_n_steps}) must be at least 1; use 500.")
        if policy not in ("serpentine", "lpt"):
            raise ValueError(f"`policy` ({policy!r}) must be 'serpentine' or 'lpt'.")
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"`smoothing` ({smoothing}) must be in [0, 1); use 0.5.")
        if not 0.0 <= min_gain < 1.0:
            raise ValueError(f"`min_gain` ({min_gain}) must be in [0, 1); use 0.02.")
        super().__init__(every_n_steps)
        self.policy = policy
        self.smoothing = smoothing
        self.min_gain = min_gain
        self._orders: dict[str, ExpertOrder] = {}
        """Layers of this rank."""
        self._sizes: dict[str, int] = {}
        """Experts of every layer of the model, in order."""
        self._averages: dict[str, list[float]] = {}
        self._slots: dict[str, Slots] = {}
        self._ep = 0
        self._active = False
        """Whether experts can move in this fit; the same on every rank."""
        self._warned = False
        self._latest: dict[str, torch.Tensor] = {}

    # -------------------------------------------------------------------------- Lightning's hooks

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if getattr(trainer.strategy, "strategy_name", None) != "mcore":
            raise ConfigurationError(
                "`ExpertPlacement` moves the experts of megatron-core's layers, but the Trainer"
                f" runs {type(trainer.strategy).__name__}; use strategy=MCoreStrategy(ep=...) or"
                " leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        run = _run_of(trainer)
        layout = run.state.layout
        found = engine.moe_layers(run.inner)
        self._sizes = _agree_on_layers(found, run, trainer.optimizers)
        self._latest, self._warned = {}, False
        self._active, self._orders = False, {}
        one_each = all(size == layout.ep for size in self._sizes.values())
        if layout.ep == 1 or one_each:
            rank_zero_warn(
                "`ExpertPlacement` does nothing:"
                + (
                    " with `ep` (1) every rank holds all experts."
                    if layout.ep == 1
                    else f" with `ep` ({layout.ep}) a rank holds one expert of each layer, so any"
                    " order is as uneven; balance the router, or use a smaller ep."
                )
            )
            return
        self._active = True
        self._orders = {name: ExpertOrder(name, moe) for name, moe in found}
        restored = self._slots if self._ep == layout.ep else {}
        self._ep = layout.ep
        self._slots = {name: placement.canonical(size) for name, size in self._sizes.items()}
        # From a checkpoint of the same ep: experts are loaded in canonical order.
        self._move(
            trainer,
            {
                name: slots
                for name, slots in restored.items()
                if sorted(slots) == list(self._slots.get(name, ()))
            },
        )

    @override
    def _at_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self._end_interval(trainer)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # Every batch, because the loggers only take what the batch at their own interval logs.
        for name, value in self._latest.items():
            pl_module.log(name, value)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._active:
            return
        self._active = False
        planned = dict(self._slots)
        self._move(trainer, {name: placement.canonical(len(s)) for name, s in planned.items()})
        for order in self._orders.values():
            order.release()
        self._orders = {}
        # What a checkpoint after this, or another fit, goes on from.
        self._slots = planned

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "ep": self._ep,
            "averages": {name: list(load) for name, load in self._averages.items()},
            "slots": {name: list(slots) for name, slots in self._slots.items()},
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ep = state_dict["ep"]
        self._averages = {name: list(load) for name, load in state_dict["averages"].items()}
        self._slots = {name: tuple(slots) for name, slots in state_dict["slots"].items()}

    # -------------------------------------------------------------------------- an interval

    def _end_interval(self, trainer: Trainer) -> None:
        counts = self._counts(trainer)
        plans = [self._plan(name, counts[name]) for name in self._sizes if sum(counts[name])]
        if not plans:
            return
        self._move(trainer, {plan.name: plan.chosen for plan in plans})
        moved = [plan for plan in plans if plan.moved]
        measured = sum(plan.measured for plan in plans) / len(plans)
        predicted = sum(plan.predicted for plan in plans) / len(plans)
        lowest = sum(plan.bound for plan in plans) / len(plans)
        self._latest = {
            "expert_placement/imbalance_measured": torch.tensor(measured),
            "expert_placement/imbalance_predicted": torch.tensor(predicted),
        }
        rank_zero_info(
            f"Expert placement ({self.policy}) at step {trainer.global_step}: load of the fullest"
            f" of ep={self._ep} ranks over the mean was {measured:.3f}; "
            + (
                f"moved {sum(plan.moved for plan in moved)} experts in {len(moved)} of"
                f" {len(plans)} layers, predicted {predicted:.3f}"
                if moved
                else f"no move would gain {100 * self.min_gain:g} %, predicted {predicted:.3f}"
            )
            + f" (lower bound {lowest:.3f})."
        )
        self._warn_if_bounded(plans)

    def _counts(self, trainer: Trainer) -> dict[str, list[int]]:
        """Tokens per expert of every layer since the last interval, over all ranks."""
        width = max(self._sizes.values())
        device = trainer.strategy.root_device
        table = torch.zeros(len(self._sizes), width, dtype=torch.int64, device=device)
        for row, name in enumerate(self._sizes):
            if name in self._orders:
                table[row, : self._sizes[name]] += self._orders[name].counts
                self._orders[name].set_to_zero()
        # All ranks of a layer route as many tokens, so which of them hold copies does not matter.
        dist.all_reduce(table)
        rows = table.tolist()
        return {
            name: row[:size] for (name, size), row in zip(self._sizes.items(), rows, strict=True)
        }

    def _plan(self, name: str, count: list[int]) -> _Plan:
        share = [value / sum(count) for value in count]
        past = self._averages.get(name)
        if past is None or len(past) != len(share):
            past = share
        keep = self.smoothing
        load = [keep * old + (1.0 - keep) * new for old, new in zip(past, share, strict=True)]
        self._averages[name] = load
        current = self._slots[name]
        wanted = placement.keep_in_place(
            placement.place(load, self._ep, self.policy), current, self._ep
        )
        now = placement.imbalance(load, current, self._ep)
        then = placement.imbalance(load, wanted, self._ep)
        chosen = wanted if then < now * (1.0 - self.min_gain) else current
        return _Plan(
            name=name,
            measured=placement.imbalance(share, current, self._ep),
            predicted=placement.imbalance(load, chosen, self._ep),
            bound=placement.bound(load, self._ep),
            chosen=chosen,
            moved=sum(a != b for a, b in zip(current, chosen, strict=True)),
        )

    def _move(self, trainer: Trainer, wanted: Mapping[str, Slots]) -> None:
        """Moves experts to the slots wanted, which are equal on all ranks. Collective."""
        changed = {name: slots for name, slots in wanted.items() if slots != self._slots[name]}
        if not changed:
            return
        run = _run_of(trainer)
        assert run.optimizer is not None, "there is a fit, so there is an optimizer"
        run.gather_parameters()
        everyone: list[Any] = [None] * run.state.layout.world_size
        own = engine.entries_of(list(self._orders.values()), run.optimizer.engine)
        dist.all_gather_object(everyone, own, group=run.state.groups.world_cpu)
        entries = {entry: dtype for one in everyone for entry, dtype in one.items()}
        for name, slots in changed.items():
            if name in self._orders:
                engine.move_experts(
                    self._orders[name], slots, run.optimizer.engine, entries, run.state.groups.ep
                )
        self._slots |= changed

    def _warn_if_bounded(self, plans: Sequence[_Plan]) -> None:
        bounded = [plan for plan in plans if plan.bound > 1.0 + self.min_gain]
        if not bounded or self._warned:
            return
        self._warned = True
        worst = max(bounded, key=lambda plan: plan.bound)
        rank_zero_warn(
            f"In {len(bounded)} of {len(plans)} MoE layers the hottest expert alone gets more than"
            f" a rank's mean share (up to {worst.bound:.2f} times, {worst.name}), with"
            f" {self._sizes[worst.name] // self._ep} experts per rank at ep={self._ep}: no"
            " placement can balance that. An auxiliary loss, `moe_router_enable_expert_bias` or a"
            " smaller ep can."
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What an interval found of one layer."""

    name: str
    measured: float
    """Imbalance of the interval's tokens in the order they were trained in."""
    predicted: float
    """Imbalance of the moving average in the order chosen."""
    bound: float
    chosen: Slots
    moved: int
    """Slots that get another expert."""


def _run_of(trainer: Trainer) -> ModelRun:
    run: ModelRun = trainer.strategy._model_run  # type: ignore[attr-defined]
    return run


def _agree_on_layers(
    found: Sequence[tuple[str, Any]], run: ModelRun, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, int]:
    """Experts of every layer of the model. Collective over the world.

    Raises:
        ConfigurationError: On every rank, if there are none or they cannot be moved.
    """
    assert run.optimizer is not None, "there is a fit, so there is an optimizer"
    group_of = {
        id(param): index
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    sizes: dict[str, int] = {}
    problem: str | None = None
    groups: dict[str, set[int | None]] = {}
    for name, moe in found:
        problem = problem or engine.why_not_movable(moe, run.optimizer.engine)
        if name in sizes:
            problem = problem or f"two of its layers are called {name!r}; give them numbers"
        sizes[name] = int(moe.config.num_moe_experts)
        for expert in engine.expert_parameters(moe) or ():
            for parameter, param in expert.items():
                group = group_of.get(id(param)) if param.requires_grad else None
                groups.setdefault(f"{name} {parameter}", set()).add(group)
    everyone: list[Any] = [None] * run.state.layout.world_size
    own = (sizes, problem, groups)
    dist.all_gather_object(everyone, own, group=run.state.groups.world_cpu)
    layers: dict[str, int] = {}
    members: dict[str, set[int | None]] = {}
    for theirs, _, their_groups in everyone:
        layers |= theirs
        for parameter, indices in their_groups.items():
            members.setdefault(parameter, set()).update(indices)
    reasons = sorted({reason for _, reason, _ in everyone if reason})
    reasons += [
        f"the experts' `{parameter}` are in different groups of the optimizer; put them in one"
        for parameter, indices in sorted(members.items())
        if len(indices) > 1
    ]
    if not layers:
        reasons = ["it has no MoE layers; leave the callback out"]
    elif run.optimizer.runs_torch_optimizer:
        reasons = ["its optimizer keeps state in a form of its own; use Adam, AdamW or SGD"]
    if reasons:
        raise ConfigurationError(
            f"`ExpertPlacement` cannot move the experts of this model: {reasons[0]}."
        )
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
