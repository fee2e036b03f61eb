"""The metadata of distributions, read quickly.

`importlib.metadata` parses the whole metadata, description included, with the `email` package,
which takes milliseconds to import. What opgraft needs is in the first lines.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

__all__ = ["headers", "version"]


def headers(distribution: metadata.Distribution) -> dict[str, list[str]]:
    """The one-line headers of a distribution: name, version, requirements, ...

    Returns:
        The values by the header's name in lower case, `"requires-dist"` for one.

    >>> headers(metadata.distribution("torch"))["name"]
    ['torch']
    """
    text = distribution.read_text("METADATA")
    if text is None:  # an .egg-info has several files, which importlib combines
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
    """The version of a distribution; None if it is not installed, or has none.

    >>> version("no-such-distribution")
    """
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: not a name
        return None
    return next(iter(headers(distribution).get("version", [])), None)
