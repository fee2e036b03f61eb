"""What the forward of a composite op leaves to its derivative.

Such an op returns its result alone, so the impl cannot return what its derivative needs. It keeps
that for the thread, with the result itself; `setup_context`, which runs next, takes it if it gets
that result. Since the result is kept, no other tensor can have its memory meanwhile.
"""

from __future__ import annotations

import threading

from torch import Tensor

__all__ = ["keep", "take"]


class _Kept(threading.local):
    """The last result of this thread that may be differentiated, and what goes with it."""

    last: tuple[Tensor, tuple[Tensor, ...]] | None = None


_kept = _Kept()


def keep(result: Tensor, tensors: tuple[Tensor, ...], *, inputs: tuple[Tensor, ...]) -> None:
    """Keep tensors with a result, if autograd may ask for them: if an input requires grad."""
    _kept.last = (result, tensors) if any(each.requires_grad for each in inputs) else None


def take(result: Tensor) -> tuple[Tensor, ...] | None:
    """What was kept with this result; None if another kernel computed it."""
    kept, _kept.last = _kept.last, None
    if kept is None or not _is_same(kept[0], result):
        return None
    return kept[1]


def _is_same(kept: Tensor, result: Tensor) -> bool:
    """Whether both are one tensor, of which autograd may have made another Python object."""
    return kept is result or (
        type(kept) is type(result)
        and kept.data_ptr() == result.data_ptr()
        and kept.shape == result.shape
        and kept.dtype == result.dtype
        and kept.device == result.device
    )
