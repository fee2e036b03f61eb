"""The ops of the `opgraft` namespace: what they are called, what they are, when they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import opgraft
from opgraft import when
from opgraft.ops.schema import resolve
from opgraft.pt2 import opaque
from tests import forked_programs, ops
from tests.pt2 import models

NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,6}", fullmatch=True)


class _Schema:
    def __init__(self, name: str) -> None:
        self.name = name


class _Named:
    """As much of an op as has a name."""

    def __init__(self, name: str) -> None:
        self.overload = self
        self._schema = _Schema(name)


@settings(deadline=None)  # a busy machine is slow
@given(NAMES, NAMES)
def test_a_name_says_which_op_it_stands_for(namespace: str, name: str) -> None:
    ours: Any = _Named(f"{namespace}::{name}")
    assert opaque.origin_of(opaque.name_of(ours)) == (namespace, name)


@pytest.mark.parametrize("name", ["__file__", "__origin__", "softmax", "_", "a_b__c", "aten__"])
def test_other_names_stand_for_nothing(name: str) -> None:
    assert opaque.origin_of(name) is None


def test_every_schema_of_aten_can_be_written_down_and_read_back() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        try:
            op = resolve(name)
        except opgraft.RegistrationError:
            continue
        if opaque.obstacle(op) is None:
            parsed = torch._C.parse_schema("opgraft::x" + opaque.signature_of(op))
            ours, theirs = str(parsed), str(op.overload._schema)
            assert ours[ours.index("(") :] == theirs[theirs.index("(") :], name


def test_it_is_the_op_that_it_stands_for() -> None:
    override = models.override("_softmax", ops.softmax)
    ours = torch.ops.opgraft.aten___softmax.default
    assert str(ours._schema) == str(torch.ops.aten._softmax.default._schema).replace(
        "aten::_softmax", "opgraft::aten___softmax"
    )
    assert {tag.name for tag in ours.tags} == {"pt2_compliant_tag", "needs_exact_strides"}
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x, -1, False), torch.softmax(x, -1))
    assert override.hits == 2


def test_every_overload_without_side_effects_has_one() -> None:
    packet = torch.ops.opgraft.aten__mul
    assert set(packet.overloads()) == {"Tensor", "Scalar"}
    torch.testing.assert_close(packet.Scalar(torch.ones(2), 3), torch.full((2,), 3.0))


@pytest.mark.parametrize("op", ["exp", "add.Tensor", "mul.Tensor", "sqrt", "pow.Tensor_Scalar"])
def test_an_op_of_which_torchscript_has_more_overloads_is_hit_in_a_graph(op: str) -> None:
    target = resolve(f"aten::{op}").overload
    override = models.override(op, lambda *args, **kwargs: target(*args, **kwargs))
    second: Any = {"add.Tensor": torch.ones(3), "mul.Tensor": torch.ones(3), "pow.Tensor_Scalar": 3}
    arguments = (torch.arange(3.0), *([second[op]] if op in second else []))
    function = getattr(torch, op.partition(".")[0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    result = compiled(*arguments)
    assert override.hits == 1
    torch.testing.assert_close(result, opgraft.native(f"aten::{op}")(*arguments))


def test_an_op_of_another_namespace_has_one() -> None:
    library = torch.library.Library("pt2_tests", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        assert torch.ops.opgraft.pt2_utests__twice(torch.ones(2)).tolist() == [2, 2]
    finally:
        library._destroy()


def test_no_op_of_that_name() -> None:
    with pytest.raises(AttributeError, match="aten__no_such_op"):
        _ = torch.ops.opgraft.aten__no_such_op
    assert not hasattr(torch.ops.opgraft, "nonsense")


def test_it_is_checked_by_torch_itself() -> None:
    models.override("_softmax", ops.softmax)
    torch.library.opcheck(
        torch.ops.opgraft.aten___softmax.default,
        (torch.randn(3, 4), -1, False),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_what_it_costs_to_compute_is_known() -> None:
    ours = torch.ops.opgraft.aten__mm.default
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with FlopCounterMode(display=False) as counter:
        ours(a, b)
    assert counter.get_total_flops() == 2 * 4 * 8 * 2


def test_an_op_without_an_override_is_the_native_one() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.ops.opgraft.aten__tanh(x), torch.tanh(x))


def test_nothing_is_imported_until_something_is_compiled() -> None:
    code = """
import sys, torch, opgraft
from tests import ops
from tests.pt2 import models
models.override("_softmax", ops.softmax)
names = ("torch._dynamo", "torch._inductor", "triton", "opgraft.pt2.graph", "opgraft.pt2.caches")
assert not any(name in sys.modules for name in names), names
assert torch.ops.opgraft._dir == []
import torch._inductor.codecache as codecache
from opgraft.pt2 import caches
assert caches.are_salted()
"""
    ran = forked_programs.run(code)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_an_opaque_composite_op_returns_nothing_in_an_arguments_memory() -> None:
    """A compiler takes a schema without aliases by its word, and this one does not keep it."""
    never = models.override("dropout", lambda *args: args[0], cond=when.ndim("input") == 9)
    x = torch.ones(3)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.dropout(x, 0.5, False) is x
            result = torch.ops.opgraft.aten__dropout(x, 0.5, False)
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
    assert never.misses == 6


@pytest.mark.parametrize("overload", ["Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_a_graph_expects_the_strides_that_isin_returns(overload: str, layout: str) -> None:
    x = torch.arange(24).view(4, 6)
    x = {"contiguous": x, "transposed": x.t(), "strided": x[:, ::2]}[layout]
    first, second = (x if part == "Tensor" else 3 for part in overload.split("_"))
    ours = getattr(torch.ops.opgraft.aten__isin, overload)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = ours(first, second)
    assert fake.stride() == ours(first, second).stride()
