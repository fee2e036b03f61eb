"""`profile`: what a program's ops cost, who took them, and how far they are from the limit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opgraft
from opgraft import cli, when
from opgraft.profiling import attribution, limits, page, profile_report, timeline, work
from opgraft.profiling.limits import Limits
from opgraft.profiling.profile_report import Line
from opgraft.profiling.routing import VerdictRecorder
from tests import forked_programs, ops
from tests.test_output import run_in

X = torch.randn(64, 128)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of this machine's measured limits is read or written."""
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that moves a byte in a nanosecond, and does a flop in a picosecond."""
    monkeypatch.setattr(
        limits, "_measured_copies", lambda where: [(1, 1e-9), (1 << 40, 1e-9 * 2**40)]
    )
    monkeypatch.setattr(limits, "_measured_product", lambda where, dtype: 1e12)


pytestmark = pytest.mark.usefixtures("known_device")


def profiled(run: Callable[[], object], **options: Any) -> opgraft.Profile:
    with torch.no_grad(), opgraft.profile(**options) as p:
        run()
    return p


def line(p: opgraft.Profile, op: str, taken_by: str = "native") -> Line:
    (found,) = [each for each in p.lines if (each.op, each.taken_by) == (op, taken_by)]
    return found


def register(**options: Any) -> opgraft.Override:
    options.setdefault("unconditional_override", "cond" not in options)
    impl = options.pop("impl", ops.softmax)
    return opgraft.register_op_override("aten", "_softmax", "CPU", impl, **options)


# ------------------------------------------------------------------------ time, bytes and flops


def test_shares_add_up_to_one() -> None:
    p = profiled(lambda: F.layer_norm(torch.mm(X, X.t()).softmax(-1), (64,)))
    assert {"aten::mm", "aten::_softmax", "aten::native_layer_norm"} <= {each.op for each in p}
    assert sum(each.share for each in p) == pytest.approx(1)
    assert all(each.seconds == pytest.approx(each.share * p.report.seconds) for each in p)
    assert [each.seconds for each in p] == sorted((each.seconds for each in p), reverse=True)


ROWS = torch.tensor([[1, 2, 3], [4, 5, 6]])
#: What runs, its op, the elements of float32 that move, other bytes that do, and the flops.
KNOWN: dict[str, tuple[Callable[[], object], str, int, int, int | None]] = {
    "matmul": (
        lambda: torch.mm(X, X.t()),
        "aten::mm",
        64 * 128 * 2 + 64 * 64,
        0,
        2 * 64 * 64 * 128,
    ),
    "bias": (
        lambda: F.linear(X, torch.ones(32, 128), torch.ones(32)),
        "aten::addmm",
        32 + 64 * 128 + 32 * 128 + 64 * 32,
        0,
        2 * 64 * 32 * 128,
    ),
    "norm": (
        lambda: F.layer_norm(X, (128,), torch.ones(128), torch.ones(128)),
        "aten::native_layer_norm",
        64 * 128 * 2 + 128 * 2 + 64 * 2,
        0,
        None,
    ),
    "softmax": (lambda: X.softmax(-1), "aten::_softmax", 64 * 128 * 2, 0, None),
    # Of the table as many rows are read as are looked up.
    "embedding": (
        lambda: F.embedding(ROWS, torch.ones(4096, 128)),
        "aten::index_select",
        2 * 6 * 128,
        6 * 8,
        None,
    ),
    "in place": (lambda: torch.ones(64, 128).mul_(X), "aten::mul_", 64 * 128 * 3, 0, None),
    "copy": (lambda: torch.empty(64, 128).copy_(X), "aten::copy_", 64 * 128 * 2, 0, None),
    "expanded": (
        lambda: X + torch.ones(1, 128).expand(64, 128),
        "aten::add",
        64 * 128 * 2 + 128,
        0,
        None,
    ),
    "list": (lambda: torch.cat([X, X]), "aten::cat", 64 * 128 * 4, 0, None),
    "lists in place": (
        lambda: torch._foreach_mul_([X.clone() for _ in range(40)], 2.0),
        "aten::_foreach_mul_",
        40 * 64 * 128 * 2,
        0,
        None,
    ),
    "by indices": (
        lambda: torch.zeros(4096, 128).index_put_((ROWS,), torch.ones(2, 3, 128)),
        "aten::_index_put_impl_",
        6 * 128 * 3,
        0,
        None,
    ),
    "optimizer": (
        lambda: torch._fused_sgd_(
            [X.clone()],
            [X.clone()],
            [X.clone()],
            weight_decay=0.0,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        ),
        "aten::_fused_sgd_",
        64 * 128 * 6,
        0,
        None,
    ),
    "number": (lambda: X[0, 0].item(), "aten::_local_scalar_dense", 1, 0, None),
    "other dtype": (lambda: X > 0, "aten::gt", 64 * 128, 64 * 128, None),
    "out": (lambda: torch.exp(X, out=torch.empty(64, 128)), "aten::exp", 64 * 128 * 2, 0, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_bytes_and_flops_are_those_of_the_tensors(name: str) -> None:
    run, op, elements, other, flops = KNOWN[name]
    run()
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profiler:
        run()
    recorded = timeline.read_profile(profiler)
    (call,) = [node for node in recorded.nodes if node.name == op]
    found = work.work_of(call.name, call.inputs)
    assert (found.bytes, found.flops) == (elements * 4 + other, flops)
    assert found.dtype == (torch.float32 if flops else None)


@pytest.mark.parametrize(
    "run",
    [lambda: X.t(), lambda: X[3:], lambda: X.expand(2, 64, 128), lambda: X.detach().squeeze_(0)],
)
def test_views_move_nothing(run: Callable[[], object]) -> None:
    p = profiled(run)
    assert [each.bytes for each in p] == [0] * len(p.lines)
    assert all(each.gain_seconds == 0 and each.share_of_limit is None for each in p)


def test_what_an_op_only_calls_is_not_counted_twice() -> None:
    x, weight = torch.randn(8, 16, 32, 32), torch.randn(16, 16, 3, 3)
    p = profiled(lambda: [F.conv2d(x, weight, padding=1) for _ in range(9)])
    flops = 9 * 2 * 8 * 16 * 32 * 32 * 16 * 9
    assert sum(each.flops or 0 for each in p) == flops
    (doer,) = [each for each in p if each.flops]
    assert doer.op not in ("aten::conv2d", "aten::convolution")
    assert doer.bytes is not None and doer.bytes >= 9 * 4 * (2 * x.numel() + weight.numel())


def test_what_cannot_be_told_is_said() -> None:
    p = profiled(lambda: torch.nonzero(X > 0))
    found = line(p, "aten::nonzero")
    assert (found.bytes, found.share_of_limit, found.gain_seconds) == (None, None, 0)
    assert "outputs are not known" in found.note
    assert re.search(r"aten::nonzero .* \?", p.table())


def test_indices_that_are_not_recorded_are_said() -> None:
    # Several, for calls of one kind vote on whose work it is.
    p = profiled(
        lambda: [(X[ROWS], X.clone().index_put_((ROWS,), torch.tensor(1.0))) for _ in range(9)]
    )
    assert line(p, "aten::index").bytes is None
    assert "indices" in line(p, "aten::_index_put_impl_").note


def test_kinds_of_calls_are_told_apart() -> None:
    p = profiled(lambda: [(X[:n] * 2, X[:n].double() * 2) for n in (8, 8, 16)])
    found = {each.inputs: each.count for each in p if each.op == "aten::mul"}
    assert {inputs.partition(", ")[0]: count for inputs, count in found.items()} == {
        "f32[8,128]": 2,
        "f32[16,128]": 1,
        "f64[8,128]": 2,
        "f64[16,128]": 1,
    }


def test_the_backward_is_in_it() -> None:
    x = X.clone().requires_grad_()
    with opgraft.profile() as p:
        for _ in range(9):  # calls of one kind vote on whose work it is
            x.softmax(-1).sum().backward()
    once = 64 * 128 * 3 * 4 - (64 * 128 - 1) * 4
    assert line(p, "aten::_softmax_backward_data").bytes == 9 * once


def test_the_limit_is_the_larger_of_moving_and_computing() -> None:
    wide = profiled(lambda: torch.mm(torch.ones(512, 512), torch.ones(512, 512)))
    assert line(wide, "aten::mm").limit_seconds == pytest.approx(3 * 512 * 512 * 4 * 1e-9)
    thin = Line("aten::mm", "", "native", 1, 1.0)
    device = Limits(torch.device("cpu"))
    assert profile_report._limit_seconds(
        work.Work(8, 10**12, torch.float32), device
    ) == pytest.approx(1)
    assert thin.share_of_limit is None


def test_gains_are_what_would_be_saved_at_nine_tenths_of_the_limit() -> None:
    half = Line("half", "", "native", 1, 2.0, limit_seconds=0.9)
    near = Line("near", "", "native", 1, 1.0, limit_seconds=0.95)
    other = Line("half", "f32[1]", "native", 1, 3.0, limit_seconds=1.8)
    unknown = Line("unknown", "", "", 1, 4.0)
    found = profile_report.ProfileReport(
        [unknown, other, half, near], "GPU", 1, 10.0, 10.0, Limits(torch.device("cpu")), []
    )
    (gain,) = found.gains
    assert (gain.op, gain.seconds) == ("half", pytest.approx(2.0))
    assert gain.share == pytest.approx(0.2)
    assert gain.speedup == pytest.approx(1.25)
    assert found.whole_gain.seconds == pytest.approx(2.0)


# ------------------------------------------------------------------------------------ who took it


def test_who_took_it_and_why_another_did_not() -> None:
    override = register(cond=when.size("self", -1) >= 100, name="wide")
    torch.softmax(X, -1)  # the first hits are compared with native, inside the op
    p = profiled(lambda: [torch.softmax(x, -1) for x in (X, X[:, :50], X[:, :50])])
    taken, native = line(p, "aten::_softmax", "wide"), line(p, "aten::_softmax")
    assert override.hits == 2
    assert (taken.count, taken.reasons, taken.fell_back) == (1, [], 0)
    assert (taken.inputs, native.inputs, native.count) == ("f32[64,128]", "f32[64,50]", 2)
    assert native.reasons == [
        {
            "override": "wide",
            "pack": None,
            "status": "declines",
            "reason": "when.size('self', -1) >= 100 (when.size('self', -1) is 50)",
            "count": 2,
        }
    ]
    assert "wide: when.size('self', -1) >= 100 (when.size('self', -1) is 50)" in p.table()


def test_what_an_impl_calls_is_the_overridden_ops_time() -> None:
    register(name="mine")
    p = profiled(lambda: torch.softmax(X, -1))
    assert "aten::exp" not in {each.op for each in p}
    assert line(p, "aten::_softmax", "mine").bytes == 64 * 128 * 2 * 4


def test_a_hit_that_ended_in_native_is_said() -> None:
    register(impl=ops.softmax_by_itself, unconditional_override=False, name="smart")
    p = profiled(lambda: torch.softmax(X, -1))
    assert line(p, "aten::_softmax", "smart").fell_back == 1
    assert "1 ended in the native kernel" in p.table()


def test_an_override_in_the_backward_is_seen() -> None:
    override = opgraft.register_op_override(
        "aten",
        "_softmax_backward_data",
        "CPU",
        lambda grad_output, output, dim, input_dtype: (
            (grad_output - (grad_output * output).sum(dim, keepdim=True)) * output
        ),
        unconditional_override=True,
        name="backward",
    )
    x = X.clone().requires_grad_()
    with opgraft.profile() as p:
        (x.softmax(-1) ** 2).sum().backward()
    assert override.hits == 1
    assert line(p, "aten::_softmax_backward_data", "backward").count == 1


def test_a_switched_off_override_is_a_reason() -> None:
    register(name="off")
    opgraft.disable(name="off")
    p = profiled(lambda: torch.softmax(X, -1))
    (reason,) = line(p, "aten::_softmax").reasons
    assert (reason["override"], reason["status"]) == ("off", "disabled")


def test_profiling_observes_nothing_once_it_is_closed() -> None:
    from opgraft.router import observers

    register()
    with opgraft.profile(steps=1) as p:
        assert observers.any_thread()
        p.step()
        assert not observers.any_thread()
    assert not observers.any_thread()


# ----------------------------------------------------------------------------------------- kernels


class Trace:
    """A trace as torch's profiler writes one where a GPU is used, of microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0

    def host(self, name: str, start: float, end: float, thread: int = 1, **arguments: Any) -> int:
        """An op, or an annotation where that is what its name is."""
        self._number += 1
        category = "cpu_op" if re.match(r"\w+::|triton_", name) else "user_annotation"
        arguments = {"External id": self._number, **arguments}
        self._add(name, category, start, end, "host", thread, arguments)
        return self._number

    def kernel(
        self, name: str, start: float, end: float, launched: float, *, thread: int = 1, **more: Any
    ) -> None:
        """A kernel and its launch on a thread; `by`: what the launch is called; None: not seen."""
        self._number += 1
        by = more.pop("by", "cudaLaunchKernel")
        link = {"correlation": self._number, **more}
        if by:
            category = "cuda_driver" if by.startswith("cu") and by[2].isupper() else "cuda_runtime"
            self._add(by, category, launched, launched + 1, "host", thread, link)
        self._add(name, "kernel", start, end, 0, 7, {"device": 0, "stream": 7, **link})

    def _add(self, name: str, category: str, start: float, end: float, *rest: Any) -> None:
        pid, tid, arguments = rest
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
            | {"ts": 1e6 + start, "dur": end - start, "args": arguments}
        )

    def groups(self) -> dict[tuple[str, str], attribution.Group]:
        found = attribution.groups(timeline.parse(self.events), VerdictRecorder(), on_device=True)
        return {(group.op, group.taken_by): group for group in found}


def shapes(*sizes: list[int]) -> dict[str, Any]:
    """What a trace says of tensors of bfloat16."""
    strides = [[1] if len(each) == 1 else [each[1], 1] for each in sizes]
    return {
        "Input type": ["c10::BFloat16"] * len(sizes),
        "Input Dims": list(sizes),
        "Input Strides": strides,
        "Concrete Inputs": [""] * len(sizes),
    }


def test_a_kernel_is_the_innermost_ops() -> None:
    trace = Trace()
    trace.host("aten::linear", 0, 50, **shapes([8, 4], [4, 4]))
    trace.host("aten::mm", 10, 40, **shapes([8, 4], [4, 4]))
    trace.kernel("gemm", 100, 130, launched=20)
    trace.kernel("splitk", 130, 140, launched=30)
    ((key, group),) = trace.groups().items()
    assert key == ("aten::mm", "native")
    assert (group.count, group.seconds) == (1, pytest.approx(40e-6))
    assert group.inputs == "bf16[8,4], bf16[4,4]"
    (done,) = group.work
    assert (done.bytes, done.flops) == (2 * (32 + 16 + 32), 2 * 8 * 4 * 4)


def test_kernels_of_an_impl_are_the_overridden_ops() -> None:
    trace = Trace()
    trace.host("aten::exp", 0, 100, **shapes([8, 4]))
    trace.host("opgraft: mine [aten::exp, triton]", 10, 90)
    trace.host("aten::add", 20, 40, **shapes([8, 4]))
    trace.kernel("vectorized_add", 200, 205, launched=30)
    trace.kernel("my_triton_kernel", 205, 225, launched=60, by="cuLaunchKernelEx")
    ((key, group),) = trace.groups().items()
    assert key == ("aten::exp", "mine")
    assert (group.count, group.seconds) == (1, pytest.approx(25e-6))


def test_a_hit_inside_a_hit_is_the_outer_ones() -> None:
    trace = Trace()
    trace.host("aten::exp", 0, 100, **shapes([8, 4]))
    trace.host("opgraft: outer [aten::exp]", 10, 90)
    trace.host("aten::sin", 20, 80, **shapes([8, 4]))
    trace.host("opgraft: inner [aten::sin]", 30, 70)
    trace.kernel("k", 200, 210, launched=50)
    assert list(trace.groups()) == [("aten::exp", "outer")]


def test_kernels_of_autograds_threads_are_their_ops() -> None:
    trace = Trace()
    trace.host("aten::mul", 0, 200, **shapes([8, 4], [8, 4]))
    trace.host("autograd::engine::evaluate_function: ExpBackward0", 10, 90, thread=2)
    trace.host("ExpBackward0", 15, 85, thread=2)
    trace.host("aten::exp", 20, 80, thread=2, **shapes([8, 4]))
    trace.kernel("k", 300, 310, launched=50, thread=2)
    assert list(trace.groups()) == [("aten::exp", "native")]


def test_kernels_outside_ops_stand_by_their_names() -> None:
    trace = Trace()
    trace.host("Torch-Compiled Region: 0/0", 0, 100)
    trace.host("## Call CompiledFxGraph abc ##", 5, 95)
    trace.kernel("triton_poi_fused_mul_0", 200, 210, launched=20, by="cuLaunchKernel")
    trace.kernel("triton_poi_fused_mul_0", 210, 220, launched=40, by="cuLaunchKernel")
    trace.kernel("ncclDevKernel_AllReduce", 220, 250, launched=500, thread=9)
    groups = trace.groups()
    assert sum(group.seconds for group in groups.values()) == pytest.approx(50e-6)
    assert all(work.bytes is None for group in groups.values() for work in group.work)
    assert groups["triton_poi_fused_mul_0", ""].count == 2
    assert groups["ncclDevKernel_AllReduce", ""].count == 1


def test_on_the_cpu_the_call_of_a_compiled_graph_is_a_row() -> None:
    trace = Trace()
    trace.host("Torch-Compiled Region: 0/0", 0, 100)
    trace.host("## Call CompiledFxGraph abc ##", 5, 95)
    trace.host("aten::mm", 10, 40, **shapes([8, 4], [4, 4]))
    found = attribution.groups(timeline.parse(trace.events), VerdictRecorder(), on_device=False)
    assert {group.op: round(group.seconds * 1e6) for group in found} == {
        "CompiledFxGraph abc": 60,
        "aten::mm": 30,
    }


def test_a_launch_that_was_not_recorded_names_its_op() -> None:
    trace = Trace()
    number = trace.host("aten::exp", 0, 100, **shapes([8, 4]))
    trace.kernel("k", 200, 210, launched=0, by=None, **{"External id": number})
    assert list(trace.groups()) == [("aten::exp", "native")]


def test_what_torch_counts_no_flops_of_has_them_from_who_called_it() -> None:
    trace = Trace()
    sizes = shapes([4, 4, 8, 8], [4, 4, 3, 3])
    sizes["Input Strides"] = [[256, 64, 8, 1], [36, 9, 3, 1]]
    values = ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    lists = ["ScalarList"] * 3 + ["Scalar", "ScalarList", "Scalar"]
    convolution = {
        "Input type": [*sizes["Input type"], "", *lists],
        "Input Dims": [*sizes["Input Dims"], *[[]] * 7],
        "Input Strides": [*sizes["Input Strides"], *[[]] * 7],
        "Concrete Inputs": [*values[:2], "", *values[2:]],
    }
    trace.host("aten::convolution", 0, 100, **convolution)
    trace.host("vendor::its_own_convolution", 10, 90)
    trace.kernel("k", 200, 210, launched=50)
    ((key, group),) = trace.groups().items()
    assert key == ("vendor::its_own_convolution", "native")
    (done,) = group.work
    assert done.flops == 2 * 4 * 4 * 8 * 8 * 4 * 9
    assert done.bytes == 2 * (2 * 4 * 4 * 64 + 4 * 4 * 9)


def test_what_profiling_does_is_nobodys_time() -> None:
    trace = Trace()
    trace.host("aten::exp", 0, 100, **shapes([8, 4]))
    trace.host(timeline.ANNOTATION, 10, 60)
    (group,) = attribution.groups(timeline.parse(trace.events), VerdictRecorder(), on_device=False)
    assert (group.op, group.seconds) == ("aten::exp", pytest.approx(50e-6))


def test_kernels_that_run_at_once_are_busy_once() -> None:
    trace = Trace()
    trace.kernel("a", 0, 10, launched=0)
    trace.kernel("b", 5, 20, launched=1)
    trace.kernel("c", 30, 40, launched=2)
    assert timeline.parse(trace.events).busy_seconds == pytest.approx(30e-6)


@pytest.mark.gpu
def test_the_time_of_ops_is_that_of_torchs_profiler() -> None:
    """Shares within two points of what `key_averages` says of a small transformer's training."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="cuda")
    x = torch.randn(16, 256, 512, device="cuda")

    def step() -> None:
        layer(x).square().mean().backward()

    step()
    with opgraft.profile(warmup=1) as p:
        for _ in range(3):
            step()
            p.step()
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
    theirs = {
        each.key: each.self_device_time_total
        for each in profiler.key_averages()
        if each.key.startswith("aten::")
    }
    total = sum(theirs.values())
    assert p.report.time == "GPU"
    for op, time in theirs.items():
        mine = sum(each.share for each in p if each.op == op)
        assert mine == pytest.approx(time / total, abs=0.02), op


# ------------------------------------------------------------------------------------------- steps


def test_steps_after_the_warmup_are_recorded() -> None:
    with torch.no_grad(), opgraft.profile(warmup=2) as p:
        for _ in range(5):
            torch.exp(X)
            p.step()
    assert (p.report.steps, line(p, "aten::exp").count) == (3, 3)


def test_as_many_steps_as_asked_for_are_recorded() -> None:
    with torch.no_grad(), opgraft.profile(warmup=1, steps=2) as p:
        for _ in range(5):
            torch.exp(X)
            p.step()
    assert (p.report.steps, line(p, "aten::exp").count) == (2, 2)


def test_without_marks_the_block_is_a_step() -> None:
    p = profiled(lambda: [torch.exp(X) for _ in range(3)])
    assert (p.report.steps, line(p, "aten::exp").count) == (1, 3)


def test_too_few_steps_are_an_error_that_says_so() -> None:
    with opgraft.profile(warmup=3) as p:
        p.step()
    with pytest.raises(RuntimeError, match=r"step\(\) was called 1 times, and the first warmup=3"):
        p.table()


@pytest.mark.parametrize("options", [{"warmup": -1}, {"steps": 0}])
def test_wrong_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="warmup is 0 or more"):
        opgraft.profile(**options)


def test_a_profile_is_used_once() -> None:
    p = profiled(lambda: torch.exp(X))
    with pytest.raises(RuntimeError, match="used already"):
        p.__enter__()
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        opgraft.profile().table()
    with pytest.raises(RuntimeError, match="this profile is not open"):
        opgraft.profile().step()


def test_an_error_in_the_program_is_the_programs() -> None:
    with pytest.raises(ZeroDivisionError), opgraft.profile() as p:
        torch.exp(X)
        raise ZeroDivisionError
    assert line(p, "aten::exp").count == 1


# ----------------------------------------------------------------------------------------- outputs


def test_as_dict_is_json_with_these_names() -> None:
    register(cond=when.size("self", -1) >= 1000, name="wide")
    p = profiled(lambda: (torch.softmax(X, -1), torch.mm(X, X.t()), torch.nonzero(X)))
    found = json.loads(json.dumps(p.as_dict()))
    assert set(found) == {
        *("version", "device", "torch", "time", "steps", "wall_seconds", "busy_seconds", "seconds"),
        *("ops", "reachable", "gains", "gain", "limits", "notes"),
    }
    assert (found["version"], found["time"], found["steps"]) == (1, "CPU", 1)
    for each in found["ops"]:
        assert set(each) == {
            *("op", "inputs", "taken_by", "count", "seconds", "share", "bytes", "flops"),
            *("limit_seconds", "share_of_limit", "gain_seconds", "reasons", "fell_back", "note"),
        }
        for reason in each["reasons"]:
            assert set(reason) == {"override", "pack", "status", "reason", "count"}
    assert all(set(each) == {"op", "seconds", "share", "speedup"} for each in found["gains"])
    saved = [each["seconds"] for each in found["gains"]]
    assert saved == sorted(saved, reverse=True)


def test_the_table_shows_as_many_rows_as_asked_for_and_sums_up_the_rest() -> None:
    p = profiled(lambda: (torch.exp(X), torch.sin(X), torch.cos(X)))
    assert len(p.lines) == 3
    short, whole = p.table(1), p.table(None)
    assert "and 2 more kinds of call" in short
    assert "more kinds of call" not in whole
    assert all(each.op in whole for each in p)
    assert repr(p) == str(p) == p.table()


class Page(HTMLParser):
    """What a page fetches, and whether its elements close."""

    VOID = frozenset({"meta", "rect", "path", "line", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else() -> None:
    p = profiled(lambda: (torch.softmax(X, -1), torch.mm(X, X.t()), torch.nonzero(X)))
    text = p.html()
    found = Page()
    found.feed(text)
    assert found.open == []
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "image"}
    assert not {name for name, _ in found.attributes} & {"src", "href", "xlink:href", "action"}
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "svg" in found.tags and all(each.op in text for each in p)
    assert p._repr_html_() in text


def test_the_page_shows_text_as_it_is() -> None:
    odd = Line("<b>&op</b>", "", "native", 1, 1.0, 1.0, bytes=1, limit_seconds=0.5)
    found = page.document(
        profile_report.ProfileReport(
            [odd], "CPU", 1, 1.0, 0.0, Limits(torch.device("cpu")), ["<i>"]
        )
    )
    assert "<b>&op" not in found and "&lt;b&gt;&amp;op" in found
    assert "<i>" not in found


def test_bars_are_as_wide_as_their_share_and_as_high_as_their_share_of_the_limit() -> None:
    lines = [
        Line("a", "", "mine", 1, 3.0, 0.75, bytes=1, limit_seconds=1.5),
        Line("b", "", "native", 1, 1.0, 0.25, bytes=1, limit_seconds=2.0),
    ]
    drawn = page.plot(
        profile_report.ProfileReport(lines, "GPU", 1, 4.0, 4.0, Limits(torch.device("cpu")), [])
    )
    bars = {
        kind: (float(width), float(height))
        for kind, width, height in re.findall(
            r'<rect class="(\w+)" x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"', drawn
        )
    }
    assert bars["override"][0] / bars["native"][0] == pytest.approx(3, rel=0.01)
    assert bars["override"][1] / bars["native"][1] == pytest.approx(0.5, rel=0.01)
    assert bars["lost"][1] > bars["override"][1]


@pytest.mark.parametrize("name", ["profile.json", "profile.html"])
def test_a_profile_is_saved_by_its_suffix(tmp_path: Path, name: str) -> None:
    p = profiled(lambda: torch.exp(X))
    p.save(tmp_path / name)
    text = (tmp_path / name).read_text()
    assert text == (p.html() if name.endswith("html") else json.dumps(p.as_dict(), indent=2))


# ------------------------------------------------------------------------------------------ limits


def test_limits_are_measured_once_for_a_device(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Limits(torch.device("cpu"))
    expected = first.seconds_to_move(1 << 20), first.flops_per_second(torch.float32)
    monkeypatch.setattr(limits, "_measured_copies", lambda where: pytest.fail("measured again"))
    monkeypatch.setattr(limits, "_measured_product", lambda *_: pytest.fail("measured again"))
    again = Limits(torch.device("cpu"))
    assert (again.seconds_to_move(1 << 20), again.flops_per_second(torch.float32)) == expected
    (kept,) = (own_cache / "limits").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert (own_cache / "limits").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("spoil", ["others may write", "no json", "of another kind"])
def test_what_cannot_be_trusted_is_measured_again(own_cache: Path, spoil: str) -> None:
    Limits(torch.device("cpu")).seconds_to_move(1)
    (kept,) = (own_cache / "limits").iterdir()
    content = kept.read_text().replace("1e-09", "77.0")
    kept.write_text({"no json": "{", "of another kind": "[]"}.get(spoil, content))
    kept.chmod(0o666 if spoil == "others may write" else 0o600)
    assert Limits(torch.device("cpu")).seconds_to_move(1) == pytest.approx(1e-9)


def test_a_cache_that_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", "/proc/none")
    assert Limits(torch.device("cpu")).seconds_to_move(1000) == pytest.approx(1e-6)


def test_between_two_sizes_a_copys_time_is_between_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [(1000, 2e-6), (10_000, 3e-6), (1_000_000, 1e-4)]
    monkeypatch.setattr(limits, "_measured_copies", lambda where: measured)
    device = Limits(torch.device("cpu"))
    assert device.seconds_to_move(10) == 2e-6  # a launch takes what it takes
    times = [device.seconds_to_move(n) for n in (1000, 2000, 10_000, 50_000, 1_000_000, 2_000_000)]
    assert all(one < other for one, other in pairwise(times))
    assert times[2] == pytest.approx(3e-6)
    assert times[-1] == pytest.approx(2e-4)


def test_limits_are_of_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    override = opgraft.register_op_override(
        "aten",
        "mm.out",
        "CPU",
        lambda self, mat2, *, out: opgraft.native("aten::mm.out")(self, mat2, out=out),
        unconditional_override=True,
    )
    assert torch.mm(X, X.t(), out=torch.empty(64, 64)) is not None and override.hits == 1
    monkeypatch.undo()  # the known device
    monkeypatch.setitem(limits._MATRIX_ROWS, "cpu", 64)
    assert (limits._measured_product(torch.device("cpu"), torch.float32) or 0) > 0
    assert override.hits == 1


def test_fewer_bytes_never_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the known device
    monkeypatch.setitem(limits._COPY_BYTES, "cpu", (1, 2, 3))
    times = iter([5e-6, 1e-6, 2e-6])
    monkeypatch.setattr(limits, "_seconds", lambda run: next(times))
    found = limits._measured_copies(torch.device("cpu"))
    assert found == [(2, 1e-6), (4, 1e-6), (6, 2e-6)]


def test_a_limit_is_that_of_all_kernels_of_a_run() -> None:
    """cuBLAS fills a workspace first, which is no product."""
    fill, product, slow = (5e-6, 1e-3, 2e-3)
    launched = [("fill", fill), ("product", product), ("fill", fill), ("product", slow)]
    kernels = [
        timeline.DeviceKernel(name, 0, 0.0, seconds)
        for name, seconds in launched * (limits._RUNS // 2)
    ]
    recorded = timeline.Timeline([], kernels)
    assert limits._of_one_run(recorded) == pytest.approx(fill + product)


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_device_is_waited_for_before_the_first_recorded_step(
    warmup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    p = opgraft.profile(warmup=warmup, steps=1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: steps.append(p._steps_ended))
    with p:
        for _ in range(warmup + 1):
            torch.ones(2) + 1
            p.step()
    assert steps == [warmup]


def test_a_dtype_without_product_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_measured_product", lambda where, dtype: None)
    p = profiled(lambda: torch.mm(X, X.t()))
    assert line(p, "aten::mm").limit_seconds is None
    assert "could not be measured" in line(p, "aten::mm").note


def test_a_real_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the known device
    monkeypatch.setenv("OPGRAFT_CACHE", "/proc/none")
    where = torch.device("cpu")
    monkeypatch.setitem(limits._COPY_BYTES, "cpu", (4096, 1 << 20))
    monkeypatch.setitem(limits._MATRIX_ROWS, "cpu", 64)
    device = Limits(where)
    assert device.seconds_to_move(1 << 21) > 0
    assert (device.flops_per_second(torch.float32) or 0) > 0
    assert device.flops_per_second(torch.bool) is None


# --------------------------------------------------------------------------------------------- CLI

TRAINS = """
import sys, torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
print("arguments", *sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def command(*words: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OPGRAFT_PACKS": "none"}
    return forked_programs.run_module("opgraft", "profile", *words, env=env)


def test_the_command_prints_rows_of_cells_and_ends_as_the_script_does(
    script: Path, tmp_path: Path
) -> None:
    done = command("--json", tmp_path / "p.json", "--html", tmp_path / "p.html", script, "a", "--b")
    assert done.returncode == 7
    assert "arguments a --b" in done.stdout
    assert "aten::addmm" not in done.stdout
    rows = [row.split("\t") for row in done.stderr.splitlines() if row.startswith("aten::addmm\t")]
    assert rows[0][1:4] == ["f32[4], f32[2,8], f32[8,4]", "native", "5"]
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["steps"] == 1
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_the_command_profiles_steps_of_an_optimizer(script: Path, tmp_path: Path) -> None:
    done = command("--warmup", 2, "--steps", 2, "--json", tmp_path / "p.json", script)
    assert done.returncode == 7
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["steps"] == 2
    assert [op["count"] for op in found["ops"] if op["op"] == "aten::addmm"] == [2]


def test_the_command_says_that_no_step_was_recorded(script: Path) -> None:
    done = command("--warmup", 50, script)
    assert done.returncode == 7
    assert "step() was called 5 times, and the first warmup=50" in done.stderr


def test_a_report_can_be_put_into_a_file(script: Path, tmp_path: Path) -> None:
    done = command("-o", tmp_path / "table", "--rows", 1, script)
    assert "more kinds of call" not in done.stderr
    assert "more kinds of call" in (tmp_path / "table").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_the_command_cuts_no_name(script: Path, terminal: bool, tmp_path: Path) -> None:
    tables = {width: tmp_path / f"table{width}" for width in (60, 200)}
    lines = []
    for width, table in tables.items():
        out = [] if terminal else ["-o", str(table)]
        lines.append((width, shlex.join(["profile", *out, "--rows", "99", str(script)])))
    printed = run_in(lines, terminal=terminal)
    for text in printed if terminal else [table.read_text() for table in tables.values()]:
        assert "…" not in text
        assert "aten::addmm" in text


def test_a_script_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "no_such_script.py"]) == 2
    assert "there is no file 'no_such_script.py'" in capsys.readouterr().err


def test_limits_that_are_read_leave_no_file_open(own_cache: Path) -> None:
    here = torch.device("cpu")
    limits.Limits(here).seconds_to_move(1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    known = [limits.Limits(here) for _ in range(5)]
    assert all(each._copies for each in known)
    assert len(os.listdir("/proc/self/fd")) == before


def test_importing_opgraft_does_not_import_it() -> None:
    program = "import torch, opgraft, sys; sys.exit('opgraft.profiling' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
