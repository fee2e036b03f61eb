"""What happens when an impl raises: fallback, quarantine, and what must always raise."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import opgraft
from opgraft import OverrideWarning
from opgraft.packs import owning
from tests import ops


class Broken:
    """An impl that raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise self.error


def register(error: BaseException, op: str = "_softmax", **keywords: Any) -> opgraft.Override:
    keywords.setdefault("on_error", "fallback")
    return opgraft.register_op_override(
        "aten", op, "CPU", Broken(error), unconditional_override=True, name="mine", **keywords
    )


def softmax(*shape: int) -> torch.Tensor:
    return torch.softmax(torch.ones(*shape), -1)


def test_by_default_the_error_is_the_callers_with_type_and_traceback() -> None:
    override = register(ZeroDivisionError("in the kernel"), on_error="raise")
    with pytest.raises(ZeroDivisionError, match="in the kernel") as raised:
        softmax(2, 2)
    assert raised.traceback[-1].name == "__call__"
    assert (override.hits, override.fallbacks) == (1, 0)


def test_fallback_runs_native_warns_once_and_quarantines_the_signature() -> None:
    override = register(ValueError("no such tile"))
    with pytest.warns(OverrideWarning, match=r"'mine' of aten::_softmax.*no such tile") as caught:
        for _ in range(3):
            assert softmax(2, 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert len(caught) == 1
    assert (override.hits, override.fallbacks) == (1, 1)
    assert "quarantined after ValueError: no such tile" in str(
        opgraft.explain("aten::_softmax", torch.ones(2, 2), -1, False)
    )


def test_another_signature_is_tried_again() -> None:
    override = register(ValueError("no such tile"))
    with pytest.warns(OverrideWarning):
        softmax(2, 2)
        softmax(3, 3)  # the same kind of call
        softmax(2)
    assert (override.hits, override.fallbacks) == (2, 2)


def test_fallback_is_the_default_for_packs() -> None:
    with owning("norms"):
        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU", Broken(ValueError("x")), unconditional_override=True
        )
    with pytest.warns(OverrideWarning):
        softmax(2, 2)
    assert override.fallbacks == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        SystemExit(1),
    ],
)
def test_never_falls_back_from(error: BaseException) -> None:
    override = register(error)
    with pytest.raises(type(error)):
        softmax(2, 2)
    assert (override.hits, override.fallbacks, override.quarantined) == (1, 0, {})


def test_an_op_that_writes_to_its_arguments_raises() -> None:
    override = register(ValueError("half written"), op="add_.Tensor")
    x = torch.ones(2)
    with pytest.raises(ValueError, match="half written"):
        x += torch.ones(2)
    assert override.fallbacks == 0


def test_strict_always_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_STRICT", "1")
    override = register(ValueError("strict"))
    with pytest.raises(ValueError, match="strict"):
        softmax(2, 2)
    assert override.quarantined == {}


def test_where_native_raises_as_well_that_is_the_error_and_nothing_is_quarantined() -> None:
    override = register(ValueError("mine"), op="bmm")
    with (
        warnings.catch_warnings(),
        pytest.raises(RuntimeError, match=r"[Ee]xpected|size") as raised,
    ):
        warnings.simplefilter("error", OverrideWarning)
        torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 4, 5))
    assert isinstance(raised.value.__context__, ValueError)
    assert override.quarantined == {}


def test_a_broken_contract_falls_back_too() -> None:
    override = opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        lambda self, dim, half_to_float: self,
        unconditional_override=True,
        on_error="fallback",
    )
    with pytest.warns(OverrideWarning, match="in the memory of an argument"):
        assert softmax(2, 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert override.fallbacks == 1


def test_a_condition_that_raises_follows_on_error() -> None:
    def cond(*args: Any) -> bool:
        raise ValueError("bad condition")

    def go(on_error: Any) -> opgraft.Override:
        return opgraft.register_op_override(
            "aten", "_softmax", "CPU", ops.softmax, cond=cond, name="mine", on_error=on_error
        )

    go("raise")
    with pytest.raises(ValueError, match="bad condition"):
        softmax(2, 2)
    override = go("fallback")
    with pytest.warns(OverrideWarning, match="bad condition"):
        assert softmax(2, 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert override.hits == 0


def test_the_router_works_after_an_interrupt() -> None:
    broken = register(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        softmax(2, 2)
    broken.remove()
    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True
    )
    softmax(2, 2)
    assert override.hits == 1
