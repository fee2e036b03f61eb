"""Tables for tests: text that stands for a measured file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import opgraft
from opgraft import when
from opgraft.crossover import models
from opgraft.crossover.tables import FORMAT, Cell, columns_of, line_of

#: What this machine's CPU is called in tables.
CPU = models.of_device(torch.device("cpu")).name

CROSSOVER_FEATURES = {
    "rows": when.numel("self") // when.size("self", -1),
    "dtype": when.dtype_of("self"),
}

#: The times that a cell does not have if it was measured in graphs alone.
GRAPHS_ONLY = dict.fromkeys(("native", "override", "native_host", "plan_host", "python_host"))


def crossover(**changes: Any) -> opgraft.Crossover:
    """On rows and the dtype, for `aten::_softmax`."""
    return opgraft.Crossover(**(CROSSOVER_FEATURES | changes))


def cell(rows: int, dtype: str = "float32", **times: Any) -> dict[str, Any]:
    """A cell where native takes 10 us; without more, the override takes 5 whatever way it runs."""
    found: dict[str, Any] = {
        "at": [rows, dtype],
        "native_us": 10.0,
        "override_us": 5.0,
        "native_host_us": 4.0,
        "plan_host_us": 4.0,
        "python_host_us": 4.0,
        "inductor_us": None,
        "opaque_us": None,
    }
    return found | {f"{name}_us": value for name, value in times.items()}


def line(cell: dict[str, Any]) -> str:
    """A cell as a table has it."""
    return line_of(cell["at"], [cell[f"{field}_us"] for field in Cell._fields])


def cells_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of an override's part of a table, as `cell` makes them."""
    names = list(part["features"])
    columns = columns_of(names).split()
    found = []
    for each in part["cells"]:
        values = {name: _value(text) for name, text in zip(columns, each.split(), strict=True)}
        times = {name: values[name] for name in columns[len(names) + 1 :]}
        found.append({"at": [values[name] for name in names]} | times)
    return found


def _value(text: str) -> Any:
    try:
        return None if text == "-" else json.loads(text)
    except ValueError:  # a dtype
        return text


def entry(*cells: dict[str, Any], **changes: Any) -> dict[str, Any]:
    features = changes.get("features", {"rows": {"steps": 1}, "dtype": "exact"})
    return {
        "version": 1,
        "features": features,
        "measured": {"date": "2026-11-24", "torch": "2.11.0", "triton": "3.6.0"},
        "columns": columns_of(features),
        "cells": [*map(line, cells)],
    } | changes


def table(overrides: dict[str, Any], device: str = CPU, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"format": FORMAT, "device": device, "capability": None}
    return found | {"overrides": overrides} | changes


def write(folder: Path, content: dict[str, Any] | str, device: str = CPU) -> Path:
    """Write a table under its device's name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / models.file_name(device)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(0o600)
    return path
