"""`opgraft list`: packs and overrides, and whether they are on."""

from __future__ import annotations

from typing import Any

import click

from opgraft import spelling, tuning
from opgraft.cli import facts, output

#: A pack's state as the table prints it; the JSON has the state itself.
_STATES = {
    "active": "active",
    "inactive": "not active",
    "unmet": "left out",
    "failed": "failed",
}


def command(op: str | None, pack: str | None, dsl: str | None, as_json: bool) -> None:
    """Print the installed packs and the overrides that are registered."""
    found: dict[str, Any] = {
        "versions": facts.versions(),
        "core": facts.core(),
        "tables": tuning.digest(),
        "packs": [row for row in facts.pack_rows() if pack in (None, row["name"])],
        "overrides": [
            row
            for row in facts.override_rows()
            if op in (None, row["op"], row["op"].partition(".")[0])
            and pack in (None, row["pack"])
            and dsl in (None, row["dsl"])
        ],
    }
    if pack is not None and not found["packs"] and not found["overrides"]:
        raise click.UsageError(f"there is no pack {pack!r}: {spelling.problem_with('pack', pack)}")
    for key, value in (("op", op), ("dsl", dsl)):
        if value is not None and not found["overrides"] and (text := _unknown(key, value)):
            raise click.UsageError(text)
    if as_json:
        output.print_json(found)
        return
    console = output.console()
    packs, overrides = found["packs"], found["overrides"]
    selects = any(each is not None for each in (op, pack, dsl))
    if packs and (pack is not None or not selects):
        _print_packs(packs)
    elif not packs:
        console.print("No pack is installed: pip install opgraft-kernels, or see opgraft new")
    if overrides:
        _print_overrides(overrides)
    elif selects:
        console.print("No registered override matches.")
    versions = (f"{name} {version or '-'}" for name, version in found["versions"].items())
    console.print("  ".join(versions))


def _unknown(key: str, value: str) -> str:
    """What is wrong with a value that matches nothing here; empty if nothing is known to be."""
    if key == "op" and spelling.overloads(value):
        return ""
    return spelling.problem_with(key, value)


def _print_packs(rows: list[dict[str, Any]]) -> None:
    output.print_table(
        "Packs",
        ["pack", "version", "state", "overrides", "because"],
        [
            [row["name"], row["version"], _STATES[row["state"]], row["overrides"], row["reason"]]
            for row in rows
        ],
        prose=["because"],
    )


def _print_overrides(rows: list[dict[str, Any]]) -> None:
    output.print_table(
        "Overrides, in the order in which they are asked",
        [
            *("op", "key", "override", "DSL", "owner", "priority", "state", "kernels", "table"),
            "because",
        ],
        [
            [
                row["op"],
                row["dispatch_key"],
                row["name"],
                row["dsl"],
                row["pack"] or "user",
                row["priority"] or None,
                "on" if row["enabled"] else "off",
                row["kernels"],
                ", ".join(map(facts.table_text, row["tables"])),
                row["reason"],
            ]
            for row in rows
        ],
        prose=["because"],
    )
