"""`trace`: what went where while it was open, and nothing outside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import OverrideWarning, when
from opgraft.router import observers
from tests import ops

X = torch.randn(4, 8)


def register(impl: Any = ops.softmax, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **keywords)


def softmaxes(*widths: int) -> None:
    for width in widths:
        torch.softmax(torch.randn(4, width), -1)


def test_hits_misses_and_their_reasons() -> None:
    override = register(cond=when.size("self", -1) >= 8, name="wide")
    softmaxes(8)
    with opgraft.trace() as t:
        softmaxes(8, 4, 2, 8)
    softmaxes(8)
    (row,) = t.rows
    assert (row.op, row.dispatch_key, row.calls, row.hits) == ("aten::_softmax", "CPU", 4, 2)
    assert row.native_calls == 2
    (of_override,) = row.overrides
    (miss,) = of_override.misses
    assert (of_override.hits, miss.count) == (2, 2)
    assert str(miss) == "when.size('self', -1) >= 8 (when.size('self', -1) is 4, 2)"
    assert (override.hits, override.misses) == (4, 2)


def test_tracing_changes_no_result() -> None:
    register(cond=when.size("self", -1) >= 8)
    with opgraft.trace():
        torch.testing.assert_close(torch.softmax(X, -1), ops.softmax(X, -1, False))
        torch.testing.assert_close(torch.softmax(X[:, :4], -1), ops.softmax(X[:, :4], -1, False))


def test_the_table_is_short_and_says_where_the_time_went() -> None:
    register(cond=(when.ndim("self") == 2) & (when.size("self", -1) >= 8), name="wide")
    with opgraft.trace() as t:
        softmaxes(*range(1, 20))
    lines = str(t).splitlines()
    assert lines[0] == "opgraft trace: 19 calls of ops with overrides, 12 taken"
    assert [line.split()[0] for line in lines[2:]] == ["aten::_softmax", "wide", "7", "native"]
    assert lines[4].strip() == (
        "7 x declined: when.size('self', -1) >= 8 (when.size('self', -1) is 1, 2, 3, ...)"
    )
    assert t.seconds > t.rows[0].seconds > t.rows[0].native_seconds > 0


def test_reasons_are_told_apart() -> None:
    register(cond=when.size("self", -1) >= 100, name="huge")
    register(name="off", dsl="mine")
    opgraft.disable(dsl="mine")
    winner = register(cond=when.size("self", -1) >= 8, name="winner", priority=1)
    with opgraft.trace() as t:
        softmaxes(8, 200)
        with opgraft.disabled(name="winner"):
            softmaxes(8)
    reasons = {
        row.override.name: [(miss.status, miss.count) for miss in row.misses]
        for row in t.rows[0].overrides
    }
    assert winner.hits == 2
    assert reasons == {
        "winner": [("disabled", 1)],
        "off": [("disabled", 3)],
        "huge": [("declines", 2), ("behind", 1)],
    }


def test_calls_are_seen_where_every_override_is_off() -> None:
    override = register()
    opgraft.disable()
    with opgraft.trace() as t:
        softmaxes(8, 8)
        assert override.misses == 0
    (row,) = t.rows
    assert (row.calls, row.native_calls) == (2, 2)
    assert "2 x disabled by opgraft.disable()" in str(t)


def test_an_override_that_fails_is_seen_to_fall_back_and_to_be_quarantined() -> None:
    def broken(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        raise ValueError("not today")

    register(broken, on_error="fallback", name="broken")
    with opgraft.trace() as t, pytest.warns(OverrideWarning):
        softmaxes(8, 8)
    (row,) = t.rows
    (broken_row,) = row.overrides
    assert (broken_row.hits, broken_row.fallbacks) == (1, 1)
    assert broken_row.errors == ["ValueError: not today"]
    assert [(miss.status, miss.count) for miss in broken_row.misses] == [("quarantined", 1)]
    assert "1 x ended in the native kernel, after ValueError: not today" in str(t)


def test_an_impl_that_calls_the_same_op_is_seen_to_end_in_native() -> None:
    register(ops.softmax_by_itself, unconditional_override=False)
    with opgraft.trace() as t:
        softmaxes(8, 8, 8, 8)  # the first two are compared with native
    (row,) = t.rows
    assert row.calls == 4
    assert (row.overrides[0].hits, row.overrides[0].fallbacks) == (4, 4)


def test_a_call_that_raises_is_counted_and_raises() -> None:
    def broken(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        raise ValueError("not today")

    register(broken, on_error="raise")
    with opgraft.trace() as t:
        for _ in range(2):
            with pytest.raises(ValueError, match="not today"):
                softmaxes(8)
        softmaxes_native = opgraft.native("aten::_softmax")(X, -1, False)
    assert softmaxes_native.shape == X.shape
    (row,) = t.rows
    assert (row.calls, row.raised, row.overrides[0].hits) == (2, 2, 2)


def test_an_exception_closes_the_trace() -> None:
    register()
    with pytest.raises(KeyError), opgraft.trace() as t:
        softmaxes(8)
        raise KeyError
    softmaxes(8)
    assert t.rows[0].calls == 1
    assert not observers.any_thread()


def test_ctrl_c_while_a_call_is_noted_interrupts_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core asks the observer, whose own errors must not become the call's."""
    # What is started in the background of a shell ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    register()
    asked = observers.of_this_thread

    def interrupted() -> Any:
        monkeypatch.setattr(observers, "of_this_thread", asked)
        raise KeyboardInterrupt

    def calls_and_goes_on() -> None:
        softmaxes(8)
        for _ in range(1000):
            softmaxes(4)

    try:
        with pytest.raises(KeyboardInterrupt), opgraft.trace():
            monkeypatch.setattr(observers, "of_this_thread", interrupted)
            calls_and_goes_on()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_backward_that_is_started_inside_is_seen() -> None:
    def impl(
        grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        return (grad_output - (grad_output * output).sum(dim, keepdim=True)) * output

    opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", impl, unconditional_override=True
    )
    loss = torch.softmax(X.clone().requires_grad_(), -1).square().sum()
    with opgraft.trace() as t:
        loss.backward()
    assert [(row.op, row.hits) for row in t] == [("aten::_softmax_backward_data", 1)]


def test_other_threads_are_routed_and_not_seen() -> None:
    override = register(cond=when.size("self", -1) >= 8)
    with opgraft.trace() as t:
        thread = threading.Thread(target=softmaxes, args=(8, 4))
        thread.start()
        thread.join()
        assert (override.hits, override.misses) == (1, 1)
        softmaxes(8)
    assert t.rows[0].calls == 1


def test_two_threads_trace_at_the_same_time() -> None:
    register(cond=when.size("self", -1) >= 8)
    traces: dict[int, opgraft.Trace] = {}

    def work(calls: int) -> None:
        with opgraft.trace() as traces[calls]:
            softmaxes(*[8, 4] * calls)

    threads = [threading.Thread(target=work, args=(calls,)) for calls in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {calls: (t.rows[0].calls, t.rows[0].hits) for calls, t in traces.items()}
    assert counts == {20: (40, 20), 30: (60, 30)}
    assert not observers.any_thread()


def test_traces_open_and_close_while_other_threads_call() -> None:
    override = register(cond=when.size("self", -1) >= 8)
    opgraft.disable(name="nothing")  # as rules do, traces publish the chain anew
    done = threading.Event()
    counts = [0] * 3

    def call(index: int) -> None:
        while not done.is_set():
            softmaxes(8, 4)
            counts[index] += 1

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(counts))]
    for thread in threads:
        thread.start()
    for _ in range(100):
        with opgraft.trace() as t:
            softmaxes(8, 4)
        assert (t.rows[0].calls, t.rows[0].hits) == (2, 1)
    done.set()
    for thread in threads:
        thread.join()
    assert override.hits == override.misses == sum(counts) + 100


def test_traces_nest() -> None:
    register()
    with opgraft.trace() as outer:
        softmaxes(8)
        with opgraft.trace() as inner:
            softmaxes(8)
        softmaxes(8)
    assert (outer.rows[0].calls, inner.rows[0].calls) == (3, 1)


def test_a_trace_is_opened_once_at_a_time_and_goes_on_when_opened_again() -> None:
    register()
    t = opgraft.trace()
    with t:
        softmaxes(8)
        with pytest.raises(RuntimeError, match="open already"):
            t.__enter__()
    with t:
        softmaxes(8)
    assert t.rows[0].calls == 2


def test_what_is_registered_meanwhile_is_seen() -> None:
    with opgraft.trace() as t:
        softmaxes(8)
        register(name="late")
        softmaxes(8)
        opgraft.register_op_override(
            "aten", "bmm", "CPU", lambda self, mat2: torch.empty(0), cond=when.ndim("self") == 7
        )
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert {row.op: row.calls for row in t} == {"aten::_softmax": 1, "aten::bmm": 1}


def test_ops_that_an_impl_calls_are_rows_of_their_own() -> None:
    def amax(self: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
        return self.max(-1, keepdim=keepdim).values

    register()
    opgraft.register_op_override("aten", "amax", "CPU", amax, unconditional_override=True)
    with opgraft.trace() as t:
        softmaxes(8)
    assert {row.op: row.hits for row in t} == {"aten::_softmax": 1, "aten::amax": 1}


def test_a_composite_op_in_training_is_seen_to_keep_its_derivative() -> None:
    opgraft.register_op_override(
        "aten", "_fused_rms_norm", "CPU", ops.rms_norm, unconditional_override=True
    )
    x = X.clone().requires_grad_()
    with opgraft.trace() as t:
        F.rms_norm(x, (8,)).sum().backward()
        with torch.no_grad():
            F.rms_norm(x, (8,))
    assert x.grad is not None
    (row,) = t.rows
    assert (row.calls, row.hits, row.native_calls) == (2, 1, 1)
    assert [(miss.status, miss.count) for miss in row.overrides[0].misses] == [("not asked", 1)]


def test_a_compiled_graph_that_calls_the_op_is_seen() -> None:
    register()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="aot_eager", fullgraph=True)
    compiled(X)
    with opgraft.trace() as t:
        compiled(X)
    assert t.rows[0].hits == 1


def test_what_no_call_can_reach_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    opgraft.register_op_override(
        "aten", "frac", "CPU", lambda self: self, dsl="triton", name="mine",
        unconditional_override=True,
    )  # fmt: skip
    with opgraft.trace() as t:
        torch.frac(X)  # no other test overrides it: a router, once there, stays
    assert t.rows == ()
    assert "note: mine [triton, user] of aten::frac at CPU: triton is missing" in str(t)


def test_as_dict_is_json_and_says_what_the_table_says() -> None:
    register(cond=when.size("self", -1) >= 8, name="wide")
    with opgraft.trace() as t:
        softmaxes(8, 4)
    data = json.loads(json.dumps(t.as_dict()))
    (op,) = data["ops"]
    assert (op["op"], op["calls"], op["hits"], op["native_calls"]) == ("aten::_softmax", 2, 1, 1)
    assert op["overrides"][0]["misses"] == [
        {
            "status": "declines",
            "reason": "when.size('self', -1) >= 8",
            "count": 1,
            "saw": ["when.size('self', -1) is 4"],
            "saw_more": False,
        }
    ]


def test_a_profile_shows_overrides_by_name(tmp_path: Path) -> None:
    register(cond=when.size("self", -1) >= 8, name="wide", dsl="mine")
    with torch.profiler.profile() as profile:
        softmaxes(8, 4, 8, 8)  # the first two hits are compared with native
    shown = [event for event in profile.events() if event.name.startswith("opgraft")]
    assert [event.name for event in shown] == ["opgraft: wide [aten::_softmax, mine]"] * 3
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "opgraft: wide [aten::_softmax, mine]" in (tmp_path / "trace.json").read_text()


PROGRAM = """
import sys, torch, opgraft
opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda self, dim, half: self.exp() / self.exp().sum(dim, True),
    unconditional_override=True, name="mine",
)
with opgraft.trace():
    torch.softmax(torch.zeros(2, 2), -1)
print(sorted({"torch._dynamo", "torch._inductor", "triton"} & set(sys.modules)))
"""


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own: the variables are read when torch is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_torch_trace_and_torch_logs_get_registrations_and_traces(tmp_path: Path) -> None:
    done = run(TORCH_TRACE=str(tmp_path), TORCH_LOGS="+opgraft")
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    names = [json.loads(line[line.index("{") :]) for line in lines if '"artifact"' in line]
    written = {each["artifact"]["name"] for each in names}
    assert {"opgraft_override", "opgraft_trace"} <= written
    assert '"hits": 1,' in log.read_text()
    assert done.stdout.strip() == "[]"
    assert "registered <Override 'mine' of aten::_softmax" in done.stderr
    assert "opgraft trace: 1 calls" in done.stderr


def test_without_them_nothing_is_said() -> None:
    assert run().stderr == ""
