"""What crossovers declare: samples fall into the cells that they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch

import opgraft_kernels
from opgraft import Crossover
from opgraft.when import Condition
from opgraft.when.grid import SteppedAxis
from opgraft_kernels.copies import overrides as copies
from opgraft_kernels.cross_entropy import overrides as cross_entropy
from opgraft_kernels.embedding import overrides as embedding
from opgraft_kernels.nll_loss import overrides as nll_loss
from opgraft_kernels.norms import overrides as norms
from opgraft_kernels.softmax import overrides as softmax

pytestmark = pytest.mark.crossovers
CPU, META = torch.device("cpu"), torch.device("meta")
#: Of what is looked up as it is.
EXACT = {"itemsize": (2, 4), "misalignment": (0, 1, 2)}


def made_in_cells(
    crossover: Crossover | None,
    cells: Mapping[str, Sequence[int]],
    exact: Mapping[str, Sequence[int]] = EXACT,
    condition: Condition | None = None,
) -> int:
    """How many calls are made for these cells, each of which falls into the one asked for.

    Args:
        crossover: what makes them.
        cells: features with steps, and where buckets of theirs begin.
        exact: the other features, and their values.
        condition: which calls with elements of 4 bytes must satisfy.
    """
    assert crossover is not None and crossover.calls is not None
    axis = SteppedAxis(1, 1, 2**31)
    made = 0
    for values in itertools.product(*cells.values(), *exact.values()):
        asked = dict(zip((*cells, *exact), values, strict=True))
        for call in crossover.calls(META, **asked):
            made += 1
            assert condition is None or condition.holds(call) or asked["itemsize"] == 2
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == {key: asked[key] for key in exact}
            for key in cells:
                assert axis.index_of(found[key]) == axis.index_of(asked[key]), (asked, found)
    return made


def octaves(low: int, high: int) -> list[int]:
    """The powers of two from one to another."""
    return [2**log2 for log2 in range(low.bit_length() - 1, high.bit_length())]


@pytest.mark.parametrize("direction", norms.DIRECTIONS)
@pytest.mark.parametrize("norm", [norms.RMS_NORM, norms.LAYER_NORM], ids=lambda norm: norm.name)
@pytest.mark.parametrize("is_permuted", [False, True], ids=["rows", "permuted"])
def test_samples_of_norms_fall_into_their_cells(
    norm: norms.Norm, direction: norms.Direction, is_permuted: bool
) -> None:
    kernels: norms.Kernels = "triton_permuted" if is_permuted else "triton_kernels"
    crossover = norms._crossover(norm, direction, kernels)
    assert crossover is not None
    # As many rows as the interpreter takes, at the least.
    cells = {
        "elements": octaves(2**17, 2**29)[::3],
        "hidden": octaves(*crossover.ranges["hidden"])[::2],
    }
    condition = norms.permuted_condition(norm, direction, "CPU") if is_permuted else None
    assert made_in_cells(crossover, cells, condition=condition) > 60


@pytest.mark.parametrize("op", softmax.OPS, ids=lambda op: op.name)
def test_samples_of_softmax_fall_into_their_cells(op: softmax.Op) -> None:
    cells = {
        "elements": octaves(64, 2**28)[::4],
        "size": (2, 16, 64, 2**17),
        "inner": (1, 2, 8, 32),
    }
    condition = softmax.condition(op, "CPU")
    assert made_in_cells(softmax._crossover(op), cells, condition=condition) > 100


def test_samples_of_cross_entropy_fall_into_their_cells() -> None:
    cells = {"elements": octaves(64, 2**28)[::4], "classes": (2, 16, 64, 1024, 2**17)}
    condition = cross_entropy.condition("CPU")
    assert made_in_cells(cross_entropy._crossover(), cells, condition=condition) > 50


@pytest.mark.parametrize("direction", nll_loss.DIRECTIONS)
def test_samples_of_nll_loss_fall_into_their_cells(direction: nll_loss.Direction) -> None:
    cells = {"rows": octaves(1, 2**22)[::3], "classes": octaves(1, 2**17)[::4]}
    exact = {"itemsize": (2, 4), "is_summed": (0, 1)}
    condition = nll_loss.condition(direction, "CPU")
    made = made_in_cells(nll_loss._crossover(direction), cells, exact, condition)
    assert made > 100


def test_samples_of_embedding_fall_into_their_cells() -> None:
    cells = {
        "tokens": (1, 256, 4096),
        "width": (8, 64, 1024),
        "num_weights": (1, 512, 4096, 2**17),
    }
    condition = embedding.condition("CPU")
    assert made_in_cells(embedding._crossover(), cells, condition=condition) > 100


def test_samples_of_copies_fall_into_their_cells() -> None:
    exact = {"source": (2, 4), "target": (2, 4)}
    assert made_in_cells(copies._crossover(), {"elements": (4096, 2**20)}, exact) == 6


def test_samples_of_embedding_have_indices_of_rows() -> None:
    crossover = embedding._crossover()
    assert crossover is not None and crossover.calls is not None
    (call, *_) = crossover.calls(
        CPU, tokens=4096, width=8, num_weights=5, itemsize=4, misalignment=0
    )
    assert call["indices"].min() >= 0 and call["indices"].max() < 5


def test_no_sample_of_embedding_is_too_large() -> None:
    crossover = embedding._crossover()
    assert crossover is not None and crossover.calls is not None
    largest = {"tokens": 2**18, "width": 2**13, "num_weights": 2**18}
    assert not list(crossover.calls(CPU, **largest, itemsize=2, misalignment=0))


def test_every_override_declares_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for override in opgraft_kernels.register():
        # Those of the pack's own ops are called where the loss's table says so.
        is_own = override.op.startswith("opgraft_kernels::")
        assert (override.crossover is None) == is_own, override
