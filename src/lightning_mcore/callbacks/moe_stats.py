"""Logs how experts are used: balance, dropped tokens and the losses that balance them.

What enters: what the routers of this rank decided. What leaves: values over the whole job, the same
on every rank. Every rank calls it, whether it holds expert layers or not.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_mcore._mcore.expert_order import experts_by_slot
from lightning_mcore._mcore.moe import LOSS_NAMES, RouterInfo, find_routers, take_losses
from lightning_mcore.callbacks._logged_step import LoggedStepCallback
from lightning_mcore.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from numpy import ndarray

    from lightning_mcore.layout import Layout

__all__ = ["MoEStats", "draw_heat_map"]


class MoEStats(LoggedStepCallback):
    """Logs the use of experts in the steps that are logged.

    Of each expert layer, over all microbatches, data-parallel and tensor-parallel ranks of a step;
    here the mean over layers, and with ``_worst`` the largest:

    * ``moe/expert_imbalance``: tokens of the fullest expert over the mean; 1 is even;
    * ``moe/rank_imbalance``: the same of expert-parallel ranks, which is what a step waits for;
    * ``moe/dropped_share``: choices that a capacity factor dropped, over all choices of a token and
      an expert; 0 without one;
    * ``moe/load_balancing_loss``, ``moe/seq_load_balancing_loss``,
      ``moe/global_load_balancing_loss``, ``moe/z_loss``: those that the model has, without their
      coefficients. The balancing losses are 1 if all experts are used alike.

    Cost: nothing in the steps between. In a step that is logged, a sum over each router's map
    ``[tokens, experts]`` per microbatch, and one all-reduce over the world of ``layers x (experts +
    ep + 9)`` numbers. The host waits for the device only with ``heat_map``.

    Args:
        every_n_steps: Optimizer steps between two logged ones; ``None`` takes the Trainer's
            ``log_every_n_steps``.
        per_layer: Also logs ``moe/layer_03/expert_imbalance`` and so on, layers numbered from 0.
        heat_map: Also draws for each layer an image of tokens per expert (across) over the logged
            steps (down), for TensorBoard. Needs matplotlib.
        history: Logged steps that an image shows, at least 1.

    Attributes:
        tokens_per_expert: Of the latest logged step, ``[layers, experts]`` over the whole job, on
            the device and the same on every rank; ``None`` before. Zero for layers without experts.

    Raises:
        ConfigurationError: At the start of ``fit``, on every rank, if the strategy is another one,
            the model has no expert layers, or images cannot be drawn.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        per_layer: bool = False,
        heat_map: bool = False,
        history: int = 100,
    ) -> None:
        super().__init__(every_n_steps)
        if history < 1:
            raise ConfigurationError(f"`history` ({history}) must be at least 1; use history=100.")
        self.per_layer = per_layer
        self.heat_map = heat_map
        self.history = history
        self.tokens_per_expert: Tensor | None = None
        self._images: dict[int, list[Tensor]] = {}
        self._routers: list[RouterInfo] = []
        self._known_losses: dict[str, bool] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.heat_map and find_spec("matplotlib") is None:
            raise ConfigurationError(
                "`heat_map` (True) of MoEStats needs the package matplotlib; pip install"
                " 'lightning-mcore[plots]', or use heat_map=False."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._routers = find_routers([pl_module])
        self._agree_on_layers(trainer, pl_module)
        self._device = pl_module.device
        self._counts = torch.zeros(len(self._is_moe), self._num_experts, device=self._device)
        ep = trainer.strategy.layout.ep  # type: ignore[attr-defined]
        self._loads = torch.zeros(len(self._is_moe), ep, device=self._device)
        self._choices = [0] * len(self._is_moe)
        self._calls = [0] * len(self._is_moe)
        self._images = {}
        self._known_losses = {}
        for info in self._routers:
            hook = partial(self._count, info)
            self._hooks.append(info.router.register_forward_hook(hook))

    def _agree_on_layers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Which layers have experts, and how many; a rank may hold none of them."""
        world = trainer.strategy.groups.world_cpu  # type: ignore[attr-defined]
        layers = max((info.layer + 1 for info in self._routers), default=0)
        experts = max((info.num_experts for info in self._routers), default=0)
        sizes = torch.tensor([layers, experts])
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=world)
        num_layers, self._num_experts = sizes.tolist()
        if num_layers == 0:
            raise ConfigurationError(
                "`MoEStats` needs expert layers, and the model has none (`num_moe_experts` of its"
                " config is None); leave the callback out."
            )
        flags = torch.zeros(num_layers, dtype=torch.int64)
        for info in self._routers:
            flags[info.layer] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=world)
        self._is_moe = flags.bool().tolist()

    @override
    def _begin_step(self) -> None:
        self._counts.zero_()
        self._loads.zero_()
        self._choices = [0] * len(self._is_moe)
        self._calls = [0] * len(self._is_moe)
        for _ in take_losses():
            pass

    def _count(self, info: RouterInfo, router: Any, args: Any, output: Any) -> None:
        if not self._is_counting:
            return
        probs, routing_map = output
        with torch.no_grad():
            chosen = routing_map & (probs != 0) if info.pads else routing_map
            tokens = chosen.sum(0).to(self._counts.dtype)
            self._loads[info.layer] += tokens.view(self._loads.shape[1], -1).sum(1)
            # What the layer sees may be experts in an order of their own (``ExpertPlacement``).
            experts = experts_by_slot(info.moe)
            if experts is None:
                self._counts[info.layer] += tokens
            else:
                self._counts[info.layer].index_add_(0, experts, tokens)
        self._choices[info.layer] += routing_map.shape[0] * info.topk
        self._calls[info.layer] += 1

    @override
    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layout: Layout = trainer.strategy.layout  # type: ignore[attr-defined]
        values = self._reduce(layout)
        for name, value in values.items():
            pl_module.log(name, value)
        if self.heat_map:
            self._draw(trainer)

    def _reduce(self, layout: Layout) -> dict[str, Tensor]:
        """Sums over all ranks and what follows from it. Collective over the world."""
        layers, experts = self._counts.shape
        ends = experts + 1 + 2 * len(LOSS_NAMES)
        table = torch.zeros(layers, ends + layout.ep, dtype=torch.float64, device=self._device)
        table[:, :experts] = self._counts
        table[:, ends:] = self._loads
        table[:, experts] = torch.tensor(self._choices, dtype=torch.float64).to(
            self._device, non_blocking=True
        )
        calls = torch.tensor(self._calls, dtype=torch.float64).clamp(min=1)
        calls = calls.to(self._device, non_blocking=True)
        same_samples = layout.tp * layout.cp
        shares = {
            "partial": 1.0 / layout.dp,
            "partial over data parallel": 1.0,
            "mean": 1.0 / (layout.dp * same_samples),
        }
        for name, value, kind in take_losses():
            if name in LOSS_NAMES:
                column = experts + 1 + 2 * LOSS_NAMES.index(name)
                table[:, column] = value[:layers].to(table.dtype) / calls * shares[kind]
                table[:, column + 1] = 1.0
        if dist.get_world_size() > 1:
            dist.all_reduce(table)
        counts = table[:, :experts].float()
        self.tokens_per_expert = counts
        rows = torch.tensor([i for i, moe in enumerate(self._is_moe) if moe], device=self._device)
        counts, choices = counts[rows], table[rows, experts].float()
        by_layer = {
            "expert_imbalance": _imbalance(counts),
            "rank_imbalance": _imbalance(table[rows, ends:].float()),
            "dropped_share": 1.0 - counts.sum(1) / choices.clamp(min=1),
        }
        found = {}
        for name, of_layers in by_layer.items():
            found[f"moe/{name}"] = of_layers.mean()
            if name != "dropped_share":
                found[f"moe/{name}_worst"] = of_layers.max()
            if self.per_layer:
                for row, value in zip(rows.tolist(), of_layers.unbind(), strict=True):
                    found[f"moe/layer_{row:02d}/{name}"] = value
        for index, name in enumerate(LOSS_NAMES):
            column = experts + 1 + 2 * index
            if self._has_loss(name, table[:, column + 1]):
                found[f"moe/{name}"] = table[rows, column].mean().float()
        return found

    def _has_loss(self, name: str, seen: Tensor) -> bool:
        """Whether any rank noted this loss; asked of the device in the first logged step only."""
        if name not in self._known_losses:
            self._known_losses[name] = bool(seen.any())
        return self._known_losses[name]

    def _draw(self, trainer: Trainer) -> None:
        """Gives TensorBoard one image per layer, from the main process."""
        if not trainer.is_global_zero or self.tokens_per_expert is None:
            return
        writers = [w for w in (_writer(logger) for logger in trainer.loggers) if w is not None]
        for layer, row in enumerate(self.tokens_per_expert.cpu()):
            if not self._is_moe[layer]:
                continue
            past = self._images.setdefault(layer, [])
            past.append(row / row.mean().clamp(min=1e-9))
            del past[: -self.history]
            image = draw_heat_map(torch.stack(past), title=f"layer {layer}")
            for writer in writers:
                writer.add_image(
                    f"moe/layer_{layer:02d}", image, trainer.global_step, dataformats="HWC"
                )

    @override
    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        self._routers = []


def _imbalance(loads: Tensor) -> Tensor:
    """The largest over the mean of each row."""
    return loads.amax(1) / loads.mean(1).clamp(min=1e-9)


def _writer(logger: Any) -> Any:
    """A TensorBoard writer, or ``None`` for loggers of other kinds."""
    experiment = getattr(logger, "experiment", None)
    return experiment if callable(getattr(experiment, "add_image", None)) else None


def draw_heat_map(loads: Tensor, *, title: str) -> ndarray[Any, Any]:
    """Draws loads as an image.

    Args:
        loads: ``[steps, experts]``, in units of the mean of their step.
        title: Above the image.

    Returns:
        Pixels ``[height, width, 3]``, 8 bits.
    """
    # Imported where it is needed, being optional; without pyplot there is no global state and no
    # window.
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        loads.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0
    )
    axes.set(title=title, xlabel="expert", ylabel="logged step")
    figure.colorbar(image, label="tokens / mean")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
