"""What users combine compiled graphs with: each with its result, and the hits it gets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import opgraft
from opgraft import Override, when
from opgraft.ops.schema import resolve
from opgraft.pt2 import policy
from tests import forked_programs, ops
from tests.modes import RecordOps
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore")

OPAQUE = "opgraft.aten___softmax.default"


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def rows(count: int, columns: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, columns, generator=generator)


@pytest.fixture
def override() -> Override:
    """Softmax, from eight rows on."""
    return models.override("_softmax", ops.softmax, when.size("self", 0) >= 8)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


def native(function: Callable[..., Any], *args: Any) -> Any:
    with opgraft.disabled():
        return function(*args)


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    override: Override,
    hits: int,
    *args: Any,
) -> None:
    """The function's result is that of the reference without overrides, and the override ran."""
    before = override.hits
    torch.testing.assert_close(function(*args), native(reference, *args))
    assert override.hits - before == hits


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_a_dimension_that_is_marked_dynamic(mark: Any, override: Override) -> None:
    run = compiled(softmax)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count, hits in ((4, 0), (9, 1), (8, 1), (7, 0)):
            x = rows(count)
            mark(x, 0)
            check(run, softmax, override, hits, x)


def test_a_dimension_that_is_marked_unbacked(override: Override) -> None:
    run = compiled(softmax)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count, hits in ((4, 0), (9, 1), (1, 0), (0, 0)):
            x = rows(count)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            check(run, softmax, override, hits, x)


def test_sizes_that_depend_on_data(override: Override) -> None:
    def of_positive(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x[x[:, 0] > 0], -1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True):
        run = compiled(of_positive)
        for positive, hits in ((4, 0), (12, 1), (8, 1), (1, 0), (0, 0)):
            x = rows(16)
            x[:, 0] = torch.arange(16) < positive
            check(run, of_positive, override, hits, x)


@pytest.mark.parametrize("op", ["cross_entropy_loss", "nll_loss"])
def test_a_composite_op_of_as_many_rows_as_data_say(op: str) -> None:
    """Torch's reference of it asks whether there are rows."""

    def loss_of_chosen(x: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x[chosen], target[chosen])

    override = models.override(op, models.itself(op))
    target = torch.arange(16) % 8
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True):
        run = compiled(loss_of_chosen)
        for count in (5, 1):
            check(run, loss_of_chosen, override, 1, rows(16), target, torch.arange(16) < count)


def test_sizes_zero_and_one(override: Override) -> None:
    run = compiled(softmax, dynamic=True)
    for count, hits in ((9, 1), (1, 0), (0, 0)):
        check(run, softmax, override, hits, rows(count))
    always = models.override("_softmax", ops.softmax, when.ndim("self") == 2)
    torch._dynamo.reset()
    run = compiled(softmax, dynamic=True)
    for shape in ((1, 8), (9, 1), (0, 8)):
        check(run, softmax, always, 1, torch.ones(shape))


def test_automatic_dynamic_shapes(override: Override) -> None:
    run = compiled(softmax)
    for count, hits in ((4, 0), (9, 1), (7, 0), (16, 1)):
        check(run, softmax, override, hits, rows(count))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


# ------------------------------------------------------------------ Inductor's modes


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead"},
        {"options": {"cpp_wrapper": True}},
        {"options": {"freezing": True}},
    ],
    ids=["max-autotune", "reduce-overhead", "cpp_wrapper", "freezing"],
)
def test_modes_of_inductor(options: dict[str, Any], override: Override) -> None:
    mm = models.override("mm", models.itself("mm"), when.size("self", 0) >= 8)
    weight = rows(8)

    def project(x: torch.Tensor) -> torch.Tensor:
        return softmax(x @ weight)

    with torch.no_grad():
        run = compiled(project, backend="inductor", dynamic=False, **options)
        check(run, project, override, 1, rows(16))
    assert mm.hits == 1


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_an_op_that_inductor_calls_as_it_is_under_auto(cpp_wrapper: bool) -> None:
    name = models.ATTENTION
    attention = models.override(
        name, models.itself(name), when.size("query", 0) >= 2, compile="auto"
    )

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    run = compiled(attend, backend="inductor", options={"cpp_wrapper": cpp_wrapper})
    check(run, attend, attention, 1, torch.randn(2, 2, 4, 8))


@pytest.mark.parametrize(
    ("cpp_wrapper", "policy", "hits"), [(False, "auto", 1), (True, "auto", 0), (True, "opaque", 1)]
)
def test_an_op_that_inductor_ends_up_calling(cpp_wrapper: bool, policy: str, hits: int) -> None:
    """As docs/compile.md has it: the C function that cpp_wrapper calls knows no dispatcher."""
    override = models.override(
        "cumsum", models.itself("cumsum"), when.size("self", 0) >= 2, compile=policy
    )

    def sums(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x * 2, -1)

    run = compiled(sums, backend="inductor", options={"cpp_wrapper": cpp_wrapper})
    check(run, sums, override, hits, torch.randn(4, 16))


@pytest.mark.parametrize("wrapper", ["python", "cpp", "aot"])
def test_an_op_that_returns_numbers_is_left_to_the_cpp_wrapper(wrapper: str) -> None:
    """Such an op that is not its own would not compile: `RAIIAtenTensorHandle 256;`."""
    import torch._inductor.lowering
    from torch._inductor import config
    from torch._inductor.virtualized import V

    op = resolve("aten::_scaled_dot_product_cudnn_attention")
    opgraft.register_op_override(
        *op.name.split("::"), "CUDA", op.overload, unconditional_override=True
    )
    aot = V.set_aot_compilation(wrapper == "aot")
    with FakeTensorMode(), config.patch(cpp_wrapper=wrapper == "cpp"), aot:
        q = torch.empty(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
        decision = policy.decide(op.bind((q, q, q, None, False), {}))
    assert decision.action == ("opaque" if wrapper == "python" else "left"), decision
    assert ("returns a number" in decision.reason) == (wrapper != "python")


def test_auto_leaves_inductor_what_it_has_code_for() -> None:
    override = models.override("_softmax", ops.softmax, compile="auto")
    run = compiled(softmax, backend="inductor")
    check(run, softmax, override, 0, rows(16))


# ------------------------------------------------------------------ autograd


def loss(x: torch.Tensor) -> torch.Tensor:
    return (softmax(x) * torch.arange(8)).pow(2).sum()


def gradient(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def test_compiled_autograd(override: Override, decisions: pytest.LogCaptureFixture) -> None:
    backward = models.override(
        "_softmax_backward_data", models.softmax_backward, when.size("output", 0) >= 8
    )
    for count, hits in ((16, 1), (4, 0)):
        x = rows(count).requires_grad_()
        before = backward.hits
        with torch._dynamo.compiled_autograd._enable(lambda graph: compiled(graph, dynamic=True)):
            loss(x).backward()
        torch.testing.assert_close(x.grad, native(gradient, loss, rows(count)))
        assert backward.hits - before == hits
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] >= 1
    assert "_softmax_backward_data at CPU is opaque" in decisions.text


def save_softmax(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op == torch.ops.aten._softmax.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("contexts", "hits"),
    [
        ({}, 2),
        ({"context_fn": lambda: create_selective_checkpoint_contexts(save_softmax)}, 1),
    ],
    ids=["all is recomputed", "the policy saves the op"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_activation_checkpointing(
    contexts: dict[str, Any], hits: int, backend: str, override: Override
) -> None:
    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(loss, x, use_reentrant=False, **contexts)

    function = checkpointed if backend == "eager" else compiled(checkpointed, backend=backend)
    torch.testing.assert_close(gradient(function, rows(16)), native(gradient, loss, rows(16)))
    assert override.hits == hits


def test_autocast(override: Override) -> None:
    mm = models.override(
        "mm", models.itself("mm"), when.dtype("self", torch.bfloat16), compile="opaque"
    )

    weight = rows(8)

    def project(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return softmax((x @ weight).float())

    check(compiled(project), project, override, 1, rows(16))
    assert mm.hits == 1


A, B = rows(4, 4), rows(5, 4)[1:]
#: Composite ops without a kernel for autocast: it casts the ops that they call.
CONTRACTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, B),
    "inner": lambda x: torch.inner(x, B),
    "tensordot": lambda x: torch.tensordot(x, B, 1),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, B]),
    "matrix_power": lambda x: torch.matrix_power(x, 2),
    "linear": lambda x: F.linear(x, B),  # which has a kernel for autocast
}


@pytest.mark.parametrize("op", CONTRACTIONS)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_of_what_a_composite_op_calls(op: str, inside: bool) -> None:
    """A graph runs without autocast, so an opaque op of such an op would not be cast."""
    contract = CONTRACTIONS[op]
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast() if inside else nullcontext():
            return contract(x)

    native_impl = resolve(f"aten::{op}").overload
    override = models.override(op, lambda *args, **named: native_impl(*args, **named))
    with nullcontext() if inside else autocast(), torch.no_grad():
        expected = native(run, A)
        graph = compiled(run)(A)
        eager = run(A)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close([graph, eager], [expected] * 2, rtol=0, atol=0)
    assert override.hits == 1 + (op == "linear")


def test_inference_mode(override: Override) -> None:
    run = compiled(softmax, dynamic=True)
    with torch.inference_mode():
        for count, hits in ((16, 1), (4, 0)):
            check(run, softmax, override, hits, rows(count))


@pytest.mark.parametrize("op", ["einsum", "inner", "linear"])
@pytest.mark.parametrize("policy", ["opaque", "auto"])
def test_inference_mode_inside(op: str, policy: str) -> None:
    """What is left to the compiler is decomposed there as torch does it: without autograd."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return CONTRACTIONS[op](x)

    native_impl = resolve(f"aten::{op}").overload
    override = models.override(
        op, lambda *args, **named: native_impl(*args, **named), compile=policy
    )
    expected = native(run, A)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(run)(A), expected)
        assert torch.equal(run(A), expected) and override.hits > 0
        override.remove()  # a graph that is compiled later has the router in it, too


# ------------------------------------------------------------------ functorch


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f: torch.vmap(f),
    "grad": lambda f: torch.func.grad(lambda x: f(x).pow(2).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f: torch.func.jacrev(f),
    "vmap of grad": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).pow(2).sum())),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("where", ["eager", "compiled"])
def test_functorch(name: str, where: str) -> None:
    override = models.override("_softmax", ops.softmax, when.numel("self") >= 8)
    function = TRANSFORMS[name](softmax)
    run = compiled(function) if where == "compiled" else function
    torch.testing.assert_close(run(rows(3)), native(function, rows(3)))
    assert override.hits >= 1


# ------------------------------------------------------------------ higher-order ops


def test_cond(override: Override) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, softmax, torch.sigmoid, (x,))

    run = compiled(branch)
    check(run, branch, override, 1, rows(16).abs())
    check(run, branch, override, 0, -rows(16).abs())


def test_while_loop(override: Override) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def repeat(x: torch.Tensor) -> torch.Tensor:
        def again(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return i < 3

        def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.softmax(x, -1)

        return while_loop(again, body, (torch.tensor(0), x))[1]

    torch.testing.assert_close(compiled(repeat)(rows(16)), native(repeat, rows(16)))
    assert override.hits == 3


def test_map(override: Override) -> None:
    from torch._higher_order_ops.map import map as torch_map

    def each(x: torch.Tensor) -> torch.Tensor:
        return torch_map(softmax, x)

    stack = torch.stack([rows(16), -rows(16)])
    torch.testing.assert_close(compiled(each)(stack), native(softmax, stack))
    assert override.hits == 2


# ------------------------------------------------------------------ modes and tensor types


def test_fake_tensors_never_reach_an_impl(override: Override) -> None:
    with FakeTensorMode():
        assert softmax(torch.empty(16, 8)).shape == (16, 8)
    assert override.hits == 0


def test_a_dispatch_mode_sees_the_opaque_op(override: Override) -> None:
    run = compiled(softmax)
    run(rows(16))  # compiled without the mode, which would have it run eagerly
    with RecordOps() as recorder, torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        check(run, softmax, override, 1, rows(16))
    assert OPAQUE in recorder.ops


class Wrapper(torch.Tensor):
    """A tensor that wraps another one and hands every op on to it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, **_: Any) -> str:
        return f"Wrapper{tuple(self.shape)}"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda x: x.inner if isinstance(x, Wrapper) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return Wrapper(result) if isinstance(result, torch.Tensor) else result


def test_tensor_subclasses(override: Override) -> None:
    def of_wrapped(x: torch.Tensor) -> torch.Tensor:
        return softmax(x)

    for function in (of_wrapped, compiled(of_wrapped)):
        before = override.hits
        result: Any = function(Wrapper(rows(16)))
        assert isinstance(result, Wrapper)
        torch.testing.assert_close(result.inner, native(softmax, rows(16)))
        assert override.hits - before == 1


def test_jagged_tensors(override: Override) -> None:
    mm = models.override("mm", models.itself("mm"), when.size("self", 0) >= 8)
    weight = rows(8)

    def project(x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, weight) * 2

    nested = torch.nested.nested_tensor([rows(5), rows(7)], layout=torch.jagged)
    for function in (project, compiled(project)):
        before = mm.hits
        result = function(nested)
        torch.testing.assert_close(result.values(), native(project, nested.values()))
        assert mm.hits - before == 1


# ------------------------------------------------------------------ processes and threads


def test_dtensors_of_a_fake_process_group(override: Override) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(rows(16), mesh, [Replicate()])
        for function in (softmax, compiled(softmax)):
            before = override.hits
            result: Any = function(x)
            torch.testing.assert_close(result.to_local(), native(softmax, rows(16)))
            assert override.hits - before == 1
    finally:
        dist.destroy_process_group()


def test_dtensors_of_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).parent / "two_processes.py"
    ran = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    for process in ran:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err[-2000:]
        assert "eager: 1 hit, compiled: 1 hit" in out


def test_threads_that_compile_at_the_same_time(override: Override) -> None:
    errors: list[BaseException] = []

    def compile_and_run(count: int) -> None:
        try:
            run = compiled(lambda x: softmax(x) + count)
            torch.testing.assert_close(run(rows(16)) - count, reference)
        except BaseException as error:
            errors.append(error)

    reference = native(softmax, rows(16))
    threads = [threading.Thread(target=compile_and_run, args=(count,)) for count in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert override.hits == 4


def test_nothing_is_installed_under_opgraft_disable(tmp_path: Path) -> None:
    code = """
import torch, opgraft
from tests import ops
from tests.pt2 import models
override = models.override("_softmax", ops.softmax)
result = torch.compile(lambda x: torch.softmax(x, -1), backend="aot_eager")(torch.ones(2, 8))
assert result[0, 0] == 0.125 and override.hits == 0, override.hits
"""
    env = os.environ | {"OPGRAFT_DISABLE": "1"}
    ran = forked_programs.run(code, env=env, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr[-2000:]


# ------------------------------------------------------------------ writing ops


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_op_that_writes_to_its_argument_is_made_functional_and_missed(
    backend: str, decisions: pytest.LogCaptureFixture
) -> None:
    def impl(self: torch.Tensor, other: torch.Tensor, *, alpha: Any) -> torch.Tensor:
        return self.copy_(self + alpha * other)

    override = models.override("add_.Tensor", impl)

    def add(x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(x * 3)

    check(add, add, override, 1, rows(4))
    check(compiled(add, backend=backend), add, override, 0, rows(4))
    assert "writes to its arguments" in decisions.text


@pytest.mark.parametrize(("backend", "hits"), [("aot_eager", 1), ("inductor", 0)])
def test_an_out_variant_is_made_functional_and_the_compiler_gets_the_functional_op(
    backend: str, hits: int, override: Override
) -> None:
    out_variant = models.override(
        "_softmax.out", lambda self, dim, half, *, out: out.copy_(ops.softmax(self, dim, half))
    )

    def into(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.aten._softmax.out(x, -1, False, out=out)
        return out

    check(into, into, out_variant, 1, rows(16))
    check(compiled(into, backend=backend), into, out_variant, 0, rows(16))
    assert override.hits == hits
