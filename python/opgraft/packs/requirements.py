"""What a pack needs, and what of it is not met here.

A pack says it as every distribution does, by its dependencies, so that pip checks the same when it
installs. opgraft checks again before it loads the pack, as torch or a DSL may have changed since:

- `dependencies` (`torch>=2.11`): where one is not met, nothing of the pack is imported;
- an extra that is named as a DSL (`triton = ["triton>=3.6"]`): where it is not met, the pack's
  overrides of that DSL are registered as unavailable. So is a DSL among the `dependencies`.
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
        name: of a distribution, normalised.
        specifier: of its version; may be empty.
        extra: that asks for it; empty: always.
    """

    def __init__(self, name: str, specifier: str, extra: str) -> None:
        self.name = name
        self.specifier = specifier
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.name}{self.specifier}"


def unmet(requires: Iterable[str]) -> list[str]:
    """What of a pack's `dependencies` is not met, DSLs aside.

    Args:
        requires: the lines of `Requires-Dist`.

    Returns:
        A text each, such as `"needs torch>=9, and this is 2.13.0"`.

    >>> unmet(["torch>=2.11", 'triton>=99; extra == "triton"'])
    []
    """
    needed = (each for each in _applying(requires) if not each.extra and not _dsl(each.name))
    return list(filter(None, map(_problem, needed)))


def unmet_for_dsl(requires: Iterable[str], dsl: str) -> list[str]:
    """What a pack's overrides of one DSL need that is not met.

    Args:
        requires: the lines of `Requires-Dist`.
        dsl: what the overrides say as `dsl=`.

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
    if not meets(version, requirement.specifier):
        return f"needs {requirement}, and this is {version}"
    return None


def _installed(name: str) -> str | None:
    """The version of a distribution; None where there is none."""
    if name == "torch":  # its metadata would be read from disk, and may be another build's
        return str(torch.__version__)
    known = dsls.find(_dsl(name) or "")
    if known is not None:
        # Importable without metadata, as from a source tree: nothing says that it does not fit.
        return known.version() or ("" if known.available() else None)
    return distributions.version(name)


def _dsl(name: str) -> str | None:
    """The DSL that a distribution is."""
    return next((dsl.name for dsl in dsls.KNOWN if name in dsl.distributions), None)


def _normal(name: str) -> str:
    """A name of a distribution or an extra, as names are compared."""
    return name.lower().replace("_", "-").replace(".", "-")


# ------------------------------------------------------------------ reading a requirement
#
# `packaging` reads them all, but takes 8 ms to import, of the 15 that packs may add to
# `import torch`. So the plain ones, which nearly all packs have, are read here: a name, numbers
# compared, at most an extra. tests/test_pack_requirements.py holds the two against each other.


def _applying(lines: Iterable[str], extra: str = "") -> Iterator[Requirement]:
    for line in lines:
        plain = _plain(line)
        if plain is None:
            yield from _with_packaging(line, _normal(extra))
        else:
            yield plain


def _plain(line: str) -> Requirement | None:
    head, _, marker = line.partition(";")
    extra = _plain_extra(marker.strip())
    if extra is None or "@" in head:
        return None
    end = next((i for i, c in enumerate(head) if c not in _NAME), len(head))
    rest = head[end:].strip()
    if rest.startswith("["):  # extras of what is required: metadata does not say which are there
        rest = rest.partition("]")[2].strip()
    return Requirement(_normal(head[:end]), rest.strip("()").replace(" ", ""), _normal(extra))


_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def _plain_extra(marker: str) -> str | None:
    """The extra of a marker that asks for nothing else; None for any other marker."""
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


def meets(version: str, specifier: str) -> bool:
    """Whether a version is one that a specifier allows; a pre-release that is there counts.

    >>> meets("2.13.0+cpu", ">=2.11,<3"), meets("2.15.0a0+git12", "~=2.11"), meets("3.7", "")
    (True, True, True)
    """
    if not specifier or not version:
        return True
    answers = [_meets_plain(version, clause) for clause in specifier.split(",")]
    if None not in answers:
        return all(answers)
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _meets_plain(version: str, clause: str) -> bool | None:
    """Whether released numbers compare as they should; None for anything that is more than that."""
    symbol = clause[:2] if clause[1:2] == "=" else clause[:1]
    # A local version ("+cpu") does not count, unless it is asked for.
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
