"""What distributions say about themselves, read without what makes that slow.

`importlib.metadata` parses a distribution's whole metadata, description included, with a package
for e-mail that takes milliseconds to import. What opgraft wants to know stands in the first lines.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

__all__ = ["headers", "version"]


def headers(distribution: metadata.Distribution) -> dict[str, list[str]]:
    """The name, version and requirements of a distribution, and what else it says in one line.

    Returns:
        The values by the header's name in lower case, `"requires-dist"` for one.

    >>> headers(metadata.distribution("torch"))["name"]
    ['torch']
    """
    text = distribution.read_text("METADATA")
    if text is None:  # an .egg-info has it in files of its own, which importlib puts together
        return {
            "name": [distribution.metadata["Name"]],
            "version": [distribution.version],
            "requires-dist": list(distribution.requires or []),
        }
    found: dict[str, list[str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.lower(), []).append(value.strip())
    return found


@cache
def version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed, or says none.

    >>> version("no-such-distribution")
    """
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: not a name
        return None
    return next(iter(headers(distribution).get("version", [])), None)
