"""Errors raised on purpose by lightning-mcore.

The tree (indented under the class it derives from; the built-in base in brackets lets callers that
know nothing about this package still catch it)::

    Exception
        MCoreError                      every error of this package
            ConfigurationError          settings that cannot work together      [ValueError]
                SequenceParallelRefused     a layer cannot run with it
            CheckpointError             a checkpoint that cannot be used        [RuntimeError]
            NotInitializedError         something was used before it was built  [RuntimeError]
            NonFiniteError              NaN or Inf in a gradient                [ArithmeticError]
            RankFailed                  another rank failed, or all hang        [RuntimeError]

A message states the relation that was broken, the values that broke it, and a way out, in that
order::

    `world_size` (6) must be a multiple of `tp` (2) x `pp` (2) x `cp` (1) = 4; use 4 or 8 devices.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "MCoreError",
    "NonFiniteError",
    "NotInitializedError",
    "RankFailed",
    "SequenceParallelRefused",
]


class MCoreError(Exception):
    """Base of every error that lightning-mcore raises on purpose."""


class ConfigurationError(MCoreError, ValueError):
    """The settings cannot work with each other, the versions installed or the hardware.

    Every rank raises it with the same message, before any process group exists.
    """


class SequenceParallelRefused(ConfigurationError):
    """A layer of the model cannot run with sequence parallelism; ``"auto"`` then does without."""


class CheckpointError(MCoreError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit the model that loads it."""


class NotInitializedError(MCoreError, RuntimeError):
    """Process groups, the model or the optimizer were used before they were built."""


class NonFiniteError(MCoreError, ArithmeticError):
    """A gradient holds NaN or Inf; no parameter was changed. Every rank raises it alike."""


class RankFailed(MCoreError, RuntimeError):
    """This rank cannot go on because another one failed, or because the run hangs.

    The message has the original rank's traceback (or what is known of its death) first, and ends
    with the last completed step and the checkpoint to resume from.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; for a hang, the one that noticed it."""
