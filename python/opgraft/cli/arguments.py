"""Makes the arguments of a call of an op from options: `--shape 8192x4096 --arg eps=1e-6`.

Other arguments get the schema's default. Without a default they get a value that such a call
usually has, which is shown as assumed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from opgraft import spelling
from opgraft.ops.describing import describe, device, gradient
from opgraft.ops.schema import Argument, Op


class ArgumentError(ValueError):
    """The options do not make a call; the message says which one is wrong, and what is right."""


class Given(NamedTuple):
    """An argument's value and its origin: `"given"`, `"default"` or `"assumed"`."""

    value: Any
    origin: str


class Options(NamedTuple):
    """The options of a command line.

    Attributes:
        shapes: the shapes of the op's tensors in the schema's order, as `8192x4096` or
            `8192x4096:bf16`.
        named: `name=value` for any argument.
        dtype: the dtype of tensors whose shape names none.
        device: the device of all tensors.
        requires_grad: whether floating-point tensors require grad.
        real: whether to allocate the tensors; if not, they are fake and need neither memory nor a
            device.
    """

    shapes: Sequence[str] = ()
    named: Sequence[str] = ()
    dtype: str = "float32"
    device: str = "cpu"
    requires_grad: bool = False
    real: bool = False


_ALIASES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "f16": torch.float16,
    "fp32": torch.float32,
    "f32": torch.float32,
    "fp64": torch.float64,
    "f64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}


def parse_dtype(text: str) -> torch.dtype:
    """A dtype by torch's name or a common short name.

    >>> parse_dtype("bf16"), parse_dtype("torch.float8_e4m3fn")
    (torch.bfloat16, torch.float8_e4m3fn)
    """
    found = _ALIASES.get(text.lower()) or getattr(torch, text.lower().removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"{text!r} is no dtype: give one such as float32, bf16, int64")
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes joined by `x`; `scalar` for no dimension.

    >>> parse_shape("8192x4096"), parse_shape("scalar")
    ((8192, 4096), ())
    """
    if text.lower() in ("", "scalar"):
        return ()
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(f"{text!r} is no shape: give sizes joined by x, such as 8192x4096")
    return tuple(int(part) for part in parts)


def arguments(op: Op, options: Options) -> dict[str, Given]:
    """A value for every argument of an op, by name.

    Raises:
        ArgumentError: an option does not fit the op, or is missing.
    """
    return _Builder(op, options).build()


def called_with(op: Op, given: dict[str, Given]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments of the call."""
    args = [given[argument.name].value for argument in op.positional]
    return args, {argument.name: given[argument.name].value for argument in op.keyword_only}


class _Builder:
    def __init__(self, op: Op, options: Options) -> None:
        self._op = op
        self._options = options
        self._given: dict[str, Given] = {}
        self._mode = _mode(options)

    def build(self) -> dict[str, Given]:
        texts = self._texts()
        with self._mode:
            for argument, text in texts:
                self._given[argument.name] = Given(self._parse(argument, text), "given")
            for argument in self._op.arguments:
                if argument.name not in self._given:
                    self._given[argument.name] = self._fill(argument)
        return {argument.name: self._given[argument.name] for argument in self._op.arguments}

    def _texts(self) -> list[tuple[Argument, str]]:
        """The text for each argument: the named ones, then shapes for the remaining tensors."""
        known = {argument.name: argument for argument in self._op.arguments}
        texts: dict[str, str] = {}
        for each in self._options.named:
            name, equals, text = each.partition("=")
            if not equals or name not in known:
                near = spelling.hint(name, known)
                raise ArgumentError(
                    f"--arg {each}: give NAME=VALUE, for one of {', '.join(known)}{near}"
                )
            texts[name] = text
        tensors = [a for a in self._op.arguments if a.is_tensor and a.name not in texts]
        if len(self._options.shapes) > len(tensors):
            raise ArgumentError(
                f"--shape is given {len(self._options.shapes)} times, and {self._op.name} has only "
                f"{len(tensors)} tensors without a shape: {self._op.overload._schema}"
            )
        pairs = zip(tensors, self._options.shapes, strict=False)
        texts |= {argument.name: text for argument, text in pairs}
        return [(known[name], text) for name, text in texts.items()]

    # Values that options give.

    def _parse(self, argument: Argument, text: str) -> Any:
        if text.lower() == "none":
            return None
        try:
            return self._value(argument, text)
        except (AttributeError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
            raise ArgumentError(f"{argument.name}={text}: {error}") from error

    def _value(self, argument: Argument, text: str) -> Any:
        kind = argument.kind
        if argument.is_tensor:
            return self._tensor(text)
        if "List[" in kind and "Tensor" in kind:
            return [self._tensor(each) for each in text.strip("[]").split(",")]
        if "List[int]" in kind or "List[SymInt]" in kind:
            return list(parse_shape(text)) if text[:1].isdecimal() else _literal(text)
        if "ScalarType" in kind:
            return parse_dtype(text)
        if "Device" in kind:
            return torch.device(text)
        if "str" in kind:
            return text
        if "Layout" in kind or "MemoryFormat" in kind:
            return getattr(torch, text.removeprefix("torch."))
        value = _literal(text)
        for word, types in _NUMBERS.items():
            if word in kind and "List[" not in kind and type(value) not in types:
                raise ValueError(f"{text!r} is no {word.replace('number', 'int or float')}")
        return value

    def _tensor(self, text: str) -> torch.Tensor:
        shape, _, dtype = text.strip().partition(":")
        tensor = torch.empty(
            parse_shape(shape),
            dtype=parse_dtype(dtype or self._options.dtype),
            device=self._options.device,
        )
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_(self._options.requires_grad and floating)

    # Values of the other arguments.

    def _fill(self, argument: Argument) -> Given:
        if not argument.required:
            return Given(argument.default, "default")
        if argument.kind.startswith("Optional["):
            return Given(None, "assumed")
        assumed = next((value for applies, value in _ASSUMED_VALUES if applies(argument)), None)
        if assumed is None or (self._first() is None and assumed in _FROM_FIRST):
            flag = "--shape" if argument.is_tensor else f"--arg {argument.name}=..."
            raise ArgumentError(
                f"{self._op.name} needs {argument.name} ({argument.kind}): give {flag}; "
                f"the schema is {self._op.overload._schema}"
            )
        return Given(assumed(self._first(), argument), "assumed")

    def _first(self) -> torch.Tensor | None:
        """The first tensor that has a value; assumed arguments are derived from it."""
        values = (self._given[a.name].value for a in self._op.arguments if a.name in self._given)
        flat = (each for value in values for each in _flat(value))
        return next((each for each in flat if isinstance(each, torch.Tensor)), None)


def _flat(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else (value,)


def _mode(options: Options) -> AbstractContextManager[Any]:
    if options.real:
        return nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _literal(text: str) -> Any:
    """A number, a bool, a list of them: as in Python, `true` and `false` as well."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError):  # their messages show a node of the parser
        raise ValueError(f"{text!r} is no number, no bool and no list of them") from None


#: The Python types that a number may have, by a word in the argument's type.
_NUMBERS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "SymInt": (int,),
    "float": (float, int),
    "number": (float, int, bool, complex),
}


def _like(first: Any, _: Argument) -> torch.Tensor:
    return torch.empty_like(first).requires_grad_(first.requires_grad)


def _last_size(first: Any, _: Argument) -> list[int]:
    return [first.shape[-1]]


def _dtype(first: Any, _: Argument) -> torch.dtype:
    dtype: torch.dtype = first.dtype
    return dtype


# Usual values for arguments without a default, by a test of the argument.
_ASSUMED_VALUES: tuple[tuple[Callable[[Argument], bool], Callable[[Any, Argument], Any]], ...] = (
    (lambda a: a.is_tensor, _like),
    (lambda a: a.name == "normalized_shape", _last_size),
    (lambda a: "ScalarType" in a.kind, _dtype),
    (lambda a: a.name == "dim" and a.kind == "int", lambda *_: -1),
    (lambda a: a.name in ("dim", "dims") and a.kind == "List[int]", lambda *_: [-1]),
    (lambda a: a.name == "eps", lambda *_: 1e-5),
    (lambda a: a.name in ("p", "dropout_p"), lambda *_: 0.0),
    (lambda a: a.kind == "bool", lambda *_: False),
    (lambda a: a.kind == "List[bool]", lambda _, a: [True] * a.list_size),
)
_FROM_FIRST = (_like, _last_size, _dtype)


def format_value(value: Any) -> str:
    """A value as a person would write it.

    >>> format_value(torch.empty(2, 3, dtype=torch.bfloat16)), format_value([torch.float16, None])
    ('bfloat16[2, 3] on cpu', '[float16, None]')
    """
    return describe(value, device, gradient)
