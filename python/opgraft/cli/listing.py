"""`opgraft list`: packs and overrides, and whether they are on."""

from __future__ import annotations

from typing import Any

import click

from opgraft.cli import facts, output

#: How a pack's state reads; the JSON has the bare word.
_STATES = {
    "active": "active",
    "inactive": "not active",
    "unmet": "left out",
    "failed": "failed",
}


@click.command("list")
@output.json_option
def command(as_json: bool) -> None:
    """List the packs that are installed, and the overrides that `import torch` brings here."""
    found: dict[str, Any] = {
        "versions": facts.versions(),
        "core": facts.core(),
        "packs": facts.pack_rows(),
        "overrides": facts.override_rows(),
    }
    if as_json:
        output.print_json(found)
        return
    console = output.console()
    packs, overrides = found["packs"], found["overrides"]
    if packs:
        console.print(_pack_table(packs))
    else:
        console.print("No pack is installed: pip install opgraft-kernels, or see opgraft new")
    if overrides:
        console.print(_override_table(overrides))
    versions = (f"{name} {version or '-'}" for name, version in found["versions"].items())
    console.print("  ".join(versions))


def _pack_table(rows: list[dict[str, Any]]) -> Any:
    return output.table(
        "Packs",
        ["pack", "version", "state", "overrides", "because"],
        [
            [row["name"], row["version"], _STATES[row["state"]], row["overrides"], row["reason"]]
            for row in rows
        ],
    )


def _override_table(rows: list[dict[str, Any]]) -> Any:
    return output.table(
        "Overrides, in the order in which they are asked",
        ["op", "key", "override", "DSL", "owner", "priority", "state", "because"],
        [
            [
                row["op"],
                row["dispatch_key"],
                row["name"],
                row["dsl"],
                row["pack"] or "user",
                row["priority"] or None,
                "on" if row["enabled"] else "off",
                row["reason"],
            ]
            for row in rows
        ],
    )
