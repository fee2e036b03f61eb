"""`opgraft.verify`: what is right passes, what is wrong is found, and found again."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import opgraft
from opgraft import packs, when
from opgraft.core import loader
from opgraft.errors import RegistrationError
from opgraft.ops.schema import resolve
from opgraft.plan import trial
from opgraft.verification import journal, opinfo, subprocesses
from opgraft.verification.checks import CHECKS, cuda
from opgraft.verification.layouts import LAYOUTS
from opgraft.verification.observation import differ_by_noise
from opgraft.verification.reference import errors
from opgraft.verification.samples import base_from_arguments, base_from_other_op
from opgraft.verification.verification_report import VerificationReport
from tests import forked_programs
from tests.verification import broken

ROOT = Path(__file__).parent.parent.parent
#: Where DSLs may be.
PATHS = [path] if (path := os.environ.get("PYTHONPATH")) else []
#: Samples for what shows in any of them.
SOME = 60
#: Without what imports Dynamo: seconds that most tests here do not need.
QUICK = [name for name in CHECKS if name not in ("opcheck", "compile")]


def failed(report: VerificationReport) -> set[str]:
    return {failure.check for failure in report.failures}


# ------------------------------------------------------------------ broken overrides


def test_an_override_that_is_right_passes_every_check() -> None:
    override = broken.register("right")
    report = opgraft.verify(override)
    assert report.ok, str(report)
    assert (report.exit_code, report.failures) == (0, [])
    (result,) = report.overrides
    assert result.hits > 30 and result.misses > 10
    assert result.samples["opinfo"] > 5 and result.samples["opinfo + changes"] > 40
    assert {"values", "strides", "gradcheck", "opcheck", "threads"} <= {
        name for name, check in result.checks.items() if check.verdict == "passed"
    }
    assert 0 < result.worst_error <= 2
    assert result.references == ["native in float64"]


@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        (
            "wrong strides",
            "strides",
            r"output 0 (has|with) strides \(1, \d+\), native's are \(\d+, 1\)",
        ),
        ("wrong corner", "values", r"output 0 has error .* native's own .*; allowed are 2 times"),
        ("writes to its input", "inputs", r"it wrote to 'self'"),
    ],
)
def test_a_broken_override_is_caught_and_its_reproducer_reproduces(
    name: str, check: str, message: str
) -> None:
    override = broken.register(name)
    report = opgraft.verify(override, checks=QUICK)
    assert not report.ok and report.exit_code == 1
    failure = next(each for each in report.failures if each.check == check)
    assert re.search(message, failure.message)
    assert len(failure.reproducer.splitlines()) == 5
    with pytest.raises(AssertionError, match=message) as again:
        exec(failure.reproducer, {})
    assert str(again.value) == f"{check}: {failure.message}"
    # And it is the override's doing, not the reproducer's.
    override.remove()
    right = opgraft.register_op_override(
        "aten", "_softmax", "CPU", broken.right, cond=override.cond, name=name
    )
    exec(failure.reproducer, {})
    assert right.hits > 0


def test_a_reproducer_reproduces_in_a_process_of_its_own(tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text("from tests.verification.broken import *\nregister('wrong corner')\n")
    override = broken.register("wrong corner")
    (failure,) = opgraft.verify(override, checks=["hit", "values"], opinfo=False).failures
    code = failure.reproducer.replace("tests.verification.broken", "mine")
    assert "import mine" in code
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = forked_programs.run(code, env=env)
    assert done.returncode == 1
    assert f"AssertionError: values: {failure.message}" in done.stderr


def test_an_override_that_raises_fails_with_its_error() -> None:
    def raises(self: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such tile") if self.ndim > 1 else TypeError("flat")

    with packs.owning("tiles"):  # whose default is to fall back: verify must see through that
        override = opgraft.register_op_override(
            "aten", "relu", "CPU", raises, unconditional_override=True
        )
    report = opgraft.verify(override, checks=["hit"], opinfo=False)
    assert failed(report) == {"hit"}
    assert re.search("it raised (ValueError: no such tile|TypeError: flat)", str(report))
    assert override.on_error == "fallback" and not override.state.quarantined


def test_an_override_that_is_never_hit_fails() -> None:
    override = opgraft.register_op_override(
        "aten", "relu", "CPU", lambda self: self.clamp(0), cond=when.ndim("self") == 11
    )
    report = opgraft.verify(override, checks=["hit"])
    assert failed(report) == {"hit"} and report.exit_code == 1
    assert "it took none of" in report.failures[0].message
    assert "when.ndim('self') == 11 holds: no call of that kind was found" in str(report)


def test_an_override_that_always_hands_on_to_native_is_never_hit() -> None:
    override = opgraft.register_op_override(
        "aten", "relu", "CPU", opgraft.native("aten::relu"), unconditional_override=True
    )
    report = opgraft.verify(override, checks=["hit"], opinfo=False)
    assert "handed each of" in report.failures[0].message


def test_a_condition_in_python_that_reads_values_is_seen_to_raise() -> None:
    def cond(self: torch.Tensor) -> bool:
        return bool(self > 0)  # ambiguous for more than one element

    override = opgraft.register_op_override("aten", "relu", "CPU", lambda self: self, cond=cond)
    report = opgraft.verify(override, checks=["hit"], opinfo=False)
    assert not report.ok
    assert "ambiguous" in str(report)


# ------------------------------------------------------------------ kinds of ops


def test_a_backward_op_is_verified_with_what_its_forward_saved() -> None:
    def backward(
        grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        product = grad * output
        result = product - output * product.sum(dim, keepdim=True)
        return result.to(input_dtype).contiguous()

    override = opgraft.register_op_override(
        "aten",
        "_softmax_backward_data",
        "CPU",
        backward,
        cond=when.dtype("output", torch.float32) & (when.numel("output") > 1),
    )
    # Each of its ops rounds; native's does once.
    report = opgraft.verify(
        override, checks=["hit", "values", "dtype", "gradients"], max_samples=SOME, k=4
    )
    assert report.ok, str(report)
    assert report.overrides[0].checks["gradients"].samples > 0


def test_a_wrong_gradient_is_found_through_the_forward() -> None:
    def backward(
        grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
    ) -> torch.Tensor:
        return output * grad  # without the sum

    override = opgraft.register_op_override(
        "aten", "_softmax_backward_data", "CPU", backward, cond=when.numel("output") > 1
    )
    report = opgraft.verify(override, checks=["gradients", "front"], max_samples=SOME)
    assert failed(report) == {"gradients", "front"}
    assert "the gradient of self has error" in str(report)


def test_a_mutating_op_is_compared_by_what_it_writes() -> None:
    def add_(self: torch.Tensor, other: torch.Tensor, *, alpha: complex) -> torch.Tensor:
        return self.copy_(torch.add(self, other, alpha=alpha) * factor[0])

    factor = [1.0]
    override = opgraft.register_op_override(
        "aten", "add_.Tensor", "CPU", add_, cond=when.dtype("self", torch.float32)
    )
    checks = ["hit", "values", "inputs"]
    report = opgraft.verify(override, checks=checks, max_samples=SOME)
    assert report.ok and override.hits > 0, str(report)
    factor[0] = 1.1
    assert "values" in failed(opgraft.verify(override, checks=checks, max_samples=SOME))


def test_an_out_variant_gets_its_arguments_from_the_functional_op() -> None:
    def out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(torch.broadcast_shapes(self.shape, other.shape)).copy_(self * other)

    override = opgraft.register_op_override(
        "aten", "mul.out", "CPU", out, cond=when.dtype("self", torch.float64)
    )
    report = opgraft.verify(override, checks=["hit", "values"], max_samples=SOME)
    assert report.ok, str(report)
    assert report.overrides[0].hits > 0


def test_a_composite_op_is_verified_where_nothing_is_differentiated() -> None:
    from tests import ops

    def rms_norm(
        input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rms_norm(input.contiguous(), shape, weight, eps)

    override = opgraft.register_op_override(
        "aten",
        "_fused_rms_norm",
        "CPU",
        rms_norm,
        cond=when.dtype("input", torch.float32) & (when.numel("input") > 0),
    )
    checks = ["hit", "values", "gradients", "front", "fake"]
    report = opgraft.verify(override, checks=checks, max_samples=SOME)
    assert report.ok, str(report)
    assert {"gradients", "front"} <= report.overrides[0].checks.keys()


@pytest.fixture
def own_op() -> Any:
    """An op of a library that PyTorch's tests know nothing of."""
    library = torch.library.Library("verifytest", "DEF")
    library.define("scale(Tensor x, float factor, int groups) -> Tensor")

    def scale(x: torch.Tensor, factor: float, groups: int) -> torch.Tensor:
        torch._check(groups > 0 and x.shape[-1] % groups == 0, lambda: "groups must divide it")
        return x * factor

    library.impl("scale", scale, "CompositeExplicitAutograd")
    yield library
    library._destroy()


def register_scale(**keywords: Any) -> opgraft.Override:
    def impl(x: torch.Tensor, factor: float, groups: int) -> torch.Tensor:
        return torch.mul(x, factor)

    return opgraft.register_op_override("verifytest", "scale", "CPU", impl, **keywords)


def test_an_op_of_which_only_the_schema_is_known(own_op: Any) -> None:
    override = register_scale(cond=when.dtype("x", torch.float32) & (when.size("x", -1) >= 16))
    report = opgraft.verify(override, checks=["hit", "miss", "values"])
    assert report.ok, str(report)
    assert list(report.overrides[0].samples) == ["schema", "schema + changes"]


@pytest.mark.parametrize("first", range(5))
def test_a_native_kernel_that_seldom_differs_from_itself_fails_no_override(
    own_op: Any, first: int
) -> None:
    calls = itertools.count(first)

    def rare(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if next(calls) % 5 else x * 2 + torch.finfo(x.dtype).eps

    own_op.define("rare(Tensor x) -> Tensor")
    own_op.impl("rare", rare, "CompositeExplicitAutograd")
    override = opgraft.register_op_override(
        "verifytest",
        "rare",
        "CPU",
        lambda x: x * 2,
        cond=when.numel("x") >= 64,
        samples=lambda device: [(torch.rand(size, device=device),) for size in (8, 16, 64)],
    )
    report = opgraft.verify(override, checks=["hit", "miss"])
    assert report.overrides[0].misses > 0
    assert report.ok, str(report)


@pytest.mark.parametrize("by_name", [True, False])
def test_samples_of_the_pack_come_first(own_op: Any, by_name: bool) -> None:
    asked: list[torch.device] = []

    def samples(device: torch.device) -> Any:
        asked.append(device)
        x = torch.randn(2, 6, device=device)
        yield {"x": x, "factor": 2.0, "groups": 3} if by_name else (x, 2.0, 3)

    override = register_scale(cond=when.value("groups") == 3, samples=samples)
    report = opgraft.verify(override, checks=["hit", "miss", "values"], seed=3)
    assert report.ok, str(report)
    assert report.overrides[0].samples["pack"] == 1
    assert set(asked) == {torch.device("cpu")}


def test_samples_that_fit_no_schema_are_an_error_that_names_the_override(own_op: Any) -> None:
    override = register_scale(unconditional_override=True, samples=lambda device: [42], name="mine")
    with pytest.raises(TypeError, match="sample 0 of override 'mine' is a int"):
        opgraft.verify(override)


def test_samples_must_be_a_function() -> None:
    with pytest.raises(RegistrationError, match="samples= for aten::relu"):
        opgraft.register_op_override(
            "aten",
            "relu",
            "CPU",
            torch.clone,
            cond=lambda self: True,
            samples=[1],  # type: ignore[arg-type]
        )


def softmax_samples(device: torch.device) -> Any:
    for columns in (7, 31, 200):
        yield torch.randn(3, columns, device=device), -1, False


def test_samples_given_for_an_internal_op_are_taken_as_they_are() -> None:
    """Its kernels trust what their callers pass: no other call is made from them."""
    override = broken.register("right", samples=softmax_samples)
    report = opgraft.verify(override, checks=["hit", "miss", "values"], opinfo=False)
    assert report.ok, str(report)
    # But for values: five kinds of them, for the two that it takes.
    assert report.overrides[0].samples == {"pack": 3, "pack + changes": 10}
    assert (report.overrides[0].hits, report.overrides[0].misses) == (12, 1)
    with_opinfo = opgraft.verify(override, checks=["hit"]).overrides[0].samples
    assert set(with_opinfo) == {"pack", "pack + changes", "opinfo"}


def test_samples_of_a_forward_serve_its_backward() -> None:
    broken.register("right", samples=softmax_samples)
    backward = opgraft.register_op_override(
        *("aten", "_softmax_backward_data", "CPU", softmax_backward),
        cond=when.size("output", -1) <= 100,
        name="backward",
    )
    report = opgraft.verify(backward, checks=["hit", "miss", "values"], opinfo=False)
    assert report.ok, str(report)
    assert report.overrides[0].samples == {"pack": 3, "pack + changes": 10}
    assert (report.overrides[0].hits, report.overrides[0].misses) == (12, 1)
    again = opgraft.verification.sample("for:pack:1", name="backward", op=backward.op)
    assert again.args[0].shape == (3, 31)
    again.check("values")


def softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    product = grad_output * output
    return product - output * product.sum(dim, keepdim=True)


def test_a_backward_is_asked_for_the_gradients_of_what_is_there() -> None:
    forward = resolve("aten::native_layer_norm")
    x, weight = torch.randn(4, 8), torch.randn(8)
    source = base_from_arguments(
        "given", forward, forward.bind((x, [8], weight, None, 1e-5), {}).values
    )
    base = base_from_other_op(resolve("aten::native_layer_norm_backward"), source)
    assert base is not None
    assert base.make({}, 0)[-1] == [True, True, False]


def test_what_native_refuses_says_nothing_of_an_override(own_op: Any) -> None:
    """It takes two calls of three, and native one of them."""
    override = register_scale(
        cond=when.size("x", -1) >= 5,
        samples=lambda device: [(torch.randn(2, n, device=device), 2.0, 5) for n in (5, 7, 2)],
    )
    report = opgraft.verify(override, checks=QUICK, opinfo=False)
    assert report.ok, str(report)
    assert report.overrides[0].checks["strides"].samples > 0


def test_no_sample_is_begun_after_so_many_seconds() -> None:
    report = opgraft.verify(broken.register("right"), checks=["hit"], max_seconds=0)
    assert report.ok, str(report)
    assert report.overrides[0].samples == {"opinfo": 1}
    assert "(max_seconds=)" in str(report)


# ------------------------------------------------------------------ boundaries


def test_samples_lie_on_both_sides_of_every_boundary(own_op: Any) -> None:
    seen: set[tuple[int, int]] = set()

    def impl(x: torch.Tensor, factor: float, groups: int) -> torch.Tensor:
        seen.add((x.numel() // x.shape[-1], x.shape[-1]))
        return torch.mul(x, factor)

    override = opgraft.register_op_override(
        "verifytest",
        "scale",
        "CPU",
        impl,
        cond=when.dtype("x", torch.float32)
        & (when.size("x", -1) >= 37)
        & (when.size("x", -1) < 101)
        & (when.numel("x") // when.size("x", -1) >= 23),
    )
    report = opgraft.verify(override, checks=["hit", "miss"], max_samples=300)
    assert report.ok, str(report)
    assert report.overrides[0].not_generated == []
    columns = {column for _, column in seen}
    rows = {row for row, _ in seen}
    assert min(columns) == 37 and max(columns) == 100 and min(rows) == 23


def test_what_could_not_be_generated_is_said(own_op: Any) -> None:
    override = register_scale(
        cond=(when.size("x", -1) >= 8) & (when.numel("x") <= 2**40) & (when.ndim("x") != 9)
    )
    report = opgraft.verify(override, checks=["hit"])
    missing = "\n".join(report.overrides[0].not_generated)
    assert re.search(r"numel\('x'\) <= 1099511627776 fails: .*GiB", missing)
    assert "when.ndim('x') != 9 fails" in missing


# ------------------------------------------------------------------ selecting and reporting


def test_what_is_verified_is_selected_as_everywhere() -> None:
    one = broken.register("right")
    relu = opgraft.register_op_override(
        "aten", "relu", "CPU", lambda self: self.clamp(0), unconditional_override=True, name="clamp"
    )
    keywords: dict[str, Any] = {"checks": ["hit"], "opinfo": False, "max_samples": 10}
    assert [o.name for o in opgraft.verify("aten::relu", **keywords).overrides] == ["clamp"]
    assert [o.name for o in opgraft.verify(name="right", **keywords).overrides] == ["right"]
    assert len(opgraft.verify(**keywords).overrides) == 2
    assert len(opgraft.verify(dispatch_key="CUDA", **keywords).overrides) == 0
    relu.remove()
    with pytest.raises(RegistrationError, match="not registered any more"):
        opgraft.verify(relu, **keywords)
    assert one.hits > 0


def test_other_overrides_are_off_meanwhile() -> None:
    other = opgraft.register_op_override(
        "aten", "_softmax", "CPU", broken.wrong_corner, unconditional_override=True, priority=9
    )
    helper = opgraft.register_op_override(
        "aten", "div.Tensor", "CPU", lambda self, other: other, unconditional_override=True
    )
    override = broken.register("right")
    report = opgraft.verify(override, checks=["hit", "values"], opinfo=False)
    assert report.ok, str(report)
    assert (other.hits, helper.hits) == (0, 0)


def test_what_cannot_run_here_is_not_run_and_not_ok() -> None:
    broken_cuda = opgraft.register_op_override(
        "aten", "_softmax", "XPU", broken.right, unconditional_override=True
    )
    report = opgraft.verify(broken_cuda)
    if not torch.xpu.is_available():
        assert (report.ok, report.exit_code) == (False, 3)
        assert "there is no xpu device here" in str(report)


def test_an_override_that_is_disabled_is_not_run() -> None:
    override = broken.register("right")
    opgraft.disable(op="aten::_softmax")
    report = opgraft.verify(override)
    assert "disabled by opgraft.disable(op='aten::_softmax')" in str(report)
    assert report.exit_code == 3


def test_there_is_nothing_to_verify() -> None:
    report = opgraft.verify("aten::relu")
    assert (report.ok, report.exit_code) == (False, 3)
    assert "no override is registered" in str(report)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"what": "no-such-pack"}, "there is no pack 'no-such-pack'"),
        ({"what": "aten::nothing_of_that_name"}, "there is no op"),
        ({"checks": ["sanity"]}, "there is no check 'sanity'"),
    ],
)
def test_a_wrong_selection_is_an_error(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        opgraft.verify(**keywords)


def test_the_report_as_json_and_as_junit() -> None:
    report = opgraft.verify(
        broken.register("wrong corner"), checks=["hit", "values", "strides"], opinfo=False
    )
    data = json.loads(report.json())
    (override,) = data["overrides"]
    assert (data["ok"], override["verdict"], override["op"]) == (False, "failed", "aten::_softmax")
    assert override["checks"]["values"]["verdict"] == "failed"
    assert override["failures"][0]["reproducer"].count("\n") == 4
    suite = ElementTree.fromstring(report.junit())[0]
    assert (suite.get("failures"), suite.get("name")) == (
        "1",
        "aten::_softmax at CPU: wrong corner",
    )
    cases = {case.get("name"): case for case in suite}
    failure = cases["values"].find("failure")
    assert failure is not None and "call.check('values')" in (failure.text or "")
    assert cases["strides"].find("failure") is None
    assert cases["opcheck"].find("skipped") is not None


def test_the_same_seed_makes_the_same_samples() -> None:
    override = broken.register("right")
    reports = [
        opgraft.verify(override, checks=["hit", "values"], seed=seed, max_samples=40).as_dict()
        for seed in (1, 1, 2)
    ]
    for each in reports:
        each["overrides"][0].pop("seconds")
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_the_users_random_state_and_modes_stay() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    opgraft.verify(broken.register("right"), checks=QUICK, max_samples=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("mine", "theirs", "problem"),
    [
        ("inf", "nan", None),  # a matter of the order of a sum's terms
        ("nan", "-inf", None),
        ("inf", "-inf", r"\+inf in 1 places, native has 0"),
        ("1", "nan", "NaN in 0 places, native has 1"),
        ("inf", "1", r"\+inf in 1 places, native has 0"),
    ],
)
def test_where_results_are_not_finite(mine: str, theirs: str, problem: str | None) -> None:
    one, other = (torch.tensor([float(each), 2.0]) for each in (mine, theirs))
    _, found = errors(one, other, other)
    assert (found is None) == (problem is None)
    assert problem is None or re.match(problem, found or "")


def test_sums_in_whatever_order_are_told_from_what_is_random() -> None:
    result = torch.randn(64, dtype=torch.bfloat16)
    last_place = torch.finfo(torch.bfloat16).eps * float(result.abs().max())
    assert differ_by_noise(result + last_place, result)
    assert not differ_by_noise(torch.randn(64, dtype=torch.bfloat16), result)
    for wrong in (torch.nan, torch.inf):
        assert not differ_by_noise(torch.full_like(result, wrong), result)
        special = result.clone()
        special[0] = wrong
        assert differ_by_noise(special.clone(), special)
        assert not differ_by_noise(torch.randn(64, dtype=torch.bfloat16), special)


def planned(impl: Any, **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        *("aten", "_softmax", "CPU", impl),
        cond=when.dtype("self", torch.float32) & (when.numel("self") > 0),
        launch_plan=True,
        **keywords,
    )


needs_plans = pytest.mark.skipif(loader.in_use() is None, reason="launch plans are the core's")


@needs_plans
@pytest.mark.parametrize("unplanned", [None, when.numel("self") > 10**9], ids=str)
def test_replays_of_launch_plans_are_verified_too(unplanned: Any) -> None:
    """So is the impl in Python, where it does not pay to run it without a plan."""

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        weights = (self - self.amax(dim, keepdim=True)).exp()
        return (weights / weights.sum(dim, keepdim=True)).contiguous()

    override = planned(impl, unplanned=unplanned)
    report = opgraft.verify(override, max_samples=20, opinfo=False)
    assert report.ok, str(report)
    (found,) = report.overrides
    assert found.checks["replay"].samples > 0 and found.hits > 5
    assert override.plans is not None and override.plans.hits > 0
    before = override.hits
    torch.softmax(torch.randn(77, 3), -1)
    assert override.hits - before == (1 if unplanned is None else 0)  # as it was


@needs_plans
def test_a_wrong_replay_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        out = torch.empty_like(self, memory_format=torch.contiguous_format)
        result = broken.right(self, dim, half_to_float).contiguous()
        ctypes.memmove(out.data_ptr(), result.data_ptr(), out.nbytes)  # nobody can record that
        return out

    monkeypatch.setattr(trial, "outputs_agree", lambda one, other: True)
    report = opgraft.verify(planned(impl), max_samples=20, opinfo=False)
    failures = [failure for failure in report.failures if failure.check == "replay"]
    assert failures and "replayed from a launch plan, output 0 has" in failures[0].message


def test_without_torchs_internal_tests_nothing_is_said_to_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opinfo, "missing", lambda: "torch.testing._internal cannot be imported")
    override = broken.register("right")
    report = opgraft.verify(override, checks=["hit", "values"], max_samples=SOME)
    assert "none of PyTorch's own samples: torch.testing._internal cannot" in str(report)
    assert (report.ok, report.exit_code, report.failures) == (False, 3, [])
    assert report.overrides[0].verdict == "not run" and report.overrides[0].hits > 0
    without = opgraft.verify(override, checks=["hit", "values"], opinfo=False, max_samples=SOME)
    assert (without.ok, without.exit_code) == (True, 0), str(without)


def test_a_fault_is_one_without_torchs_internal_tests_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opinfo, "missing", lambda: "torch.testing._internal cannot be imported")
    report = opgraft.verify(broken.register("wrong corner"), checks=["hit", "values"])
    assert (report.ok, report.exit_code) == (False, 1)


def test_under_compile_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    override = broken.register("right")
    monkeypatch.setattr(torch, "compile", lambda function, **keywords: function)
    report = opgraft.verify(override, checks=["compile"], opinfo=False)
    assert report.overrides[0].checks["compile"].verdict == "passed", str(report)


# ------------------------------------------------------------------ the command


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *PATHS]), **variables}


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment(**variables)
    return forked_programs.run_module("opgraft", "verify", *arguments, env=env, cwd=ROOT)


def command_on(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on the overrides that a module registers, and on no pack's."""
    (folder / "mine.py").write_text(source)
    paths = {"PYTHONPATH": f"{ROOT}:{folder}", "OPGRAFT_PACKS": "none"}
    return command("--import", "mine", *arguments, **paths)


@pytest.mark.longest
@pytest.mark.timeout(900)  # it takes minutes where other tests run beside it
def test_the_first_party_pack_passes_on_cpu(tmp_path: Path) -> None:
    """In Triton's interpreter, in a process of its own.

    It is started, not forked from one whose objects are frozen: there the checks, which leave what
    others froze as it is, would have the garbage collector search all that was imported since.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "opgraft", "verify", "opgraft-kernels"),
            *("--max-samples", "12", "--json", "--junit", str(tmp_path / "report.xml")),
        ],
        env=environment(TRITON_INTERPRET="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    overrides = json.loads(done.stdout)["overrides"]
    assert overrides
    for override in overrides:
        print(override["name"], override["samples"], override["hits"], override["misses"])
        assert override["hits"] >= 2 and override["misses"] >= 2
        assert sum(override["samples"].values()) <= 12
    assert len(ElementTree.parse(tmp_path / "report.xml").getroot()) == len(overrides)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)  # FlashAttention-4 alone compiles for minutes, on one core
def test_the_first_party_pack_passes_on_a_gpu() -> None:
    gigabytes = torch.cuda.get_device_properties(0).total_memory // 2**30
    jobs = str(min(gigabytes // 14, os.cpu_count() or 1))  # the largest samples take some 10 GB
    done = command("opgraft-kernels", "--json", "--jobs", jobs, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout + done.stderr
    overrides = json.loads(done.stdout)["overrides"]
    assert overrides and {override["dispatch_key"] for override in overrides} == {"CUDA"}
    for override in overrides:
        print(override["name"], override["samples"], override["hits"], override["misses"])
        assert override["hits"] > 5 and override["misses"] > 5
        assert override["checks"]["values"]["verdict"] == "passed"


def test_the_command_imports_what_registers_and_fails_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.verification.broken import *\nregister('wrong strides')\n"
    )
    done = command(
        *("aten::_softmax", "--import", "mine", "--check", "hit", "--check", "strides"),
        *("--no-opinfo", "--json", "--max-samples", "60"),
        PYTHONPATH=f"{ROOT}:{tmp_path}",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    (failure,) = report["overrides"][0]["failures"]
    assert re.search(r"output 0 (has|with) strides \(1, \d+\)", failure["message"])
    quick = ("--no-opinfo", "--check", "hit", "--check", "strides", "--max-samples", "60")
    table = command(
        "aten::_softmax", "--import", "mine", *quick, PYTHONPATH=f"{ROOT}:{tmp_path}"
    ).stdout
    assert "wrong strides" in table and "FAILED strides" in table and "call.check" in table


def test_overrides_verified_in_processes_of_their_own(tmp_path: Path) -> None:
    """One of them crashes: that is its failure, and the others' reports are there."""
    mine = (
        "import os, opgraft\n"
        "from tests.verification.broken import *\n"
        "register('right'); register('wrong strides')\n"
        "opgraft.register_op_override('aten', 'relu', 'CPU', lambda self: os.abort(),\n"
        "                             unconditional_override=True, name='crashes')\n"
    )
    done = command_on(
        tmp_path,
        mine,
        *("--check", "hit", "--check", "strides", "--dispatch-key", "CPU"),
        *("--no-opinfo", "--json", "--jobs", "2", "--junit", str(tmp_path / "report.xml")),
        *("--max-samples", "60"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["overrides"]}
    assert found["right"]["verdict"] == "passed" and found["right"]["hits"] > 0
    assert found["right"]["checks"]["strides"]["samples"] > 0
    assert found["wrong strides"]["failures"][0]["check"] == "strides"
    (failure,) = found["crashes"]["failures"]
    assert failure["check"] == "process" and "died of SIGABRT" in failure["message"]
    suites = {
        suite.get("name"): suite for suite in ElementTree.parse(tmp_path / "report.xml").getroot()
    }
    assert len(suites) == 3
    assert suites["aten::relu at CPU: crashes"].get("failures") == "1"


def test_a_sample_on_which_native_ends_the_process_is_left_out(tmp_path: Path) -> None:
    mine = (
        "import os, torch, opgraft\n"
        "library = torch.library.Library('left_out', 'DEF')\n"
        "library.define('double(Tensor x) -> Tensor')\n"
        "def native(x):\n"
        "    return os.abort() if x.numel() == 3 else x * 2\n"
        "library.impl('double', native, 'CPU')\n"
        "library.impl('double', lambda x: torch.empty_like(x), 'Meta')\n"
        "opgraft.register_op_override('left_out', 'double', 'CPU', lambda x: x + x,\n"
        "    unconditional_override=True, name='right',\n"
        "    samples=lambda device: [(torch.ones(n, device=device),) for n in (2, 3, 4)])\n"
        "opgraft.register_op_override('aten', 'relu', 'CPU', lambda self: self.clamp(min=0),\n"
        "    unconditional_override=True, name='another')\n"
    )
    done = command_on(
        tmp_path,
        mine,
        *("--check", "hit", "--check", "values", "--dispatch-key", "CPU"),
        *("--no-opinfo", "--json", "--jobs", "2", "--max-samples", "60"),
    )
    found = {each["name"]: each for each in json.loads(done.stdout)["overrides"]}
    assert found["right"]["verdict"] == "passed", done.stdout + done.stderr
    assert found["right"]["hits"] > 0
    assert any("left out, as native ends the process" in note for note in found["right"]["notes"])


def test_a_change_of_a_sample_that_is_left_out_is_left_out_too() -> None:
    with journal.writing_to(None, leaving_out=["pack:1", "pack:2 x[0]=3"]):
        left_out = ["pack:1", "pack:1 x[0]=5", "pack:2 x[0]=3", "pack:2 y[0]=1 x[0]=3 @x:expanded"]
        assert all(map(journal.is_left_out, left_out))
        left = ["pack:10", "pack:2", "pack:2 x[0]=30", "pack:3 x[0]=3"]
        assert not any(map(journal.is_left_out, left))


def test_a_change_that_is_left_out_of_two_samples_is_made_to_no_other() -> None:
    with journal.writing_to(
        None, leaving_out=["pack:1 x[0]=0", "pack:2 x[0]=0", "pack:4", "pack:5"]
    ):
        assert journal.is_left_out("pack:3 x[0]=0") and journal.is_left_out("pack:3 y[1]=2 x[0]=0")
        assert not journal.is_left_out("pack:3 x[1]=0") and not journal.is_left_out("pack:3")


@pytest.mark.gpu
@pytest.mark.slow
def test_a_sample_on_which_native_loses_the_device_is_left_out(tmp_path: Path) -> None:
    """Its error comes later, with another sample: the notes name the one that it is of."""
    mine = (
        "import torch, opgraft\n"
        "from opgraft import when\n"
        "def samples(device):\n"
        "    for width in (8, 0, 4):\n"
        "        grad = torch.randn(4, width, device=device)\n"
        "        yield grad, torch.arange(4, device=device), 10, -1, False\n"
        "def impl(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):\n"
        "    new = grad_output.new_zeros(num_weights, grad_output.size(-1))\n"
        "    return new.index_add_(0, indices, grad_output)\n"
        "opgraft.register_op_override('aten', 'embedding_dense_backward', 'CUDA', impl,\n"
        "    cond=(when.dtype('grad_output', torch.float32) & (when.numel('grad_output') > 0)\n"
        "        & (when.ndim('grad_output') == 2) & (when.ndim('indices') == 1)\n"
        "        & (when.value('padding_idx') == -1)\n"
        "        & (when.value('scale_grad_by_freq') == False)),\n"
        "    name='right', samples=samples)\n"
    )
    done = command_on(
        tmp_path,
        mine,
        *("aten::embedding_dense_backward", "--name", "right"),
        *("--check", "hit", "--no-opinfo", "--json", "--jobs", "2", "--max-samples", "20"),
    )
    (found,) = json.loads(done.stdout)["overrides"]
    assert found["verdict"] == "passed", done.stdout + done.stderr
    assert found["hits"] > 0
    assert "left out, as native ends the process on it: pack:1" in found["notes"]


@pytest.mark.parametrize(
    ("code", "said", "is_broken"),
    [
        (-6, "", True),
        (1, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        (1, "ValueError: a bad sample", False),
        (0, "UserWarning: device-side assert is not compiled in", False),
    ],
)
def test_a_process_that_lost_its_device_is_as_one_that_died(
    code: int, said: str, is_broken: bool
) -> None:
    assert subprocesses._is_broken(subprocess.CompletedProcess([], code, "", said)) == is_broken


def test_a_lost_device_ends_verify_with_what_to_do(tmp_path: Path) -> None:
    """A native kernel that loses it has not refused a call: no other call can be verified."""
    mine = (
        "import torch, opgraft\n"
        "library = torch.library.Library('loses', 'DEF')\n"
        "library.define('double(Tensor x) -> Tensor')\n"
        "def native(x):\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "library.impl('double', native, 'CPU')\n"
        "library.impl('double', lambda x: torch.empty_like(x), 'Meta')\n"
        "opgraft.register_op_override('loses', 'double', 'CPU', lambda x: x + x,\n"
        "    unconditional_override=True, name='right',\n"
        "    samples=lambda device: [(torch.ones(2, device=device),)])\n"
    )
    done = command_on(tmp_path, mine, "--check", "hit", "--op", "loses::double", "--no-opinfo")
    assert done.returncode == 1
    assert "an illegal memory access" in done.stderr and "--jobs 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_native_is_not_asked_again_for_what_an_internal_op_refused(tmp_path: Path) -> None:
    """The sizes 3 and 5 are refused once each, and the process ends when it is asked again."""
    mine = (
        "import os, torch, opgraft\n"
        "library = torch.library.Library('refuses', 'DEF')\n"
        "library.define('_double(Tensor x) -> Tensor')\n"
        "refused = []\n"
        "def native(x):\n"
        "    if x.shape[0] % 2 == 0:\n"
        "        return x * 2\n"
        "    if (x.shape, x.dtype) in refused:\n"
        "        os.abort()\n"
        "    refused.append((x.shape, x.dtype))\n"
        "    raise RuntimeError('there is no plan for an odd size')\n"
        "library.impl('_double', native, 'CPU')\n"
        "library.impl('_double', lambda x: torch.empty_like(x), 'Meta')\n"
        "override = opgraft.register_op_override('refuses', '_double', 'CPU', lambda x: x + x,\n"
        "    cond=opgraft.when.size('x', 0) >= 4, name='right')\n"
    )
    done = command_on(
        tmp_path,
        mine,
        *("--check", "hit", "--check", "values", "--op", "refuses::_double"),
        *("--no-opinfo", "--json", "--max-samples", "60"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["overrides"]
    assert found["verdict"] == "passed" and found["hits"] > 0


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        (torch.arange(3.0).expand(2, 3), (1, 3)),
        (torch.ones(1).expand(3), (1,)),
        (torch.arange(6.0).view(2, 3).t(), (3, 2)),
        (torch.arange(3.0).view(3, 1).expand(3, 2), (3, 1)),
    ],
)
def test_each_element_of_an_expanded_tensor_is_written_once(
    tensor: torch.Tensor, shape: tuple[int, ...]
) -> None:
    before = tensor.clone()
    once = cuda._each_element_once(tensor)
    assert once.shape == shape
    values = once.clone()
    once.zero_()
    assert not tensor.any()
    once.copy_(values)
    assert torch.equal(tensor, before)


def test_the_command_without_expecttest_has_not_verified(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\nsys.modules['expecttest'] = None\n"
        "from tests.verification.broken import *\nregister('right')\n"
    )
    arguments = ("aten::_softmax", "--import", "mine", "--check", "hit", "--max-samples", "20")
    done = command(*arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "expecttest" in done.stdout and "pip install" in done.stdout
    done = command(*arguments, "--no-opinfo", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_command_decides_by_comes_with_it() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert needed is not None
    assert '"expecttest"' in needed[1] and '"numpy"' in needed[1]


def test_a_time_limit_leaves_what_was_done_by_then(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time, opgraft\n"
        "from tests.verification.broken import *\n"
        "register('right')\n"
        "opgraft.register_op_override('aten', 'relu', 'CPU', lambda self: time.sleep(600),\n"
        "                             unconditional_override=True, name='sleeps')\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "opgraft", "verify", "--import", "mine", "--check", "hit"),
            *("--no-opinfo", "--json", "--jobs", "2", "--dispatch-key", "CPU"),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OPGRAFT_PACKS": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert next(line for line in process.stderr if "right: passed" in line)
    process.terminate()
    out, _ = process.communicate(timeout=60)
    found = {each["name"]: each for each in json.loads(out)["overrides"]}
    assert process.returncode == 3
    assert found["right"]["verdict"] == "passed"
    assert found["sleeps"]["verdict"] == "not run"
    assert "interrupted" in found["sleeps"]["skipped"]


def test_what_lacked_memory_beside_others_is_verified_again_alone(tmp_path: Path) -> None:
    """A kernel that CUDA cannot load for want of memory raises torch's general error."""
    mine = (
        "import pathlib, torch\n"
        "from tests.verification.broken import *\n"
        "mark = pathlib.Path(__file__).with_suffix('.mark')\n"
        "def samples(device):\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        raise RuntimeError('CUDA error: out of memory')\n"
        "    return [(torch.randn(8, 4), 1, False)]\n"
        "register('right', samples=samples)\n"
    )
    done = command_on(
        tmp_path,
        mine,
        *("--check", "values", "--no-opinfo", "--json", "--jobs", "2"),
        *("--max-samples", "20"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right: again, alone" in done.stderr
    (found,) = json.loads(done.stdout)["overrides"]
    assert found["verdict"] == "passed" and found["hits"] > 0


def test_a_check_that_lacks_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(seen: Any) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setitem(CHECKS, "threads", replace(CHECKS["threads"], function=check))
    report = opgraft.verify(broken.register("right"), checks=["threads"], opinfo=False)
    assert report.ok
    assert "too little memory" in (report.overrides[0].checks["threads"].reason or "")


@pytest.mark.parametrize("lacks", [1, 2, 3, 5, 8])
def test_a_layout_that_fits_into_memory_no_more_is_left_out(
    lacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free changes between two looks at it, while other processes run."""
    count = itertools.count(1)

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        if next(count) == lacks:
            raise ValueError("it does not fit")
        return tensor.clone()

    monkeypatch.setitem(LAYOUTS, "huge-strides", (lambda tensor: True, lay_out))
    report = opgraft.verify(
        broken.register("right"), checks=["values"], opinfo=False, max_samples=60
    )
    assert report.ok, str(report)
    assert next(count) > lacks


def test_the_command_says_what_is_wrong_with_its_arguments() -> None:
    done = command("no-such-pack")
    assert done.returncode == 2
    assert "there is no pack 'no-such-pack' installed" in done.stderr
