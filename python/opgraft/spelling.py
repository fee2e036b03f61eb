"""Words that switch something off and match nothing: a warning with the nearest name.

A rule obeys what is registered later, so a word that matches nothing now may be right. What can be
known is told at once: which variables there are, DSLs that opgraft knows, packs that are installed,
dispatch keys, ops of `aten`. Of the rest, a word is told of that is nearly the name of something
that is registered; and at the process's end one of `OPGRAFT_DISABLE` that matched nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from opgraft.base import env

if TYPE_CHECKING:
    from opgraft.registry import Selector

log = logging.getLogger(__name__)

#: Every variable that opgraft reads, those of a build too.
VARIABLES = (
    *("OPGRAFT_DISABLE", "OPGRAFT_PACKS", "OPGRAFT_STRICT", "OPGRAFT_PLANS", "OPGRAFT_ROUTER"),
    *(
        "OPGRAFT_CACHE",
        "OPGRAFT_SHADOW",
        "OPGRAFT_COMPILE_TIMEOUT",
        "OPGRAFT_LOG",
        "OPGRAFT_WHEN_NOT_READY",
    ),
    *("OPGRAFT_BUILD_CORE", "OPGRAFT_TORCH_HEADERS"),
)
# Of benchmarks and tests, and of whoever else names variables so.
_OF_OTHERS = ("OPGRAFT_TEST_", "OPGRAFT_STRESS")


def check_environment() -> None:
    """Warn of what is known to be misspelt in the environment, once. Never raises."""
    try:
        for text in environment():
            env.warn_once(text)
        if env.initially_disabled():
            _watch()
    except Exception as error:  # it would end the user's `import torch`
        log.debug("the environment is not checked", exc_info=error)


def environment() -> list[str]:
    """What is known to be misspelt in the environment, by now; a text each."""
    found = [
        f"{name} is no variable of opgraft's{hint(name, VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("OPGRAFT_") and name not in VARIABLES and not name.startswith(_OF_OTHERS)
    ]
    router = os.environ.get("OPGRAFT_ROUTER", "").strip()
    if router and router.lower() != "python":
        found.append(
            f"OPGRAFT_ROUTER={router} is ignored: python is what it may say"
            f"{hint(router.lower(), ('python',))}"
        )
    for keywords in env.initially_disabled():
        (key, word), *_ = keywords.items()
        if text := misspelt(key, word):
            found.append(
                f"OPGRAFT_DISABLE={env.selector_text(key, word)} switches nothing off: {text}"
            )
    return found


def misspelt(key: str, word: str) -> str:
    """What is wrong with a selector's word, as far as it is known; empty where nothing is."""
    return _CHECKS[key](word)


def check_selector(selector: Selector, verb: str) -> None:
    """Warn whoever called `opgraft.disable`, `enable` or `disabled` of a word that is misspelt."""
    for key, word in selector.given().items():
        if text := misspelt(key, word):
            from opgraft.errors import warn_caller

            warn_caller(f"opgraft.{verb}({key}={word!r}) matches nothing: {text}")


def overloads(name: str) -> list[str]:
    """The ops of a name without its overload, such as `aten::mul`: there are others of it.

    >>> overloads("aten::mul")[0]
    'aten::mul.Scalar'
    """
    return sorted(op for op in _ops() if op.partition(".")[0] == name)


# ------------------------------------------------------------------------- what a word may be


def _dsl(word: str) -> str:
    from opgraft import dsl as dsls

    known = [each.name for each in dsls.KNOWN]
    labels = {label for label in _registered("dsl") if label}
    if word in known or word in labels:
        return ""
    if near := hint(word, {*known, *labels}):
        return f"no override is of a DSL {word!r}{near}"
    # A word that is no DSL's is taken for one by OPGRAFT_DISABLE, whatever was meant.
    if word in _registered("name"):
        return f"{word!r} is an override's name; did you mean name:{word}?"
    if _is_op(f"aten::{word}"):
        return f"{word!r} is an op; did you mean aten::{word}?"
    if word in _packs():
        return f"{word!r} is a pack; did you mean pack:{word}?"
    return ""


def _op(word: str) -> str:
    namespace, _, symbol = word.partition("::")
    if not symbol and (_is_op(f"aten::{word}") or overloads(f"aten::{word}")):
        return f"{word!r} has no namespace; did you mean aten::{word}?"
    if word in _registered("op") or _is_op(word):
        return ""
    ops = _ops()
    if namespace != "aten" and not any(op.startswith(f"{namespace}::") for op in ops):
        return ""  # of a library that is not imported yet
    if whole := overloads(word):  # aten::mul is aten::mul.Tensor, aten::mul.Scalar, ...
        return f"{word} has no overload without a name; name one of {', '.join(whole)}"
    return f"there is no op {word}{hint(word, ops)}"


def _dispatch_key(word: str) -> str:
    from opgraft.ops.dispatch_keys import BACKEND_KEYS

    return "" if word in BACKEND_KEYS else f"it is no backend's key{hint(word, BACKEND_KEYS)}"


def _pack(word: str) -> str:
    if word in _packs() or word in _registered("pack"):
        return ""
    return f"no pack of that name is installed{hint(word, _packs())}"


def _name(word: str) -> str:
    names = _registered("name")
    if word in names or not (near := hint(word, names)):
        return ""
    return f"no override of that name is registered{near}"


_CHECKS: dict[str, Callable[[str], str]] = {
    "dsl": _dsl,
    "op": _op,
    "dispatch_key": _dispatch_key,
    "pack": _pack,
    "name": _name,
}


def hint(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where something that is known is spelt nearly so."""
    import difflib

    by_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), by_case, n=1, cutoff=0.7)
    return f"; did you mean {by_case[near[0]]}?" if near else ""


def _packs() -> list[str]:
    from opgraft.packs import discovery

    return list(discovery.installed())


def _registered(attribute: str) -> set[str]:
    """What overrides that are registered have; nothing is activated to find out."""
    module = sys.modules.get("opgraft.registry")
    registry = getattr(module, "registry", None)  # absent while the module is imported
    chains = list(registry._chains.values()) if registry is not None else []
    return {getattr(override, attribute) for chain in chains for override in chain.members}


def _is_op(name: str) -> bool:
    import torch

    try:
        return bool(torch._C._dispatch_has_kernel(name))
    except RuntimeError:  # no word that an op can have for a name
        return False


def _ops() -> list[str]:
    import torch

    return list(torch._C._dispatch_get_all_op_names())


# ------------------------------------------------------------------------- at the process's end


@cache
def _watch() -> None:
    atexit.register(_tell_what_matched_nothing)


def _tell_what_matched_nothing() -> None:
    """Warn of words in OPGRAFT_DISABLE that nothing which this process registered has."""
    registry = getattr(sys.modules.get("opgraft.registry"), "registry", None)
    if registry is None or env.installs_nothing() or not registry.ever_registered("op"):
        return
    for keywords in env.initially_disabled():
        (key, word), *_ = keywords.items()
        is_known = (key == "dsl" and word in ("triton", "cutedsl")) or misspelt(key, word)
        if key in ("dsl", "name") and not is_known and word not in registry.ever_registered(key):
            env.warn_once(
                f"OPGRAFT_DISABLE={env.selector_text(key, word)} switched nothing off: no override "
                f"of this process has that {'DSL' if key == 'dsl' else 'name'}"
            )
