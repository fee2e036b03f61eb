"""Computes references, and the errors of results against them.

The reference is the native kernel in higher precision. An override's error against it is compared
with the native kernel's own error at the call's dtype: an override need not be more accurate than
native.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opgraft.ops.describing import dtype_name
from opgraft.ops.schema import Call, Op
from opgraft.router import threads
from opgraft.router.outputs import as_outputs
from opgraft.verification.random_values import RandomValues

_WIDER = {
    torch.float64: {torch.float32, torch.float16, torch.bfloat16, torch.float64},
    torch.float32: {torch.float16, torch.bfloat16},
}


NATIVE = "native"


@dataclass(frozen=True)
class CallResults:
    """What a call returned: one value for each output of the op."""

    outputs: tuple[Any, ...]
    what: str  #: which kernel in which precision


def native(call: Call) -> CallResults:
    """The native kernel's results, with every override off.

    Where the backend has none (a backward op that only other backends have), torch's own
    decomposition of the op stands in.

    Raises:
        Exception: what the native kernel raises.
    """
    with threads.scope(threads.EVERYTHING):
        try:
            return CallResults(as_outputs(call.op, _run(call)), NATIVE)
        except NotImplementedError:
            decomposed = _decomposition(call.op)
            if decomposed is None:
                raise
            result = decomposed(*call.args, **call.kwargs)
            return CallResults(as_outputs(call.op, result), "torch's decomposition")


def native_with_written(call: Call) -> CallResults:
    """Like :func:`native`, with the arguments that the op writes to after its outputs."""
    outcome = native(call)
    return CallResults((*outcome.outputs, *written(call)), outcome.what)


def written(call: Call) -> tuple[torch.Tensor, ...]:
    """The arguments that the call writes to, whether the op's schema says so or not."""
    return tuple(tensor for _, tensor in call.written())


def reference(call: Call) -> CallResults:
    """The results in the highest precision that the op supports, or else at the call's own.

    Args:
        call: the call, which is not changed; ops that write to their arguments get copies.
    """
    if not any(tensor.is_floating_point() for tensor in call.tensors()):
        return native_with_written(copied(call))
    known = _REFERENCES.get(call.op.name)
    if known is not None and not call.named.get("dropout_p"):
        with threads.scope(threads.EVERYTHING):
            return known(call)
    for dtype in _WIDER:
        try:
            wide = native_with_written(widened(call, dtype))
        except Exception:  # no kernel for that dtype
            continue
        return CallResults(wide.outputs, f"{wide.what} in {dtype_name(dtype)}")
    own = native_with_written(copied(call))
    return CallResults(own.outputs, f"{own.what} in the call's own precision")


def _run(call: Call) -> Any:
    return call.op.overload(*call.args, **call.kwargs)


def _decomposition(op: Op) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table

    return decomposition_table.get(op.overload)


def copied(call: Call, *, contiguous: bool = False) -> Call:
    """The call with copies of its tensors; `contiguous` makes them contiguous."""
    layout = torch.contiguous_format if contiguous else torch.preserve_format

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone(memory_format=layout)
        return value

    return call.changed(copy)


def widened(call: Call, dtype: torch.dtype) -> Call:
    """The call in higher precision, with copies of its tensors.

    Args:
        call: the call, which is not changed.
        dtype: `torch.float64` or `torch.float32`; tensors with this precision keep theirs.
    """
    narrow = {t.dtype for t in call.tensors() if t.is_floating_point()}

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype in _WIDER[dtype]:
                return value.detach().to(dtype, copy=True)
            if value.dtype == torch.complex64 and dtype == torch.float64:
                return value.detach().to(torch.complex128)
            return value.detach().clone()
        # `input_dtype` of a backward, `dtype` of a reduction.
        return dtype if isinstance(value, torch.dtype) and value in narrow else value

    return call.changed(cast)


def narrowed(call: Call) -> Call:
    """A float64 call in float32."""
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(narrow.get(value.dtype, value.dtype), copy=True)
        return narrow.get(value, value) if isinstance(value, torch.dtype) else value

    return call.changed(cast)


def on_host(call: Call) -> Call:
    """The call with copies of its tensors on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return call.changed(moved)


def perturbed(call: Call, seed: int) -> Call:
    """The call in float64, with values changed by up to four units in the last place of float32."""
    wide = widened(call, torch.float64)
    eps = 4 * torch.finfo(torch.float32).eps
    if all(t.dtype == torch.float64 for t in call.tensors() if t.is_floating_point()):
        eps = 4 * torch.finfo(torch.float64).eps
    rng = RandomValues(seed)

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        shift = rng.uniform(value.shape, value.device, torch.float64) * 2 - 1
        return value * (1 + eps * shift)

    return wide.changed(moved)


def _attention(call: Call) -> CallResults:
    """The output of attention by its formula; each kernel defines the other outputs itself."""
    out = _attend_by_batches(call, partial(_inputs, call))
    rest = (None,) * (len(call.op.returns) - 1)
    return CallResults((out, *rest), _BY_FORMULA)


def _attention_gradients(call: Call) -> CallResults:
    """The gradients of attention's inputs, through its formula."""
    name = "grad_out" if "grad_out" in call.named else "grad_out_"
    found = []
    for where in _batches(call):
        inputs = [t.requires_grad_() for t in _inputs(call, where)]
        with torch.enable_grad():
            out = _attend(call, where, *inputs)
        (grad,) = _wide(call, where, name)
        found.append(torch.autograd.grad(out, inputs, grad))
    rest = (None,) * (len(call.op.returns) - 3)
    return CallResults((*map(torch.cat, zip(*found, strict=True)), *rest), _BY_FORMULA)


def differentiable(call: Call) -> Any:
    """What the call of a forward op returns in float64, for autograd to differentiate.

    Raises:
        Exception: the op has no kernel for float64.
    """
    if _REFERENCES.get(call.op.name) is not _attention:
        return call.op.overload(*call.args, **call.kwargs)
    inputs = [call.named[name] for name in _INPUTS]
    return _attend_by_batches(call, lambda where: [tensor[where] for tensor in inputs])


_BY_FORMULA = "attention by its formula in float64"


_INPUTS = ("query", "key", "value")


def _attend_by_batches(
    call: Call, inputs: Callable[[slice], Sequence[torch.Tensor]]
) -> torch.Tensor:
    return torch.cat([_attend(call, where, *inputs(where)) for where in _batches(call)])


def _batches(call: Call) -> list[slice]:
    """A slice for each batch: the float64 scores of all may not fit into the device's memory."""
    query = call.named["query"]
    if query.dim() < 4 or query.size(0) == 0:  # sequences laid end to end, or nothing
        return [slice(None)]
    return [slice(index, index + 1) for index in range(query.size(0))]


def _inputs(call: Call, where: slice) -> list[torch.Tensor]:
    return _wide(call, where, *_INPUTS)


def _wide(call: Call, where: slice, *names: str) -> list[torch.Tensor]:
    return [call.named[name].detach()[where].double() for name in names]


def _attend(
    call: Call, where: slice, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    if not call.op.name.startswith("aten::_flash_attention"):
        return _attend_heads_first(call, where, query, key, value)
    # Lengths before heads.
    ends = call.named["cum_seq_q"]
    if ends is None:
        return _attend_lengths_first(call, where, query, key, value)
    pairs = zip(_parts(query, ends), _parts(key, call.named["cum_seq_k"]), strict=True)
    values = _parts(value, call.named["cum_seq_k"])
    return torch.cat(
        [
            _attend_lengths_first(call, where, q[None], k[None], v[None])[0]
            for (q, k), v in zip(pairs, values, strict=True)
        ]
    )


def _parts(packed: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    """The sequences that were laid end to end."""
    return list(packed.split(ends.diff().tolist()))


def _attend_lengths_first(call: Call, where: slice, *tensors: torch.Tensor) -> torch.Tensor:
    return _attend_heads_first(call, where, *(t.transpose(1, 2) for t in tensors)).transpose(1, 2)


def _attend_heads_first(
    call: Call, where: slice, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    named = call.named
    bias = named.get("attn_bias", named.get("attn_mask"))
    is_causal = named.get("is_causal", False)
    length_q, length_k = query.size(-2), key.size(-2)
    if is_causal and length_q != length_k and call.op.name in _BOTTOM_RIGHT:
        unseen = query.new_full((length_q, length_k), -math.inf)
        bias, is_causal = unseen.triu(length_k - length_q + 1), False
    elif bias is not None:
        bias = (bias if bias.dim() < 4 or bias.size(0) == 1 else bias[where]).double()
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(
        *(query, key, value, bias, 0.0, is_causal, None),
        scale=named.get("scale"),
        enable_gqa=query.size(1) != key.size(1),
    )
    return out


#: Ops that align the causal mask at the bottom right; the formula aligns it at the top left.
_BOTTOM_RIGHT = frozenset(
    f"aten::{op}{suffix}"
    for op, suffixes in (
        ("_scaled_dot_product_flash_attention", ("", "_backward")),
        ("_flash_attention", ("_forward", "_backward")),
    )
    for suffix in suffixes
)
_DENSE_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
)
#: References of ops without a float64 kernel, or whose kernels replace NaN by zero.
_REFERENCES: dict[str, Callable[[Call], CallResults]] = {
    **{f"aten::{op}": _attention for op in _DENSE_ATTENTION},
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_flash_attention_forward": _attention,
    **{f"aten::{op}_backward": _attention_gradients for op in _DENSE_ATTENTION},
    "aten::_flash_attention_backward": _attention_gradients,
}


# ------------------------------------------------------------------ errors


@dataclass(frozen=True)
class Error:
    """The errors of an output against the reference: the override's, and native's own."""

    mine: float
    native: float
    #: One unit in the last place of the largest value: no kernel need be more accurate.
    unit: float
    #: The change of the output when arguments are rounded; computed only if the rest fails.
    noise: float = 0.0

    @property
    def bound(self) -> float:
        """The error that the override's is compared with: native's own, or rounding if larger."""
        return max(self.native, self.unit, self.noise)

    def within(self, k: float) -> bool:
        return self.mine <= k * self.bound

    def joined(self, other: Error) -> Error:
        """The larger of each error, over several sets of values of the same call."""
        return Error(
            max(self.mine, other.mine),
            max(self.native, other.native),
            max(self.unit, other.unit),
        )

    def __str__(self) -> str:
        if self.bound == 0:
            return f"error {self.mine:.2g}, native's is 0"
        times = self.mine / self.bound
        if self.bound == self.native:
            return f"error {self.mine:.2g}, {times:.1f} times native's own {self.native:.2g}"
        return (
            f"error {self.mine:.2g}, native's own is {self.native:.2g}: {times:.1f} times what "
            f"rounding explains ({self.bound:.2g})"
        )


def errors(
    mine: torch.Tensor, native: torch.Tensor, exact: torch.Tensor
) -> tuple[Error, str | None]:
    """An output's largest error where all are finite, and how it differs elsewhere.

    Args:
        mine: the override's output; of native's dtype and shape.
        native: the native kernel's.
        exact: the reference's, in any dtype.

    Returns:
        The errors, and a problem in words or None. It is a problem if NaN or infinities are at
        places where neither the native kernel nor the reference has them (native attention replaces
        some NaN by zero). An infinity where native has NaN is no problem, nor the other way round:
        a sum over an infinity becomes one or the other by the order of its terms. (The mean of inf
        and 1 is NaN by Welford's formula, as in native LayerNorm.)
    """
    if mine.numel() == 0:
        return Error(0.0, 0.0, 0.0), None
    mine, native, exact = (_real(each.detach()) for each in (mine, native, exact.to(mine.device)))
    finite = mine.isfinite() & native.isfinite() & exact.isfinite()
    all_finite = bool(finite.all())  # as in most calls: nothing need be picked out
    problem = None if all_finite else next(_misplaced_values(mine, native, exact), None)
    if not all_finite and not bool(finite.any()):
        return Error(0.0, 0.0, 0.0), problem

    def largest(values: torch.Tensor) -> float:
        return float((values if all_finite else values[finite]).abs().max())

    eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
    wide = exact.double()
    error = Error(
        largest(mine.double() - wide),
        largest(native.double() - wide),
        max(eps * largest(wide), _subnormal_unit(mine.dtype)),
    )
    return error, problem


def _subnormal_unit(dtype: torch.dtype) -> float:
    """The unit in the last place of subnormal numbers.

    Of the wide dtypes, a GPU's kernels keep the first bits only: a product in parts of TF32 or
    bfloat16 has as many as the largest part. In float16 subnormal numbers are common, and kept.
    """
    if not dtype.is_floating_point:
        return 0.0
    info = torch.finfo(dtype)
    eps = info.eps if dtype == torch.float16 else torch.finfo(torch.bfloat16).eps
    return eps * info.smallest_normal


def _misplaced_values(
    mine: torch.Tensor, native: torch.Tensor, exact: torch.Tensor
) -> Iterator[str]:
    unlike = mine.isfinite() | native.isfinite() | ~(mine.isnan() | native.isnan())
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        ours, theirs = test(mine), test(native)
        count = int(((ours != theirs) & (ours != test(exact)) & unlike).sum())
        if count:
            yield (
                f"{name} in {int(ours.sum())} places, native has {int(theirs.sum())}, "
                f"{count} of them elsewhere"
            )


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
