"""Selectors of overrides, for `enable`, `disable` and queries, and the rules made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opgraft.errors import RegistrationError

if TYPE_CHECKING:
    from opgraft.registry.declaration import Declaration
    from opgraft.registry.override import Override


class Selector:
    """Selects the overrides that match every given keyword, for a rule or a query.

    An empty string selects those that have none: a user's own have no pack.
    """

    #: The keywords.
    KEYS = ("dsl", "op", "dispatch_key", "pack", "name")

    def __init__(
        self,
        *,
        dsl: str | None = None,
        op: str | None = None,
        dispatch_key: str | None = None,
        pack: str | None = None,
        name: str | None = None,
    ) -> None:
        self.dsl = dsl
        self.op = op
        self.dispatch_key = dispatch_key
        self.pack = pack
        self.name = name

    def matches(self, override: Override | Declaration) -> bool:
        return all((getattr(override, key) or "") == value for key, value in self.given().items())

    def covers(self, other: Selector) -> bool:
        """Whether this selector matches everything that `other` matches."""
        return self.given().items() <= other.given().items()

    def given(self) -> dict[str, str]:
        return {key: value for key, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.given().items())


class Rule:
    """An `enable` or `disable` of what a selector matches. The last rule that matches wins."""

    def __init__(self, enables: bool, selector: Selector, origin: str = "") -> None:
        self.enables = enables
        self.selector = selector
        self.origin = origin

    def __str__(self) -> str:
        verb = "enable" if self.enables else "disable"
        return self.origin or f"opgraft.{verb}({self.selector})"


def selector_from(keywords: Mapping[str, Any], *, normalise_op: Callable[[Any], str]) -> Selector:
    """A selector from a user's keywords; an op may be a name or an `OpOverload`.

    Raises:
        RegistrationError: a keyword's value is not a string.
    """
    given = {key: value for key, value in keywords.items() if value is not None}
    if "op" in given:
        given["op"] = normalise_op(given["op"])
    for key, value in given.items():
        if not isinstance(value, str):
            raise RegistrationError(f"{key}={value!r}: select overrides by a string")
    return Selector(**given)
