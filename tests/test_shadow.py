"""Shadow mode: a share of hits is compared with native, in both routers."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import ContractError, OverrideWarning, RegistrationError, when
from opgraft.base.env import warn_once
from opgraft.router import saved_calls, shadow
from tests import forked_programs, ops
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).parent.parent
OFF = 1.01  # what a wrong impl's values are multiplied by


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    shadow._logged.clear()


def on_softmax(factor: float = 1.0, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return ops.softmax(self.contiguous(), dim, half_to_float) * factor

    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, name="mine", **keywords)


def test_off_nothing_is_compared() -> None:
    override = on_softmax()
    torch.softmax(torch.randn(3, 4), -1)
    assert (override.hits, override.shadowed) == (1, 0)


def test_hits_are_compared_and_misses_are_not() -> None:
    override = on_softmax(cond=when.size("self", -1) == 4)
    with opgraft.shadow(rate=1.0):
        for columns in (4, 5, 4):
            torch.softmax(torch.randn(3, columns), -1)
    torch.softmax(torch.randn(3, 4), -1)
    assert (override.hits, override.misses) == (3, 1)
    assert (override.shadowed, override.mismatches) == (2, 0)


def test_about_the_share_that_was_asked_for() -> None:
    override = on_softmax()
    x = torch.randn(3, 4)
    with opgraft.shadow(rate=0.1):
        for _ in range(2000):
            torch.softmax(x, -1)
    assert 100 < override.shadowed < 320
    assert override.hits == 2000


def test_a_difference_is_logged_counted_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    override = on_softmax(OFF)
    x = torch.randn(6, 4).t()
    with opgraft.shadow(rate=1.0), caplog.at_level(logging.WARNING, "opgraft"):
        result = torch.softmax(x, 0)
    torch.testing.assert_close(result, ops.softmax(x, 0, False) * OFF)
    assert (override.shadowed, override.mismatches, override.fallbacks) == (1, 1, 0)
    message = caplog.messages[0]
    assert "override 'mine' of aten::_softmax at CPU differs from native: output 0: " in message
    assert "of 24 elements are up to" in message
    facts = json.loads(message.partition("The call: ")[2])
    assert facts["arguments"]["self"] == {
        "dtype": "float32",
        "sizes": [4, 6],
        "strides": [1, 4],
        "offset": 0,
    }
    assert facts["arguments"]["dim"] == 0
    assert "saved" not in facts


def test_what_differs_often_is_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    override = on_softmax(OFF)
    with opgraft.shadow(rate=1.0), caplog.at_level(logging.WARNING, "opgraft"):
        for _ in range(30):
            torch.softmax(torch.randn(3, 4), -1)
    assert override.mismatches == 30
    assert len(caplog.messages) == shadow.MAX_LOGGED
    assert "no longer logged" in caplog.messages[-1]


def test_a_difference_can_raise() -> None:
    on_softmax(OFF)
    with (
        opgraft.shadow(rate=1.0, on_mismatch="raise"),
        pytest.raises(ContractError, match="differs from native: output 0"),
    ):
        torch.softmax(torch.randn(3, 4), -1)


def test_a_difference_can_quarantine_and_the_caller_gets_natives_result() -> None:
    override = on_softmax(OFF)
    x = torch.randn(3, 4)
    native = opgraft.native("aten::_softmax")(x, -1, False)
    with opgraft.shadow(rate=1.0, on_mismatch="quarantine"), pytest.warns(OverrideWarning) as seen:
        assert torch.equal(torch.softmax(x, -1), native)
        assert torch.equal(torch.softmax(x, -1), native)
    assert torch.equal(torch.softmax(x, -1), native)  # after the scope, too
    assert "differs: output 0" in str(seen[0].message) and len(seen) == 1
    assert (override.hits, override.fallbacks, override.shadowed) == (1, 1, 1)
    assert "quarantined" in str(opgraft.explain("aten::_softmax", x, -1, False))
    assert torch.softmax(x.double(), -1).dtype == torch.float64  # another kind of call
    assert override.hits == 2


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)],
    ids=str,
)
def test_rounding_is_no_difference(dtype: torch.dtype, error: float) -> None:
    override = on_softmax(1 + error)
    with opgraft.shadow(rate=1.0):
        torch.softmax(torch.randn(30, 40, dtype=dtype), -1)
    assert (override.shadowed, override.mismatches) == (1, 0)


def test_the_tolerance_can_be_changed() -> None:
    override = on_softmax(OFF)
    with opgraft.shadow(rate=1.0, tolerance=1000):
        torch.softmax(torch.randn(3, 4), -1)
    with opgraft.shadow(rate=1.0, tolerance=1e-9):
        torch.softmax(torch.randn(3, 4), -1)
    assert (override.shadowed, override.mismatches) == (2, 1)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": lambda y: torch.where(torch.arange(y.numel()).view(y.shape) == 3, 0.0, y),
    "a NaN": lambda y: torch.where(torch.arange(y.numel()).view(y.shape) == 3, float("nan"), y),
    "a view in other memory order": lambda y: y.flip(0),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_in_one_place_is_found(fault: str) -> None:
    override = opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        lambda *args: WRONG[fault](ops.softmax(*args)),
        unconditional_override=True,
    )
    with opgraft.shadow(rate=1.0):
        torch.softmax(torch.randn(30, 40), -1)
    assert (override.shadowed, override.mismatches) == (1, 1)


def test_an_impl_that_writes_to_its_input_differs() -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result = ops.softmax(self, dim, half_to_float)
        if writes:
            self.mul_(2)
        return result

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, unconditional_override=True
    )
    x, writes = torch.randn(3, 4), []
    torch.softmax(x, -1), torch.softmax(x, -1)  # the contract check would find it
    writes.append(True)
    with opgraft.shadow(rate=1.0):
        torch.softmax(x, -1)
    assert override.mismatches == 1


def test_integers_are_compared_exactly() -> None:
    override = opgraft.register_op_override(
        "aten",
        "argmax",
        "CPU",
        lambda self, dim, keepdim: opgraft.native("aten::argmax")(self, dim, keepdim) + wrong[0],
        unconditional_override=True,
    )
    wrong = [0]
    with opgraft.shadow(rate=1.0):
        torch.argmax(torch.randn(3, 4), 1)
        wrong[0] = 1
        torch.argmax(torch.randn(3, 4), 1)
    assert (override.shadowed, override.mismatches) == (2, 1)


# ------------------------------------------------------------------ what it must leave alone


@pytest.mark.parametrize("on_mismatch", ["log", "quarantine"])
@pytest.mark.parametrize("factor", [1.0, OFF])
def test_an_op_that_writes_to_its_arguments(on_mismatch: Any, factor: float) -> None:
    def add_(self: torch.Tensor, other: torch.Tensor, *, alpha: complex) -> torch.Tensor:
        return self.copy_(torch.add(self, other, alpha=alpha) * factor)

    override = opgraft.register_op_override(
        "aten", "add_.Tensor", "CPU", add_, unconditional_override=True
    )
    x = torch.ones(3)
    with opgraft.shadow(rate=1.0, on_mismatch=on_mismatch):
        if factor != 1 and on_mismatch == "quarantine":
            with pytest.warns(OverrideWarning):
                x += torch.ones(3)
        else:
            x += torch.ones(3)
    put_back = factor != 1 and on_mismatch == "quarantine"
    assert torch.allclose(x, torch.full((3,), 2.0 * (1 if put_back else factor)))
    assert (override.hits, override.shadowed) == (1, 1)
    assert override.mismatches == (factor != 1)


@pytest.mark.parametrize("other", ["itself", "a view of it"])
def test_arguments_that_share_memory_share_it_in_what_is_compared(other: str) -> None:
    override = opgraft.register_op_override(
        "aten",
        "add_.Tensor",
        "CPU",
        lambda self, other, *, alpha: self.copy_(torch.add(self, other, alpha=alpha)),
        unconditional_override=True,
    )
    x = torch.arange(3.0)
    with opgraft.shadow(rate=1.0, on_mismatch="raise"):
        x.add_(x if other == "itself" else x.view(3))
    assert x.tolist() == [0, 2, 4]
    assert (override.shadowed, override.mismatches) == (1, 0)


def test_a_random_call_is_not_compared_and_the_generator_is_left_alone() -> None:
    def impl(self: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(self.shape) > p
        return self * mask / (1 - p), mask

    override = opgraft.register_op_override(
        "aten", "native_dropout", "CPU", impl, unconditional_override=True
    )
    x = torch.ones(64)
    with opgraft.shadow(rate=1.0):
        torch.manual_seed(0)
        torch.native_dropout(x, 0.5, True)
        after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(64)
    assert torch.equal(torch.rand(1), after)
    assert (override.hits, override.shadowed) == (1, 0)


def test_a_call_of_a_random_op_that_is_not_random_is_compared() -> None:
    """As attention without dropout is."""
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    override = opgraft.register_op_override(
        "aten",
        name.removeprefix("aten::"),
        "CPU",
        lambda *args, **kwargs: opgraft.native(name)(*args, **kwargs),
        unconditional_override=True,
    )
    q = torch.randn(1, 2, 8, 16)
    with opgraft.shadow(rate=1.0):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert (override.hits, override.shadowed, override.mismatches) == (1, 1, 0)


def test_overrides_are_off_while_native_is_asked() -> None:
    inner = opgraft.register_op_override(
        "aten", "abs", "CPU", lambda self: self, unconditional_override=True
    )
    override = on_softmax()
    with opgraft.shadow(rate=1.0):
        torch.softmax(torch.randn(3, 4), -1)
    assert (override.shadowed, inner.hits) == (1, 0)


def test_where_native_cannot_do_a_call_nothing_is_compared_and_nothing_breaks() -> None:
    override = opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        lambda self, dim, half_to_float: ops.softmax(self.float(), dim, False).long(),
        unconditional_override=True,
    )
    x = torch.zeros(3, 4, dtype=torch.int64)
    with opgraft.disabled(), pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.softmax(x, -1)
    with opgraft.shadow(rate=1.0):
        assert torch.softmax(x, -1).shape == x.shape
    assert (override.hits, override.shadowed) == (1, 0)


def test_it_works_in_training() -> None:
    forward = on_softmax()
    backward = opgraft.register_op_override(
        "aten",
        "_softmax_backward_data",
        "CPU",
        lambda *args: opgraft.native("aten::_softmax_backward_data")(*args).clone(),
        unconditional_override=True,
    )
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with opgraft.shadow(rate=1.0):
        for _ in range(3):
            optimizer.zero_grad()
            torch.softmax(layer(torch.randn(5, 4)), -1).pow(2).sum().backward()
            optimizer.step()
    assert (forward.shadowed, backward.shadowed) == (3, 3)
    assert forward.mismatches == backward.mismatches == 0


def test_every_thread_is_sampled() -> None:
    override = on_softmax()
    x = torch.randn(3, 4)

    def work() -> None:
        for _ in range(50):
            torch.softmax(x, -1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    with opgraft.shadow(rate=1.0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (override.hits, override.shadowed, override.mismatches) == (200, 200, 0)


def test_scopes_nest_and_the_innermost_holds() -> None:
    override = on_softmax(OFF)
    x = torch.randn(3, 4)
    with opgraft.shadow(rate=1.0):
        with opgraft.shadow(rate=1.0, on_mismatch="raise"), pytest.raises(ContractError):
            torch.softmax(x, -1)
        torch.softmax(x, -1)
    torch.softmax(x, -1)
    assert override.shadowed == 2


def test_what_is_registered_meanwhile_is_sampled_too() -> None:
    with opgraft.shadow(rate=1.0):
        override = on_softmax()
        torch.softmax(torch.randn(3, 4), -1)
        opgraft.disable(name="mine")
        opgraft.enable(name="mine")
        torch.softmax(torch.randn(3, 4), -1)
    assert (override.hits, override.shadowed) == (2, 2)


def test_a_disabled_scope_holds_under_it() -> None:
    override = on_softmax()
    with opgraft.shadow(rate=1.0), opgraft.disabled():
        torch.softmax(torch.randn(3, 4), -1)
    assert (override.hits, override.shadowed) == (0, 0)


def test_an_error_of_the_impl_is_its_own() -> None:
    def impl(*args: Any) -> torch.Tensor:
        raise ValueError("mine")

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, unconditional_override=True
    )
    with opgraft.shadow(rate=1.0), pytest.raises(ValueError, match="mine"):
        torch.softmax(torch.randn(3, 4), -1)
    assert (override.hits, override.shadowed) == (1, 0)


def test_a_condition_in_python_and_the_form_with_a_keyset() -> None:
    first = opgraft.register_op_override(
        "aten", "relu", "CPU", lambda self: self.clamp(0), cond=lambda self: self.ndim == 2
    )
    second = opgraft.register_op_override(
        "aten", "abs", "CPU", lambda keyset, self: torch.abs(self)
    )
    x = torch.randn(3, 4)
    with opgraft.shadow(rate=1.0):
        torch.relu(x), torch.relu(x[0]), torch.abs(x)
    assert (first.hits, first.misses, first.shadowed) == (1, 1, 1)
    assert (second.hits, second.fallbacks, second.shadowed) == (1, 1, 1)


# ------------------------------------------------------------------ saving, settings, environment


def test_calls_that_differ_are_saved_when_asked_and_load_again(tmp_path: Path) -> None:
    on_softmax(OFF)
    folder = tmp_path / "calls"
    x = torch.randn(6, 4, dtype=torch.bfloat16).t()
    with opgraft.shadow(rate=1.0, save=folder, tolerance=0.01):
        torch.softmax(x, 0)
        torch.softmax(torch.randn(1, 4).expand(3, 4), -1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.glob("*.json"))
    assert len(files) == 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    first, second = (saved_calls.load(file) for file in files)
    assert first.op.name == "aten::_softmax"
    assert torch.equal(first.args[0], x) and first.args[0].stride() == x.stride()
    assert first.args[1:] == (0, False)
    assert second.args[0].stride() == (0, 1)


def test_where_a_call_cannot_be_saved_the_program_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    override = on_softmax(OFF)
    with opgraft.shadow(rate=1.0, save=tmp_path / "calls"):
        (tmp_path / "calls").rmdir()
        torch.softmax(torch.randn(2, 4), -1)
    assert override.mismatches == 1
    assert "No such file or directory" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rate": 0}, r"rate=0: give a share"),
        ({"rate": 1.5}, r"rate=1.5: give a share"),
        ({"on_mismatch": "explode"}, "on_mismatch='explode': choose one of"),
        ({"tolerance": -1.0}, "tolerance=-1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keywords: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message), opgraft.shadow(**keywords):
        pass
    assert shadow.current() is None


PROGRAM = """
import logging, torch, opgraft
from tests import ops
logging.basicConfig()
override = opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda *a: ops.softmax(*a) * 1.01, unconditional_override=True
)
torch.softmax(torch.ones(2, 4), -1)
print(override.shadowed, override.mismatches, override.fallbacks)
"""


@pytest.mark.parametrize(
    ("value", "printed", "logged"),
    [
        ("1", "1 1 0", "differs from native"),
        ("1:quarantine", "1 1 1", "OverrideWarning"),
    ],
)
def test_opgraft_shadow(value: str, printed: str, logged: str) -> None:
    env = os.environ | {"OPGRAFT_SHADOW": value, "PYTHONPATH": str(ROOT)}
    done = forked_programs.run(PROGRAM, env=env)
    assert done.stdout.strip() == printed, done.stderr
    assert logged in done.stderr


@pytest.mark.parametrize(
    ("value", "logged"),
    [
        ("0", ""),
        ("often", "OPGRAFT_SHADOW=often is ignored: give a share"),
        ("1:explode", "OPGRAFT_SHADOW=1:explode is ignored: give a share"),
    ],
)
def test_opgraft_shadow_that_turns_nothing_on(
    value: str, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPGRAFT_SHADOW", value)
    warn_once.cache_clear()
    shadow._from_environment()  # what importing it calls
    assert shadow.current() is None
    assert logged in caplog.text and bool(logged) == bool(caplog.text)


@where_the_core_routes
def test_the_same_in_the_python_router() -> None:
    run_again(__file__, selected="not opgraft_shadow and not python_router")
