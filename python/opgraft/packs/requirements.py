"""Checks a pack's requirements.

A pack declares them like every distribution, as dependencies, so that pip checks the same when it
installs. opgraft checks them again before it loads the pack, because torch or a DSL may have
changed since:

- `dependencies` (`torch>=2.11`): if one is not met, nothing of the pack is imported;
- an extra with the name of a DSL (`triton = ["triton>=3.6"]`): if it is not met, the pack's
  overrides of that DSL are registered as unavailable. A DSL among the `dependencies` counts as such
  an extra.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator

import torch

from opgraft import dsl as dsls
from opgraft.base import distributions

__all__ = ["unmet", "unmet_for_dsl"]


class Requirement:
    """A line of `Requires-Dist` that applies here.

    Attributes:
        name: the normalised name of a distribution.
        specifier: the version specifier; may be empty.
        extra: the extra that it belongs to; empty if it always applies.
    """

    def __init__(self, name: str, specifier: str, extra: str) -> None:
        self.name = name
        self.specifier = specifier
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.name}{self.specifier}"


def unmet(requires: Iterable[str]) -> list[str]:
    """The `dependencies` of a pack that are not met, without DSLs.

    Args:
        requires: the lines of `Requires-Dist`.

    Returns:
        A text for each, such as `"needs torch>=9, and this is 2.13.0"`.

    >>> unmet(["torch>=2.11", 'triton>=99; extra == "triton"'])
    []
    """
    needed = (each for each in _applying(requires) if not each.extra and not _dsl(each.name))
    return list(filter(None, map(_problem, needed)))


def unmet_for_dsl(requires: Iterable[str], dsl: str) -> list[str]:
    """The requirements of a pack's overrides of one DSL that are not met.

    Args:
        requires: the lines of `Requires-Dist`.
        dsl: the overrides' `dsl=`.

    >>> unmet_for_dsl(['torch>=99; extra == "mine"'], "mine")
    ['needs torch>=99, and this is ...']
    """
    needed = (
        each
        for each in _applying(requires, dsl)
        if each.extra == _normal(dsl) or (not each.extra and _dsl(each.name) == dsl)
    )
    return list(filter(None, map(_problem, needed)))


def _problem(requirement: Requirement) -> str | None:
    version = _installed(requirement.name)
    if version is None:
        return f"needs {requirement}, which is not installed"
    if not satisfies(version, requirement.specifier):
        return f"needs {requirement}, and this is {version}"
    return None


def _installed(name: str) -> str | None:
    """The version of a distribution; None where there is none."""
    if name == "torch":  # its metadata is on disk, and may be that of another build
        return str(torch.__version__)
    known = dsls.find(_dsl(name) or "")
    if known is not None:
        # Importable without metadata, as from a source tree: then any version is accepted.
        return known.version() or ("" if known.available() else None)
    return distributions.version(name)


def _dsl(name: str) -> str | None:
    """The name of the DSL that a distribution contains; None if it contains none."""
    return next((dsl.name for dsl in dsls.KNOWN if name in dsl.distributions), None)


def _normal(name: str) -> str:
    """The name of a distribution or an extra, normalised for comparison."""
    return name.lower().replace("_", "-").replace(".", "-")


# ------------------------------------------------------------------ reading a requirement
#
# `packaging` parses all of them, but its import takes 8 of the 15 ms that packs may add to
# `import torch`. So simple ones, which nearly all packs have, are parsed here: a name, comparisons
# of numbers, at most one extra. tests/test_pack_requirements.py compares the two parsers.


def _applying(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    for line in lines:
        plain = _parse_simple(line)
        if plain is None:
            yield from _with_packaging(line, _normal(extra))
        else:
            yield plain


def _parse_simple(line: str) -> Requirement | None:
    head, _, marker = line.partition(";")
    extra = _parse_simple_extra(marker.strip())
    if extra is None or "@" in head:
        return None
    end = next((i for i, c in enumerate(head) if c not in _NAME), len(head))
    rest = head[end:].strip()
    if rest.startswith("["):  # its extras: metadata does not say which of them are installed
        rest = rest.partition("]")[2].strip()
    return Requirement(_normal(head[:end]), rest.strip("()").replace(" ", ""), _normal(extra))


_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _parse_simple_extra(marker: str) -> str | None:
    """The extra of a marker that names nothing but an extra; None for any other marker."""
    if not marker:
        return ""
    variable, _, value = marker.partition("==")
    value = value.strip()
    name = value[1:-1]
    quoted = len(value) > 2 and value[0] == value[-1] and value[0] in "'\""
    if variable.strip() != "extra" or not quoted or not _NAME.issuperset(name):
        return None
    return name


def _with_packaging(line: str, extra: str) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Parsed

    try:
        parsed = Parsed(line)
    except InvalidRequirement:
        return  # pip refuses it, too
    name, specifier = _normal(parsed.name), str(parsed.specifier)
    if parsed.marker is None or parsed.marker.evaluate({"extra": ""}):
        yield Requirement(name, specifier, "")
    elif parsed.marker.evaluate({"extra": extra}):
        yield Requirement(name, specifier, extra)


_COMPARISONS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def satisfies(version: str, specifier: str) -> bool:
    """Whether a specifier allows a version; an installed pre-release counts.

    >>> satisfies("2.13.0+cpu", ">=2.11,<3"), satisfies("2.15.0a0+git12", "~=2.11")
    (True, True)
    """
    if not specifier or not version:
        return True
    answers = [_satisfies_simple(version, clause) for clause in specifier.split(",")]
    if None not in answers:
        return all(answers)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _satisfies_simple(version: str, clause: str) -> bool | None:
    """Whether a plain release satisfies a plain comparison; None for anything else."""
    symbol = clause[:2] if clause[1:2] == "=" else clause[:1]
    # A local version ("+cpu") does not count, unless the clause names one.
    have, wanted = _release(version.partition("+")[0]), _release(clause[len(symbol) :])
    if symbol not in _COMPARISONS or have is None or wanted is None:
        return None
    return _COMPARISONS[symbol](have, wanted)


def _release(version: str) -> tuple[int, ...] | None:
    """The numbers of a plain release, without zeros at the end: "2.13" and "2.13.0" are the same.

    >>> _release("2.13.0"), _release("2.15.0a0")
    ((2, 13), None)
    """
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
