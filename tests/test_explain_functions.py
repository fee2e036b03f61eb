"""`explain` of what is made of ops: it finds what a call would reach, and leaves no trace of it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import opgraft
from opgraft import when
from opgraft.explanation.stand_ins import StandInError
from tests import forked_programs, ops

X, WEIGHT = torch.randn(4, 8), torch.randn(8)
Q = torch.randn(2, 4, 16, 64)
LONG = torch.zeros(9)
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def register(op: str, impl: Any = None, **keywords: Any) -> opgraft.Override:
    """An override that no test should ever run."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{op} ran")

    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override("aten", op, "CPU", impl or fail, **keywords)


def reached(explanation: opgraft.Explanation) -> list[str]:
    return [each.op for each in explanation.reached]


@pytest.fixture
def rms_norm() -> Iterator[opgraft.Override]:
    yield register("_fused_rms_norm", cond=when.size("input", -1) >= 8, name="mine")


@pytest.mark.parametrize(
    "front",
    [
        pytest.param(lambda x: ("aten::rms_norm", x, [8], WEIGHT), id="name"),
        pytest.param(lambda x: (torch.ops.aten.rms_norm.default, x, [8], WEIGHT), id="overload"),
        pytest.param(lambda x: (torch.ops.aten.rms_norm, x, [8], WEIGHT), id="packet"),
        pytest.param(lambda x: (F.rms_norm, x, (8,), WEIGHT), id="function"),
        pytest.param(lambda x: (torch.rms_norm, x, (8,), WEIGHT), id="builtin"),
        pytest.param(lambda x: (lambda y: F.rms_norm(y, (8,), WEIGHT), x), id="lambda"),
        pytest.param(
            lambda x: (nn.Sequential(nn.Identity(), nn.RMSNorm(8)).requires_grad_(False), x),
            id="module",
        ),
    ],
)
def test_every_way_to_the_op_reaches_it(front: Any, rms_norm: opgraft.Override) -> None:
    report = opgraft.explain(*front(X))
    assert reached(report) == ["aten::_fused_rms_norm"]
    assert report.winners == (rms_norm,)
    assert report.complete


def test_the_part_of_the_condition_that_fails_is_named_with_what_it_saw(
    rms_norm: opgraft.Override,
) -> None:
    report = opgraft.explain(F.rms_norm, X[:, :4], (4,), WEIGHT[:4])
    assert report.winners == ()
    assert str(report).splitlines() == [
        "torch.nn.functional.rms_norm -> aten::_fused_rms_norm",
        f"  aten::_fused_rms_norm at CPU -> native ({report.reached[0].native})",
        "    1. mine [no DSL, user]: declines: when.size('input', -1) >= 8 "
        "(when.size('input', -1) is 4)",
    ]


@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_dtypes_compose_above_the_fused_op(
    autocast: bool, rms_norm: opgraft.Override
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = opgraft.explain(F.rms_norm, X.bfloat16(), (8,), WEIGHT)
    assert reached(report) == []
    assert {"aten::pow.Tensor_Scalar", "aten::rsqrt"} <= set(report.others)
    assert "input is torch.bfloat16 and weight is torch.float32" in str(report)
    assert "give the weight the input's dtype" in str(report)


def test_what_is_explained_is_what_runs(rms_norm: opgraft.Override) -> None:
    """The same functions, explained and run: the ops that hits are counted for are those named."""
    softmax = register("_softmax", ops.softmax, cond=when.size("self", -1) >= 8)
    wide = register(
        "bmm", lambda self, mat2: (self.unsqueeze(-1) * mat2.unsqueeze(-3)).sum(-2),
        cond=when.size("mat2", -1) >= 8,
    )  # fmt: skip
    functions = [
        lambda: torch.softmax(X, 1),
        lambda: F.softmax(X[:, :4], 1),
        lambda: torch.matmul(torch.ones(2, 3, 4), torch.ones(4, 8)),
        lambda: torch.einsum("bij,bjk->bik", torch.ones(2, 3, 4), torch.ones(2, 4, 8)),
        lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 4, 4)),
        lambda: torch.baddbmm(torch.ones(2, 3, 8), torch.ones(2, 3, 4), torch.ones(2, 4, 8)),
        lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.5),
    ]
    for function in functions:
        before = [override.hits for override in (softmax, wide)]
        report = opgraft.explain(function)
        assert [override.hits for override in (softmax, wide)] == before
        function()
        hit = [o for o, hits in zip((softmax, wide), before, strict=True) if o.hits > hits]
        assert set(report.winners) == set(hit)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_reaches_the_backend_that_torch_chooses(causal: bool) -> None:
    flash = register(FLASH, cond=when.size("query", -1) >= 64)
    report = opgraft.explain(F.scaled_dot_product_attention, Q, Q, Q, is_causal=causal)
    assert report.winners == (flash,)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        report = opgraft.explain(F.scaled_dot_product_attention, Q, Q, Q, is_causal=causal)
    assert reached(report) == []
    assert "aten::bmm" in report.others
    assert "math backend" in str(report)


def test_autocast_holds() -> None:
    bmm = register("bmm", cond=when.dtype("self", torch.bfloat16))
    a = torch.ones(1, 2, 2)
    assert opgraft.explain("aten::bmm", a, a).winner is None
    with torch.autocast("cpu", torch.bfloat16):
        assert opgraft.explain("aten::bmm", a, a).winner is bmm
        assert opgraft.explain(torch.matmul, a, a).winners == (bmm,)


def test_a_conjugate_is_resolved_before_the_backend() -> None:
    bmm = register("_softmax", cond=when.ndim("self") == 2)
    lazy = torch.view_as_complex(torch.randn(4, 4, 2)).conj()
    assert opgraft.explain("aten::_softmax", lazy, 0, False).winner is bmm


def test_a_composite_op_in_training_keeps_its_derivative(rms_norm: opgraft.Override) -> None:
    report = opgraft.explain(F.rms_norm, X.clone().requires_grad_(), (8,))
    assert "keep the composite derivative" in str(report)
    assert "aten::rsqrt" in report.others
    with torch.no_grad():
        assert opgraft.explain(F.rms_norm, X.clone().requires_grad_(), (8,)).winners == (rms_norm,)
    with torch.inference_mode():
        assert opgraft.explain(F.rms_norm, X, (8,)).winners == (rms_norm,)


def test_the_backward_is_followed_too() -> None:
    backward = register("_softmax_backward_data")
    x = X.clone().requires_grad_()
    assert opgraft.explain(torch.softmax, x, -1).reached == ()
    report = opgraft.explain(torch.softmax, x, -1, backward=True)
    assert report.winners == (backward,)
    assert "backward: aten::_softmax_backward_data at CPU -> override" in str(report)
    assert x.grad is None
    report = opgraft.explain("aten::_softmax", x, -1, False, backward=True)
    assert report.winners == (backward,)
    report = opgraft.explain(torch.softmax, X, -1, backward=True)
    assert "there is no backward" in str(report)


def test_calls_that_fare_alike_are_one_entry() -> None:
    register("_softmax")
    model = nn.Sequential(*(nn.Softmax(-1) for _ in range(5)))
    report = opgraft.explain(model, X)
    assert [(each.op, each.calls) for each in report.reached] == [("aten::_softmax", 5)]
    assert "(5 calls)" in str(report)


def test_convolution_is_looked_into_down_to_its_backend() -> None:
    conv = nn.Conv2d(3, 4, 3)
    assert "aten::mkldnn_convolution" in opgraft.explain(conv, torch.randn(2, 3, 8, 8)).others
    override = register("convolution", cond=when.ndim("input") == 4)
    assert opgraft.explain(conv, torch.randn(2, 3, 8, 8)).winners == (override,)


@pytest.mark.parametrize("op", ["convolution", "reshape", "linear", "_convolution"])
def test_an_op_whose_override_was_removed_is_looked_into_as_before(op: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.conv2d(x.reshape(2, 3, 8, 8), torch.ones(4, 3, 3, 3)), torch.ones(2, 6))

    before = opgraft.explain(call, torch.randn(2, 192)).others
    register(op).remove()
    assert opgraft.explain(call, torch.randn(2, 192)).others == before


def test_the_address_of_a_view_is_that_of_its_memory() -> None:
    override = register("_softmax", cond=when.aligned("self", 16))
    row = torch.randn(64)
    assert opgraft.explain(lambda x: torch.softmax(x[4:], 0), row).winners == (override,)
    report = opgraft.explain(lambda x: torch.softmax(x[3:], 0), row)
    assert "self is 12 bytes off" in str(report)


def test_fake_and_meta_tensors(rms_norm: opgraft.Override) -> None:
    with FakeTensorMode() as mode:
        fake = torch.empty(4, 8)
        assert opgraft.explain(F.rms_norm, fake, (8,)).winners == (rms_norm,)
    assert opgraft.explain(F.rms_norm, fake, (8,)).winners == (rms_norm,)
    assert mode is not None
    assert opgraft.explain(F.rms_norm, X.to("meta"), (8,)).winners == ()


# ------------------------------------------------------------------ what cannot be followed


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense reads a tensor's values"),
        (lambda x: x if x.sum() > 0 else -x, "reads a tensor's values"),
        (lambda x: x[x > 0], "the shape of what aten::index.Tensor returns depends on values"),
        (lambda x: x.unique(), "depends on values"),
        (lambda x: x.view(3, 3), "invalid for input of size 32"),
        (
            lambda x: LONG.resize_(3),
            "changes the shape of a tensor that was not among the arguments",
        ),
    ],
)
def test_it_says_up_to_where_it_could_follow(function: Any, why: str) -> None:
    softmax = register("_softmax", cond=when.ndim("self") == 2)
    report = opgraft.explain(lambda x: function(torch.softmax(x, -1)), X)
    assert report.winners == (softmax,)
    assert not report.complete
    assert why in report.notes[-1]


def test_code_that_catches_exceptions_does_not_go_on_with_what_is_not_there() -> None:
    def careful(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.softmax(x, -1) * x.sum().item()
        except Exception:
            return torch.bmm(x, x)

    register("bmm")
    assert opgraft.explain(careful, X).reached == ()


def test_values_that_are_known_are_read() -> None:
    softmax = register("_softmax")
    scale = torch.tensor(2.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * scale.item() * torch.tensor(3).item(), -1)

    report = opgraft.explain(function, X)
    assert report.winners == (softmax,)
    assert report.complete


def test_memory_is_never_handed_out() -> None:
    touches = [torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.tolist]
    touches.append(lambda x: torch.tensor_split(x, torch.arange(2) + 1))
    touches.append(torch.utils.dlpack.to_dlpack)
    for touch in touches:
        report = opgraft.explain(touch, X)
        assert not report.complete
        assert "it needs a tensor's memory" in report.notes[-1]
    for what in (X.to_sparse(), torch.nested.nested_tensor([X, X])):
        with pytest.raises(StandInError, match=r"opgraft\.trace\(\) shows the real call"):
            opgraft.explain(torch.relu, what)


def test_kernels_of_other_libraries_do_not_run_either() -> None:
    ran = []
    library = torch.library.Library("opgraft_test_fronts", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: ran.append(1) or x * 2, "CompositeExplicitAutograd")
    op = torch.ops.opgraft_test_fronts.twice
    report = opgraft.explain(lambda x: torch.softmax(op(x), -1), X)
    assert "opgraft_test_fronts::twice has no fake kernel" in report.notes[-1]
    softmax = register("_softmax")
    torch.library.register_fake("opgraft_test_fronts::twice", torch.empty_like, lib=library)
    assert opgraft.explain(lambda x: torch.softmax(op(x), -1), X).winners == (softmax,)
    assert not ran
    library._destroy()


def test_stand_ins_that_the_code_kept_are_said() -> None:
    kept: list[torch.Tensor] = []
    report = opgraft.explain(lambda x: kept.append(torch.softmax(x, -1)), X)
    assert "the code kept stand-ins" in report.notes[-1]
    with pytest.raises(StandInError, match="only imagines"):
        kept[0].sin()
    assert opgraft.explain(lambda x: torch.softmax(x, -1).sin(), X, backward=True).notes == (
        "nothing that it returns requires grad: there is no backward",
    )
    x = X.clone().requires_grad_()
    assert opgraft.explain(lambda x: torch.softmax(x, -1).sin(), x, backward=True).notes == ()


def test_a_backward_that_raises_is_said() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        y.register_hook(lambda grad: 1 / 0)
        return y

    report = opgraft.explain(hooked, X.clone().requires_grad_(), backward=True)
    assert "its backward raises ZeroDivisionError" in report.notes[-1]


def test_an_error_of_the_callers_is_the_callers() -> None:
    with pytest.raises(TypeError, match="softmax"):
        opgraft.explain(torch.softmax, "no tensor", -1)
    with pytest.raises(opgraft.RegistrationError, match="neither an op nor a callable"):
        opgraft.explain(7)  # type: ignore[arg-type]


# ------------------------------------------------------------------ nothing runs, nothing changes


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    model.append(nn.Linear(144, 2))
    image = torch.randn(2, 3, 8, 8)
    loss = model(image).sum()  # its backward needs the tensors as they are
    before = {name: (t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    random = torch.random.get_rng_state()
    report = opgraft.explain(model, image, backward=True)
    assert report.complete, report
    assert "aten::convolution_backward" in report.others
    assert torch.equal(torch.random.get_rng_state(), random)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, before[name][0]), name
        assert tensor._version == before[name][1], name
        assert tensor.grad is None
    loss.backward()


def test_a_training_step_leaves_parameters_and_gradients_alone() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    assert model.weight.grad is not None
    weight, grad, gradient = model.weight.clone(), model.weight.grad, model.weight.grad.clone()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).softmax(-1).square().sum().backward()
        optimizer.step()

    backward = register("_softmax_backward_data")
    report = opgraft.explain(step, X)
    assert backward in report.winners
    assert torch.equal(model.weight, weight)
    model.zero_grad(set_to_none=False)
    assert grad is not None
    assert gradient.shape == grad.shape


def test_arguments_are_left_alone() -> None:
    x = torch.ones(3)
    version = x._version
    opgraft.explain(torch.Tensor.add_, x, 1)
    opgraft.explain(lambda: x.mul_(2))
    opgraft.explain(torch.add, x, x, out=x)
    assert x.tolist() == [1, 1, 1]
    assert x._version == version
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf * 2
    assert opgraft.explain(torch.Tensor.mul_, middle, 2).complete
    report = opgraft.explain(lambda: x.mul_(leaf))
    assert "give that tensor as an argument" in report.notes[-1]
    assert not x.requires_grad
    middle.sum().backward()


def test_a_graph_of_the_users_is_not_consumed() -> None:
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf.exp()
    report = opgraft.explain(lambda: middle.sin().sum().backward())
    assert "give that tensor as an argument" in report.notes[-1]
    assert leaf.grad is None
    assert opgraft.explain(lambda m: m.sin().sum().backward(), middle).complete
    middle.sum().backward()
    assert leaf.grad is not None


def test_autocast_keeps_nothing_of_it() -> None:
    linear = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        opgraft.explain(linear, X)
        assert torch.is_autocast_cache_enabled()
        assert type(linear(X)) is torch.Tensor
        assert linear(X).isfinite().all()


def test_no_warning_is_shown_or_used_up(rms_norm: opgraft.Override) -> None:
    program = """
import warnings, torch, opgraft
x, weight = torch.randn(2, 8).bfloat16(), torch.ones(8)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    report = opgraft.explain(lambda x: torch.rms_norm(x, (8,), weight), x)
    assert not seen, seen
    assert not torch.is_warn_always_enabled()
    torch.rms_norm(x, (8,), weight)
    print(len(seen), "torch warns: Mismatch dtype" in str(report))
"""
    done = forked_programs.run(program)
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_traces_do_not_see_it(rms_norm: opgraft.Override) -> None:
    with opgraft.trace() as t:
        opgraft.explain(F.rms_norm, X.clone().requires_grad_(), (8,))
        opgraft.explain(F.rms_norm, X, (8,))
    assert t.rows == ()
    assert (rms_norm.hits, rms_norm.misses) == (0, 0)


def test_a_compiled_function_is_explained_as_it_was_written() -> None:
    softmax = register("_softmax")
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        calls.append(graph)
        return graph.forward

    report = opgraft.explain(torch.compile(lambda x: torch.softmax(x, -1), backend=backend), X)
    assert report.winners == (softmax,)
    assert "this explains the eager code" in str(report)
    assert calls == []


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("opaque", "called as it is and routed at run time: mine takes every call"),
        ("inductor", "mine is left to the compiler: compile='inductor'"),
        ("traceable", "the impl is traced into the graph: mine takes every call"),
        (when.ndim("self") == 7, "mine is left to the compiler: "),
    ],
    ids=str,
)
def test_of_a_compiled_function_it_says_what_the_policy_does(policy: Any, told: str) -> None:
    opgraft.register_op_override(
        *("aten", "_softmax", "CPU", ops.softmax),
        unconditional_override=True,
        name="mine",
        compile=policy,
    )
    report = opgraft.explain(torch.compile(lambda x: torch.softmax(x, -1), backend="eager"), X)
    (reached,) = report.reached
    assert any(note.startswith(f"in a compiled graph: {told}") for note in reached.notes), report
    plain = opgraft.explain(lambda x: torch.softmax(x, -1), X)
    assert "in a compiled graph" not in str(plain)


def test_it_imports_no_dsl_and_no_compiler_for_a_norm() -> None:
    program = """
import sys, torch, torch.nn.functional as F, opgraft
opgraft.register_op_override("aten", "_fused_rms_norm", "CPU", lambda *args: None,
                             unconditional_override=True)
assert opgraft.explain(F.rms_norm, torch.randn(4, 8), (8,)).winners
print(sorted({"torch._dynamo", "torch._inductor", "triton", "sympy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_as_dict_is_json(rms_norm: opgraft.Override) -> None:
    data = json.loads(json.dumps(opgraft.explain(F.rms_norm, X[:, :4], (4,)).as_dict()))
    assert (data["op"], data["dispatch_key"], data["runs"]) == (
        "torch.nn.functional.rms_norm",
        None,
        None,
    )
    (each,) = data["reached"]
    assert (each["op"], each["dispatch_key"], each["runs"]) == (
        "aten::_fused_rms_norm",
        "CPU",
        "native",
    )
    (override,) = each["overrides"]
    assert override["status"] == "declines"
    assert override["part"] == "when.size('input', -1) >= 8"
    assert override["saw"] == "when.size('input', -1) is 4"


def test_warnings_of_other_threads_are_theirs() -> None:
    import threading

    def warn(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=warnings.warn, args=("of another thread",))
        thread.start()
        thread.join()
        warnings.warn("of this one", stacklevel=1)
        return x

    with pytest.warns(UserWarning, match="of another thread") as seen:
        report = opgraft.explain(warn, X)
    assert [str(each.message) for each in seen] == ["of another thread"]
    assert report.notes == ("torch warns: of this one",)
