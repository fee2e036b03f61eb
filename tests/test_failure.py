"""What happens when an impl raises: fallback, quarantine, and what must always raise."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import OverrideWarning, when
from opgraft.core import loader
from opgraft.packs import owning
from opgraft.router import failure, timebox
from tests import forked_programs, ops
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).parent.parent


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
    assert (override.hits, override.fallbacks, override.state.quarantined) == (1, 0, {})


class TimeLimit:
    """A signal handler, in each form that one may have."""

    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("the user's time is over")

    method = __call__


HANDLERS: dict[str, Callable[..., None]] = {
    "function": lambda number, frame: TimeLimit()(number, frame),
    "method": TimeLimit().method,
    "object": TimeLimit(),
    "partial": functools.partial(TimeLimit.method, TimeLimit()),
}


@pytest.fixture(params=HANDLERS.values(), ids=HANDLERS)
def send_alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Has the user's handler called, which raises where the program is."""
    before = signal.signal(signal.SIGALRM, request.param)
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def softmax_that_calls(function: Callable[[], None]) -> Callable[..., torch.Tensor]:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        function()
        return ops.softmax(self, dim, half_to_float)

    return impl


@pytest.mark.parametrize("earlier", [0, 1, 3], ids=lambda calls: f"after {calls} calls")
def test_what_a_signal_handler_raises_in_an_impl_is_the_callers(
    earlier: int, send_alarm: Callable[[], None]
) -> None:
    alarms = [lambda: None] * earlier + [send_alarm, lambda: None]
    impl = softmax_that_calls(lambda: alarms.pop(0)())
    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, unconditional_override=True, on_error="fallback"
    )
    for _ in range(earlier):
        softmax(2, 2)
    with pytest.raises(TimeoutError, match="the user's time is over"):
        softmax(2, 2)
    assert (override.fallbacks, override.state.quarantined) == (0, {})
    softmax(2, 2)
    assert (override.hits, override.fallbacks) == (earlier + 2, 0)


def test_what_a_signal_handler_raises_in_a_condition_is_the_callers(
    send_alarm: Callable[[], None],
) -> None:
    alarms = [send_alarm]

    def cond(*args: Any) -> bool:
        while alarms:
            alarms.pop()()
        return True

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, cond=cond, on_error="fallback"
    )
    with pytest.raises(TimeoutError, match="the user's time is over"):
        softmax(2, 2)
    assert override.state.quarantined == {}
    softmax(2, 2)
    assert override.hits == 1


def test_an_error_that_is_made_of_a_signal_handlers_is_the_callers(
    send_alarm: Callable[[], None],
) -> None:
    """Triton's compiler wraps whatever is raised while it compiles."""

    def compile_kernel() -> None:
        try:
            send_alarm()
        except TimeoutError as error:
            raise RuntimeError("the kernel does not compile") from error

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", softmax_that_calls(compile_kernel)),
        unconditional_override=True,
        on_error="fallback",
    )
    with pytest.raises(RuntimeError, match="does not compile"):
        softmax(2, 2)
    assert override.state.quarantined == {}


def test_a_time_limit_of_the_impls_own_is_its_failure() -> None:
    def compile_kernel() -> None:
        before = signal.signal(signal.SIGALRM, TimeLimit())
        try:
            signal.raise_signal(signal.SIGALRM)
        finally:
            signal.signal(signal.SIGALRM, before)

    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", softmax_that_calls(compile_kernel)),
        unconditional_override=True,
        on_error="fallback",
    )
    with pytest.warns(OverrideWarning, match="the user's time is over"):
        softmax(2, 2)
    assert override.fallbacks == 1


def test_an_impl_that_fails_where_the_caller_handles_a_timeout_falls_back(
    send_alarm: Callable[[], None],
) -> None:
    override = register(ValueError("no such tile"))
    try:
        send_alarm()
    except TimeoutError:
        with pytest.warns(OverrideWarning, match="no such tile"):
            softmax(2, 2)
    assert override.fallbacks == 1


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
    assert override.state.quarantined == {}


def test_where_native_raises_as_well_that_is_the_error_and_nothing_is_quarantined() -> None:
    override = register(ValueError("mine"), op="bmm")
    with (
        warnings.catch_warnings(),
        pytest.raises(RuntimeError, match=r"[Ee]xpected|size") as raised,
    ):
        warnings.simplefilter("error", OverrideWarning)
        torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 4, 5))
    assert isinstance(raised.value.__context__, ValueError)
    assert override.state.quarantined == {}


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


# ------------------------------------------------------------------ what falls back, and what not


def accelerator_error(code: int | None, message: str) -> torch.AcceleratorError:
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


def out_of_resources() -> Exception:
    errors = pytest.importorskip("triton.runtime.errors")
    error: Exception = errors.OutOfResources(262144, 232448, "shared memory")
    return error


FALLS_BACK: dict[str, Callable[[], Exception]] = {
    "a kernel that does not compile": lambda: TypeError("unsupported operand tl.float8e5 + int32"),
    "out of shared memory": out_of_resources,
    "ptxas": lambda: RuntimeError("`ptxas` failed with error code 255: uses too much shared data"),
    "no host compiler": lambda: RuntimeError("Failed to find C compiler. Please specify via CC"),
    "no Python.h": lambda: subprocess.CalledProcessError(1, ["gcc", "/tmp/main.c", "-O3"]),
    "no driver": lambda: RuntimeError("0 active drivers ([]). There should only be one."),
    "a module that is missing": lambda: ModuleNotFoundError("No module named 'cutlass'"),
    "a read-only cache": lambda: PermissionError(13, "Permission denied", "/root/.triton"),
    "a refused launch, by Triton": lambda: RuntimeError("Triton Error [CUDA]: invalid argument"),
    "too many resources, by Triton": lambda: RuntimeError(
        "Triton Error [CUDA]: too many resources requested for launch"
    ),
    "a refused launch, by torch": lambda: accelerator_error(
        9, "CUDA error: invalid configuration argument"
    ),
    "no kernel image, by torch": lambda: accelerator_error(
        209, "CUDA error: no kernel image is available for execution on the device"
    ),
}


@pytest.mark.parametrize("fault", FALLS_BACK)
def test_falls_back_with_one_warning_and_explain_says_it(fault: str) -> None:
    override = register(FALLS_BACK[fault]())
    x = torch.ones(2, 2)
    with pytest.warns(OverrideWarning) as caught:
        for _ in range(3):
            assert torch.softmax(x, -1).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert len(caught) == 1
    assert (override.hits, override.fallbacks) == (1, 1)
    assert "quarantined after" in str(opgraft.explain("aten::_softmax", x, -1, False))


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error(700, "CUDA error: an illegal memory access was encountered"),
        accelerator_error(719, "CUDA error: unspecified launch failure"),
        accelerator_error(2, "CUDA error: out of memory"),
        accelerator_error(None, "CUDA error: who knows"),
        RuntimeError("Triton Error [CUDA]: the launch timed out and was terminated"),
        RuntimeError("Triton Error [CUDA]: uncorrectable NVLink error detected"),
        RuntimeError("HIP error: Memory access fault by GPU node-1"),
    ],
    ids=str,
)
def test_never_falls_back_where_the_device_may_be_lost(error: Exception) -> None:
    override = register(error)
    with pytest.raises(type(error)):
        softmax(2, 2)
    assert override.state.quarantined == {}


def run(program: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CC")}
    env = kept | {"PYTHONPATH": str(ROOT)} | environment
    done = forked_programs.run(textwrap.dedent(program), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


REAL = """
    import os, sysconfig, warnings
    import torch
    import opgraft
    from opgraft.packs import owning

    {prepare}

    def impl(self, dim, half_to_float):
        {body}

    with owning("pack"):
        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU", impl, unconditional_override=True, dsl="triton"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.softmax(torch.zeros(2, 2), -1).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert [w.category for w in caught] == [opgraft.OverrideWarning], caught
    assert (override.hits, override.fallbacks) == (1, 1)
    print(caught[0].message)
    print(opgraft.explain("aten::_softmax", torch.zeros(2, 2), -1, False))
"""
BUILD = """from triton.runtime.build import compile_module_from_src as build
        return build("#include <Python.h>\\nint opgraft;", "nothing").run(self)"""
KERNEL = """import mine; mine.kernel[(1,)](self); return self"""


@pytest.mark.parametrize(
    ("prepare", "body", "said"),
    [
        ("os.environ['PATH'] = ''", BUILD, "Failed to find C compiler"),
        (
            "paths = sysconfig.get_paths\n"
            "    sysconfig.get_paths = lambda *a, **k: paths(*a, **k) | {'include': '/nowhere'}",
            BUILD,
            "CalledProcessError: Command '",
        ),
        ("", KERNEL, "active drivers"),
    ],
    ids=["no host compiler", "no Python.h", "no driver"],
)
def test_what_triton_really_raises_falls_back(
    prepare: str, body: str, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available() and said == "active drivers":
        pytest.skip("there is a driver")
    (tmp_path / "mine.py").write_text("import triton\n@triton.jit\ndef kernel(x):\n    return\n")
    printed = run(
        REAL.format(prepare=prepare, body=body),
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert said in printed.splitlines()[0]
    assert "quarantined after" in printed


# ------------------------------------------------------------------ giving an override up


def kinds() -> Iterator[torch.Tensor]:
    """Tensors of different kinds of calls."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shape in ((4,), (2, 4), (2, 2, 4)):
            yield torch.zeros(shape, dtype=dtype)


def test_what_fails_everywhere_and_never_worked_is_given_up() -> None:
    override = register(RuntimeError("Failed to find C compiler"))
    with pytest.warns(OverrideWarning) as caught:
        for x in kinds():
            assert torch.softmax(x, -1).flatten()[0] == 0.25
    assert len(caught) == failure.MAX_FAILED_AT_FIRST
    assert "for all calls from now on, as it failed for 3 kinds of them and never worked" in str(
        caught[-1].message
    )
    assert (override.hits, override.fallbacks) == (3, 3)
    assert not override.enabled
    said = str(opgraft.explain("aten::_softmax", torch.zeros(1, 1, 1, 2), -1, False))
    assert "given up: it failed for 3 kinds of calls, last with RuntimeError: Failed to" in said


def test_what_worked_before_is_not_given_up() -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if self.dtype != torch.float32:
            raise ValueError("float32 only")
        return ops.softmax(self, dim, half_to_float)

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, unconditional_override=True, on_error="fallback"
    )
    with pytest.warns(OverrideWarning) as caught:
        for x in [*kinds(), *kinds()]:
            torch.softmax(x, -1)
    assert len(caught) == len(override.state.quarantined) == 6
    assert override.enabled
    assert (override.hits, override.fallbacks) == (12, 6)


def test_the_next_in_the_chain_takes_over_from_what_failed() -> None:
    behind = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True
    )
    first = register(ValueError("no such tile"), priority=1)
    with pytest.warns(OverrideWarning):
        for _ in range(3):
            softmax(2, 2)
    assert (first.hits, first.fallbacks, behind.hits) == (1, 1, 2)


def test_a_kind_whose_condition_declines_is_no_hit_of_the_quarantined() -> None:
    def impl(*args: Any) -> torch.Tensor:
        raise ValueError("no such tile")

    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, cond=when.size("self", -1) >= 4, on_error="fallback"
    )
    with pytest.warns(OverrideWarning):
        softmax(2, 4)
    softmax(2, 4), softmax(2, 3)
    assert (override.hits, override.misses) == (1, 1)


@pytest.mark.skipif(loader.in_use() is None, reason="the router in Python is Python")
def test_after_a_quarantine_calls_run_no_python() -> None:
    register(ValueError("no such tile"))
    x = torch.ones(2, 2)
    with pytest.warns(OverrideWarning):
        torch.softmax(x, -1)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name))
    try:
        torch.softmax(x, -1)
    finally:
        sys.setprofile(None)
    assert [name for name in called if "opgraft" in name or name.startswith("_")] == []


# ------------------------------------------------------------------ compiling takes too long


class Slow:
    """An impl that compiles, for whatever it has not seen, until it is told that it is done."""

    def __init__(self, impl: Callable[..., Any] = ops.softmax) -> None:
        self.compiled = threading.Event()
        self.threads: list[int] = []
        self._impl = impl

    def __call__(self, *args: Any) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        assert self.compiled.wait(60)
        result: torch.Tensor = self._impl(*args)
        return result


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", "0.05")
    slow = Slow()
    yield slow
    slow.compiled.set()


def on_softmax(impl: Callable[..., Any], **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", "_softmax", "CPU", impl, unconditional_override=True, **keywords
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_does_not_wait_longer_than_it_may(slow: Slow) -> None:
    override = on_softmax(slow)
    x = torch.zeros(2, 2)
    with pytest.warns(OverrideWarning, match="still compiling after 0.05 s") as caught:
        for _ in range(3):
            assert torch.softmax(x, -1).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert len(caught) == 1
    assert len(slow.threads) == 1  # nobody compiles it twice
    assert (override.hits, override.fallbacks, override.state.quarantined) == (3, 3, {})
    slow.compiled.set()
    until(lambda: (torch.softmax(x, -1), override.hits > override.fallbacks)[1])
    assert threading.get_ident() in slow.threads  # from then on, without another thread
    before = override.fallbacks
    torch.softmax(x, -1)
    assert override.fallbacks == before


def test_what_compiles_in_time_is_the_result(slow: Slow) -> None:
    slow.compiled.set()
    override = on_softmax(slow)
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.softmax(x, -1), ops.softmax(x, -1, False))
    torch.softmax(x, -1), torch.softmax(torch.randn(3, 5), -1)
    assert (override.hits, override.fallbacks) == (3, 0)
    assert [thread == threading.get_ident() for thread in slow.threads] == [False, True, False]


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_an_error_of_the_other_thread_is_the_calls(slow: Slow, on_error: Any) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise ValueError("no such tile")

    slow.compiled.set()
    slow._impl = fails
    override = on_softmax(slow, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(ValueError, match="no such tile"):
            softmax(2, 2)
    else:
        with pytest.warns(OverrideWarning, match="no such tile"):
            softmax(2, 2)
        assert override.fallbacks == 1


def test_the_other_thread_is_below_autograd_and_the_same_op_is_native(slow: Slow) -> None:
    seen: list[bool] = []

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        result = torch.softmax(self, dim) * 1.0
        seen.append(result.requires_grad)
        return result

    slow.compiled.set()
    slow._impl = impl
    override = on_softmax(slow)
    x = torch.randn(3, 4, requires_grad=True)
    torch.softmax(x, -1).pow(2).sum().backward()
    stock = x.detach().clone().requires_grad_()
    with opgraft.disabled():
        torch.softmax(stock, -1).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, stock.grad)
    assert seen == [False]
    assert override.hits == 1


def test_threads_that_compile_are_few(slow: Slow) -> None:
    override = on_softmax(slow)
    with pytest.warns(OverrideWarning):
        for columns in range(2, 10):
            torch.softmax(torch.zeros(2, columns), -1)
    assert len(slow.threads) == timebox.MAX_COMPILING
    assert override.fallbacks == 8


def test_an_op_that_writes_to_its_arguments_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", "0")

    def relu_(self: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return self.clamp_(min=0)

    override = opgraft.register_op_override(
        "aten", "relu_", "CPU", relu_, unconditional_override=True
    )
    assert torch.relu_(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]
    assert (override.hits, override.fallbacks) == (1, 0)


def test_a_process_ends_while_something_compiles_for_ever() -> None:
    printed = run(
        """
        import threading, warnings
        import torch
        import opgraft

        def impl(*args):
            threading.Event().wait()

        warnings.simplefilter("ignore")
        override = opgraft.register_op_override(
            "aten", "_softmax", "CPU", impl, unconditional_override=True
        )
        print(torch.softmax(torch.zeros(2), -1).tolist(), override.fallbacks)
        """,
        OPGRAFT_COMPILE_TIMEOUT="0.1",
    )
    assert printed == "[0.5, 0.5] 1\n"


@pytest.mark.parametrize("value", ["soon", "-1"])
def test_a_timeout_that_is_no_number_is_ignored(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", value)
    override = on_softmax(ops.softmax)
    softmax(2, 2)
    assert override.hits == 1
    assert f"OPGRAFT_COMPILE_TIMEOUT={value} is ignored" in caplog.text


@where_the_core_routes
def test_all_of_this_in_the_router_in_python() -> None:
    run_again(__file__, selected="not really_raises and not in_python and not for_ever")
