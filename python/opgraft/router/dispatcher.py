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
# thread that dispatches at the same moment: that is why a router goes in once and stays.
lock = fork_safe_lock()


def register(op: Op, dispatch_key: str, kernel: Callable[..., Any]) -> torch.library.Library:
    """Put `kernel`, which takes the keyset first, at an op and key.

    Returns:
        The library that holds the registration: while it is referenced, the kernel stays.
    """
    _keep_dynamo_out(kernel)
    library = torch.library.Library(op.name.split("::", 1)[0], "IMPL")
    options: dict[str, Any] = {"with_keyset": True, "allow_override": True}
    with _without_our_own_warning():
        library.impl(op.registration_name, kernel, dispatch_key, **options)
    _let_others_register(library)
    return library


def _keep_dynamo_out(kernel: Callable[..., Any]) -> None:
    """Let Dynamo trace neither a kernel nor what it calls.

    Where a graph breaks, PyTorch's ops are called with Dynamo's frame evaluation on: it would
    compile an impl, and the router's own Python, as if they were the model's.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    code = getattr(kernel, "__code__", None) or type(kernel).__call__.__code__  # type: ignore[operator]
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def look_up_anew(op: Op) -> None:
    """Let torch's dispatcher in Python find the kernels that are there now.

    It serves traces with symbolic sizes, and remembers for each op and key which kernel is meant:
    after a compile it would go on to the composite of an op that has a kernel of ours by now.
    """
    op.overload._dispatch_cache.clear()


def _let_others_register(library: torch.library.Library) -> None:
    """Forget in torch's list of what was registered from Python that we did.

    Whoever is in that list keeps others from registering there later, unless they ask to override.
    """
    for name in list(getattr(library, "_op_impls", ())):
        library._op_impls.discard(name)
        torch.library._impls.discard(name)


def capture(op: Op, dispatch_key: str) -> tuple[Any | None, str]:
    """The kernel that an op runs at a key now, and where it was registered.

    Returns:
        The kernel and its origin; `(None, "")` where there is none.
    """
    try:
        kernel = torch.library.get_kernel(op.overload, dispatch_key)
    except RuntimeError:
        return None, ""
    match = re.search(r"debug='(.*)'", repr(kernel))
    return kernel, match[1] if match else "an unknown place"


def is_composite(op: Op, dispatch_key: str) -> bool:
    """Whether the op has no kernel of its own at the key but a CompositeImplicitAutograd one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return not has(op.name, dispatch_key) and has(op.name, "CompositeImplicitAutograd")


def top_kernel(op: Op, dispatch_key: str) -> str:
    """Where the kernel that is on top at an op and key was registered; empty if nowhere."""
    return capture(op, dispatch_key)[1]


def is_ours(origin: str) -> bool:
    """Whether a kernel's origin, as :func:`top_kernel` gives it, is a router of ours."""
    core = loader.in_use()
    ours = register.__code__.co_filename if core is None else core.ORIGIN
    return ours in origin


@contextmanager
def _without_our_own_warning() -> Iterator[None]:
    """Keep torch from warning about our registration, and only about that.

    torch warns once per process when a kernel replaces another one. Swallowing that warning would
    also swallow it for whoever comes next, so the once-flag is left alone (`set_warn_always`) and a
    filter that names this file takes our warning out. `warnings.catch_warnings` would not do: it
    swaps the filters of all threads for a while and puts old ones back.
    """
    ours = re.compile(
        rf"(?s).*new kernel: registered at {re.escape(register.__code__.co_filename)}"
    )
    rule = ("ignore", ours, UserWarning, None, 0)
    # One list throughout: another thread that leaves `catch_warnings` puts another one in place.
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
    """Keep torch from counting what it warns of meanwhile as warned of.

    For the whole process, so threads that do this at the same time share it.
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
