"""Warns of misspelt names in switches that match nothing, with the nearest correct name.

A rule applies to overrides that are registered later, so a name that matches nothing now may be
right. What is certain is reported at once: unknown environment variables, DSLs, packs, dispatch
keys and ops of `aten`. Any other name is reported if it is nearly that of something registered. At
the process's end, the names in `OPGRAFT_DISABLE` that matched nothing are reported.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from opgraft.base import env

if TYPE_CHECKING:
    from opgraft.registry import Selector

log = logging.getLogger(__name__)

#: Every environment variable that opgraft reads, also when it is built.
VARIABLES = (
    *("OPGRAFT_DISABLE", "OPGRAFT_PACKS", "OPGRAFT_STRICT", "OPGRAFT_PLANS", "OPGRAFT_ROUTER"),
    *("OPGRAFT_KERNELS", "OPGRAFT_READY"),
    *(
        "OPGRAFT_CACHE",
        "OPGRAFT_SHADOW",
        "OPGRAFT_TABLES",
        "OPGRAFT_COMPILE_TIMEOUT",
        "OPGRAFT_LOG",
        "OPGRAFT_WHEN_NOT_READY",
    ),
    *("OPGRAFT_BUILD_CORE", "OPGRAFT_TORCH_HEADERS"),
)
#: The words of `OPGRAFT_DISABLE` that were warned of, as a selector's keyword and value.
_told: set[tuple[str, str]] = set()
# Variables of benchmarks and tests.
_FOREIGN_PREFIXES = ("OPGRAFT_TEST_", "OPGRAFT_STRESS")


def check_environment() -> None:
    """Warn once of misspelt environment variables and values. Never raises."""
    try:
        for text in _misspelt_variables():
            env.warn_once(text)
        for word, text in _misspelt_words():
            env.warn_once(text)
            _told.add(word)
        if env.initially_disabled():
            _check_at_exit()
    except Exception as error:  # it would break the user's `import torch`
        log.debug("the environment is not checked", exc_info=error)


def environment() -> list[str]:
    """A text for each misspelt environment variable or value that is known by now."""
    return [*_misspelt_variables(), *(text for _, text in _misspelt_words())]


def _misspelt_variables() -> list[str]:
    unknown = [
        f"opgraft has no variable {name}{hint(name, VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("OPGRAFT_")
        and name not in VARIABLES
        and not name.startswith(_FOREIGN_PREFIXES)
    ]
    return unknown + env.values_without_meaning()


def _misspelt_words() -> Iterator[tuple[tuple[str, str], str]]:
    """Each misspelt word of `OPGRAFT_DISABLE`, as a selector's keyword and value, and a text."""
    for keywords in env.initially_disabled():
        ((key, value),) = keywords.items()
        if text := problem_with(key, value):
            written = env.selector_text(key, value)
            yield (key, value), f"OPGRAFT_DISABLE={written} switches nothing off: {text}"


def problem_with(key: str, value: str) -> str:
    """What is wrong with the value of a selector's keyword; empty if nothing is known to be."""
    return _CHECKS[key](value)


def check_selector(selector: Selector, verb: str) -> None:
    """Warn the caller of `opgraft.disable`, `enable` or `disabled` of misspelt values."""
    for key, value in selector.given().items():
        if text := problem_with(key, value):
            from opgraft.errors import warn_caller

            warn_caller(f"opgraft.{verb}({key}={value!r}) matches nothing: {text}")


def overloads(name: str) -> list[str]:
    """All overloads of an op's name without overload, such as `aten::mul`.

    >>> overloads("aten::mul")[0]
    'aten::mul.Scalar'
    """
    return sorted(op for op in _ops() if op.partition(".")[0] == name)


# ------------------------------------------------------------------------- checks by keyword


def _dsl(value: str) -> str:
    from opgraft import dsl as dsls

    known = [each.name for each in dsls.KNOWN]
    labels = {label for label in _registered("dsl") if label}
    if value in known or value in labels:
        return ""
    if near := hint(value, {*known, *labels}):
        return f"no override is of a DSL {value!r}{near}"
    # OPGRAFT_DISABLE takes a value without prefix for a DSL, whatever the user meant.
    if value in _registered("name"):
        return f"{value!r} is an override's name; did you mean name:{value}?"
    if _is_op(f"aten::{value}"):
        return f"{value!r} is an op; did you mean aten::{value}?"
    if value in _packs():
        return f"{value!r} is a pack; did you mean pack:{value}?"
    return ""


def _op(value: str) -> str:
    namespace, _, symbol = value.partition("::")
    if not symbol and (_is_op(f"aten::{value}") or overloads(f"aten::{value}")):
        return f"{value!r} has no namespace; did you mean aten::{value}?"
    if value in _registered("op") or _is_op(value):
        return ""
    ops = _ops()
    if namespace != "aten" and not any(op.startswith(f"{namespace}::") for op in ops):
        return ""  # its library may not be imported yet
    if whole := overloads(value):  # aten::mul is aten::mul.Tensor, aten::mul.Scalar, ...
        return f"{value} has no overload without a name; name one of {', '.join(whole)}"
    return f"there is no op {value}{hint(value, ops)}"


def _dispatch_key(value: str) -> str:
    from opgraft.ops.dispatch_keys import BACKEND_KEYS

    return "" if value in BACKEND_KEYS else f"it is no backend's key{hint(value, BACKEND_KEYS)}"


def _pack(value: str) -> str:
    if value in _packs() or value in _registered("pack"):
        return ""
    return f"no pack of that name is installed{hint(value, _packs())}"


def _name(value: str) -> str:
    names = _registered("name")
    if value in names or not (near := hint(value, names)):
        return ""
    return f"no override of that name is registered{near}"


_CHECKS: dict[str, Callable[[str], str]] = {
    "dsl": _dsl,
    "op": _op,
    "dispatch_key": _dispatch_key,
    "pack": _pack,
    "name": _name,
}


def hint(value: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if a known name is spelt nearly the same."""
    import difflib

    by_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(value.lower(), by_case, n=1, cutoff=0.7)
    return f"; did you mean {by_case[near[0]]}?" if near else ""


def _packs() -> list[str]:
    from opgraft.packs import discovery

    return list(discovery.installed())


def _registered(attribute: str) -> set[str]:
    """The values of an attribute of the registered overrides; this activates no pack."""
    module = sys.modules.get("opgraft.registry")
    registry = getattr(module, "registry", None)  # absent while the module is imported
    chains = list(registry._chains.values()) if registry is not None else []
    return {getattr(override, attribute) for chain in chains for override in chain.members}


def _is_op(name: str) -> bool:
    import torch

    try:
        return bool(torch._C._dispatch_has_kernel(name))
    except RuntimeError:  # not a valid op name
        return False


def _ops() -> list[str]:
    import torch

    return list(torch._C._dispatch_get_all_op_names())


# ------------------------------------------------------------------------- at the process's end


@cache
def _check_at_exit() -> None:
    atexit.register(_warn_of_unused_selectors)


def _warn_of_unused_selectors() -> None:
    """Warn of values in OPGRAFT_DISABLE that no override of this process had."""
    registry = getattr(sys.modules.get("opgraft.registry"), "registry", None)
    if registry is None or env.installs_nothing() or not registry.ever_registered("op"):
        return
    misspelt = dict(_misspelt_words())  # by now more is registered that a word may be nearly
    for keywords in env.initially_disabled():
        ((key, value),) = keywords.items()
        if (key, value) in _told or value in registry.ever_registered(key):
            continue
        is_known = key == "dsl" and value in ("triton", "cutedsl")
        if text := misspelt.get((key, value)):
            env.warn_once(text)
        elif key in ("dsl", "name") and not is_known:
            env.warn_once(
                f"OPGRAFT_DISABLE={env.selector_text(key, value)} switched nothing off: no "
                f"override of this process has that {'DSL' if key == 'dsl' else 'name'}"
            )
