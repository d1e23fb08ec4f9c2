"""Keeps random numbers apart: what a step draws before its model call, and what chunks draw.

Every stage of a pipeline runs the step's code up to the model call. A mask or a noise level drawn
there must come out the same on all stages, or the first stage's input and the last stage's labels
would not belong together; dropout inside the chunks must differ. So a step has one stream, begun
anew for each microbatch from a number that all stages share, and the chunks of a rank have another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _TorchState:
    host: Tensor
    device: Tensor | None


class StepRandomness:
    """Random streams of one rank of a pipeline.

    Args:
        device: Of this rank.
        chunk_seed: Begins the chunks' stream; different on every stage, and on every
            tensor-parallel rank where the schedule runs the layers.
    """

    def __init__(self, device: torch.device, chunk_seed: int) -> None:
        self._device = device
        self._chunks = _TorchState(
            torch.Generator().manual_seed(chunk_seed).get_state(),
            None
            if device.type == "cpu"
            else torch.Generator(device).manual_seed(chunk_seed).get_state(),
        )
        self._seed = 0

    @contextmanager
    def schedule(self, layers_between_steps: bool = False) -> Iterator[None]:
        """Around one schedule: afterwards the host's streams are where data loading left them.

        The host's stream is the same on all ranks of a model's copy, as they draw the same data;
        one number is taken from it as the schedule's seed.

        Args:
            layers_between_steps: Whether the schedule runs the chunks' layers itself, outside
                steps, as the combined 1F1B schedule does.
        """
        self._seed = int(torch.empty((), dtype=torch.int64).random_(2**31))
        torch_state, python, numpy = self._torch_state(), random.getstate(), np.random.get_state()
        if layers_between_steps:
            self._set_torch_state(self._chunks)
        try:
            yield
        finally:
            if layers_between_steps:
                self._chunks = self._torch_state()
            self._set_torch_state(torch_state)
            random.setstate(python)
            np.random.set_state(numpy)

    def begin_step(self, index: int) -> None:
        """Begins the step's stream for microbatch ``index``; the same on all stages."""
        seed = (self._seed + index) % 2**31
        # Not torch.manual_seed: it seeds every kind of device, and for one that is not in use it
        # keeps a formatted stack trace, which takes more than a millisecond inside a Trainer.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    @contextmanager
    def step_between_layers(self, index: int) -> Iterator[None]:
        """Around a step's code in a schedule that runs layers itself, which draw on afterwards.

        The second time for the same microbatch, the step draws the same numbers.
        """
        chunks = self._torch_state()
        self.begin_step(index)
        try:
            yield
        finally:
            self._set_torch_state(chunks)

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around the model call: chunks draw from their own stream."""
        step = self._torch_state()
        self._set_torch_state(self._chunks)
        try:
            yield
        finally:
            self._chunks = self._torch_state()
            self._set_torch_state(step)

    def state_dict(self) -> dict[str, Any]:
        """State of the chunks' stream, for an exact resume."""
        return {"host": self._chunks.host, "device": self._chunks.device}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        self._chunks = _TorchState(state["host"], state["device"])

    def _torch_state(self) -> _TorchState:
        on_host = self._device.type == "cpu"
        return _TorchState(
            torch.get_rng_state(), None if on_host else torch.cuda.get_rng_state(self._device)
        )

    def _set_torch_state(self, state: _TorchState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device, self._device)
