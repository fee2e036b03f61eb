"""The environment variables, read in one place.

`OPGRAFT_DISABLE`  `1`: nothing is installed at all; or a list of what starts disabled:
                   `triton,aten::bmm,pack:NAME,name:NAME`.
`OPGRAFT_PACKS`    which packs `import torch` activates: `opgraft-kernels,mine`; `none` or an empty
                   value: none of them; not set: every pack that is installed.
`OPGRAFT_STRICT`   `1`: an impl's exception is always raised, whatever its `on_error`.
`OPGRAFT_PLANS`    `0`: nothing is recorded as a launch plan; every hit runs in Python.
`OPGRAFT_WHEN_NOT_READY`  `native` or `wait`: what a call does whose kernels are not compiled yet,
                   whatever overrides were registered with.
`OPGRAFT_KERNELS`  a bundle's folder, whose kernels and launch plans are loaded first; `none`: no
                   launch plan is taken from another process, nor kept for one.
`OPGRAFT_READY`    `bundle`: only what that bundle holds is routed to a kernel.
`OPGRAFT_ROUTER`   `python`: route in Python even where the compiled core is there.
`OPGRAFT_CACHE`    the cache, instead of `~/.cache/opgraft`: cores that `opgraft build` compiled,
                   kernels and launch plans, the user's tables, and what tables decide.
`OPGRAFT_TABLES`   where the user's crossover tables are, instead of `~/.cache/opgraft/tables`.
`OPGRAFT_SHADOW`   `0.01`: compare this share of hits with native; `0.01:quarantine` or `:raise`
                   says what becomes of a difference.
`OPGRAFT_COMPILE_TIMEOUT`  seconds that a call waits for its impl to be compiled, before it gets the
                   native kernel; not set: as long as it takes.
`OPGRAFT_LOG`      a `logging` level for the `opgraft` logger: `debug`, `info`, ...
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import cache

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
#: What becomes of a difference that shadow mode finds.
_ON_MISMATCH = frozenset({"log", "quarantine", "raise"})


def installs_nothing() -> bool:
    """Whether `OPGRAFT_DISABLE=1` disables opgraft as a whole."""
    return os.environ.get("OPGRAFT_DISABLE", "").strip().lower() in _TRUE


def initially_disabled() -> list[dict[str, str]]:
    """The list form of `OPGRAFT_DISABLE` as keyword arguments for `opgraft.disable`.

    >>> import os
    >>> os.environ["OPGRAFT_DISABLE"] = "triton, aten::bmm, pack:fast-norms"
    >>> initially_disabled()
    [{'dsl': 'triton'}, {'op': 'aten::bmm'}, {'pack': 'fast-norms'}]
    >>> del os.environ["OPGRAFT_DISABLE"]
    """
    if installs_nothing():
        return []
    words = [word.strip() for word in os.environ.get("OPGRAFT_DISABLE", "").split(",")]
    return [_selector(word) for word in words if word and word.lower() not in _FALSE]


def _selector(word: str) -> dict[str, str]:
    key, colon, rest = word.partition(":")
    if colon and key in ("pack", "name") and not rest.startswith(":"):
        return {key: rest}
    return {"op": word.removesuffix(".default")} if "::" in word else {"dsl": word}


def selector_text(key: str, word: str) -> str:
    """A selector's keyword and value as `OPGRAFT_DISABLE` writes them.

    >>> selector_text("pack", "fast-norms"), selector_text("dsl", "triton")
    ('pack:fast-norms', 'triton')
    """
    return f"{key}:{word}" if key in ("pack", "name") else word


def packs() -> frozenset[str] | None:
    """The packs that `OPGRAFT_PACKS` names; None (all of them) if it is not set.

    >>> import os
    >>> os.environ["OPGRAFT_PACKS"] = "opgraft-kernels, mine"
    >>> sorted(packs())
    ['mine', 'opgraft-kernels']
    >>> os.environ["OPGRAFT_PACKS"] = "none"
    >>> packs()
    frozenset()
    >>> del os.environ["OPGRAFT_PACKS"]
    """
    value = os.environ.get("OPGRAFT_PACKS")
    if value is None:
        return None
    names = {word.strip() for word in value.split(",")} - {""}
    return frozenset(names - {"none"})


def wants_python_router() -> bool:
    """Whether `OPGRAFT_ROUTER=python` asks for the Python router even if there is a core."""
    return os.environ.get("OPGRAFT_ROUTER", "").strip().lower() == "python"


def interprets_triton() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU: `TRITON_INTERPRET=1`."""
    # The values that Triton accepts.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def plans() -> bool:
    """Whether launch plans are recorded: always, unless `OPGRAFT_PLANS=0`."""
    return os.environ.get("OPGRAFT_PLANS", "").strip().lower() not in _FALSE


def when_not_ready() -> str | None:
    """What `OPGRAFT_WHEN_NOT_READY` says; None where it says nothing that makes sense."""
    return _usable("OPGRAFT_WHEN_NOT_READY") or None


def shares_plans() -> bool:
    """Whether launch plans are kept for others, and loaded: unless `OPGRAFT_KERNELS=none`."""
    return os.environ.get("OPGRAFT_KERNELS", "").strip().lower() != "none"


def needs_bundle() -> bool:
    """Whether `OPGRAFT_READY=bundle` routes to a kernel what a bundle holds, and nothing else."""
    return _usable("OPGRAFT_READY") == "bundle"


def strict() -> bool:
    """Whether `OPGRAFT_STRICT` turns every fallback into an error."""
    return os.environ.get("OPGRAFT_STRICT", "").strip().lower() in _TRUE


def shadow() -> tuple[float, str] | None:
    """The fraction of hits and the action on a difference that `OPGRAFT_SHADOW` sets.

    >>> import os
    >>> os.environ["OPGRAFT_SHADOW"] = "0.01:quarantine"
    >>> shadow()
    (0.01, 'quarantine')
    >>> del os.environ["OPGRAFT_SHADOW"]
    """
    rate, _, on_mismatch = _usable("OPGRAFT_SHADOW").partition(":")
    return (float(rate), on_mismatch or "log") if rate and float(rate) else None


def tables() -> str | None:
    """The folder that `OPGRAFT_TABLES` names; None if it is not set."""
    return os.environ.get("OPGRAFT_TABLES", "").strip() or None


def compile_timeout() -> float | None:
    """The seconds of `OPGRAFT_COMPILE_TIMEOUT`; None if it is not set or invalid.

    >>> import os
    >>> os.environ["OPGRAFT_COMPILE_TIMEOUT"] = "30"
    >>> compile_timeout()
    30.0
    >>> del os.environ["OPGRAFT_COMPILE_TIMEOUT"]
    """
    text = _usable("OPGRAFT_COMPILE_TIMEOUT")
    return float(text) if text else None


def _is_switch(value: str) -> bool:
    return value in _TRUE or value in _FALSE


def _is_duration(value: str) -> bool:
    return _number(value) >= 0


def _is_shadow(value: str) -> bool:
    rate, colon, on_mismatch = value.partition(":")
    return 0 <= _number(rate) <= 1 and (not colon or on_mismatch in _ON_MISMATCH)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_folder(value: str) -> bool:
    path = os.path.expanduser(value)
    return os.path.isdir(path) or not os.path.exists(path)  # it is made when it is needed


#: Whether a variable's value means something, and what to give else.
_MEANINGFUL: dict[str, tuple[Callable[[str], bool], str]] = {
    "OPGRAFT_STRICT": (_is_switch, "1 or 0"),
    "OPGRAFT_PLANS": (_is_switch, "0 or 1"),
    "OPGRAFT_BUILD_CORE": (frozenset({"0", "1"}).__contains__, "0 or 1"),
    "OPGRAFT_ROUTER": (frozenset({"python"}).__contains__, "python, its only value"),
    "OPGRAFT_WHEN_NOT_READY": (frozenset({"native", "wait"}).__contains__, "native or wait"),
    "OPGRAFT_READY": (frozenset({"bundle"}).__contains__, "bundle, its only value"),
    "OPGRAFT_COMPILE_TIMEOUT": (_is_duration, "a number of seconds"),
    "OPGRAFT_SHADOW": (
        _is_shadow,
        "a share of hits from 0 to 1, and :log, :quarantine or :raise after it",
    ),
    "OPGRAFT_LOG": (_LEVELS.__contains__, "debug, info, warning, error or critical"),
    "OPGRAFT_TABLES": (_is_folder, "a folder"),
    "OPGRAFT_CACHE": (_is_folder, "a folder"),
}


def values_without_meaning() -> list[str]:
    """A text for each variable whose value means nothing, and what to give instead."""
    return [text for variable in _MEANINGFUL if (text := _problem_with(variable))]


def _problem_with(variable: str) -> str:
    """What is wrong with the variable's value; empty if nothing is."""
    means_something, allowed = _MEANINGFUL[variable]
    value = os.environ.get(variable, "").strip()
    # The case of a folder's name counts.
    if not value or means_something(value) or means_something(value.lower()):
        return ""
    if means_something is _is_folder:
        return f"{variable}={value} cannot be used: it is a file; give {allowed}"
    return f"{variable}={value} is ignored: give {allowed}"


def _usable(variable: str) -> str:
    """The variable's value in lower case; empty, with a warning, where it means nothing."""
    if text := _problem_with(variable):
        warn_once(text)
        return ""
    return os.environ.get(variable, "").strip().lower()


def has_any() -> bool:
    """Whether any environment variable begins with `OPGRAFT_`."""
    return any(name.startswith("OPGRAFT_") for name in os.environ)


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per message."""
    logging.getLogger("opgraft").warning("%s", message)


def configure_logging() -> None:
    """Apply `OPGRAFT_LOG` to the `opgraft` logger. An unknown level is logged, not raised."""
    level = _usable("OPGRAFT_LOG")
    if not level:
        return
    logger = logging.getLogger("opgraft")
    logger.setLevel(level.upper())
    if not logging.getLogger().handlers and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
