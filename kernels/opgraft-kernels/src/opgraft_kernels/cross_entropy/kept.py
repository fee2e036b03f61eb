"""What the forward of cross-entropy leaves to its backward.

The op returns the loss alone, so the impl cannot return what its derivative needs. It keeps that
for the thread, with the loss itself; `setup_context`, which runs next, takes it if it gets that
loss. Since the loss is kept, no other tensor can have its memory meanwhile.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch import Tensor

__all__ = ["Statistics", "keep", "take"]


class Statistics(NamedTuple):
    """What the op of the forward returns beside the loss; see `ops.py`."""

    rows: Tensor
    mass: Tensor


class _Kept(threading.local):
    """The last loss of this thread that may be differentiated, and its statistics."""

    last: tuple[Tensor, Statistics] | None = None


_kept = _Kept()


def keep(logits: Tensor, loss: Tensor, statistics: Statistics) -> None:
    """Keep the statistics of a loss, if autograd may ask for them."""
    _kept.last = (loss, statistics) if logits.requires_grad else None


def take(loss: Tensor) -> Statistics | None:
    """The statistics that were kept with this loss; None if another kernel computed it."""
    kept, _kept.last = _kept.last, None
    if kept is None or not _is_same(kept[0], loss):
        return None
    return kept[1]


def _is_same(kept: Tensor, loss: Tensor) -> bool:
    """Whether both are one tensor, of which autograd may have made another Python object."""
    return kept is loss or (
        type(kept) is type(loss)
        and kept.data_ptr() == loss.data_ptr()
        and kept.shape == loss.shape
        and kept.dtype == loss.dtype
        and kept.device == loss.device
    )
