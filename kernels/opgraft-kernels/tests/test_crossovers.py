"""What crossovers declare: samples fall into the cells that they are asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

import opgraft_kernels
from opgraft import Crossover
from opgraft.when.grid import SteppedAxis
from opgraft_kernels.copies import overrides as copies
from opgraft_kernels.cross_entropy import overrides as cross_entropy
from opgraft_kernels.embedding import overrides as embedding
from opgraft_kernels.norms import overrides as norms
from opgraft_kernels.softmax import overrides as softmax

pytestmark = pytest.mark.crossovers
CPU = torch.device("cpu")


def crossovers() -> dict[str, Crossover]:
    return {
        f"{norm.name}.{direction}": norms._crossover(
            norm, direction, norms._TRITON_RANGES, ["itemsize", "misalignment"]
        )
        for norm in (norms.RMS_NORM, norms.LAYER_NORM)
        for direction in norms.DIRECTIONS
    }


@pytest.mark.parametrize("name", crossovers())
def test_samples_fall_into_their_cells(name: str) -> None:
    crossover = crossovers()[name]
    axes = {key: SteppedAxis(1, 1, 2**31) for key in ("elements", "hidden")}
    made = 0
    for elements, hidden, itemsize, misalignment in itertools.product(
        (1, 2, 64, 4096), (1, 2, 4, 8, 16, 1024), (2, 4), (0, 1, 2)
    ):
        cell = {"elements": elements, "hidden": hidden}
        exact = {"itemsize": itemsize, "misalignment": misalignment}
        assert crossover.calls is not None
        for call in crossover.calls(CPU, **cell, **exact):
            made += 1
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == exact
            for key, value in cell.items():
                assert axes[key].index_of(found[key]) == axes[key].index_of(value), (cell, found)
    assert made > 50


@pytest.mark.parametrize("direction", norms.DIRECTIONS)
@pytest.mark.parametrize("norm", [norms.RMS_NORM, norms.LAYER_NORM], ids=lambda norm: norm.name)
def test_samples_of_permuted_norms_fall_into_their_cells(
    norm: norms.Norm, direction: norms.Direction
) -> None:
    ranges = norms._PERMUTED_RANGES[direction]
    exact = ["itemsize", "misalignment"]
    crossover = norms._crossover(norm, direction, ranges, exact, is_permuted=True)
    condition = norms.permuted_condition(norm, direction, "CPU")
    assert crossover.calls is not None
    axis = SteppedAxis(1, 1, 2**31)
    made = 0
    for hidden, *values in itertools.product(ranges["hidden"], *(ranges[key] for key in exact)):
        cell, given = {"elements": 2**17, "hidden": hidden}, dict(zip(exact, values, strict=True))
        for call in crossover.calls(CPU, **cell, **given):
            made += 1
            assert condition.holds(call) or given["itemsize"] == 2
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == given
            for key, value in cell.items():
                assert axis.index_of(found[key]) == axis.index_of(value), (cell, found)
    assert made > 12


@pytest.mark.parametrize("op", softmax.OPS, ids=lambda op: op.name)
def test_samples_of_softmax_fall_into_their_cells(op: softmax.Op) -> None:
    crossover = softmax._crossover(op)
    axis = SteppedAxis(1, 1, 2**31)
    made = 0
    for elements, size, inner, itemsize, misalignment in itertools.product(
        (64, 4096, 65536), (2, 16, 64), (1, 2, 8, 32), (2, 4), (0, 1, 2)
    ):
        cell = {"elements": elements, "size": size, "inner": inner}
        exact = {"itemsize": itemsize, "misalignment": misalignment}
        assert crossover.calls is not None
        for call in crossover.calls(CPU, **cell, **exact):
            made += 1
            assert softmax.condition(op, "CPU").holds(call) or itemsize == 2
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == exact
            for key, value in cell.items():
                assert axis.index_of(found[key]) == axis.index_of(value), (cell, found)
    assert made > 50


def test_samples_of_cross_entropy_fall_into_their_cells() -> None:
    crossover = cross_entropy._crossover()
    assert crossover is not None and crossover.calls is not None
    axis = SteppedAxis(1, 1, 2**31)
    made = 0
    for elements, classes, itemsize, misalignment in itertools.product(
        (64, 4096, 65536), (2, 16, 64, 1024), (2, 4), (0, 1, 2)
    ):
        cell, exact = (
            {"elements": elements, "classes": classes},
            {"itemsize": itemsize, "misalignment": misalignment},
        )
        for call in crossover.calls(CPU, **cell, **exact):
            made += 1
            assert cross_entropy.condition("CPU").holds(call) or itemsize == 2
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == exact
            for key, value in cell.items():
                assert axis.index_of(found[key]) == axis.index_of(value), (cell, found)
    assert made > 30


def test_samples_of_embedding_fall_into_their_cells() -> None:
    crossover = embedding._crossover()
    assert crossover is not None and crossover.calls is not None
    axis = SteppedAxis(1, 1, 2**31)
    made = 0
    for tokens, width, num_weights, itemsize, misalignment in itertools.product(
        (1, 256, 4096), (8, 64, 1024), (1, 512, 4096), (2, 4), (0, 1, 2)
    ):
        cell = {"tokens": tokens, "width": width, "num_weights": num_weights}
        exact = {"itemsize": itemsize, "misalignment": misalignment}
        for call in crossover.calls(CPU, **cell, **exact):
            made += 1
            assert embedding.condition("CPU").holds(call) or itemsize == 2
            assert call["indices"].min() >= 0 and call["indices"].max() < num_weights
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert {key: found[key] for key in exact} == exact
            for key, value in cell.items():
                assert axis.index_of(found[key]) == axis.index_of(value), (cell, found)
    assert made > 100


def test_no_sample_of_embedding_is_too_large() -> None:
    crossover = embedding._crossover()
    assert crossover is not None and crossover.calls is not None
    largest = {"tokens": 2**18, "width": 2**13, "num_weights": 2**18}
    assert not list(crossover.calls(CPU, **largest, itemsize=2, misalignment=0))


def test_samples_of_copies_fall_into_their_cells() -> None:
    crossover = copies._crossover()
    assert crossover is not None and crossover.calls is not None
    made = 0
    for elements, source, target in itertools.product((4096, 2**20), (2, 4), (2, 4)):
        cell = {"elements": elements, "source": source, "target": target}
        for call in crossover.calls(CPU, **cell):
            made += 1
            found = {key: each.evaluate(call) for key, each in crossover.features.items()}
            assert found == cell
    assert made == 6


def test_every_override_declares_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for override in opgraft_kernels.register():
        # Those of the pack's own ops are called where the loss's table says so.
        is_own = override.op.startswith("opgraft_kernels::")
        assert (override.crossover is None) == is_own, override
