"""What stands in for measurements."""

from __future__ import annotations

from typing import Any

import pytest

from opgraft.crossover import rule
from opgraft.crossover.tables import Cell
from opgraft.tuning import measuring, tuner


class Clock:
    """Stands in for the clock: native takes a microsecond a row, the override as many always."""

    def __init__(self) -> None:
        #: From so many rows on the override is faster by the margin.
        self.from_rows = 64
        self.cells: list[tuple[int, ...]] = []

    def __call__(self, tuning: Any, at: tuple[int, ...]) -> Cell:
        self.cells.append(at)
        native = float(tuning._features(at)["rows"])
        ours = (self.from_rows - 0.5) / (1 + rule.MARGIN)
        return Cell(native, ours, 0.5, None, 0.5, None, None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(tuner._Tuning, "_cell", lambda self, at: found(self, at))
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for compiling: opaque is faster from 256 rows on. Gives the rows of the calls."""
    compiled: list[int] = []

    def graph(self: object, calls: list[Any]) -> tuple[float, float]:
        compiled.append(calls[0].named["self"].size(0))
        return (2.0, 1.0) if compiled[-1] >= 256 else (1.0, 2.0)

    monkeypatch.setattr(measuring.Measuring, "graph", graph)
    return compiled
