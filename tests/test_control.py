"""Enabling, disabling, listing, bypassing: process-wide rules and scopes."""

from __future__ import annotations

import threading

import pytest
import torch

import opgraft
from opgraft import RegistrationError
from opgraft.packs import owning
from opgraft.registry import registry
from tests import forked_programs, ops


def softmax_override(**keywords: object) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, **keywords
    )  # type: ignore[arg-type]


def bmm_override(**keywords: object) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten",
        "bmm",
        "CPU",
        lambda self, mat2: (self.unsqueeze(-1) * mat2.unsqueeze(-3)).sum(-2),
        unconditional_override=True,
        **keywords,
    )  # type: ignore[arg-type]


def call_both() -> None:
    torch.softmax(torch.randn(2, 3), -1)
    torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5))


def test_keywords_intersect() -> None:
    softmax, bmm, other = (
        softmax_override(dsl="triton"),
        bmm_override(dsl="triton"),
        softmax_override(dsl="mine", priority=-1),
    )
    opgraft.disable(dsl="triton", op="aten::bmm")
    call_both()
    assert (softmax.hits, bmm.hits, other.hits) == (1, 0, 0)


def test_triton_for_bmm_only() -> None:
    softmax, bmm = softmax_override(dsl="triton"), bmm_override(dsl="triton")
    opgraft.disable(dsl="triton")
    opgraft.enable(dsl="triton", op="aten::bmm")
    call_both()
    assert (softmax.hits, bmm.hits) == (0, 1)


def test_the_last_rule_that_matches_wins() -> None:
    override = softmax_override()
    opgraft.disable(op="aten::_softmax")
    assert not override.enabled
    opgraft.enable()
    assert override.enabled
    opgraft.disable(dispatch_key="CPU")
    assert not override.enabled


def test_later_registrations_obey_earlier_rules() -> None:
    opgraft.disable(op=torch.ops.aten._softmax.default)
    override = softmax_override()
    call_both()
    assert not override.enabled
    assert override.hits == 0


def test_rules_do_not_pile_up() -> None:
    softmax_override()
    for _ in range(100):
        opgraft.disable(op="aten::_softmax")
        opgraft.enable(op="aten::_softmax")
    assert len(registry._rules) == 1


def test_disabling_an_op_that_does_not_exist_is_an_error_unless_its_library_may_come() -> None:
    with pytest.raises(RegistrationError, match="did you mean"):
        opgraft.disable(op="aten::_sofmax")
    opgraft.disable(op="some_library::its_op")


def test_a_scope_holds_on_its_thread_only() -> None:
    override = softmax_override()
    with opgraft.disabled(op="aten::_softmax"):
        call_both()
        assert override.hits == 0
        thread = threading.Thread(target=call_both)
        thread.start()
        thread.join()
        assert override.hits == 1
    call_both()
    assert override.hits == 2


def test_scopes_nest_and_end_with_an_exception() -> None:
    softmax, bmm = softmax_override(), bmm_override()
    with pytest.raises(KeyError), opgraft.disabled(op="aten::_softmax"):
        with opgraft.disabled(op="aten::bmm"):
            call_both()
            assert (softmax.hits, bmm.hits) == (0, 0)
        call_both()
        assert (softmax.hits, bmm.hits) == (0, 1)
        raise KeyError
    call_both()
    assert (softmax.hits, bmm.hits) == (1, 2)


def test_a_scope_holds_for_a_backward_that_is_started_inside() -> None:
    def impl(
        grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        return (grad_output - (grad_output * output).sum(dim, keepdim=True)) * output

    backward = opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", impl, unconditional_override=True
    )
    x = torch.randn(3, 4, requires_grad=True)
    torch.softmax(x, -1).square().sum().backward()
    assert backward.hits == 1
    loss = torch.softmax(x, -1).square().sum()
    with opgraft.disabled():
        loss.backward()
    assert backward.hits == 1


def test_a_scope_holds_for_a_compiled_graph_at_run_time() -> None:
    override = softmax_override()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    compiled(x)
    assert override.hits == 1
    with opgraft.disabled():
        compiled(x)
    assert override.hits == 1


def test_native_bypasses_every_override_of_the_op_and_keeps_its_derivative() -> None:
    override = softmax_override()
    x = torch.randn(2, 3, requires_grad=True)
    opgraft.native("aten::_softmax")(x, -1, False).square().sum().backward()
    assert override.hits == 0
    assert x.grad is not None
    torch.softmax(x, -1)
    assert override.hits == 1


def test_overrides_are_listed_in_order_and_filtered() -> None:
    user = softmax_override(name="mine", dsl="a")
    with owning("zeta"):
        zeta = softmax_override(name="z", dsl="a")
    with owning("alpha"):
        alpha = softmax_override(name="y", dsl="b")
        urgent = softmax_override(name="x", priority=1)
    assert opgraft.overrides(op="aten::_softmax") == [user, urgent, alpha, zeta]
    assert opgraft.overrides(dsl="a") == [user, zeta]
    assert opgraft.overrides(pack="alpha", dsl="b") == [alpha]
    assert opgraft.overrides(name="z") == [zeta]


def test_what_a_pack_registers_belongs_to_it_and_falls_back() -> None:
    with owning("norms"):
        of_pack = softmax_override()
    own = softmax_override()
    assert (of_pack.pack, of_pack.on_error) == ("norms", "fallback")
    assert (own.pack, own.on_error) == (None, "raise")
    opgraft.disable(pack="norms")
    assert (of_pack.enabled, own.enabled) == (False, True)


PROGRAM = """
import torch, opgraft
o = opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda self, dim, half: self.exp() / self.exp().sum(dim, True),
    unconditional_override=True, dsl="mine",
)
torch.softmax(torch.zeros(2, 2), -1)
kernel = torch.library.get_kernel("aten::_softmax", "CPU")
print(o.hits, o.enabled, "opgraft" in repr(kernel))
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", "1 True True"),
        ("0", "1 True True"),
        ("1", "0 False False"),  # nothing is installed at all
        ("mine", "0 False True"),
        ("aten::_softmax", "0 False True"),
        ("triton, pack:other", "1 True True"),
    ],
)
def test_opgraft_disable(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_DISABLE", value)
    done = forked_programs.run(PROGRAM)
    assert done.stdout.strip() == expected, done.stderr
