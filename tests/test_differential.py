"""The compiled core against the Python router, its oracle, on generated conditions and calls.

- A condition is evaluated by the core, by Python and by the plain evaluation of
  test_when_properties, on arguments of real ops' schemas: all three agree.
- A program (registrations, rules, scopes, removals, calls) runs in this process, where the core
  routes, and in another one, where Python does: the two traces are equal.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import opgraft
from opgraft import OverrideWarning, packs
from opgraft.core import loader
from opgraft.ops.schema import Op, resolve
from opgraft.registry import registry
from opgraft.when.compilation import compile_condition
from tests.test_when_properties import (
    Arguments,
    Names,
    Tree,
    build,
    conditions,
    plain,
    relaxed,
    tensor_names,
    tensors,
)

# Set in the other process, which imports this module for its programs.
ORACLE = "OPGRAFT_TEST_ORACLE"
if ORACLE not in os.environ and loader.in_use() is None:
    pytest.skip(f"Python routes here: {loader.status()}", allow_module_level=True)


# ------------------------------------------------------------------ conditions

OPS = (
    *("_fused_rms_norm", "native_layer_norm", "cat", "gelu", "add.Tensor", "sum.dim_IntList"),
    *("_to_copy", "index.Tensor", "clamp", "upsample_bilinear2d.vec", "_softmax"),
)
EDGES = [0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 3_037_000_500]
INTEGERS = st.integers(-3, 8) | st.sampled_from(EDGES)
FLOATS = st.sampled_from(
    [
        *(0.0, -0.0, 1e-5, 0.5, 1.0, 2.5, 3.0, 2.0**53, 2.0**63, -(2.0**63), 1e300),
        *(float("inf"), float("-inf"), float("nan"), True, False, 1, 2, 2**53 + 1, 2**63 - 1),
    ]
)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
COMPLEX = [1j, 2 + 0j, 0j, 1 + 2j]
#: Values of the kinds that are compared for equality alone, and constants of these kinds.
CHOICES: dict[str, tuple[Any, ...]] = {
    "str": ("none", "tanh", ""),
    "ScalarType": (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64),
    "Layout": (torch.strided, torch.sparse_coo),
    "Device": tuple(map(torch.device, ("cpu", "cpu:0", "cuda:0", "cuda:1", "meta"))),
    "MemoryFormat": (torch.contiguous_format, torch.preserve_format, torch.channels_last),
}


def _kind(kind: str) -> tuple[str, bool]:
    """A schema's kind without `Optional`, and whether it is optional."""
    bare = kind.removeprefix("Optional[")
    return (bare, False) if bare == kind else (bare[:-1], True)


def names_of(op: Op) -> Names:
    """What expressions can ask of an op's arguments."""

    def of(*kinds: str) -> tuple[str, ...]:
        return tuple(a.name for a in op.arguments if _kind(a.kind)[0] in kinds)

    return Names(
        tensors=of("Tensor"),
        integers=of("int"),
        floats=of("float", "bool", "number"),
        integer_lists=of("List[int]"),
        tensor_lists=of("List[Tensor]", "List[Optional[Tensor]]"),
        float_lists=of("List[float]"),
        others=tuple(
            (a.name, CHOICES[_kind(a.kind)[0]]) for a in op.arguments if _kind(a.kind)[0] in CHOICES
        ),
    )


BIG = st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])
REALS = st.sampled_from([0.0, 1e-5, 0.5, 3.0, 2.0**53, 2.0**63, float("nan"), float("inf")])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Tensor": tensors(),
    "List[Tensor]": st.lists(tensors(), max_size=3),
    "List[Optional[Tensor]]": st.lists(tensors() | st.none(), max_size=3),
    "int": st.integers(-3, 8) | BIG,
    "List[int]": st.lists(st.integers(0, 8) | BIG, max_size=3),
    "float": REALS,
    "List[float]": st.lists(REALS, max_size=3),
    "bool": st.booleans(),
    "number": st.integers(-3, 8) | BIG | REALS | st.booleans() | st.sampled_from(COMPLEX),
    **{kind: st.sampled_from(choices) for kind, choices in CHOICES.items()},
}


def arguments_of(op: Op) -> st.SearchStrategy[Arguments]:
    """Values that the op's schema takes; what native makes of them is not asked here."""

    def values(kind: str) -> st.SearchStrategy[Any]:
        bare, optional = _kind(kind)
        return VALUES[bare] | st.none() if optional else VALUES[bare]

    # Tuples: hypothesis puts the keys of dictionaries in an order of its own.
    names = [a.name for a in op.arguments]
    everything = st.tuples(*(values(a.kind) for a in op.arguments))
    return everything.map(lambda drawn: dict(zip(names, drawn, strict=True)))


def every_condition(op: Op) -> st.SearchStrategy[Tree]:
    names = names_of(op)
    trees = conditions(names, INTEGERS, FLOATS, FORMATS)
    tensor = tensor_names(names)
    rare = st.tuples(st.just("same_dtype"), tensor, tensor, tensor) | st.tuples(
        st.sampled_from(["<", "=="]),
        st.tuples(st.just("device_capability"), tensor),
        st.just(("constant", (9, 0))),
    )
    return trees | trees | trees | st.tuples(st.sampled_from(["&", "|"]), trees, rare)


def conditions_on_calls(name: str) -> st.SearchStrategy[tuple[str, Tree, list[Arguments]]]:
    op = resolve(f"aten::{name}")
    calls = st.lists(arguments_of(op), min_size=1, max_size=4)
    return st.tuples(st.just(name), every_condition(op), calls)


def _holds(tree: Tree, op: Op, arguments: Arguments) -> tuple[bool, bool, bool]:
    """As the core, Python and the plain evaluation say."""
    core = loader.in_use()
    assert core is not None
    cond = build(tree)
    cond.check({argument.name: argument.kind for argument in op.arguments})
    nodes = compile_condition(cond, op)
    assert nodes is not None, f"{cond!r} was not compiled"
    schema = op.overload._schema
    values = tuple(arguments.values())
    compiled = core.holds(nodes, values, schema.name, schema.overload_name)
    return compiled, cond.holds(arguments), plain(tree, arguments) is True


@settings(relaxed, max_examples=800)
@given(st.one_of([conditions_on_calls(name) for name in OPS]))
def test_core_python_and_plain_evaluation_agree(case: tuple[str, Tree, list[Arguments]]) -> None:
    name, tree, calls = case
    op = resolve(f"aten::{name}")
    for arguments in calls:
        for each in (tree, ("~", tree)):
            compiled, python, expected = _holds(each, op, arguments)
            assert compiled is python is expected, f"{build(each)!r} on {arguments}"


NUMBERS = st.sampled_from([*EDGES, 2, 3, 7, 8, -2, -3, -7, -8])


@settings(relaxed, max_examples=500)
@given(
    st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), NUMBERS, NUMBERS),
    st.sampled_from(["<", "==", ">="]),
    NUMBERS,
)
@example(("//", -(2**63), -1), "==", -(2**63))
@example(("%", -(2**63), -1), "==", 0)
@example(("//", -7, 2), "==", -4)
@example(("%", -7, 2), "==", 1)
@example(("%", 7, -2), "==", -1)
@example(("%", 7, 0), "==", 0)
def test_arithmetic_at_the_edges_of_64_bits(
    operation: tuple[str, int, int], compare: str, constant: int
) -> None:
    symbol, left, right = operation
    tree = (symbol, ("item", "dim", 0), ("item", "dim", 1))
    arguments = {"self": torch.ones(1), "dim": [left, right], "keepdim": False, "dtype": None}
    for each in ((compare, tree, ("constant", constant)), ("==", tree, tree)):
        for cond in (each, ("~", each)):
            answers = _holds(cond, resolve("aten::sum.dim_IntList"), arguments)
            assert len(set(answers)) == 1, f"{build(cond)!r} on {arguments['dim']}: {answers}"


def test_what_the_core_cannot_hold_is_left_to_python() -> None:
    dim = opgraft.when.value("dim")
    for cond in (dim < 2**63, dim != -(2**64), opgraft.when.device_capability("self") > (9, 0, 1)):
        assert compile_condition(cond, resolve("aten::_softmax")) is None
    override = opgraft.register_op_override(
        "aten", "_softmax", "CPU", lambda self, *_: torch.zeros_like(self), cond=dim < 2**63
    )
    torch.softmax(torch.ones(2, 2), 1)
    assert (override.hits, override.misses) == (1, 0)


# ------------------------------------------------------------------ programs


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that two processes can make alike."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    offset: int = 0
    grad: bool = False
    lazy: bool = False  #: conjugated, where it is complex
    device: str = "cpu"

    def make(self) -> torch.Tensor:
        count = torch.Size(self.sizes).numel() + self.offset
        flat = torch.arange(count, device=self.device) % 7
        tensor = flat.to(self.dtype)[self.offset :].reshape(self.sizes)
        tensor = tensor.mT.contiguous().mT if self.transposed and tensor.ndim >= 2 else tensor
        if self.lazy and self.dtype.is_complex:
            tensor = tensor.conj()
        return tensor.requires_grad_(self.grad and self.dtype.is_floating_point)


def _made(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.make()
    return [_made(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Call:
    op: str
    values: tuple[Any, ...]  #: in the schema's order, all of them
    times: int = 1  #: more than once: the first hits of a kind take another way than later ones
    boxed: bool = False  #: without the autograd kernel, which hands on C++ arguments


@dataclass(frozen=True)
class Register:
    op: str
    tree: Tree | None
    callable_cond: str | None  #: a key of CONDITIONS, instead of `tree`
    impl: str  #: a key of IMPLS
    priority: int
    pack: str | None
    dsl: str
    name: str | None
    on_error: str


@dataclass(frozen=True)
class Rule:
    enables: bool
    selector: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scoped:
    selectors: tuple[tuple[tuple[str, str], ...], ...]  #: of nested scopes
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Remove:
    index: int


@dataclass(frozen=True)
class Explain:
    call: Call


Step: TypeAlias = "Call | Register | Rule | Scoped | Remove | Explain"
Trace: TypeAlias = list[Any]

ROUTED = ("_softmax", "add.Tensor", "cat", "native_layer_norm", "_fused_rms_norm")


def _is_flat(*args: Any, **_: Any) -> bool:
    first = args[0][0] if isinstance(args[0], list) else args[0]
    return bool(first.ndim < 2)


def _raises(*args: Any, **kwargs: Any) -> bool:
    raise KeyError("cond")


CONDITIONS: dict[str, Callable[..., Any]] = {
    "always": lambda *_, **__: True,
    "flat": _is_flat,
    "raises": _raises,
    "a number": lambda *_, **__: 0,
}


def _native(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return opgraft.native(f"aten::{op}")(*args, **kwargs)


def _map(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_map(function, each) for each in result)
    return function(result) if isinstance(result, torch.Tensor) else result


def _fails_on_large(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _native(op, args, kwargs)
    first = result[0] if isinstance(result, tuple) else result
    if first.numel() > 4:
        raise ValueError("too large")
    return _map(torch.clone, result)


def _fails(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise ZeroDivisionError("in the impl")


#: What an impl does with a call: (op, args, kwargs) -> result.
IMPLS: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Any]] = {
    "native": _native,
    "fresh": lambda *call: _map(torch.clone, _native(*call)),
    "changed": lambda *call: _map(lambda t: t + 1, _native(*call)),
    "keyset": lambda op, args, kwargs: resolve(f"aten::{op}").overload(*args, **kwargs),
    "fails": _fails,
    "fails on large": _fails_on_large,
    "fails later": _native,
    "wrong dtype": lambda *call: _map(lambda t: t.to(torch.int8), _native(*call)),
    "none": lambda *call: None,
    "a list": lambda *call: [1, 2, 3],
}


class Machine:
    """Runs programs under this process's router, and notes what can be seen of it."""

    def __init__(self) -> None:
        registry.reset()
        self.overrides: list[opgraft.Override] = []
        self.ran: list[tuple[int, Any]] = []
        self.trace: Trace = []

    def run(self, program: list[Step]) -> Trace:
        for step in program:
            getattr(self, type(step).__name__.lower())(step)
        for override in self.overrides:
            counts = (override.hits, override.misses, override.fallbacks)
            quarantined = sorted(override.state.quarantined.values())
            self.trace.append((override.name, counts, quarantined, override.enabled))
        registry.reset()
        return self.trace

    def register(self, step: Register) -> None:
        index = len(self.overrides)

        runs = itertools.count(1)

        def impl(*args: Any, **kwargs: Any) -> Any:
            if step.impl == "fails later" and next(runs) > 3:
                raise OSError("in the impl, later")
            if step.impl == "keyset":
                args = args[1:]
            self.ran.append((index, _seen((args, kwargs))))
            return IMPLS[step.impl](step.op, args, kwargs)

        keywords: dict[str, Any] = {
            "priority": step.priority,
            "dsl": step.dsl,
            "name": step.name or f"o{index}",
            "on_error": step.on_error,
        }
        if step.impl != "keyset":
            if step.callable_cond is not None:
                keywords["cond"] = CONDITIONS[step.callable_cond]
            elif step.tree is not None:
                keywords["cond"] = build(step.tree)
            else:
                keywords["unconditional_override"] = True
        args = ("aten", step.op, "CPU", impl)
        if step.pack is None:
            self.overrides.append(opgraft.register_op_override(*args, **keywords))
            return
        with packs.owning(step.pack):
            self.overrides.append(opgraft.register_op_override(*args, **keywords))

    def call(self, step: Call) -> None:
        for _ in range(step.times):
            self._call(step)

    def _call(self, step: Call) -> None:
        op, positional, keywords = _bound(step)
        self.ran = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with torch.inference_mode(step.boxed):
                    result = _seen(op.overload(*positional, **keywords))
            except Exception as error:
                result = (type(error).__name__, str(error).splitlines()[:1])
        warned = [str(w.message) for w in caught if issubclass(w.category, OverrideWarning)]
        self.trace.append((self.ran, result, warned))

    def rule(self, step: Rule) -> None:
        change = opgraft.enable if step.enables else opgraft.disable
        change(**dict(step.selector))

    def scoped(self, step: Scoped) -> None:
        selector, *inner = step.selectors
        with opgraft.disabled(**dict(selector)):
            if inner:
                self.scoped(replace(step, selectors=tuple(inner)))
            else:
                for call in step.calls:
                    self.call(call)

    def remove(self, step: Remove) -> None:
        if self.overrides:
            self.overrides[step.index % len(self.overrides)].remove()

    def explain(self, step: Explain) -> None:
        op, positional, keywords = _bound(step.call)
        try:
            explained = str(opgraft.explain(op.name, *positional, **keywords))
        except Exception as error:  # a condition's own
            explained = repr(error)
        self.trace.append(explained)


def _bound(call: Call) -> tuple[Op, list[Any], dict[str, Any]]:
    """The op with the call's positional and keyword-only arguments."""
    op = resolve(f"aten::{call.op}")
    values = [_made(value) for value in call.values]
    positional, rest = values[: len(op.positional)], values[len(op.positional) :]
    return op, positional, {a.name: v for a, v in zip(op.keyword_only, rest, strict=True)}


def _seen(value: Any) -> Any:
    """A value as the other process can compare it: tensors by all that can be told of them."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return ("tensor", str(value.device), tuple(value.shape))
        plain_values = value.detach().resolve_conj()
        numbers = repr(plain_values.tolist())
        return (
            "tensor",
            str(value.dtype),
            value.shape,
            value.stride(),
            value.requires_grad,
            numbers,
        )
    if isinstance(value, dict):
        return {name: _seen(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_seen(each) for each in value])
    return repr(value)


# The strategies.

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=3).map(tuple)
REAL_DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64])
SPECS = st.builds(
    TensorSpec,
    sizes=SIZES,
    dtype=REAL_DTYPES,
    transposed=st.booleans(),
    offset=st.sampled_from([0, 0, 1]),
    grad=st.sampled_from([False, False, True]),
)


@st.composite
def softmax_calls(draw: st.DrawFn) -> Call:
    spec = draw(SPECS)
    rank = max(len(spec.sizes), 1)
    dim = draw(st.integers(-rank, rank - 1) | st.just(rank))  # `rank` is an error of native's
    return Call("_softmax", (spec, dim, False))


@st.composite
def add_calls(draw: st.DrawFn) -> Call:
    """With numbers in tensor slots, lazy conjugation and promotion."""
    spec = draw(SPECS)
    if draw(st.booleans()):
        spec = replace(spec, dtype=torch.complex64, lazy=draw(st.booleans()))
    number = st.sampled_from([2, 0.5, True, 1j])
    other = draw(number | st.just(spec) | SPECS.map(lambda other: replace(other, sizes=())))
    return Call("add.Tensor", (spec, other, draw(st.sampled_from([1, 1, 2, 0.5]))))


@st.composite
def cat_calls(draw: st.DrawFn) -> Call:
    spec = draw(SPECS.filter(lambda spec: spec.sizes))
    dim = draw(st.integers(-len(spec.sizes), len(spec.sizes) - 1))
    return Call("cat", ([spec] * draw(st.integers(1, 3)), dim))


@st.composite
def norm_calls(draw: st.DrawFn, op: str) -> Call:
    spec = draw(SPECS.filter(lambda spec: spec.sizes and 0 not in spec.sizes))
    sizes = list(spec.sizes[draw(st.integers(0, len(spec.sizes) - 1)) :])
    affine = st.none() | st.just(TensorSpec(tuple(sizes), spec.dtype))
    if op == "_fused_rms_norm":
        return Call(op, (spec, sizes, draw(affine), draw(st.sampled_from([None, 1e-5, 0.5]))))
    return Call(op, (spec, sizes, draw(affine), draw(affine), draw(st.sampled_from([1e-5, 0.5]))))


CALLS: dict[str, st.SearchStrategy[Call]] = {
    "_softmax": softmax_calls(),
    "add.Tensor": add_calls(),
    "cat": cat_calls(),
    "native_layer_norm": norm_calls("native_layer_norm"),
    "_fused_rms_norm": norm_calls("_fused_rms_norm"),
}
TREES = {op: conditions(names_of(resolve(f"aten::{op}"))) for op in ROUTED}
SELECTORS = st.dictionaries(
    st.sampled_from(["dsl", "pack", "name", "op", "dispatch_key"]), st.just("")
).flatmap(
    lambda keys: st.fixed_dictionaries(
        {
            key: st.sampled_from(
                {
                    "dsl": ["one", "two"],
                    "pack": ["alpha", "beta"],
                    "name": ["o0", "o1", "same"],
                    "op": [f"aten::{op}" for op in ROUTED[:2]],
                    "dispatch_key": ["CPU", "CUDA"],
                }[key]
            )
            for key in keys
        }
    ).map(lambda given: tuple(given.items()))
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Registrations and all that changes them, on one or two ops; calls between them."""
    ops = draw(st.lists(st.sampled_from(ROUTED), min_size=1, max_size=2, unique=True))
    op = st.sampled_from(ops)
    once = op.flatmap(lambda name: CALLS[name])
    calls = st.builds(replace, once, times=st.sampled_from([1, 1, 5]), boxed=st.booleans())

    def registrations(name: str) -> st.SearchStrategy[Register]:
        return st.builds(
            Register,
            op=st.just(name),
            tree=st.none() | TREES[name],
            callable_cond=st.none() | st.none() | st.sampled_from(list(CONDITIONS)),
            impl=st.sampled_from([*IMPLS, "native", "fresh", "fresh"]),
            priority=st.integers(-1, 1),
            pack=st.sampled_from([None, None, "alpha", "beta"]),
            dsl=st.sampled_from(["one", "two"]),
            name=st.sampled_from([None, None, None, "same"]),
            on_error=st.sampled_from(["raise", "fallback", "fallback"]),
        )

    steps: list[Step] = draw(st.lists(op.flatmap(registrations), min_size=1, max_size=4))
    mixed = calls.map(lambda call: Explain(_on_two_devices(call)))
    change = st.one_of(
        *([calls] * 4),
        op.flatmap(registrations),
        st.builds(Rule, enables=st.booleans(), selector=SELECTORS),
        st.builds(
            Scoped,
            selectors=st.lists(SELECTORS, min_size=1, max_size=2).map(tuple),
            calls=st.lists(calls, min_size=1, max_size=2).map(tuple),
        ),
        st.builds(Remove, index=st.integers(0, 3)),
        st.builds(Explain, call=calls),
        mixed,
    )
    return steps + draw(st.lists(change, min_size=2, max_size=10))


def _on_two_devices(call: Call) -> Call:
    """Explained only: native could not take it, and there may be no second device to run it on."""
    far = TensorSpec((2, 2), device="meta")
    first, *rest = call.values
    if isinstance(first, list):
        return replace(call, values=([*first, far], *rest))
    if call.op == "_softmax":
        return call
    place = 1 if call.op == "add.Tensor" else 2
    return replace(call, values=(*call.values[:place], far, *call.values[place + 1 :]))


# The other process.


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    assert loader.in_use() is None, "the oracle must route in Python"
    while (program := connection.recv()) is not None:
        try:
            connection.send(Machine().run(pickle.loads(program)))
        except Exception as error:
            connection.send(repr(error))


@pytest.fixture(scope="module")
def oracle() -> Iterator[Callable[[list[Step]], Trace]]:
    """Runs programs in a process where the router is the one in Python."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPGRAFT_ROUTER", "python")
        patch.setenv(ORACLE, "1")
        process.start()
    theirs.close()  # so that the end of the process is the end of the pipe

    def run(program: list[Step]) -> Trace:
        ours.send(pickle.dumps(program))
        trace: Trace = ours.recv()
        return trace

    yield run
    ours.send(None)
    process.join(10)


@settings(relaxed, max_examples=250)
@given(program=programs())
def test_a_program_does_the_same_under_both_routers(
    oracle: Callable[[list[Step]], Trace], program: list[Step]
) -> None:
    expected = oracle(program)
    assert isinstance(expected, list), expected
    assert Machine().run(program) == expected
