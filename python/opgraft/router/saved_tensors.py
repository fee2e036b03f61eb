"""What a thread's calls save for their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Functions that pack a tensor that is saved, and unpack it.
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def are_hooked() -> bool:
    """Whether hooks get what this thread's calls save for their backward, as checkpointing's do."""
    return _innermost() is not None


def can_be_held_back() -> bool:
    """Whether :class:`HeldBack` can come between this thread's calls and the hooks."""
    is_enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return is_enabled


def _innermost() -> Hooks | None:
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks


class HeldBack(torch.autograd.graph.saved_tensors_hooks):
    """Holds what calls inside save for their backward, for the hooks outside to get it later.

    Checkpointing counts what its hooks get. What an impl saved before it failed is never handed on:
    a second forward, in which native runs at once, saves none of it.
    """

    def __init__(self) -> None:
        held: list[_Held] = []

        def hold(tensor: torch.Tensor) -> _Held:
            held.append(_Held(tensor))
            return held[-1]

        # Not a method: what is saved keeps its hooks, and must not keep what else was.
        self._held = held
        super().__init__(hold, _Held.unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            self._drop()

    def _drop(self) -> None:
        for each in self._held:
            each.drop()
        self._held.clear()

    def hand_on(self) -> None:
        """Give the hooks outside what was saved, in order.

        Raises:
            BaseException: what the hooks raise, as checkpointing's do to end a second forward.
        """
        hooks = _innermost()
        assert hooks is not None, "tensors are held back where there are hooks"
        try:
            with torch.no_grad():  # as autograd calls hooks
                for each in self._held:
                    each.hand_on(hooks)
        finally:
            self._drop()


class _Held:
    """A saved tensor that is held back, and what hooks made of it later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._was_written = False

    def hand_on(self, hooks: Hooks) -> None:
        assert self._tensor is not None
        pack, self._unpack = hooks
        self._was_written = self._tensor._version != self._version
        self._packed, self._tensor = pack(self._tensor), None

    def drop(self) -> None:
        """Let go of the tensor, whose graph may keep this: a cycle through C++."""
        self._tensor = None

    def unpack(self) -> torch.Tensor:
        # Hooks would have got it before. Without hooks that is an error, too, but only of who needs
        # the tensor.
        if self._was_written or (
            self._tensor is not None and self._tensor._version != self._version
        ):
            raise RuntimeError(
                "a tensor that an impl with autograd='impl' saved for its backward has been "
                "modified by an inplace operation after that"
            )
        return self._unpack(self._packed) if self._tensor is None else self._tensor
