"""Conditions: what each predicate means, how it prints, and what it says when it declines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import opgraft
from opgraft import when
from opgraft.when import Condition

INF = float("inf")


def undefined() -> Condition:
    """A condition that has no value, whatever the call: `w` is None wherever it is used."""
    return when.ndim("w") == 1


def true() -> Condition:
    return when.ndim("x") == 2


def false() -> Condition:
    return when.ndim("x") == 3


def call(**given: Any) -> dict[str, Any]:
    """A call with an argument of every kind."""
    arguments: dict[str, Any] = {
        "x": torch.zeros(3, 4),
        "w": None,
        "dim": -1,
        "eps": 1e-5,
        "flag": True,
        "mode": "tanh",
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "sizes": [2, 64],
        "tensors": [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        "nothing": None,
    }
    return arguments | given


def evaluated(printed: str) -> Condition:
    """What the printed condition means to someone who copies it into a file."""
    return eval(printed, {"when": when, "torch": torch})


def same_op(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return opgraft.native("aten::_softmax")(self, dim, half_to_float)


def register_softmax(cond: object) -> opgraft.Override:
    return opgraft.register_op_override("aten", "_softmax", "CPU", same_op, cond=cond)  # type: ignore[arg-type]


# ------------------------------------------------------------------ the vocabulary

X34 = torch.zeros(3, 4)

HOLDS: list[tuple[Condition, dict[str, Any], bool]] = [
    (when.dtype("x", torch.float32), {}, True),
    (when.dtype("x", torch.float16), {}, False),
    (when.dtype("x", torch.float16, torch.float32), {}, True),
    (when.ndim("x") == 2, {}, True),
    (when.ndim("x") == 0, {"x": torch.tensor(1.0)}, True),
    (when.size("x", 0) == 3, {}, True),
    (when.size("x", -1) == 4, {}, True),
    (when.size("x", -2) == 3, {}, True),
    (when.size("x", 0) == 0, {"x": torch.zeros(0, 4)}, True),
    (when.size("x", when.value("dim")) == 4, {}, True),
    (when.size("x", when.value("dim")) == 3, {"dim": -2}, True),
    (when.size("x", when.value("dim")) == 4, {"dim": 2}, False),
    (when.size("x", when.value("dim") - 1) == 3, {"dim": 1}, True),
    (when.stride("x", when.value("dim")) == 4, {"dim": 0}, True),
    (when.stride("x", 0) == 4, {}, True),
    (when.stride("x", 0) == 1, {"x": X34.t()}, True),
    (when.stride("x", 0) == 0, {"x": torch.zeros(1).expand(5)}, True),
    (when.numel("x") == 12, {}, True),
    (when.numel("x") == 0, {"x": torch.zeros(0, 4)}, True),
    (when.numel("x") == 1, {"x": torch.tensor(1.0)}, True),
    (when.is_contiguous("x"), {}, True),
    (when.is_contiguous("x"), {"x": X34.t()}, False),
    (when.is_contiguous("x", torch.channels_last), {"x": torch.zeros(2, 3, 4, 5)}, False),
    (
        when.is_contiguous("x", torch.channels_last),
        {"x": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)},
        True,
    ),
    (when.aligned("x", 16), {"x": torch.zeros(8)}, True),
    (when.aligned("x", 16), {"x": torch.zeros(8)[1:]}, False),
    (when.aligned("x", 4), {"x": torch.zeros(8)[1:]}, True),
    (when.aligned("x", 16), {"x": torch.zeros(8)[4:]}, True),
    (when.requires_grad("x"), {}, False),
    (when.requires_grad("x"), {"x": torch.zeros(2, requires_grad=True)}, True),
    (when.is_none("w"), {}, True),
    (when.is_none("x"), {}, False),
    (when.is_none("nothing"), {"nothing": 0}, False),
    (when.same_dtype("x", "w"), {"w": torch.zeros(1)}, True),
    (when.same_dtype("x", "w"), {"w": torch.zeros(1).half()}, False),
    (when.same_dtype("x", "w"), {}, False),
    (when.same_device("x", "w"), {"w": torch.zeros(1)}, True),
    (when.same_device("x", "w"), {"w": torch.zeros(1, device="meta")}, False),
    (when.value("dim") == -1, {}, True),
    (when.value("eps") < 1e-4, {}, True),
    (when.value("flag") == True, {}, True),  # noqa: E712
    (when.value("mode") == "tanh", {}, True),
    (when.value("mode") != "none", {}, True),
    (when.value("dtype") == torch.float32, {}, True),
    (when.value("device") == torch.device("cpu"), {}, True),
    (when.value("layout") == torch.strided, {}, True),
    (when.value("eps") < INF, {}, True),
    (when.value("nothing") == 1, {}, False),
    (when.value("nothing") != 1, {}, False),
    (when.length("sizes") == 2, {}, True),
    (when.length("tensors") == 0, {"tensors": []}, True),
    (when.length("nothing") == 0, {}, False),
    (when.item("sizes", -1) == 64, {}, True),
    (when.item("sizes", 2) == 64, {}, False),
    (when.dtype(when.item("tensors", 1), torch.float64), {}, True),
    (when.same_dtype(when.item("tensors", 0), when.item("tensors", 1)), {}, False),
    (when.size(when.item("tensors", 0), 0) == 2, {}, True),
    (when.dtype(when.item("tensors", 9), torch.float64), {}, False),
    (when.device_capability("x") >= (8, 0), {}, False),
]


@pytest.mark.parametrize(("cond", "given", "expected"), HOLDS, ids=lambda part: repr(part)[:60])
def test_what_a_part_means(cond: Condition, given: dict[str, Any], expected: bool) -> None:
    assert cond.holds(call(**given)) is expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (when.size("x", 0) + 1, 4),
        (1 + when.size("x", 0), 4),
        (when.size("x", 0) - 5, -2),
        (5 - when.size("x", 0), 2),
        (when.size("x", 0) * when.size("x", 1), 12),
        (2 * when.size("x", 0), 6),
        (when.numel("x") // when.size("x", -1), 3),
        (7 // when.size("x", 0), 2),
        (when.value("dim") // 2, -1),  # as Python has it: towards minus infinity
        (when.value("dim") % 4, 3),
        (7 % when.size("x", 1), 3),
        (when.size("x", 0) - (when.size("x", 1) - 2), 1),
        (when.size("x", 0) * (when.size("x", 1) + 1), 15),
        (when.length("sizes") + when.item("sizes", 0), 4),
    ],
    ids=repr,
)
def test_arithmetic_is_pythons(number: when.Number, expected: int) -> None:
    assert (number == expected).holds(call())
    assert not (number != expected).holds(call())


@pytest.mark.parametrize("symbol", ["<", "<=", "==", "!=", ">=", ">"])
@pytest.mark.parametrize("bound", [2, 3, 4])
def test_comparisons_from_both_sides(symbol: str, bound: int) -> None:
    expected = eval(f"3 {symbol} {bound}")
    assert evaluated(f"when.size('x', 0) {symbol} {bound}").holds(call()) is expected
    mirrored = eval(f"{bound} {symbol} 3")
    assert evaluated(f"{bound} {symbol} when.size('x', 0)").holds(call()) is mirrored


def test_nothing_compares_true_with_nan() -> None:
    arguments = call(eps=float("nan"))
    assert not (when.value("eps") < 1).holds(arguments)
    assert not (when.value("eps") == when.value("eps")).holds(arguments)
    assert (when.value("eps") != when.value("eps")).holds(arguments)


@pytest.mark.gpu
def test_device_capability_on_a_gpu() -> None:
    x = torch.zeros(2, device="cuda")
    capability = torch.cuda.get_device_capability()
    assert (when.device_capability("x") == capability).holds({"x": x})
    assert not (when.device_capability("x") > capability).holds({"x": x})


# ------------------------------------------------------------------ three-valued logic


@pytest.mark.parametrize(
    ("cond", "expected"),
    [
        (undefined(), False),
        (~undefined(), False),
        (~~undefined(), False),
        (undefined() | true(), True),
        (true() | undefined(), True),
        (undefined() | false(), False),
        (~(undefined() | false()), False),
        (undefined() & true(), False),
        (~(undefined() & true()), False),
        (undefined() & false(), False),
        (~(undefined() & false()), True),
        (~(false() & undefined()), True),
        (~(true() | undefined()), False),
    ],
    ids=repr,
)
def test_undefined_is_neither_true_nor_false(cond: Condition, expected: bool) -> None:
    assert cond.holds(call()) is expected


@pytest.mark.parametrize(
    "part",
    [
        when.size("x", 2) == 1,
        when.size("x", -3) == 1,
        when.stride("x", 2) == 1,
        when.size("w", 0) == 1,
        when.dtype("w", torch.float32),
        when.is_contiguous("w"),
        when.aligned("w", 16),
        when.requires_grad("w"),
        when.same_dtype("x", "w"),
        when.same_device("x", "w"),
        when.value("nothing") == 1,
        when.length("nothing") == 0,
        when.item("sizes", 2) == 1,
        when.item("sizes", -3) == 1,
        when.item("nothing", 0) == 1,
        when.size("x", 0) // (when.size("x", 0) - 3) == 1,
        when.size("x", 0) % (when.size("x", 0) - 3) == 1,
        when.device_capability("x") >= (9, 0),
        when.size("x", 0) + when.size("w", 0) == 1,
    ],
    ids=repr,
)
def test_a_part_without_a_value_keeps_the_condition_and_its_opposite_from_holding(
    part: Condition,
) -> None:
    assert not part.holds(call())
    assert not (~part).holds(call())


def test_none_or_same_dtype_means_what_it_says() -> None:
    cond = when.is_none("w") | when.same_dtype("x", "w")
    assert cond.holds(call())
    assert cond.holds(call(w=torch.zeros(1)))
    assert not cond.holds(call(w=torch.zeros(1).half()))


@pytest.mark.parametrize(
    ("cond", "given"),
    [
        (when.value("eps") < 1, {"eps": 1j}),
        (when.value("eps") >= 1, {"eps": "text"}),
        (when.value("mode") <= 3, {}),
    ],
    ids=repr,
)
def test_a_value_without_an_order_declines_instead_of_raising(
    cond: Condition, given: dict[str, Any]
) -> None:
    assert not cond.holds(call(**given))
    assert not (~cond).holds(call(**given))


def test_a_complex_scalar_against_a_bound_reaches_the_native_kernel() -> None:
    override = opgraft.register_op_override(
        "aten",
        "add.Tensor",
        "CPU",
        lambda self, other, *, alpha: self + other,
        cond=when.value("alpha") <= 1,
    )
    x = torch.ones(2, dtype=torch.complex64)
    assert torch.add(x, x, alpha=1j).tolist() == [1 + 1j, 1 + 1j]
    assert (override.hits, override.misses) == (0, 1)


# ------------------------------------------------------------------ printing

PRINTED = [
    "when.dtype('x', torch.float16, torch.bfloat16) & (when.size('x', -1) <= 65536)",
    "when.is_none('w') | when.same_dtype('x', 'w') & (when.ndim('x') == 2)",
    "(when.is_none('w') | when.same_dtype('x', 'w')) & (when.ndim('x') == 2)",
    "~(when.is_none('w') | when.is_contiguous('x'))",
    "~when.is_contiguous('x', torch.channels_last)",
    "~(when.size('x', 0) == 3)",
    "when.size('x', when.value('dim')) == 4",
    "~~when.is_none('w')",
    "when.numel('x') // when.size('x', -1) >= 3",
    "when.size('x', 0) - (when.size('x', 1) - 1) == 0",
    "when.size('x', 0) - when.size('x', 1) - 1 == -2",
    "when.size('x', 0) * (when.size('x', 1) + 1) == 15",
    "when.size('x', 0) % 2 * 3 == 3",
    "when.size('x', 0) // (when.size('x', 1) // 2) == 1",
    "when.size('x', 0) - -1 == 4",
    "-1 * when.size('x', 0) == -3",
    "when.aligned('x', 16)",
    "when.requires_grad('x')",
    "when.same_device('x', 'w')",
    "when.value('dim') == -1",
    "when.value('mode') == 'tanh'",
    "when.value('flag') == True",
    "when.value('eps') < 0.001",
    "when.value('dtype') == torch.float32",
    "when.value('layout') == torch.strided",
    "when.length('sizes') == 2",
    "when.item('sizes', -1) == 64",
    "when.dtype(when.item('tensors', 0), torch.float32)",
    "when.device_capability('x') >= (9, 0)",
]


@pytest.mark.parametrize("text", PRINTED)
def test_a_condition_prints_as_it_was_written(text: str) -> None:
    assert repr(evaluated(text)) == text


@pytest.mark.parametrize(
    "cond", [cond for cond, _, _ in HOLDS] + [evaluated(text) for text in PRINTED], ids=repr
)
def test_the_printed_condition_means_the_same(cond: Condition) -> None:
    again = evaluated(repr(cond))
    assert repr(again) == repr(cond)
    assert again.holds(call()) is cond.holds(call())


@pytest.mark.parametrize("constant", [INF, -INF, torch.device("cpu"), torch.device("cuda", 1)])
def test_a_constant_without_a_literal_still_prints_as_an_expression(constant: object) -> None:
    cond = when.value("nothing") == constant
    again = evaluated(repr(cond))
    assert again.holds(call(nothing=constant))
    assert repr(again) == repr(cond)


# ------------------------------------------------------------------ naming what failed


@pytest.mark.parametrize(
    ("cond", "part", "saw"),
    [
        (when.ndim("x") == 3, "when.ndim('x') == 3", "when.ndim('x') is 2"),
        (
            true() & (when.size("x", 0) < 3) & false(),
            "when.size('x', 0) < 3",
            "when.size('x', 0) is 3",
        ),
        (
            when.size("x", 0) < when.size("x", 1) - 1,
            "when.size('x', 0) < when.size('x', 1) - 1",
            "when.size('x', 0) is 3, when.size('x', 1) - 1 is 3",
        ),
        (  # an alternative fails as a whole, and every side of it is shown
            true() & (false() | when.dtype("x", torch.float16)),
            "(when.ndim('x') == 3) | when.dtype('x', torch.float16)",
            "when.ndim('x') is 2, x is torch.float32",
        ),
        (
            ~when.dtype("x", torch.float32),
            "~when.dtype('x', torch.float32)",
            "x is torch.float32",
        ),
        (~(when.ndim("x") == 2), "~(when.ndim('x') == 2)", "when.ndim('x') is 2"),
        (when.size("w", 0) == 1, "when.size('w', 0) == 1", "w is None"),
        (when.size("x", 5) == 1, "when.size('x', 5) == 1", "x has 2 dimensions"),
        (when.is_none("x"), "when.is_none('x')", "x is given"),
        (when.requires_grad("x"), "when.requires_grad('x')", "x has requires_grad=False"),
        (when.same_dtype("x", "w"), "when.same_dtype('x', 'w')", "x is torch.float32, w is None"),
        (when.item("sizes", 7) == 1, "when.item('sizes', 7) == 1", "sizes has 2 items"),
        (
            when.size("x", 0) // (when.size("x", 0) - 3) == 1,
            "when.size('x', 0) // (when.size('x', 0) - 3) == 1",
            "when.size('x', 0) - 3 is 0",
        ),
        (
            when.dtype(when.item("tensors", 1), torch.float32),
            "when.dtype(when.item('tensors', 1), torch.float32)",
            "tensors[1] is torch.float64",
        ),
        (
            when.value("mode") == "none",
            "when.value('mode') == 'none'",
            "when.value('mode') is tanh",
        ),
    ],
    ids=lambda part: repr(part)[:60],
)
def test_the_first_part_that_failed_is_named_with_what_it_saw(
    cond: Condition, part: str, saw: str
) -> None:
    failure = cond.failure(call())
    assert failure is not None
    assert (failure.part, failure.saw) == (part, saw)
    assert str(failure) == f"{part} ({saw})"


def test_a_condition_that_holds_has_no_failure() -> None:
    assert (true() & ~false() & (false() | true())).failure(call()) is None


def test_the_part_inside_a_negated_conjunction_is_shown_with_all_its_values() -> None:
    failure = (~(true() & when.is_none("w"))).failure(call())
    assert failure is not None
    assert failure.saw == "when.ndim('x') is 2, w is None"


def test_misalignment_and_layout_say_by_how_much() -> None:
    failure = when.aligned("x", 16).failure({"x": torch.zeros(8)[1:]})
    assert failure is not None and failure.saw == "x is 4 bytes off"
    failure = when.is_contiguous("x").failure({"x": X34.t()})
    assert failure is not None and failure.saw == "x has sizes (4, 3) and strides (1, 4)"


# ------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: true() and false(), "& | ~"),
        (lambda: true() or false(), "& | ~"),
        (lambda: not true(), "& | ~"),
        (lambda: 1 <= when.ndim("x") <= 3, "chained"),
        (lambda: when.numel("x") / 2, "use //"),
        (lambda: 2 / when.numel("x"), "use //"),
        (lambda: when.value("eps") == None, "is_none"),  # noqa: E711
        (lambda: when.value("eps") != None, "is_none"),  # noqa: E711
        (lambda: when.size("x", 0) + 0.5, "integers"),
        (lambda: when.size("x", 0) + True, "integers"),
        (lambda: when.size("x", 0) < "3", "a number"),
        (lambda: when.size("x", 0) == torch.float32, "a number"),
        (lambda: when.size("x", 0) == (1, 2), "a number"),
        (lambda: when.device_capability("x") >= 9, "(9, 0)"),
        (lambda: when.value("mode") < "tanh", "compare it with a number"),
        (lambda: when.value("sizes") == [1], "not a value"),
        (lambda: when.ndim("x") == true(), "a number is compared with a number"),
        (lambda: true() & when.ndim("x"), "no condition"),
        (lambda: when.numel("x") >= 4 & true(), "4 is no condition: & | ~ combine"),
        (lambda: when.numel("x") > 1 & when.numel("x") < 3, "1 is no condition"),
        (lambda: when.numel("x") > 1 | true(), "1 is no condition"),
        (lambda: when.numel("x") & true(), "when.numel('x') is no condition"),
        (lambda: true() | 1, "no condition"),
        (lambda: true() & when.ndim("x") == 2, "no condition"),
        (lambda: when.dtype("x"), "one or more torch.dtype"),
        (lambda: when.dtype("x", "float32"), "one or more torch.dtype"),
        (lambda: when.aligned("x", 0), "positive"),
        (lambda: when.same_dtype("x"), "two tensors or more"),
    ],
)
def test_misuse_says_how_to_write_it(build: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    ("lib_op", "cond", "message"),
    [
        ("_softmax", when.dtype("input", torch.half), "has no argument 'input'; it has self, dim"),
        ("_softmax", when.dtype("dim", torch.half), "'dim' is a int, not a tensor"),
        ("_softmax", when.value("self") == 1, "metadata only"),
        ("_softmax", when.item("self", 0) == 1, "not a list"),
        ("_softmax", when.length("dim") == 1, "not a list"),
        ("_softmax", when.is_none("wrong"), "has no argument 'wrong'"),
        ("_softmax", ~(when.is_none("self") | when.is_none("wrong")), "has no argument 'wrong'"),
        ("_softmax", when.value("half_to_float") + 1 == 2, "not an integer"),
        ("cat", when.dtype("tensors", torch.half), "when.item('tensors', 0)"),
        ("cat", when.value("tensors") == 1, "metadata only"),
        ("_fused_rms_norm", when.value("normalized_shape") == 1, "when.item or when.length"),
        ("_fused_rms_norm", when.dtype(when.item("normalized_shape", 0), torch.half), "not a tens"),
        ("_fused_rms_norm", when.value("eps") + 1 == 2, "not an integer"),
        ("_softmax", when.size("self", 0), "compare it with one"),
    ],
    ids=lambda part: repr(part)[:60],
)
def test_a_condition_that_does_not_fit_the_schema_fails_at_registration(
    lib_op: str, cond: object, message: str
) -> None:
    with pytest.raises(opgraft.RegistrationError) as caught:
        opgraft.register_op_override("aten", lib_op, "CPU", lambda *args: None, cond=cond)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert opgraft.overrides() == []


@pytest.mark.parametrize(
    ("lib_op", "build"),
    [
        ("cat", lambda: when.item("tensors", 0) == 3),
        ("_softmax", lambda: when.size("self", when.is_contiguous("self")) == 3),  # type: ignore[arg-type]
        ("_softmax", lambda: when.size("self", when.value("half_to_float")) == 3),
        ("_softmax", lambda: when.size("self", when.value("axis")) == 3),
        ("_softmax", lambda: when.size("self", 1.5) == 3),  # type: ignore[arg-type]
        ("_softmax", lambda: when.size("self", 0) < when.device_capability("self")),
        ("gelu", lambda: when.value("approximate") < 3),
        ("gelu", lambda: when.value("approximate") == 3),
        ("_softmax", lambda: when.is_contiguous("self", torch.preserve_format)),
    ],
    ids=[
        "a tensor item where a number is wanted",
        "a condition as a dimension",
        "a flag as a dimension",
        "a dimension of no such argument",
        "a fractional dimension",
        "a size against a capability",
        "an order on a string",
        "a string against a number",
        "a memory format that is none",
    ],
)
def test_a_condition_that_could_never_be_evaluated_fails_before_any_call(
    lib_op: str, build: Callable[[], Condition]
) -> None:
    # Either when it is written or when it is registered; in a call it would break the program.
    with pytest.raises((TypeError, opgraft.RegistrationError)):
        opgraft.register_op_override("aten", lib_op, "CPU", lambda *a, **k: None, cond=build())


# ------------------------------------------------------------------ fake tensors and symbols


def symbolic(*shape: int) -> tuple[torch.Tensor, ShapeEnv]:
    """A FakeTensor all of whose sizes are symbols."""
    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    with FakeTensorMode(shape_env=environment) as mode:
        pass
    return mode.from_tensor(torch.zeros(shape), symbolic_context=context), environment


@pytest.mark.parametrize("cond", [cond for cond, given, _ in HOLDS if not given], ids=repr)
def test_fake_tensors_decide_as_real_ones(cond: Condition) -> None:
    real = call()
    mode = FakeTensorMode()
    fake = call(
        x=mode.from_tensor(real["x"]), tensors=[mode.from_tensor(each) for each in real["tensors"]]
    )
    assert cond.holds(fake) is cond.holds(real)


def test_alignment_of_a_fake_tensor_is_that_of_its_offset() -> None:
    base = FakeTensorMode().from_tensor(torch.zeros(8))
    assert when.aligned("x", 16).holds({"x": base})
    assert not when.aligned("x", 16).holds({"x": base[1:]})
    failure = when.aligned("x", 16).failure({"x": base[1:]})
    assert failure is not None and failure.saw == "x is 4 bytes off"


def test_a_symbolic_size_is_decided_and_guarded() -> None:
    x, environment = symbolic(6, 16)
    cond = (when.size("x", 0) <= 8) & (when.numel("x") // when.size("x", -1) >= 4)
    assert cond.holds({"x": x}) is True
    assert len(environment.guards) >= 2
    failure = (when.size("x", 1) < 9).failure({"x": x})
    assert failure is not None and failure.part == "when.size('x', 1) < 9"


def test_what_does_not_depend_on_a_size_guards_nothing() -> None:
    x, environment = symbolic(6, 16)
    cond = when.dtype("x", torch.float32) & (when.ndim("x") == 2) & ~when.requires_grad("x")
    assert cond.holds({"x": x})
    assert not (cond & (when.size("x", 5) == 1)).holds({"x": x})
    assert not environment.guards


def test_the_same_condition_decides_each_call_of_a_dynamic_graph() -> None:
    override = register_softmax(when.size("self", 0) % 2 == 0)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    for rows in (4, 5, 6, 7, 8):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(model(x), torch.exp(x) / torch.exp(x).sum(-1, keepdim=True))
    assert (override.hits, override.misses) == (3, 2)


def test_symbols_of_a_traced_function() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    seen: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append((when.size("x", 0) * 2 == when.size("x", 1)).holds({"x": x}))
        return x.relu()

    make_fx(traced, tracing_mode="symbolic")(torch.zeros(3, 6))
    assert seen == [True]


# ------------------------------------------------------------------ looking changes nothing


@pytest.mark.parametrize(
    "cond",
    [
        when.aligned("x", 16),
        when.is_contiguous("x") & (when.numel("x") == 8) & when.dtype("x", torch.float32),
    ],
    ids=repr,
)
def test_a_copy_on_write_tensor_stays_unmaterialised(cond: Condition) -> None:
    lazy = torch._lazy_clone(torch.zeros(8))
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]
    assert cond.holds({"x": lazy})
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def test_alignment_of_a_copy_on_write_view() -> None:
    lazy = torch._lazy_clone(torch.zeros(8))[1:]
    assert not when.aligned("x", 16).holds({"x": lazy})
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ through a real call


@pytest.mark.parametrize(
    ("cond", "hits"),
    [
        (when.size("self", -1) >= 4, 1),
        (when.size("self", -1) >= 5, 0),
        (when.value("dim") == -1, 0),  # the dispatcher hands on what `torch.softmax` normalised
        (when.value("dim") == 1, 1),
        (when.size("self", when.value("dim")) == 4, 1),
        (when.size("self", when.value("dim")) == 3, 0),
        (when.size("self", when.value("dim") - 1) == 3, 1),
        (when.size("self", when.value("dim") + 1) != 3, 0),
        (when.stride("self", when.value("dim")) == 1, 1),
        (when.stride("self", when.value("dim") - 1) > 4, 0),
        (when.value("half_to_float") == False, 1),  # noqa: E712
        (when.requires_grad("self"), 0),
    ],
    ids=repr,
)
def test_a_registered_condition_routes(
    cond: Condition, hits: int, device: torch.device, dispatch_key: str
) -> None:
    override = opgraft.register_op_override("aten", "_softmax", dispatch_key, same_op, cond=cond)
    x = torch.randn(3, 4, device=device)
    torch.softmax(x, 1)
    assert (override.hits, override.misses) == (hits, 1 - hits)


def test_requires_grad_is_seen_below_autograd() -> None:
    override = register_softmax(when.requires_grad("self"))
    torch.softmax(torch.randn(2, 3, requires_grad=True), -1).sum().backward()
    assert (override.hits, override.misses) == (1, 0)


def test_a_condition_sees_defaults_and_numbers_as_tensors() -> None:
    override = opgraft.register_op_override(
        "aten",
        "add.Tensor",
        "CPU",
        lambda self, other, *, alpha: opgraft.native("aten::add.Tensor")(self, other, alpha=alpha),
        cond=(when.value("alpha") == 1)
        & when.dtype("other", torch.float64)
        & (when.ndim("other") == 0),
    )
    x = torch.ones(2)
    torch.add(x, 2.5)  # the number arrives as a 0-dim float64 tensor, alpha as its default
    torch.add(x, 2.5, alpha=2)
    torch.add(x, x)
    assert (override.hits, override.misses) == (1, 2)


@pytest.mark.parametrize("given", [-2, -1, 0, 1])
@pytest.mark.parametrize("wanted", [-2, -1, 0, 1])
def test_a_dimension_is_the_same_from_either_end(given: int, wanted: int) -> None:
    arguments = {"x": torch.zeros(3, 4), "d": given}
    dimension = when.dim("d", "x")
    assert (dimension == wanted).holds(arguments) is (given % 2 == wanted % 2)
    assert (dimension != wanted).holds(arguments) is (given % 2 != wanted % 2)
    assert (dimension >= wanted).holds(arguments) is (given % 2 >= wanted % 2)
    assert (dimension < wanted).holds(arguments) is (given % 2 < wanted % 2)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_the_routers_know_a_dimension_from_either_end(dim: int) -> None:
    def impl(self, dim, *, dtype=None):
        return opgraft.native("aten::cumsum")(self, dim, dtype=dtype)

    override = opgraft.register_op_override("aten", "cumsum", "CPU", impl, cond=when.dim() == -1)
    torch.ones(2, 3).cumsum(dim)
    assert override.hits == (dim % 2 == 1)
    override.remove()


def test_a_parameter_that_has_no_sizes_yet_has_the_size_that_torch_says() -> None:
    """Its shape is an error, as of nn.LazyLinear's weight before the first call."""
    weight = torch.nn.UninitializedParameter()
    assert (when.size("x", 0) == weight.size(0)).holds({"x": weight})
    assert not (when.size("x", 0) >= 99).holds({"x": weight})
