"""`register_op_override`: what it accepts, what it refuses and how it says so."""

from __future__ import annotations

import ast
import copy
import importlib
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft import RegistrationError, registration, when
from opgraft.base import env
from opgraft.core import loader
from opgraft.ops.schema import resolve
from tests import ops


def register(**changes: object) -> opgraft.Override:
    arguments: dict[str, object] = {
        "lib_symbol": "aten",
        "op_symbol": "_softmax",
        "dispatch_key": "CPU",
        "impl": ops.softmax,
        "unconditional_override": True,
    }
    return opgraft.register_op_override(**{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_symbol": "_sofmax"}, r"no op aten::_sofmax; did you mean .*aten::_softmax"),
        ({"op_symbol": "_softmax.outt"}, r"no overload 'outt': name one of .*_softmax\.out"),
        ({"lib_symbol": "nolib"}, r"no op nolib::_softmax; import the library"),
        ({"dispatch_key": "Meta"}, r"'Meta' .* shape inference .* use a backend key"),
        ({"dispatch_key": "CompositeImplicitAutograd"}, r"use a backend key"),
        ({"dispatch_key": "AutogradCPU"}, r"above the kernels.*use a backend key"),
        ({"dispatch_key": "cuda"}, r"not a dense backend's dispatch key; use a backend key"),
        ({"impl": lambda self: self}, r"impl .*<lambda>\(self\) cannot take .* aten::_softmax"),
        ({"impl": 3}, r"impl for aten::_softmax must be callable, not 3"),
        ({"cond": when.ndim("self") == 2}, r"cond= and unconditional_override=True .* contradict"),
        ({"on_error": "ignore"}, r"on_error='ignore': choose one of \('raise', 'fallback'\)"),
        ({"compile": "yes"}, r"compile='yes': choose one of .*, or give an expression of"),
        ({"unplanned": when.numel("self"), "launch_plan": True}, r"unplanned= .*, a number"),
        ({"compile": when.size("x", 0) > 8}, r"compile= for aten::_softmax: .*'x'"),
        ({"compile": when.size("self", 0)}, r"compile= for aten::_softmax is .*, a number"),
        (
            {"unplanned": when.size("x", 0) > 8, "launch_plan": True},
            r"unplanned= for aten::_softmax: .*'x'",
        ),
        ({"autograd": len}, r"autograd= for aten::_softmax must be two functions"),
        ({"name": 3}, r"name= for aten::_softmax must be a str, not 3"),
        ({"name": "\ud800"}, r"name= for aten::_softmax has a character that is no text"),
        ({"dsl": 3}, r"dsl= for aten::_softmax must be a str, not 3"),
        ({"priority": "high"}, r"priority= for aten::_softmax must be an int, not 'high'"),
    ],
)
def test_bad_registration_names_the_fault_and_the_mend(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RegistrationError, match=f"(?s){message}"):
        register(**changes)
    assert opgraft.overrides() == []


async def always_later(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
    return False


def always_next(self: torch.Tensor, dim: int, half_to_float: bool) -> Iterator[bool]:
    yield False


@pytest.mark.parametrize(
    ("cond", "message"),
    [
        (when.ndim("input") == 2, r"no argument 'input'; it has self, dim, half_to_float"),
        (when.ndim("dim") == 2, r"'dim' is a int, not a tensor"),
        (when.value("self") == 2, r"'self' is a tensor, and reading its value"),
        (when.length("self") == 2, r"'self' is a Tensor, not a list"),
        (when.size("self", 0), r"a number: compare it"),
        (lambda self: True, r"cond .*<lambda>\(self\) cannot take the arguments"),
        (always_later, r"returns a coroutine or a generator, which is always true"),
        (always_next, r"returns a coroutine or a generator, which is always true"),
    ],
)
def test_bad_condition_fails_at_registration(cond: object, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        register(cond=cond, unconditional_override=False)


def test_keyset_form_must_take_the_keyset() -> None:
    with pytest.raises(RegistrationError, match=r"called with \(DispatchKeySet, self, dim"):
        register(unconditional_override=False)


def test_keyset_form_gets_the_keyset_first() -> None:
    seen: list[object] = []

    def impl(keyset: torch.DispatchKeySet, *args: object) -> torch.Tensor:
        seen.append(keyset)
        return ops.softmax(*args)  # type: ignore[arg-type]

    override = register(impl=impl, unconditional_override=False)
    torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == 1
    assert isinstance(seen[0], torch._C.DispatchKeySet)


def test_condition_may_be_any_callable_with_the_ops_signature() -> None:
    override = register(
        cond=lambda self, dim, half_to_float: self.shape[0] > 2, unconditional_override=False
    )
    torch.softmax(torch.randn(3, 4), -1)
    torch.softmax(torch.randn(2, 4), -1)
    assert (override.hits, override.misses) == (1, 1)


def test_defaults_are_filled_in_and_keyword_only_arguments_come_by_name() -> None:
    seen: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def impl(*args: object, **kwargs: object) -> object:
        seen.append((args, kwargs))
        return opgraft.native("aten::add.Tensor")(*args, **kwargs)

    override = register(op_symbol="add.Tensor", impl=impl)
    x = torch.randn(3)
    assert torch.equal(x + x, 2 * x)
    torch.add(x, x, alpha=3)
    assert override.hits == 2
    assert [len(args) for args, _ in seen] == [2, 2]
    assert [kwargs for _, kwargs in seen] == [{"alpha": 1}, {"alpha": 3}]


def test_default_lists_are_fresh_for_every_call() -> None:
    def impl(*args: object) -> torch.Tensor:
        result = opgraft.native("aten::avg_pool2d")(*args)
        args[2].append(7)  # type: ignore[attr-defined]
        return result  # type: ignore[no-any-return]

    override = register(op_symbol="avg_pool2d", impl=impl)
    x = torch.randn(1, 1, 4, 4)
    first, second = (torch.ops.aten.avg_pool2d(x, [2, 2]) for _ in range(2))
    assert override.hits == 2
    assert torch.equal(first, second)


@pytest.mark.parametrize("number", [2, 2.5, True, 2j])
def test_a_number_in_a_tensor_slot_arrives_as_a_tensor_and_promotes_as_a_number(
    number: complex,
) -> None:
    x = torch.arange(3, dtype=torch.int32)
    expected = x * number
    seen: list[object] = []

    def impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append(other)
        return opgraft.native("aten::mul.Tensor")(self, other)  # type: ignore[no-any-return]

    override = register(op_symbol="mul.Tensor", impl=impl)
    result = x * number
    hits = override.hits
    override.remove()
    assert hits == 1
    assert isinstance(seen[0], torch.Tensor)
    assert seen[0].ndim == 0
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def test_mutating_op() -> None:
    def impl(self: torch.Tensor, other: torch.Tensor, *, alpha: int) -> torch.Tensor:
        self.copy_(self.clone().sub(other, alpha=-alpha))
        return self

    override = register(op_symbol="add_.Tensor", impl=impl)
    x = torch.ones(3)
    alias = x
    x += 2
    assert override.hits == 1
    assert alias is x
    assert x.tolist() == [3, 3, 3]


def test_out_variant() -> None:
    def impl(self: torch.Tensor, mat2: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_((self.unsqueeze(-1) * mat2.unsqueeze(-3)).sum(-2))

    override = register(op_symbol="bmm.out", impl=impl)
    a, b, out = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.empty(2, 3, 5)
    torch.bmm(a, b, out=out)
    assert override.hits == 1
    torch.testing.assert_close(out, a @ b)


def test_an_op_of_any_namespace() -> None:
    with torch.library._scoped_library("opgraft_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        override = register(
            lib_symbol="opgraft_test", op_symbol="twice", impl=lambda x: torch.add(x, x)
        )
        assert torch.ops.opgraft_test.twice(torch.ones(2)).tolist() == [2, 2]
        assert override.hits == 1


def test_an_op_without_a_native_kernel_says_so_on_a_miss() -> None:
    def impl(*args: object) -> tuple[None, None]:
        return None, None

    override = register(
        op_symbol="_fused_rms_norm_backward",
        impl=impl,
        cond=when.ndim("input") == 2,
        unconditional_override=False,
    )
    x = torch.randn(2, 3, 4)
    with pytest.raises(NotImplementedError, match=r"no native kernel at CPU.*opgraft.explain"):
        torch.ops.aten._fused_rms_norm_backward(x, x, [4], x, None, [True, False])
    assert (override.hits, override.misses) == (0, 1)


def test_registering_again_under_an_explicit_name_replaces() -> None:
    first = register(name="mine")
    second = register(name="mine")
    torch.softmax(torch.randn(3, 4), -1)
    assert opgraft.overrides() == [second]
    assert (first.hits, second.hits) == (0, 1)
    assert not first.enabled


def test_registering_again_without_a_name_keeps_both_apart() -> None:
    first, second = register(), register()
    assert first.name != second.name
    assert opgraft.overrides() == [second, first]


def test_training_miss_of_a_composite_op_is_said_at_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "opgraft"):
        register(op_symbol="_fused_rms_norm", impl=ops.rms_norm)
    assert "keep the composite derivative" in caplog.text


def test_registering_costs_no_cuda_initialisation() -> None:
    register(dispatch_key="CUDA")
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


# ------------------------------------------------------------------ what a new user writes


@pytest.mark.parametrize("symbol", ["mul", "add", "sub"])
def test_an_overload_that_is_not_named_is_asked_for(symbol: str) -> None:
    """TorchScript has one without a name, of Python's numbers, that the dispatcher has not."""
    with pytest.raises(opgraft.RegistrationError, match=f"name one of aten::{symbol}.Tensor, "):
        opgraft.register_op_override(
            "aten", symbol, "CPU", lambda a, b: a, unconditional_override=True
        )


@pytest.mark.parametrize("spelling", ["torch.ops.aten.mul.Tensor", "aten.mul.Tensor"])
def test_an_op_may_be_named_as_python_has_it(spelling: str) -> None:
    assert resolve(spelling).name == "aten::mul.Tensor"


@pytest.mark.parametrize("spelling", ["rms_norm", "F.rms_norm", "torch.rms_norm"])
def test_a_functions_name_gets_the_op_as_a_suggestion(spelling: str) -> None:
    with pytest.raises(opgraft.RegistrationError, match="did you mean aten::rms_norm"):
        resolve(spelling)


def test_without_a_condition_the_two_words_are_named() -> None:
    def impl(self, dim, half_to_float):
        return self

    with pytest.raises(opgraft.RegistrationError, match=r"cond=.*unconditional_override=True"):
        opgraft.register_op_override("aten", "_softmax", "CPU", impl)


CELL = """
def impl(self, dim, half_to_float):
    return opgraft.native("aten::_softmax")(self, dim, half_to_float)

made.append(opgraft.register_op_override("aten", "_softmax", "CPU", impl, cond=cond))
"""


def test_a_cell_that_is_run_again_replaces(caplog: pytest.LogCaptureFixture) -> None:
    made: list[opgraft.Override] = []
    cell = {"opgraft": opgraft, "made": made, "cond": when.ndim("self") == 2, "__name__": "cell"}
    with caplog.at_level("WARNING", logger="opgraft"):
        for _ in range(4):
            exec(CELL, cell)
    assert opgraft.overrides(op="aten::_softmax", dispatch_key="CPU") == made[-1:]
    assert [override.state.removed for override in made] == [True, True, True, False]
    assert made[-1].name == "cell.impl"
    assert "was defined again" in caplog.text
    torch.softmax(torch.ones(2, 3), -1)
    assert made[-1].hits == 1


def test_one_function_registered_twice_is_two_overrides() -> None:
    made: list[opgraft.Override] = []
    cell = {"opgraft": opgraft, "made": made, "cond": when.ndim("self") == 2, "__name__": "cell"}
    exec(CELL, cell)
    second = opgraft.register_op_override(
        "aten", "_softmax", "CPU", cell["impl"], cond=when.ndim("self") == 3
    )
    assert [override.state.removed for override in (*made, second)] == [False, False]


def test_functions_that_another_makes_are_as_many_overrides() -> None:
    def make():
        def impl(self, dim, half_to_float):
            return self.clone()

        return impl

    for size in (2, 3):
        opgraft.register_op_override(
            "aten", "_softmax", "CPU", make(), cond=when.ndim("self") == size
        )
    assert len(opgraft.overrides(op="aten::_softmax", dispatch_key="CPU")) == 2


# What cells use, as from a module of the user's, and what they register: each way to write an impl.
IMPORTED = """
import functools

def bare(function):
    return lambda *args: function(*args)

def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def softmax(self, dim, half_to_float, number=0):
    return native(self, dim, half_to_float)

class Kernel:
    def __init__(self, number):
        self.number = number

    def __call__(self, self_, dim, half_to_float):
        return native(self_, dim, half_to_float)

    method = __call__

def made(number):
    def impl(self, dim, half_to_float):
        return native(self, dim, half_to_float), number
    return lambda *args: impl(*args)[0]
"""
DEFINED = """
def impl(self, dim, half_to_float):
    return native(self, dim, half_to_float)
"""
IMPLS = {
    "decorated": DEFINED + "register(wrapping(impl))",
    "decorated without its name": DEFINED + "register(bare(impl))",
    "lambda": "register(lambda self, dim, half_to_float: native(self, dim, half_to_float))",
    "partial of a new function": DEFINED + "register(functools.partial(impl))",
    "partial of an old function": "register(functools.partial(softmax, number=1))",
    "lazy": "register(opgraft.lazy('tests.ops:softmax'))",
    "the same function": "register(softmax)",
    "object": "register(Kernel(1))",
    "method": "register(Kernel(1).method)",
    "made by a factory": "register(made(1))",
}


class Cells:
    """A notebook, whose cells register overrides of softmax in one namespace."""

    def __init__(self, imported: str = IMPORTED) -> None:
        self.made: list[opgraft.Override] = []
        self.namespace: dict[str, object] = {
            "opgraft": opgraft,
            "when": when,
            "native": opgraft.native("aten::_softmax"),
            "register": self._register,
            "__name__": "__main__",
        }
        exec(imported, self.namespace)

    def _register(self, impl: Callable[..., object], ndim: int = 2) -> None:
        cond = when.ndim("self") == ndim
        self.made.append(register(impl=impl, cond=cond, unconditional_override=False))

    def run(self, source: str, name: str = "<cell>") -> None:
        """Run a cell as IPython does: each of its statements is compiled by itself."""
        for statement in ast.parse(source).body:
            exec(compile(ast.Module([statement], []), name, "exec"), self.namespace)

    @property
    def removed(self) -> list[bool]:
        return [override.state.removed for override in self.made]


def took_softmax(override: opgraft.Override) -> bool:
    hits = override.hits
    torch.softmax(torch.ones(2, 3), -1)
    return override.hits == hits + 1


@pytest.mark.parametrize("written", IMPLS.values(), ids=IMPLS)
def test_a_cell_that_is_run_again_replaces_however_its_impl_is_written(
    written: str, caplog: pytest.LogCaptureFixture
) -> None:
    cells = Cells()
    with caplog.at_level("WARNING", logger="opgraft"):
        for number in range(3):  # a prompt of IPython's numbers what it runs
            cells.run(written, f"<input {number}>")
    assert cells.removed == [True, True, False]
    assert opgraft.overrides() == cells.made[-1:]
    assert "#" not in cells.made[-1].name
    assert "was defined again" in caplog.text
    assert took_softmax(cells.made[-1])


@pytest.mark.parametrize("how", ["decorated", "partial of a new function"])
def test_a_function_that_an_edited_cell_defines_again_is_replaced(how: str) -> None:
    cells = Cells()
    cells.run(IMPLS[how], "<before>")
    cells.run("more = 1\n" + IMPLS[how], "<after>")
    assert cells.removed == [True, False]
    assert took_softmax(cells.made[-1])


@pytest.mark.parametrize("written", IMPLS.values(), ids=IMPLS)
def test_what_a_loop_registers_is_as_many_overrides_when_its_cell_is_run_again(
    written: str,
) -> None:
    *definition, registering = written.strip().splitlines()
    loop = f"for ndim in (2, 3):\n    {registering[:-1]}, ndim)"
    cells = Cells()
    cells.run("\n".join([*definition, loop]))
    assert cells.removed == [False, False]
    cells.run("\n".join([*definition, loop]))
    assert cells.removed == [True, True, False, False]
    assert took_softmax(cells.made[-2])


@pytest.mark.parametrize(
    "impl", ["lambda *args: native(*args)", "made(1)", "functools.partial(softmax)", "softmax"]
)
def test_what_the_statements_of_one_cell_register_is_as_many_overrides(impl: str) -> None:
    cells = Cells()
    for _ in range(2):
        cells.run(f"register({impl}, 2)\nregister({impl}, 3)\nregister({impl}, 3)")
    assert cells.removed == [True] * 3 + [False] * 3
    cells.run(f"register({impl}, 4)", "<other cell>")
    assert cells.removed[3:] == [False] * 4


def test_an_edited_loop_replaces_as_many_overrides_as_it_registers() -> None:
    cells = Cells()
    loop = "for ndim in (2, 3):\n    register(impl, ndim)"
    for edited in ("", "first = 1\n", "first = second = 1\n"):
        cells.run(edited + DEFINED + loop)
    assert cells.removed == [True] * 4 + [False] * 2


def test_a_function_that_is_defined_again_takes_no_override_of_another_cell() -> None:
    cells = Cells()
    cells.run(DEFINED)
    cells.run("register(impl, 2)")
    cells.run("register(impl, 3)")
    cells.run("first = 1\n" + DEFINED)
    cells.run("register(impl, 2)")
    assert cells.removed == [True, False, False]


def test_two_functions_of_one_name_in_a_script_are_two_overrides() -> None:
    cells = Cells()
    exec(f"{DEFINED}\nregister(impl, 2)\n{DEFINED}\nregister(impl, 3)", cells.namespace)
    assert cells.removed == [False, False]


def test_a_factory_that_two_cells_call_makes_two_overrides() -> None:
    cells = Cells()
    cells.run("def install(ndim):\n    register(lambda *args: native(*args), ndim)")
    cells.run("install(2)")
    cells.run("install(3)", "<other cell>")
    assert cells.removed == [False, False]
    cells.run("install(3)", "<other cell>")
    assert cells.removed == [False, True, False]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a module, and imports or reloads it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # its time of change is too coarse

    def write(source: str) -> None:
        (tmp_path / "reloaded_overrides.py").write_text(source)
        importlib.invalidate_caches()
        if (module := sys.modules.get("reloaded_overrides")) is not None:
            importlib.reload(module)
        else:
            importlib.import_module("reloaded_overrides")

    yield write
    sys.modules.pop("reloaded_overrides", None)


@pytest.mark.parametrize("written", IMPLS.values(), ids=IMPLS)
def test_a_module_that_is_edited_and_reloaded_replaces_what_it_registered(
    written: str, module: Callable[[str], None]
) -> None:
    registering = """
import opgraft
from opgraft import when

native = opgraft.native("aten::_softmax")

def register(impl, ndim=2):
    opgraft.register_op_override("aten", "_softmax", "CPU", impl, cond=when.ndim("self") == ndim)
"""
    *definition, call = written.strip().splitlines()
    body = "\n".join([IMPORTED, registering, *definition, f"{call[:-1]}, 2)", f"{call[:-1]}, 3)"])
    module(body)
    first = opgraft.overrides()
    module("added = 1\n" + body)
    second = opgraft.overrides()
    assert len(first) == len(second) == 2
    assert [override.state.removed for override in first] == [True, True]
    assert took_softmax(second[-1])


def test_a_function_of_a_module_that_is_reloaded_registers_anew(
    module: Callable[[str], None],
) -> None:
    """A program that reloads a module and calls its function, all in one run."""
    body = f"""
import opgraft
native = opgraft.native("aten::_softmax")
{DEFINED}
def install():
    opgraft.register_op_override("aten", "_softmax", "CPU", impl, unconditional_override=True)
"""
    for added in ("", "added = 1\n"):
        module(added + body)
        sys.modules["reloaded_overrides"].install()
    (override,) = opgraft.overrides()
    assert took_softmax(override)


def test_what_a_thread_registers_stays() -> None:
    made: list[opgraft.Override] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: made.append(register()))
        thread.start()
        thread.join()
    assert [override.state.removed for override in made] == [False, False]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_module_that_holds_an_override_is_copied(copied) -> None:
    module = torch.nn.Linear(2, 2)
    module.override = opgraft.register_op_override(
        "aten",
        "_softmax",
        "CPU",
        lambda self, dim, half_to_float: self,
        cond=when.ndim("self") == 9,
    )
    assert copied(module).override is module.override


def test_a_pickled_override_that_is_gone_is_named() -> None:
    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", lambda *args: None, cond=when.ndim("self") == 9, name="gone"
    )
    state = pickle.dumps(override)
    override.remove()
    with pytest.raises(opgraft.RegistrationError, match=r"'gone'.* is not registered"):
        pickle.loads(state)


def test_the_version_is_the_distributions() -> None:
    assert opgraft.__version__ == metadata.version("opgraft")


def test_routing_in_python_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPGRAFT_ROUTER", raising=False)
    told: list[str] = []
    monkeypatch.setattr(env, "warn_once", told.append)
    registration._warn_without_core()
    assert bool(told) == (loader.load() is None)
    told.clear()
    monkeypatch.setattr(loader, "in_use", lambda: None)
    registration._warn_without_core()
    (message,) = told
    assert "routed in Python" in message
    monkeypatch.setenv("OPGRAFT_ROUTER", "python")  # somebody wants it so
    registration._warn_without_core()
    assert len(told) == 1
