"""`opgraft explain`: which override would take a call, and why the others would not."""

from __future__ import annotations

from typing import Any

import click
import torch
from rich.console import Console

import opgraft
from opgraft.cli import facts, output
from opgraft.cli.arguments import (
    ArgumentError,
    Given,
    Options,
    arguments,
    called_with,
    format_value,
)
from opgraft.explanation.result import outcome_of_error
from opgraft.ops.dispatch_keys import is_built_for
from opgraft.ops.schema import resolve


def command(
    op: str,
    shapes: tuple[str, ...],
    named: tuple[str, ...],
    dtype: str,
    device: str | None,
    requires_grad: bool,
    backward: bool,
    real: bool,
    as_json: bool,
) -> None:
    """Print which override would take a call, and why the others would not."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device, real=real, backward=backward)
    options = Options(shapes, named, dtype, device, requires_grad or backward, real)
    try:
        resolved = resolve(op)
        given = arguments(resolved, options)
        args, kwargs = called_with(resolved, given)
        explanation = opgraft.explain(resolved.overload, *args, backward=backward, **kwargs)
    except (ArgumentError, opgraft.RegistrationError) as error:
        raise click.UsageError(str(error)) from error
    except Exception as error:  # out of memory, a bad --arg, whatever a cond raises
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    found = explanation.as_dict()
    found["notes"] = [*found["notes"], *_elsewhere(found, device), *_notes(torch.device(device))]
    found["call"] = {
        name: {"value": format_value(each.value), "origin": each.origin}
        for name, each in given.items()
    }
    if as_json:
        output.print_json(found)
    else:
        _print(output.console(), given, found)


def _check_device(device: str, *, real: bool, backward: bool) -> None:
    """Refuse options that need a device which is not here.

    Raises:
        click.UsageError: an option needs such a device.
    """
    try:
        key = _key(torch.device(device))
    except RuntimeError as error:
        raise click.UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error
    if not facts.has_device(key) and (real or backward):
        option = "--real allocates tensors" if real else "--backward needs torch's device threads"
        raise click.UsageError(
            f"{option}, and there is no {key} device here: leave it out, or give another --device"
        )


def _key(device: torch.device) -> str:
    return str(torch._C._dispatch_key_for_device(device.type))


def _elsewhere(found: dict[str, Any], device: str) -> list[str]:
    """Notes on other dispatch keys with overrides of the op, or of ops that it calls."""
    here = _key(torch.device(device))
    names = {found["op"], *found["others"]}
    if found["overrides"] or found["reached"]:
        return []
    keys = {o.dispatch_key for o in opgraft.overrides() if o.op in names} - {here}
    return [
        f"its overrides are at {key}, and this call is at {here}: --device {key.lower()}"
        for key in sorted(keys)
    ]


def _notes(device: torch.device) -> list[str]:
    notes = []
    key = _key(device)
    if not is_built_for(key):
        notes.append(
            f"this torch is built without {key}: conditions are evaluated as in a build with it; "
            "which ops have kernels there is not known here"
        )
    elif not facts.has_device(key):
        notes.append(f"there is no {key} device here: this is what would happen with one")
    notes += [  # the others are in the explanation's own notes
        f"pack {row['name']} is not active: {row['reason']}"
        for row in facts.pack_rows()
        if row["state"] == "inactive"
    ]
    return notes


def _print(console: Console, given: dict[str, Given], found: dict[str, Any]) -> None:
    console.print(found["op"])
    for name, each in given.items():
        origin = "" if each.origin == "given" else f"  ({each.origin})"
        console.print(f"  {name} = {format_value(each.value)}{origin}")
    if found["dispatch_key"] is None:
        _print_made_of_ops(console, found)
    else:
        _print_op(console, found)
    for note in found["notes"]:
        console.print(f"Note: {note}")


def _print_op(console: Console, found: dict[str, Any]) -> None:
    where = f"{found['op']} at {found['dispatch_key']}"
    if found["overrides"]:
        rows = [
            [each["name"], each["dsl"], each["pack"] or "user", each["reason"] or "takes it"]
            for each in found["overrides"]
        ]
        title = f"{where}: its overrides, in the order in which they are asked"
        headings = ["override", "DSL", "owner", "verdict"]
        output.print_table(title, headings, rows, prose=["verdict"])
    else:
        console.print(f"No override is registered for {where}.")
    runs = found["runs"] or next(
        outcome_of_error(each["status"], each["name"])
        for each in found["overrides"]
        if each["status"] in ("raises", "unknown")
    )
    origin = f" ({found['native'] or 'there is none'})" if runs == "native" else ""
    console.print(f"Runs: {runs}{origin}")


def _print_made_of_ops(console: Console, found: dict[str, Any]) -> None:
    if not found["reached"]:
        console.print("Reaches no op that has overrides.")
    for each in found["reached"]:
        times = f"{each['calls']} calls" if each["calls"] > 1 else "1 call"
        console.print(f"Reaches {each['op']}: {times}{', backward' if each['backward'] else ''}.")
        _print_op(console, each)
        for note in each["notes"]:
            console.print(f"Note: {note}")
    if found["others"]:
        console.print(f"Ops without overrides that it calls: {', '.join(found['others'])}")
