"""The only place that changes torch's dispatcher."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opgraft.base.locks import fork_safe_lock
from opgraft.core import loader
from opgraft.ops.schema import Op

# Held while we change the dispatcher, so that our own changes never overlap. It cannot protect a
# thread that dispatches at the same moment, so a router is registered once, and only removed
# where somebody else changes the dispatcher at that op as well, by defining it anew.
lock = fork_safe_lock()


def register(op: Op, dispatch_key: str, kernel: Callable[..., Any]) -> torch.library.Library:
    """Register `kernel`, which takes the keyset first, at an op and key.

    Returns:
        The library that holds the registration: while it is referenced, the kernel stays.
    """
    _keep_dynamo_out(kernel)
    library = torch.library.Library(op.name.split("::", 1)[0], "IMPL")
    options: dict[str, Any] = {"with_keyset": True, "allow_override": True}
    is_others = is_registered_in_python(op, dispatch_key)
    with _without_our_own_warning():
        library.impl(op.registration_name, kernel, dispatch_key, **options)
    _take_off_list(library, keep=is_others)
    return library


def is_registered_in_python(op: Op, dispatch_key: str) -> bool:
    """Whether somebody registered a kernel of an op at a key in Python. Routers do not count."""
    namespace = op.name.split("::", 1)[0]
    return f"{namespace}/{op.registration_name}/{dispatch_key}" in torch.library._impls


def _keep_dynamo_out(kernel: Callable[..., Any]) -> None:
    """Keep Dynamo from tracing a kernel and what it calls.

    After a graph break, ops run while Dynamo's frame evaluation is on. Dynamo would then compile
    impls and the router's own Python as if they were part of the model.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    code = getattr(kernel, "__code__", None) or type(kernel).__call__.__code__  # type: ignore[operator]
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def clear_dispatch_cache(op: Op) -> None:
    """Make torch's Python dispatcher look up the kernels of an op again.

    That dispatcher serves traces with symbolic sizes, and caches the kernel of each op and key.
    After a compile it would go on calling the composite kernel of an op that has a router by now.
    """
    op.overload._dispatch_cache.clear()


def _take_off_list(library: torch.library.Library, *, keep: bool) -> None:
    """Take our registration off torch's list of registrations from Python.

    An entry in that list keeps others from registering there later, unless they pass
    `allow_override`. An entry of the same name that was there before is theirs: `keep` it.
    """
    for name in list(getattr(library, "_op_impls", ())):
        library._op_impls.discard(name)
        if not keep:
            torch.library._impls.discard(name)


def capture(op: Op, dispatch_key: str) -> tuple[Any | None, str]:
    """The kernel that an op has at a key now, and where it was registered.

    Returns:
        The kernel and its origin; `(None, "")` where there is none.
    """
    try:
        kernel = torch.library.get_kernel(op.overload, dispatch_key)
    except RuntimeError:
        return None, ""
    match = re.search(r"debug='(.*)'", repr(kernel))
    return kernel, match[1] if match else "an unknown place"


def capture_for_all_backends(op: Op) -> tuple[Any | None, str]:
    """The kernel that an op has now at keys without one of their own, as :func:`capture` does."""
    return capture(op, "Undefined")


def is_composite(op: Op, dispatch_key: str) -> bool:
    """Whether the op has no kernel of its own at the key, but a CompositeImplicitAutograd one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not has(op.name, dispatch_key) and has(op.name, "CompositeImplicitAutograd")


def current_kernel_origin(op: Op, dispatch_key: str) -> str:
    """Where the kernel that an op has at a key now was registered; empty if there is none."""
    return capture(op, dispatch_key)[1]


def is_ours(origin: str) -> bool:
    """Whether a kernel's origin is that of our routers."""
    core = loader.in_use()
    ours = register.__code__.co_filename if core is None else core.ORIGIN
    return ours in origin


@contextmanager
def _without_our_own_warning() -> Iterator[None]:
    """Suppress torch's warning about our registration, and no other.

    torch warns once per process when a kernel replaces another one. If our registration used up
    that one warning, others would never see theirs. So torch is made to warn every time
    (`set_warn_always`), and a filter that names this file drops our warning.
    `warnings.catch_warnings` would not do: it replaces the filters of all threads and later
    restores old ones.
    """
    ours = re.compile(
        rf"(?s).*new kernel: registered at {re.escape(register.__code__.co_filename)}"
    )
    rule = ("ignore", ours, UserWarning, None, 0)
    # Hold on to one list: another thread that leaves `catch_warnings` replaces `warnings.filters`.
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, rule)
    try:
        with warning_always():
            yield
    finally:
        filters.remove(rule)


_always = fork_safe_lock()
_always_depth = 0
_always_before = False


@contextmanager
def warning_always() -> Iterator[None]:
    """Make torch warn every time, so that no once-per-process warning is used up.

    The setting is the whole process's, so threads that do this at the same time share it.
    """
    global _always_depth, _always_before
    with _always:
        if _always_depth == 0:
            _always_before = torch.is_warn_always_enabled()
            torch.set_warn_always(True)
        _always_depth += 1
    try:
        yield
    finally:
        with _always:
            _always_depth -= 1
            if _always_depth == 0:
                torch.set_warn_always(_always_before)
