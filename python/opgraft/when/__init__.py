"""Conditions as expressions: the calls that an override is for.

```python
cond = when.dtype("input", torch.float16, torch.bfloat16) & (when.size("input", -1) <= 65536)
```

Arguments are named as the op's schema names them; `when.item("tensors", 0)` names an item of a
list. An expression is data, not code. It is checked against the schema at registration, evaluated
on real tensors, FakeTensors and SymInts, and printed as it was written. It can report which part
failed for a call.

**Three-valued logic.** A part that has no value (the size of a tensor that is `None`, a dimension
that does not exist, a division by zero, the compute capability of a CPU tensor) is *undefined*. So
is everything that depends on it, also under `~`. But `False & undefined` is false, and `True |
undefined` is true (Kleene's logic). A condition holds only if it is true. So a condition that
cannot be evaluated never lets a kernel run, and `when.is_none("w") | when.same_dtype("input", "w")`
works as expected.
"""

from __future__ import annotations

from typing import Any

import torch

from opgraft.when.nodes import (
    Condition,
    Dim,
    Expression,
    Failure,
    IsNone,
    Item,
    Length,
    Number,
    Same,
    TensorCondition,
    TensorName,
    TensorNumber,
    Value,
)

__all__ = [
    "Condition",
    "Expression",
    "Failure",
    "Number",
    "aligned",
    "device_capability",
    "dim",
    "dtype",
    "dtype_of",
    "is_contiguous",
    "is_none",
    "item",
    "itemsize",
    "length",
    "ndim",
    "numel",
    "requires_grad",
    "same_device",
    "same_dtype",
    "size",
    "stride",
    "value",
]


def dtype(tensor: TensorName, *dtypes: torch.dtype) -> Condition:
    """`tensor` has one of `dtypes`.

    >>> import torch
    >>> cond = dtype("x", torch.float16, torch.bfloat16)
    >>> cond.holds({"x": torch.ones(2, dtype=torch.float16)}), cond
    (True, when.dtype('x', torch.float16, torch.bfloat16))
    """
    if not dtypes or not all(isinstance(each, torch.dtype) for each in dtypes):
        raise TypeError(f"when.dtype({tensor!r}, ...) takes one or more torch.dtype, not {dtypes}")
    return TensorCondition("dtype", tensor, dtypes)


def dtype_of(tensor: TensorName) -> Number:
    """The dtype, as a feature of an :class:`opgraft.Crossover`; conditions ask :func:`dtype`.

    >>> import torch
    >>> dtype_of("x").evaluate({"x": torch.ones(2)})
    torch.float32
    """
    return TensorNumber("dtype_of", tensor)


def ndim(tensor: TensorName) -> Number:
    """The number of dimensions.

    >>> import torch
    >>> (ndim("x") == 2).holds({"x": torch.ones(3, 4)})
    True
    """
    return TensorNumber("ndim", tensor)


def size(tensor: TensorName, dim: int | Number) -> Number:
    """The size of dimension `dim`. A negative one counts from the end. Undefined if there is none.

    >>> import torch
    >>> print((size("x", -1) <= 64).failure({"x": torch.ones(3, 128)}))
    when.size('x', -1) <= 64 (when.size('x', -1) is 128)

    The dimension may be one that a scalar argument names:

    >>> (size("x", value("dim")) == 3).holds({"x": torch.ones(3, 128), "dim": -2})
    True
    """
    return TensorNumber("size", tensor, _dimension(dim))


def stride(tensor: TensorName, dim: int | Number) -> Number:
    """The stride of dimension `dim`, in elements; the dimension is given as in :func:`size`.

    >>> import torch
    >>> (stride("x", 0) == 1).holds({"x": torch.ones(3, 4).t()})
    True
    """
    return TensorNumber("stride", tensor, _dimension(dim))


def _dimension(dim: object) -> int | Number:
    return dim if isinstance(dim, Number) else _literal(dim)


def _literal(position: object) -> int:
    if isinstance(position, int) and not isinstance(position, bool):
        return position
    raise TypeError(f"{position!r}: a dimension or an index is written as an integer")


def numel(tensor: TensorName) -> Number:
    """The number of elements.

    >>> import torch
    >>> (numel("x") // size("x", -1) >= 3).holds({"x": torch.ones(3, 4)})
    True
    """
    return TensorNumber("numel", tensor)


def itemsize(tensor: TensorName) -> Number:
    """The bytes of an element.

    >>> import torch
    >>> (itemsize("x") * size("x", -1) % 16 == 0).holds({"x": torch.ones(3, 4)})
    True
    """
    return TensorNumber("itemsize", tensor)


def is_contiguous(
    tensor: TensorName, memory_format: torch.memory_format = torch.contiguous_format
) -> Condition:
    """`tensor` is contiguous in `memory_format`.

    >>> import torch
    >>> is_contiguous("x").holds({"x": torch.ones(3, 4).t()})
    False
    """
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    if memory_format not in formats:
        raise TypeError(f"when.is_contiguous({tensor!r}, {memory_format}) takes one of {formats}")
    options = () if memory_format == torch.contiguous_format else (memory_format,)
    return TensorCondition("is_contiguous", tensor, options)


def aligned(tensor: TensorName, alignment: int) -> Condition:
    """The first element's address is a multiple of `alignment` bytes.

    >>> import torch
    >>> aligned("x", 16).holds({"x": torch.ones(8)[1:]})
    False
    """
    if not isinstance(alignment, int) or alignment < 1:
        raise TypeError(f"when.aligned({tensor!r}, {alignment!r}) takes a positive number of bytes")
    return TensorCondition("aligned", tensor, (alignment,))


def requires_grad(tensor: TensorName) -> Condition:
    """`tensor.requires_grad`.

    >>> import torch
    >>> requires_grad("x").holds({"x": torch.ones(2, requires_grad=True)})
    True
    """
    return TensorCondition("requires_grad", tensor)


def is_none(name: str) -> Condition:
    """The argument is None.

    >>> (is_none("w") | same_dtype("x", "w")).holds({"x": None, "w": None})
    True
    """
    return IsNone(name)


def device_capability(tensor: TensorName) -> Number:
    """The CUDA compute capability of the tensor's device, to compare with `(major, minor)`.

    Undefined on every other kind of device, ROCm included.

    >>> device_capability("x") >= (9, 0)
    when.device_capability('x') >= (9, 0)
    """
    return TensorNumber("device_capability", tensor)


def same_dtype(*tensors: TensorName) -> Condition:
    """All `tensors` have one dtype; undefined if one of them is None.

    >>> import torch
    >>> print(same_dtype("x", "w").failure({"x": torch.ones(1), "w": torch.ones(1).half()}))
    when.same_dtype('x', 'w') (x is torch.float32, w is torch.float16)
    """
    return _same("dtype", tensors)


def same_device(*tensors: TensorName) -> Condition:
    """All `tensors` are on one device; undefined if one of them is None.

    >>> import torch
    >>> same_device("x", "w").holds({"x": torch.ones(1), "w": torch.ones(1)})
    True
    """
    return _same("device", tensors)


def _same(attribute: str, tensors: tuple[TensorName, ...]) -> Condition:
    if len(tensors) < 2:
        raise TypeError(f"when.same_{attribute} compares two tensors or more")
    return Same(attribute, tensors)


def value(name: str) -> Number:
    """The value of a scalar argument: a number, bool, string or dtype; undefined if it is None.

    >>> (value("dim") == -1).holds({"dim": -1}), (value("eps") < 1e-3).holds({"eps": None})
    (True, False)
    """
    return Value(name)


def dim(name: str = "dim", tensor: TensorName = "self") -> Number:
    """The dimension of `tensor` that a scalar argument names, from the start or from the end.

    For a tensor of two dimensions `x.cumsum(1)` and `x.cumsum(-1)` are the same call, but
    `value("dim") == -1` holds only for the second. Compare with a number from 0 on, or with a
    negative one, which counts from the end. Undefined for a tensor without dimensions.

    >>> import torch
    >>> last = dim("dim", "x") == -1
    >>> [last.holds({"x": torch.ones(2, 3), "dim": each}) for each in (1, -1, 0, -2)]
    [True, True, False, False]
    """
    return Dim(name, tensor)


def length(name: str) -> Number:
    """The number of items of a list argument.

    >>> (length("normalized_shape") == 1).holds({"normalized_shape": [64]})
    True
    """
    return Length(name)


def item(name: str, index: int) -> Any:
    """An item of a list argument: a number, or a tensor to name in the other functions.

    >>> import torch
    >>> (item("shape", -1) == 64).holds({"shape": [2, 64]})
    True
    >>> dtype(item("tensors", 0), torch.float32).holds({"tensors": [torch.ones(1)]})
    True
    """
    return Item(name, _literal(index))
