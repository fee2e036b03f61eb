"""Opaque ops: the ops of the `opgraft` namespace, which stand for overridden ops in graphs.

A compiler that sees `aten::_softmax` decomposes and fuses it, or calls its kernel without the
dispatcher. A compiler that sees `opgraft::aten___softmax` knows nothing about it and calls it. The
opaque op has the schema and the tags of the op that it stands for, and the same outputs for fake
tensors. At run time its kernel redispatches to that op, at the same dispatch key, where the router
decides.

An opaque op is defined when a graph first needs it, or when it is looked up in `torch.ops.opgraft`
by name: by code from a compiler's cache, or by an exported program that is being loaded. Defining
an op changes nothing that another thread may be dispatching on.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from opgraft.core import loader
from opgraft.errors import RegistrationError
from opgraft.ops.bypass import bypassing
from opgraft.ops.schema import Call, Op, current, resolve_all
from opgraft.pt2 import NAMESPACE, decomposition, randomness
from opgraft.router import composite, outputs

# These tags describe the op's place in torch's own set of ops, not what it computes.
_CATALOGUE_TAGS = frozenset({"core", "generated"})
# With these tags, Inductor counts on fusing the op, and while it compiles it runs the op on one
# element of a constant.
_FUSION_TAGS = frozenset({"pointwise", "reduction"})
_LAYOUT_TAGS = frozenset(
    {
        "flexible_layout",
        "needs_contiguous_strides",
        "needs_exact_strides",
        "needs_fixed_stride_order",
    }
)

# Their outputs are contiguous; torch's meta function, a decomposition, says otherwise.
_CONTIGUOUS = frozenset({"aten::isin"})
# Their outputs are contiguous or channels last, which depends on the device. Torch's meta function
# does not know that, so Inductor would refuse the result.
_STRIDES_UNKNOWN = frozenset({"aten::roll", "aten::max_unpool2d", "aten::max_unpool3d"})
# Their output is in an argument's memory, which their schema does not say; some say it by their
# name. Compilers and functionalization know each of them. They know no opaque op, and would reuse
# the argument's memory.
_UNDECLARED_ALIASES = frozenset(
    {
        *("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_split_with_sizes"),
        *("aten::lift", "aten::dequantize"),
        *("aten::channel_shuffle", "aten::native_channel_shuffle"),  # of one group, on CUDA
    }
)

_lock = threading.RLock()
_defined: dict[Op, OpOverload] = {}
#: The signature of each opaque op, by its name with the overload. It stays when its op is defined
#: anew, because compiled graphs may call it.
_signatures: dict[str, str] = {}
#: Whether an op is being defined: torch itself then looks up its name.
_defining = False
#: It is kept alive: torch drops definitions together with their library.
_library: torch.library.Library | None = None


def name_of(op: Op) -> str:
    """The name of an op's opaque op, without namespace and overload.

    Two ops never have the same name: a `_` in the namespace is written `_u`, so that the op's own
    name begins after the first `__`.

    >>> from opgraft.ops.schema import resolve
    >>> name_of(resolve("aten::_softmax"))
    'aten___softmax'
    """
    namespace, _, name = op.overload._schema.name.partition("::")
    return f"{namespace.replace('_', '_u')}__{name}"


def origin_of(name: str) -> tuple[str, str] | None:
    """The namespace and the name of the op that an opaque op stands for; None for any other name.

    >>> origin_of("aten___softmax")
    ('aten', '_softmax')
    """
    namespace, _, origin = name.partition("__")
    if not namespace or not origin or re.search("_(?!u)", namespace):
        return None
    return namespace.replace("_u", "_"), origin


def op_for(op: Op) -> OpOverload:
    """The opaque op that stands for `op`, defined on first use.

    Args:
        op: an op that can have an opaque op; see :func:`obstacle`.

    Returns:
        The overload, with the same overload name.
    """
    with _lock:
        if op not in _defined:
            schema = op.overload._schema
            _define_overloads(*schema.name.split("::"))
        return _defined[op]


def define(op: Op) -> None:
    """Define the opaque op that stands for `op`, if it can have one."""
    if obstacle(op) is None:
        op_for(op)


def obstacle(op: Op) -> str | None:
    """Why an op cannot have an opaque op; None where it can."""
    schema = op.overload._schema
    try:
        torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return "it is an op of TorchScript, which the dispatcher does not know"
    if op.writes:
        return "it writes to its arguments, and compilers functionalize it first"
    if any(returned.alias_info is not None for returned in op.returns):
        return "its output shares memory with an argument"
    if schema.name in _UNDECLARED_ALIASES:
        return "its output shares memory with an argument, which its schema does not say"
    if schema.name in _STRIDES_UNKNOWN:
        return "torch does not know the strides of its output"
    if _signatures.get(_name_with_overload(op), signature_of(op)) != signature_of(op):
        return "it was defined anew with another schema, and earlier graphs call its opaque op"
    return None


def _define_overloads(namespace: str, name: str) -> None:
    """Define an opaque op for every overload that can have one: a packet has all its overloads."""
    global _defining
    ops = [op for op in resolve_all(namespace, name) if obstacle(op) is None]
    _defining = True
    try:
        for op in ops:
            _define(op)
        for op in ops:
            opaque = getattr(getattr(torch.ops.opgraft, name_of(op)), op.overload._overloadname)
            _count_flops_as(opaque, op)
            randomness.forbid_merging(opaque, op)
            _defined[op] = opaque
    finally:
        _defining = False


def _define(op: Op) -> None:
    name = _name_with_overload(op)
    if name in _signatures:
        return
    library = _get_library()
    library.define(name + signature_of(op), tags=_tags(op))
    _implement(library, name, op)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_of(op), lib=library)
    _signatures[name] = signature_of(op)


def _name_with_overload(op: Op) -> str:
    overload = op.overload._schema.overload_name
    return name_of(op) + (f".{overload}" if overload else "")


def _get_library() -> torch.library.Library:
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
    # Kernels are written for the strides that they get in eager mode.
    tags["needs_exact_strides"] = torch.Tag.needs_exact_strides
    if op.is_random:
        tags["nondeterministic_seeded"] = torch.Tag.nondeterministic_seeded
    return list(tags.values())


def _implement(library: torch.library.Library, name: str, op: Op) -> None:
    core = loader.in_use()
    if core is not None:
        schema = op.overload._schema
        opaque, _, overload = name.partition(".")
        core.forward_op(f"{NAMESPACE}::{opaque}", overload, schema.name, schema.overload_name)
        return

    # torch's object of an op that was defined anew is a pointer to freed memory.

    def at_backend(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        now = current(op)
        call = now.bind(args, kwargs)
        return _without_aliases(call, now.overload.redispatch(keyset, *call.args, **call.kwargs))

    def at_autograd(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        now = current(op)
        call = now.bind(args, kwargs)
        # A composite op runs at the autograd key, once no mode or transform is left that must see
        # the opaque op.
        runs_composite = is_composite(now) and composite.is_backend_next(keyset)
        if runs_composite or composite.must_differentiate(call):
            return _without_aliases(call, now.overload(*call.args, **call.kwargs))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            rest = composite.below_autograd(keyset)
            return op_for(now).redispatch(rest, *call.args, **call.kwargs)

    def when_batched(*args: Any, **kwargs: Any) -> Any:
        return current(op).overload(*args, **kwargs)

    library.impl(name, at_backend, "CompositeExplicitAutograd", with_keyset=True)
    library.impl(name, at_autograd, "Autograd", with_keyset=True)
    library.impl(name, when_batched, "FuncTorchBatched")


def is_composite(op: Op) -> bool:
    """Whether an op's native kernel may be one for all backends, that calls other ops."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name, "CompositeImplicitAutograd")


def _without_aliases(call: Call, result: Any) -> Any:
    """The results of an op's native kernel, without aliases of an argument.

    A composite op may return its argument without saying so in its schema. A compiler believes the
    schema, and reuses the argument's memory.
    """
    if not is_composite(call.op):
        return result
    if isinstance(result, (tuple, list)):
        return type(result)(_without_aliases(call, each) for each in result)
    if isinstance(result, torch.Tensor) and outputs.shares_memory(result, call.tensors()):
        with bypassing("aten::clone"):  # opgraft's own call does not go to overrides of clone
            return result.clone()
    return result


def shares_undeclared_memory(call: Call, result: Any) -> bool:
    """Whether a result of an op, or an item of one, is in an argument's memory, or another's."""
    seen = list(call.tensors())
    for each in tree_leaves(result):
        if isinstance(each, torch.Tensor):
            if outputs.shares_memory(each, seen):
                return True
            seen.append(each)
    return False


def _fake_of(op: Op) -> Any:
    def fake(*args: Any, **kwargs: Any) -> Any:
        # That which was defined first may be freed: see `_implement`.
        now = current(op)
        if not is_composite(now):
            return now.overload(*args, **kwargs)
        with decomposition.Decomposing():
            result = now.overload(*args, **kwargs)
        return _without_aliases(now.bind(args, kwargs), result)

    def contiguous(*args: Any, **kwargs: Any) -> Any:
        return torch.empty_like(fake(*args, **kwargs), memory_format=torch.contiguous_format)

    return contiguous if op.overload._schema.name in _CONTIGUOUS else fake


def _count_flops_as(opaque: OpOverload, op: Op) -> None:
    """Register the op's flop formula: an activation-memory budget weighs recomputation by it."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(op.overload._overloadpacket)
    if formula is not None:
        flop_registry.setdefault(opaque._overloadpacket, formula)


def define_by_name(name: str) -> None:
    """Define the opaque op of that name, if the name is one; defined ops do not change."""
    origin = origin_of(name)
    with _lock:
        if origin is not None and not _defining:
            with contextlib.suppress(AttributeError, RegistrationError):  # no such op
                _define_overloads(*origin)
