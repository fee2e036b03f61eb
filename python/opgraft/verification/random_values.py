"""Random tensors by seed, generated on their device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from opgraft.router import threads

__all__ = ["RandomValues"]


class RandomValues:
    """Random tensors, the same for the same seed on one kind of device.

    A GPU generates its own. Some samples have 2**24 values in a row, and every check makes its
    samples again. A CPU would take longer to generate them than the check takes.

    >>> one, other = (RandomValues(7).uniform([2], torch.device("cpu")) for _ in range(2))
    >>> one.equal(other)
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def uniform(
        self, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Values from 0 up to 1."""
        with _natively():
            drawn = torch.rand(
                shape, generator=self._on(device), device=self._where(device), dtype=dtype
            )
            return drawn.to(device)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Normally distributed values with the shape, dtype and device of `like`."""
        with _natively():
            drawn = torch.randn(
                like.shape,
                generator=self._on(like.device),
                device=self._where(like.device),
                dtype=torch.float64,
            )
            return drawn.to(like.device, like.dtype)

    def integers(self, end: int, count: int, device: torch.device) -> torch.Tensor:
        """Integers from 0 up to `end`, without it."""
        with _natively():
            where = self._where(device)
            drawn = torch.randint(end, (count,), generator=self._on(device), device=where)
            return drawn.to(device)

    def _on(self, device: torch.device) -> torch.Generator:
        where = self._where(device)
        if where not in self._generators:
            self._generators[where] = torch.Generator(where).manual_seed(self._seed)
        return self._generators[where]

    def _where(self, device: torch.device) -> torch.device:
        # Generators of other devices do not support a seed, or not every dtype.
        return device if device.type == "cuda" else torch.device("cpu")


def _natively() -> AbstractContextManager[None]:
    """Disable all overrides: the one being verified may override the random op itself."""
    return threads.scope(threads.EVERYTHING)
