"""Finds the installed packs in the metadata of distributions, without importing them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata

from opgraft.base import distributions
from opgraft.ops.dispatch_keys import BACKEND_KEYS

log = logging.getLogger(__name__)

GROUP = "opgraft.packs"
#: With a dispatch key: the entry-point group in which a distribution declares the ops it overrides.
OPS = "opgraft.ops."


class Pack:
    """An entry point in the group `opgraft.packs`, with the distribution that declares it.

    Attributes:
        name: the entry point's name, as `pack=` and `OPGRAFT_PACKS` use it.
        entry: the entry point, which names the function that registers.
        distribution: the distribution's name.
        version: the distribution's version.
        requires: the requirements in the distribution's metadata (`Requires-Dist`).
        ops: the ops and dispatch keys that its metadata declares; None where it declares none, or
            declares them wrongly.
    """

    def __init__(
        self,
        name: str,
        entry: metadata.EntryPoint,
        distribution: str,
        version: str,
        requires: tuple[str, ...],
        ops: frozenset[tuple[str, str]] | None = None,
    ) -> None:
        self.name = name
        self.entry = entry
        self.distribution = distribution
        self.version = version
        self.requires = requires
        self.ops = ops

    @property
    def package(self) -> str:
        """The package of the function that registers."""
        return self.entry.module.partition(".")[0]

    def __str__(self) -> str:
        return f"pack {self.name!r} ({self.distribution} {self.version})"


def installed() -> list[str]:
    """The names of the packs that are installed here.

    >>> isinstance(installed(), list)
    True
    """
    return sorted({pack.name for pack in scan()})


def module_of(name: str) -> str | None:
    """The module of the function that registers an installed pack; None if there is no such pack.

    >>> module_of("no-such-pack") is None
    True
    """
    return next((pack.entry.module for pack in scan() if pack.name == name), None)


@cache
def scan() -> tuple[Pack, ...]:
    """Every installed pack, in the order of `sys.path`; the result is cached.

    Of a distribution that is installed twice, the first counts, as for `import`.
    """
    packs: list[Pack] = []
    seen: set[str] = set()
    # Not `metadata.entry_points`, which reads and parses the entry points of every distribution:
    # with 300 of them it takes half as long again.
    for distribution in metadata.distributions():
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            found = list(_packs(distribution))
        except Exception as error:  # a damaged distribution must not hide the others
            log.warning("opgraft: a distribution's metadata cannot be read: %r", error)
            continue
        if found and found[0].distribution not in seen:
            seen.add(found[0].distribution)
            packs += found
    return tuple(packs)


def _packs(distribution: metadata.Distribution) -> Iterator[Pack]:
    headers = distributions.headers(distribution)
    entries = tuple(distribution.entry_points)
    ops = _ops(entries)
    for entry in entries:
        if entry.group == GROUP:
            yield Pack(
                entry.name,
                entry,
                next(iter(headers.get("name", [])), ""),
                next(iter(headers.get("version", [])), ""),
                tuple(headers.get("requires-dist", [])),
                ops,
            )


def _ops(entries: Iterable[metadata.EntryPoint]) -> frozenset[tuple[str, str]] | None:
    """The declared ops, such as `softmax = "aten:_softmax"` in the group `opgraft.ops.CUDA`."""
    found = set()
    for entry in entries:
        if not entry.group.startswith(OPS):
            continue
        key = entry.group.removeprefix(OPS)
        namespace, _, op = entry.value.partition(":")
        if key not in BACKEND_KEYS or not namespace or not op or ":" in op:
            log.warning(
                "opgraft: the entry point %r = %r in the group %r declares no op: give it as "
                "namespace:op, in a group that ends in a backend's dispatch key, such as %sCUDA",
                *(entry.name, entry.value, entry.group, OPS),
            )
            return None
        found.add((f"{namespace}::{op.removesuffix('.default')}", key))
    return frozenset(found) or None
