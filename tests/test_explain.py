"""`explain`: where a call goes and why, without running it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import opgraft
from opgraft import when
from opgraft.packs import owning
from tests import ops

X = torch.randn(4, 8)


def register(impl: Any = ops.softmax, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)


def explain(x: torch.Tensor = X) -> opgraft.Explanation:
    return opgraft.explain("aten::_softmax", x, -1, False)


def test_nothing_runs_and_nothing_is_counted() -> None:
    override = register(cond=when.size("self", -1) >= 8)
    explain()
    explain(X[:, :4])
    assert (override.hits, override.misses) == (0, 0)


def test_the_whole_chain_in_order_with_a_verdict_each() -> None:
    with owning("norms"):
        pack = register(name="pack", dsl="triton")
    disabled = register(name="off", dsl="mine")
    opgraft.disable(dsl="mine")
    winner = register(name="winner", priority=1)
    narrow = register(
        name="narrow", cond=(when.ndim("self") == 2) & (when.size("self", -1) <= 4), priority=2
    )
    report = explain()
    assert report.winner is winner
    assert [verdict.override for verdict in report.verdicts] == [narrow, winner, disabled, pack]
    lines = str(report).splitlines()
    assert lines[0] == "aten::_softmax at CPU -> override winner"
    assert lines[1] == (
        "  1. narrow [no DSL, user]: declines: when.size('self', -1) <= 4 "
        "(when.size('self', -1) is 8)"
    )
    assert lines[2] == "  2. winner [no DSL, user]: takes it"
    assert lines[3] == "  3. off [mine, user]: disabled by opgraft.disable(dsl='mine')"
    assert lines[4] == "  4. pack [triton, norms]: would take it, but one before it does"


def test_what_is_explained_is_what_happens() -> None:
    override = register(cond=when.size("self", -1) >= 8)
    for x in (X, X[:, :4]):
        expected = explain(x).winner is override
        before = override.hits
        torch.softmax(x, -1)
        assert (override.hits > before) == expected


def test_without_overrides_it_names_the_native_kernel() -> None:
    report = opgraft.explain("aten::bmm", torch.randn(1, 2, 2), torch.randn(1, 2, 2))
    assert report.winner is None
    assert "RegisterCPU" in report.native
    assert str(report) == f"aten::bmm at CPU -> native ({report.native})"


def test_native_origin_is_what_was_there_before_the_router() -> None:
    register(cond=when.ndim("self") == 7)
    assert "RegisterCPU" in explain().native


def test_a_missing_dsl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    override = register(dsl="triton")
    assert not override.enabled
    assert "triton is missing (no module triton): pip install" in str(explain())


def test_a_python_condition_is_named() -> None:
    def is_square(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
        return self.shape[0] == self.shape[1]

    register(cond=is_square)
    assert "is_square (returned false)" in str(explain())


def no_such_shape(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
    raise ValueError("no such shape")


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
def test_what_comes_of_a_condition_that_raises_is_said(
    on_error: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strict:
        monkeypatch.setenv("OPGRAFT_STRICT", "1")
    raising = register(cond=no_such_shape, on_error=on_error, name="raising", priority=1)
    following = register(name="next")
    report = explain()
    assert "its condition raises ValueError: no such shape" in str(report.verdicts[0])
    if on_error == "fallback" and not strict:
        assert report.winner is following
        with pytest.warns(opgraft.OverrideWarning, match="no such shape"):
            torch.softmax(X, -1)
        assert (raising.hits, following.hits) == (0, 1)
        return
    assert report.winner is None and report.as_dict()["runs"] is None
    head = "aten::_softmax at CPU -> an error: the condition of override raising raises"
    assert str(report).splitlines()[0] == head
    assert "would take it, but the condition of one before it raises" in str(report.verdicts[1])
    with pytest.raises(ValueError, match="no such shape"):
        torch.softmax(X, -1)
    assert (raising.hits, following.hits) == (0, 0)


def test_a_condition_behind_the_override_that_takes_a_call_may_raise() -> None:
    winner = register(name="winner", priority=1)
    register(cond=no_such_shape)
    report = explain()
    assert report.winner is winner
    torch.softmax(X, -1)
    assert winner.hits == 1


@pytest.mark.parametrize("by_function", [False, True], ids=["op", "function"])
def test_what_a_condition_says_of_values_is_not_known_without_them(by_function: bool) -> None:
    def is_positive(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
        return bool(self.max() > 0)

    register(cond=is_positive, name="reading", priority=1)
    register(name="next")
    if by_function:
        (report,) = opgraft.explain(lambda x: torch.softmax(x + 1, -1), X).reached
    else:
        with FakeTensorMode():
            report = explain(torch.empty(4, 8))
    head = "aten::_softmax at CPU -> not known: the condition of override reading raises"
    assert str(report).splitlines()[0] == head
    assert [verdict.status for verdict in report.verdicts] == ["unknown", "behind"]
    assert "on tensors without values" in report.verdicts[0].reason


def test_a_scope_is_said() -> None:
    register()
    with opgraft.disabled():
        assert "switched off on this thread by opgraft.disabled()" in str(explain())
    with opgraft.disabled(dsl="other"), opgraft.disabled(op="aten::_softmax"):
        assert "by opgraft.disabled(op='aten::_softmax')" in str(explain())


def test_a_composite_op_in_training_is_said() -> None:
    opgraft.register_op_override(
        "aten", "_fused_rms_norm", "CPU", ops.rms_norm, unconditional_override=True
    )
    x = X.clone().requires_grad_()
    report = opgraft.explain("aten::_fused_rms_norm", x, [8], None, None)
    assert report.winner is None
    assert "keep the composite derivative" in str(report)
    with torch.no_grad():
        report = opgraft.explain("aten::_fused_rms_norm", x, [8], None, None)
    assert report.winner is not None


def test_a_kernel_that_was_put_on_top_of_us_is_said() -> None:
    register()
    with torch.library._scoped_library("aten", "IMPL") as library:
        below = torch.library.get_kernel("aten::_softmax", "CPU")
        library.impl(
            "_softmax",
            lambda keys, *args: below.call_boxed(keys, *args),
            "CPU",
            with_keyset=True,
            allow_override=True,
        )
        assert "shadowed by a kernel that was registered on top" in str(explain())


def test_fake_and_meta_tensors() -> None:
    override = register(cond=when.size("self", -1) >= 8)
    with FakeTensorMode():
        fake = torch.empty(4, 8)
    assert explain(fake).winner is override
    report = explain(X.to("meta"))
    assert report.winner is None
    assert "meta tensors have shapes only" in str(report)


def test_arguments_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(TypeError, match="misses dim, half_to_float"):
        opgraft.explain("aten::_softmax", X)
    with pytest.raises(TypeError, match="no argument 'axis'"):
        opgraft.explain("aten::_softmax", X, axis=1)
    with pytest.raises(opgraft.RegistrationError, match="does not name an op"):
        opgraft.explain("softmax", X)


def test_packs_that_are_not_active_for_want_of_something_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def status(name: str, state: str, reason: str) -> SimpleNamespace:
        return SimpleNamespace(pack=SimpleNamespace(name=name), state=state, reason=reason)

    statuses = [
        status("norms", "unmet", "it needs triton>=9"),
        status("fine", "active", ""),
        status("off", "inactive", "OPGRAFT_PACKS"),
    ]
    monkeypatch.setattr(opgraft.packs, "statuses", lambda: statuses, raising=False)
    assert explain().notes == ("pack norms is not active: it needs triton>=9",)
