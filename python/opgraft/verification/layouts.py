"""Layouts: the same tensor in another memory layout, or with values that kernels get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Layout = Callable[[torch.Tensor], Any]


def _poisoned(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Memory around a tensor, in which a wrong read or write shows."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full((count,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    value = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    return torch.full((count,), value, dtype=tensor.dtype, device=tensor.device)


def _inside(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    buffer = _poisoned(tensor, tensor.numel() + offset + 64)
    view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return _inside(tensor, 64)


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    return _inside(tensor, 1)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    buffer = _poisoned(tensor, tensor.numel() * 2).view(*tensor.shape, 2)
    return buffer[..., 0].copy_(tensor)


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    *rows, columns = tensor.shape
    buffer = _poisoned(tensor, torch.Size([*rows, columns + 3]).numel()).view(*rows, columns + 3)
    return buffer[..., :columns].copy_(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, infinities, zeros of both signs and a subnormal number among the values."""
    tiny = torch.finfo(tensor.dtype).smallest_normal / 4
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, tiny]
    flat = tensor.clone().view(-1)
    # Far from each other, so that most rows have none of them and some have one.
    for value, index in zip(
        special, range(0, flat.numel(), max(flat.numel() // 6, 1)), strict=False
    ):
        flat[index] = value
    return flat.view(tensor.shape)


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _masked(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of -inf, as a mask leaves them, and rows with one +inf, among the others."""
    out = tensor.clone()
    if tensor.ndim == 0:
        return out.fill_(-float("inf"))
    rows = out.view(-1, out.shape[-1])
    rows[::3] = -float("inf")
    rows[1::3, -1:] = float("inf")
    return out


def _scaled(tensor: torch.Tensor, largest: float) -> torch.Tensor:
    values = tensor.double()
    now = values[values.isfinite()].abs()
    scale = float(now.max()) if now.numel() else 0.0
    return (values * (largest / scale if scale else 1.0)).to(tensor.dtype)


def _large(tensor: torch.Tensor) -> torch.Tensor:
    """Values up to 1000: their exponential is infinite in every dtype."""
    return _scaled(tensor, 1000.0)


def _tiny(tensor: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers, all of them."""
    return _scaled(tensor, torch.finfo(tensor.dtype).smallest_normal / 2)


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """One value everywhere: no variance, and ties in every comparison."""
    return torch.full_like(tensor, 0.7)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Values far from zero and near each other: the difference of their squares cancels."""
    return _scaled(tensor, 1.0) + 1000.0


def _is_wide_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in INDEX_DTYPES and tensor.numel() > 0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Odd integers that no floating-point dtype of fewer bits holds."""
    return tensor * 2 + (2**53 + 1 if tensor.dtype == torch.int64 else 2**24 + 1)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _huge_strides(tensor: torch.Tensor) -> torch.Tensor:
    """More than 2**31 elements from first to last: an index in 32 bits reads elsewhere."""
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    stride = 2**31 // (tensor.shape[dim] - 1) + tensor.numel()
    rest = tensor.select(dim, 0).contiguous().stride()
    strides = [*rest[:dim], stride, *rest[dim:]]
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    # On the host, untouched pages take no memory, so nothing may fill them.
    settings: Any = torch.utils.deterministic
    filled, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    try:
        buffer = torch.empty(span, dtype=tensor.dtype, device=tensor.device)
    finally:
        settings.fill_uninitialized_memory = filled
    # LayerNorm's native backward takes such a mean for contiguous; so it reads the same each time.
    first = buffer[: tensor.numel()]
    first.fill_(math.nan) if tensor.is_floating_point() else first.zero_()
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


def _has(dims: int) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: tensor.ndim >= dims and tensor.numel() > 1


def _can_span(tensor: torch.Tensor) -> bool:
    """Whether 2**31 elements fit into the free memory."""
    if not 1 < tensor.numel() <= 2**16 or not any(size > 1 for size in tensor.shape):
        return False
    needed = 2**31 * tensor.element_size() * 1.1
    if tensor.device.type == "cuda":
        return bool(torch.cuda.mem_get_info(tensor.device)[0] > 2 * needed)
    return tensor.device.type == "cpu" and needed < _host_memory()


def _host_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            words = dict(line.split(":", 1) for line in file)
        return int(words["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


#: By name: what tensors it applies to, and how it lays one out.
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], bool], Layout]] = {
    "offset": (lambda tensor: True, _offset),
    "misaligned": (lambda tensor: True, _misaligned),
    "transposed": (_has(2), _transposed),
    "strided": (_has(1), _strided),
    "sliced": (_has(2), _sliced),
    "expanded": (_has(1), _expanded),
    "channels_last": (lambda tensor: tensor.ndim == 4 and tensor.numel() > 1, _channels_last),
    "huge-strides": (_can_span, _huge_strides),
    "special": (_is_floating, _special),
    "masked": (_is_floating, _masked),
    "large": (_is_floating, _large),
    "tiny": (_is_floating, _tiny),
    "constant": (_is_floating, _constant),
    "shifted": (_is_floating, _shifted),
    "zeros": (_is_floating, torch.zeros_like),
    "wide": (_is_wide_integer, _wide),
}
#: Layouts that set special values; new random values would undo them.
SPECIAL = ("special", "masked", "large", "tiny", "constant", "shifted", "zeros", "wide")
#: The special values without NaN or infinities, which kernels of internal ops accept.
FINITE = ("large", "tiny", "constant", "shifted", "zeros")
#: These change the values.
_OTHER_VALUES = ("expanded", *SPECIAL)
#: The dtypes of tensors that may hold indices.
INDEX_DTYPES = (torch.int32, torch.int64)
#: The prefix of layouts that put a number into the last element of an integer tensor.
_INDEX_PREFIX = "holding"


def applicable_layouts(tensor: torch.Tensor, *, other_values: bool) -> list[str]:
    """The layouts that a tensor can have, memory layouts first."""
    return [
        name
        for name, (applies, _) in LAYOUTS.items()
        if applies(tensor) and (other_values or name not in _OTHER_VALUES)
    ]


def layout_with_index(number: int) -> str:
    """The layout that puts a number into the last element of an integer tensor.

    >>> apply_layout(torch.tensor([4, 2]), layout_with_index(-1))
    tensor([ 4, -1])
    """
    return f"{_INDEX_PREFIX}{number}"


def index_in_layout(layout: str) -> int | None:
    """The number in a layout of :func:`layout_with_index`; None for any other layout."""
    return int(layout.removeprefix(_INDEX_PREFIX)) if layout.startswith(_INDEX_PREFIX) else None


def apply_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in a layout.

    Raises:
        ValueError: there is no such layout, or the tensor cannot have it.
    """
    if (number := index_in_layout(layout)) is not None:
        flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
        flat[-1] = number
        return flat.view(tensor.shape)
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    applies, lay_out = LAYOUTS[layout]
    if not applies(tensor):
        raise ValueError(f"a tensor of sizes {tuple(tensor.shape)} cannot be {layout}")
    return lay_out(tensor)  # type: ignore[no-any-return]
