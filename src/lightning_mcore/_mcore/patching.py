"""Setting attributes so that they can be put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

__all__ = ["Patches"]


class Patches:
    """What has been replaced, undone in reverse order when the stack closes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute; an inherited or missing one is deleted again at the end.

        The raw entry of the owner's own ``__dict__`` is kept, so descriptors such as
        ``staticmethod`` come back as they were.
        """
        own = vars(owner)
        if name in own:
            undo: tuple[Any, ...] = (setattr, owner, name, own[name])
        else:
            undo = (delattr, owner, name)
        setattr(owner, name, value)
        self._stack.callback(*undo)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute that must exist: a name that moved is an error, not a lost patch."""
        if not hasattr(owner, name):
            where = getattr(owner, "__qualname__", owner.__name__)
            raise AttributeError(
                f"`{where}.{name}`, which is replaced here, does not exist in this version of"
                " megatron-core; install a supported one (megatron-core>=0.16.1,<0.20)."
            )
        self.set(owner, name, value)

    def on_exit(self, undo: Callable[..., object], *args: Any) -> None:
        """Calls ``undo`` at the end."""
        self._stack.callback(undo, *args)

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enters a context that lasts as long as the patches."""
        self._stack.enter_context(context)
