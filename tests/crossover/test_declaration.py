"""What a crossover declares to be measured: ranges that are none are refused at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import opgraft
from opgraft import when
from opgraft.errors import RegistrationError
from opgraft.tuning import tuner
from tests.crossover.tables import crossover

NUMBERS, DTYPES, EXACT = "rows", "dtype", "heads"
RANGES: dict[str, Any] = {NUMBERS: (1, 8), DTYPES: (torch.float32,), EXACT: (8, 16)}


def with_ranges(**ranges: Any) -> opgraft.Crossover:
    return crossover(heads=when.size("self", 1), exact=[EXACT], calls=list, ranges=RANGES | ranges)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize(
    "values",
    [
        *((), 5, None, "12", {1: 2}, range(1, 3)),
        *((1.0, 2.0), ("1", "2"), ([1], [2]), ([1],), (None, None), (1, None), (True, 2)),
        *((1, torch.float32), (torch.float32, 1), (1, 2.0), (float("nan"),) * 2),
        *((8, 8, 8), (1, 2**63), (-(2**63) - 1, 1), (torch.float32, torch.float32)),
    ],
    ids=str,
)
def test_what_is_no_range_is_refused_when_it_is_declared(name: str, values: Any) -> None:
    with pytest.raises(RegistrationError, match=rf"ranges=\): {name} is .*: .*give"):
        with_ranges(**{name: values})


@pytest.mark.parametrize("values", [(0, 16), (-4, 16), (16, 4), (4,), (1, 2, 3)], ids=str)
def test_numbers_in_buckets_have_a_smallest_and_a_largest_from_one_on(values: Any) -> None:
    with pytest.raises(RegistrationError, match=r"rows is .*from 1 to 2\*\*63 - 1; or .*exact="):
        with_ranges(rows=values)


@pytest.mark.parametrize("values", [(8, 8), (True, False, True)], ids=str)
def test_a_value_of_an_exact_feature_stands_once(values: Any) -> None:
    with pytest.raises(RegistrationError, match=r"heads is .*stands twice: give each value once"):
        with_ranges(heads=values)


def test_ranges_are_a_dict() -> None:
    with pytest.raises(RegistrationError, match="give a dict, by feature: rows, dtype"):
        crossover(ranges=[(1, 2)])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((NUMBERS, (1, 2**63 - 1)), (NUMBERS, [4, 4]), (NUMBERS, (False, True))),
        *((EXACT, (-(2**63), 0, 2**63 - 1)), (EXACT, [7]), (EXACT, (True,))),
        (DTYPES, [torch.float32, torch.float16]),
    ],
    ids=str,
)
def test_a_range_is_an_axis(name: str, values: Any) -> None:
    given = list(values)
    declared = with_ranges(**{name: values})
    if isinstance(values, list):
        values.append("changed later")
    assert list(declared.ranges[name]) == given
    axis = tuner.axes_of(declared)[name]
    assert axis.index_of(given[0]) == 0 and axis.index_of(given[-1]) == axis.count - 1


@pytest.mark.parametrize("name", ["", 5, ["fast"]], ids=str)
def test_what_it_is_measured_as_is_a_name(name: Any) -> None:
    with pytest.raises(RegistrationError, match=r"measured_as=.*give the name= of the override"):
        crossover(measured_as=name)


@pytest.mark.parametrize(
    "more", [{"calls": list}, {"ranges": {NUMBERS: (1, 2), DTYPES: (torch.float32,)}}], ids=str
)
def test_what_is_measured_as_another_is_not_measured_itself(more: dict[str, Any]) -> None:
    with pytest.raises(RegistrationError, match="leave out calls= and ranges="):
        crossover(measured_as="fast", **more)
