"""Ops of the `opgraft` namespace: an overridden op as a compiled graph holds it.

A compiler that sees `aten::_softmax` decomposes and fuses it, or calls its kernel around the
dispatcher; one that sees `opgraft::aten___softmax` knows nothing about it and calls it. It has the
schema and the tags of the op that it stands for, the same outputs for fake tensors, and at run time
it is that op: its kernel hands the call on, at the same dispatch key, where the router decides.

Ops are defined when a graph first needs one, or when somebody asks `torch.ops.opgraft` for one by
name: code from a compiler's cache, or an exported program that is being loaded. Defining an op
changes nothing that another thread may be dispatching on.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

import torch
from torch._ops import OpOverload

from opgraft.core import loader
from opgraft.errors import RegistrationError
from opgraft.ops.bypass import bypassing
from opgraft.ops.schema import Call, Op, resolve_all
from opgraft.pt2 import NAMESPACE, randomness
from opgraft.router import composite, outputs

# Said of the op in torch's own catalogue, not of what it computes.
_CATALOGUE_TAGS = frozenset({"core", "generated"})
# Taken by Inductor as leave to run the op, while it compiles, on one element of what is constant,
# and to count on fusing it.
_FUSION_TAGS = frozenset({"pointwise", "reduction"})
_LAYOUT_TAGS = frozenset(
    {
        "flexible_layout",
        "needs_contiguous_strides",
        "needs_exact_strides",
        "needs_fixed_stride_order",
    }
)

# What they return is contiguous, and torch's meta of them, a decomposition, says otherwise.
_CONTIGUOUS = frozenset({"aten::isin"})
# What they return is contiguous, or channels last, by the device, of which torch's meta of them
# knows nothing: Inductor would refuse the result.
_STRIDES_UNKNOWN = frozenset({"aten::roll"})

_lock = threading.RLock()
_defined: dict[Op, OpOverload] = {}
#: torch itself asks for the name of an op that is being defined.
_defining = False
#: Kept for good: a definition goes with its library.
_library: torch.library.Library | None = None


def name_of(op: Op) -> str:
    """The name, without namespace and overload, under which a compiled graph holds an op.

    Two ops never share one: a `_` of the namespace is written `_u`, so that the first `__` is where
    the op's own name begins.

    >>> from opgraft.ops.schema import resolve
    >>> name_of(resolve("aten::_softmax"))
    'aten___softmax'
    """
    namespace, _, name = op.overload._schema.name.partition("::")
    return f"{namespace.replace('_', '_u')}__{name}"


def origin_of(name: str) -> tuple[str, str] | None:
    """The namespace and the name that :func:`name_of` was made of; None for any other name.

    >>> origin_of("aten___softmax")
    ('aten', '_softmax')
    """
    namespace, _, origin = name.partition("__")
    if not namespace or not origin or re.search("_(?!u)", namespace):
        return None
    return namespace.replace("_u", "_"), origin


def op_for(op: Op) -> OpOverload:
    """The op of the `opgraft` namespace that stands for `op`, defined on first use.

    Args:
        op: without arguments that it writes to and without outputs that alias them; see
            :func:`why_not`.

    Returns:
        The overload, with the same overload name.
    """
    with _lock:
        if op not in _defined:
            schema = op.overload._schema
            _define_overloads(*schema.name.split("::"))
        return _defined[op]


def define(op: Op) -> None:
    """Define the op that stands for `op`, if it can have one."""
    if why_not(op) is None:
        op_for(op)


def why_not(op: Op) -> str | None:
    """Why an op cannot have an opaque one; None where it can."""
    schema = op.overload._schema
    try:
        torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return "it is TorchScript's own, and no dispatcher knows it"
    if op.writes:
        return "it writes to its arguments, and compilers make it a functional op first"
    if any(returned.alias_info is not None for returned in op.returns):
        return "its output shares memory with an argument"
    if schema.name in _STRIDES_UNKNOWN:
        return "torch does not know the strides of its output"
    return None


def _define_overloads(namespace: str, name: str) -> None:
    """Define every overload of an op that can have one: who asks for the packet finds them all."""
    global _defining
    ops = [op for op in resolve_all(namespace, name) if why_not(op) is None]
    _defining = True
    try:
        for op in ops:
            _define(op)
        for op in ops:
            opaque = getattr(getattr(torch.ops.opgraft, name_of(op)), op.overload._overloadname)
            _count_flops_as(opaque, op)
            randomness.declare(opaque, op)
            _defined[op] = opaque
    finally:
        _defining = False


def _define(op: Op) -> None:
    overload = op.overload._schema.overload_name
    name = name_of(op) + (f".{overload}" if overload else "")
    library = _our_library()
    library.define(name + signature_of(op), tags=_tags(op))
    _implement(library, name, op)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_of(op), lib=library)


def _our_library() -> torch.library.Library:
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    return _library


def signature_of(op: Op) -> str:
    """The arguments and returns of an op's schema, as text."""
    text = str(op.overload._schema)
    return text[text.index("(") :]


def _tags(op: Op) -> list[torch.Tag]:
    dropped = _CATALOGUE_TAGS | _FUSION_TAGS | _LAYOUT_TAGS
    tags = {tag.name: tag for tag in op.overload.tags if tag.name not in dropped}
    tags["pt2_compliant_tag"] = torch.Tag.pt2_compliant_tag
    # Kernels are written for the strides that eager hands them.
    tags["needs_exact_strides"] = torch.Tag.needs_exact_strides
    if randomness.is_random(op):
        tags["nondeterministic_seeded"] = torch.Tag.nondeterministic_seeded
    return list(tags.values())


def _implement(library: torch.library.Library, name: str, op: Op) -> None:
    core = loader.in_use()
    if core is not None:
        schema = op.overload._schema
        opaque, _, overload = name.partition(".")
        core.forward_op(f"{NAMESPACE}::{opaque}", overload, schema.name, schema.overload_name)
        return

    def at_backend(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = op.bind(args, kwargs)
        return _fresh(call, op.overload.redispatch(keyset, *call.args, **call.kwargs))

    def at_autograd(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = op.bind(args, kwargs)
        # A composite op runs at the autograd key, once nobody is there any more who wants to see
        # the op that stands for it.
        at_last = _is_composite(op) and composite.is_backend_next(keyset)
        if at_last or composite.must_differentiate(call):
            return _fresh(call, op.overload(*call.args, **call.kwargs))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            rest = composite.below_autograd(keyset)
            return op_for(op).redispatch(rest, *call.args, **call.kwargs)

    def when_batched(*args: Any, **kwargs: Any) -> Any:
        return op.overload(*args, **kwargs)

    library.impl(name, at_backend, "CompositeExplicitAutograd", with_keyset=True)
    library.impl(name, at_autograd, "Autograd", with_keyset=True)
    library.impl(name, when_batched, "FuncTorchBatched")


def _is_composite(op: Op) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name, "CompositeImplicitAutograd")


def _fresh(call: Call, result: Any) -> Any:
    """The results of an op's native kernel, none in the memory of an argument.

    A composite op may return its argument without saying so in its schema. A compiler takes the op
    that stands for it by its word, and uses the argument's memory again.
    """
    if not _is_composite(call.op):
        return result
    if isinstance(result, tuple):
        return tuple(_fresh(call, each) for each in result)
    if isinstance(result, torch.Tensor) and outputs.shares_memory(result, call.tensors()):
        with bypassing("aten::clone"):  # ours, and no call for its overrides
            return result.clone()
    return result


def _fake_of(op: Op) -> Any:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return op.overload(*args, **kwargs)

    def contiguous(*args: Any, **kwargs: Any) -> Any:
        return torch.empty_like(fake(*args, **kwargs), memory_format=torch.contiguous_format)

    return contiguous if op.overload._schema.name in _CONTIGUOUS else fake


def _count_flops_as(opaque: OpOverload, op: Op) -> None:
    """Let an activation-memory budget see what recomputing the op costs."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(op.overload._overloadpacket)
    if formula is not None:
        flop_registry.setdefault(opaque._overloadpacket, formula)


def define_by_name(name: str) -> None:
    """Define what an opaque op's name stands for, if it does; what is defined stays as it is."""
    origin = origin_of(name)
    with _lock:
        if origin is not None and not _defining:
            with contextlib.suppress(AttributeError, RegistrationError):  # no such op
                _define_overloads(*origin)
