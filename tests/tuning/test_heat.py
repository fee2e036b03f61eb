"""The colours of a table's cells: what is taken is green, and what is slower red."""

from __future__ import annotations

import pytest

from opgraft.crossover import rule
from opgraft.crossover.tables import Cell
from opgraft.tuning import heat
from opgraft.when.grid import SteppedAxis


@pytest.mark.parametrize(
    ("cell", "ratio", "color"),
    [
        (Cell(10.4, 10.0, 1.0, 1.0, 1.0, None, None), "1.04", "green"),
        (Cell(10.2, 10.0, 1.0, 1.0, 1.0, None, None), "1.02", "yellow"),
        (Cell(11.0, 1.0, 1.0, 10.0, 10.0, None, None), "1.10", "yellow"),  # the host's time
        (Cell(11.3, 1.0, 1.0, 10.0, 10.0, None, None), "1.13", "green"),
        (Cell(9.0, 10.0, 1.0, 1.0, 1.0, None, None), "0.90", "red"),
    ],
)
def test_a_cell_is_green_where_the_rule_takes_it(cell: Cell, ratio: str, color: str) -> None:
    (grid,) = heat.grids({"rows": SteppedAxis(1, 4, 4)}, {(0,): cell})
    (span,) = [each for each in grid.spans if ratio in grid.plain[each.start : each.end]]
    assert color in str(span.style)
    assert rule.pays(cell, rule.PLAN, rule.MARGIN) == (color == "green")
