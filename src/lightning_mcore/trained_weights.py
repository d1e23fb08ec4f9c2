"""Notices what users do to parameters that the engine has taken over at the start of ``fit``.

The engine keeps parameters in buffers and, under mixed precision, updates fp32 copies of them
(main parameters). What hooks such as ``on_fit_start`` do to the parameters comes after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_mcore.errors import ConfigurationError

__all__ = ["TrainedWeights"]

_HALVES = (torch.float16, torch.bfloat16)


class TrainedWeights:
    """The parameters of one ``fit`` on this rank, as the engine took them over.

    Args:
        chunks: As the user built them, after they were wrapped for the engine.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._named = [
            (f"chunk {index}: {name}" if len(chunks) > 1 else name, param)
            for index, chunk in enumerate(chunks)
            for name, param in chunk.named_parameters()
        ]
        self._num_trainable = self._count_trainable()
        self._places = self._find_places()
        self._contents: Tensor | None = None
        self._checks_places = True
        self.remember()

    def remember(self) -> None:
        """Takes the present values as those that main parameters have too."""
        self._contents = self._sum_of_bits()

    def look_again(self) -> None:
        """Lets the next step check again where parameters are, after code that may move them."""
        self._checks_places = True

    def check(self) -> bool:
        """Before a step; returns whether main parameters are to be taken from the model's anew.

        They are where 16-bit values have changed since ``remember``, before the first step.

        Raises:
            ConfigurationError: If others are trainable now, or one has left the engine's buffers.
        """
        now = self._count_trainable()
        if now != self._num_trainable:
            raise ConfigurationError(
                f"{now} parameters require gradients, but {self._num_trainable} did at the start of"
                " fit, from which the engine's gradient buffers and optimizer were built; choose"
                " them before fit, and give phases in which some shall not change a learning rate"
                " of 0."
            )
        if not self._checks_places:
            return False
        self._checks_places = False
        places = self._find_places()
        moved = [name for name, place in self._places.items() if places.get(name) != place]
        if moved:
            raise ConfigurationError(
                f"{len(moved)} parameters have left the engine's buffers since the start of fit, so"
                f" that training would not reach them: {moved[:8]}; give them new values in place"
                " (`param.copy_(value)`, `load_state_dict` without assign=True) rather than by"
                " `param.data = value`, and convert the module before fit."
            )
        before, self._contents = self._contents, None
        return before is not None and not torch.equal(before, self._sum_of_bits())

    def _sum_of_bits(self) -> Tensor:
        """A sum over all bits of 16-bit parameters, exact in any order."""
        halves = [p.data for _, p in self._named if p.dtype in _HALVES and type(p.data) is Tensor]
        sums = [half.view(torch.int16).sum(dtype=torch.int64) for half in halves]
        return torch.stack(sums).sum() if sums else torch.zeros(())

    def _count_trainable(self) -> int:
        return sum(param.requires_grad for _, param in self._named)

    def _find_places(self) -> dict[str, int]:
        # Not of quantized parameters, which are tensors of a class of their own without an address.
        return {
            name: param.data_ptr()
            for name, param in self._named
            if param.requires_grad and type(param.data) is Tensor
        }
