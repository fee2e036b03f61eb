"""What a pack needs: read from its metadata, and held against what is here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from opgraft.packs import requirements
from opgraft.packs.requirements import satisfies, unmet, unmet_for_dsl

numbers = st.integers(0, 12)
releases = st.lists(numbers, min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
versions = st.builds(
    str.__add__,
    releases,
    st.sampled_from(["", "", "+cpu", "+cu130", "a0", "rc1", ".dev20261101", ".post1", "a0+git12"]),
)
clauses = st.one_of(
    st.builds(str.__add__, st.sampled_from(["<", "<=", "==", "!=", ">=", ">"]), releases),
    st.builds(lambda release: f"=={release}.*", releases),
    st.builds(lambda *parts: "~=" + ".".join(map(str, parts)), numbers, numbers),
    st.builds(lambda release: f">={release}rc1", releases),
)


@given(versions, st.lists(clauses, min_size=1, max_size=3).map(",".join))
@settings(max_examples=400, deadline=None)
def test_versions_compare_as_packaging_compares_them(version: str, specifier: str) -> None:
    expected = SpecifierSet(specifier).contains(Version(version), prereleases=True)
    assert satisfies(version, specifier) == expected


def test_plain_versions_need_no_packaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "packaging.specifiers", None)
    assert satisfies("2.13.0+cpu", ">=2.11,<3")
    with pytest.raises(ImportError):
        satisfies("2.13.0+cpu", "~=2.11")


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch>=2.11",
        "torch >=2.11, <3",
        "torch (>=2.11,<3.0)",
        "Torch.Nightly_x[opt,more]>=1; extra == 'triton'",
        'opgraft[triton] ; extra == "t_r.iton"',
        'torch; extra=="triton"',
        'numpy; python_version >= "3"',
        'numpy; python_version < "3"',
        'numpy; extra == "triton" and python_version >= "3"',
        "numpy @ file:///tmp/numpy.whl",
        "numpy @ file:///tmp/numpy.whl ; extra == 'triton'",
    ],
)
@pytest.mark.parametrize("extra", ["", "triton", "other"])
def test_lines_are_read_as_packaging_reads_them(line: str, extra: str) -> None:
    parsed = Requirement(line)
    marker = parsed.marker
    applies = marker is None or marker.evaluate({"extra": extra})
    found = [
        each
        for each in requirements._applying([line], extra)
        if each.extra in ("", requirements._normal(extra))
    ]
    assert len(found) == applies
    for each in found:
        assert each.name == requirements._normal(parsed.name)
        assert SpecifierSet(each.specifier) == parsed.specifier


def test_a_line_that_pip_would_refuse_asks_for_nothing() -> None:
    assert unmet(["!!; nonsense"]) == []


def test_dependencies_that_are_not_met_are_named() -> None:
    lines = ["torch>=2.11,<99", "torch>=99", "no-such-thing", "numpy>=999; extra == 'test'"]
    assert unmet(lines) == [
        f"needs torch>=99, and this is {torch.__version__}",
        "needs no-such-thing, which is not installed",
    ]


def test_a_dsl_among_the_dependencies_concerns_the_overrides_of_that_dsl_only() -> None:
    here = metadata.version("triton")
    assert unmet(["triton>=99"]) == []
    assert unmet_for_dsl(["triton>=99"], "triton") == [f"needs triton>=99, and this is {here}"]
    assert unmet_for_dsl(["triton>=99"], "cutedsl") == []


def test_an_extra_concerns_the_overrides_of_the_dsl_of_that_name() -> None:
    lines = ['no-such-thing; extra == "mine"', 'triton>=3; extra == "triton"']
    assert unmet_for_dsl(lines, "mine") == ["needs no-such-thing, which is not installed"]
    assert unmet_for_dsl(lines, "triton") == []


@pytest.mark.parametrize("name", ["triton", "pytorch-triton", "Pytorch_Triton-ROCm"])
def test_a_dsl_goes_by_every_name_that_it_is_distributed_under(name: str) -> None:
    assert unmet_for_dsl([f"{name}>=3"], "triton") == []


@pytest.mark.parametrize("read", [unmet, lambda lines: unmet_for_dsl(lines, "triton")])
def test_nothing_is_needed_without_requirements(read: Callable[[list[str]], list[str]]) -> None:
    assert read([]) == []
