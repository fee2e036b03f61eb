"""Shared by the benchmarks: writes results as JSON files, with the machine that measured them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# Before torch is imported: packs that are installed would take part in what is measured as native.
# A benchmark loads what it measures.
os.environ["OPGRAFT_PACKS"] = "none"
# A pack's kernels are measured, not native's until they are compiled.
os.environ.setdefault("OPGRAFT_WHEN_NOT_READY", "wait")

import torch

from opgraft.base import files, locks, processor

RESULTS = Path(__file__).parent / "results"


def save(
    name: str,
    device: str,
    records: Sequence[Mapping[str, Any]],
    *,
    versions: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """Write the records with what they were measured on.

    Args:
        name: what was measured; with the device it makes the file's name.
        device: the GPU's or the CPU's name.
        records: one for each number or row.
        versions: of what else took part, by its name.
        more: further entries of the file.

    Returns:
        The path of the JSON file.
    """
    RESULTS.mkdir(exist_ok=True)
    path = path_of(name, device)
    result = {
        "device": device,
        **_all_versions(versions or {}),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        **more,
        "records": records,
    }
    files.replace(path, json.dumps(result, indent=1) + "\n", mode=0o644)
    return path


def _all_versions(others: Mapping[str, str]) -> dict[str, str]:
    return {"torch": torch.__version__, **others, "python": platform.python_version()}


def path_of(name: str, device: str) -> Path:
    """Where `save` writes."""
    return RESULTS / f"{name}_{device.lower().replace(' ', '_')}.json"


def load(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `save` wrote; none if there is no file."""
    return json.loads(path.read_text())["records"] if path.exists() else []


def add(
    name: str,
    device: str,
    records: Sequence[Mapping[str, Any]],
    *by: str,
    versions: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """As `save`, beside the records of earlier runs that this one did not measure. Other processes
    may be adding theirs to the same file.

    A record that is kept has the date of its run, and its versions where they differ from today's.

    Args:
        by: the keys that say which record is of the same.
        versions: as `save`.
        options: of `save`.
    """
    path = path_of(name, device)
    with alone(path):
        all_records = _with_others(path, records, by, _all_versions(versions or {}))
        return save(name, device, all_records, versions=versions, **options)


def alone(path: Path) -> AbstractContextManager[None]:
    """Hold off the other processes that write a file."""
    return locks.file_lock(Path(tempfile.gettempdir()) / f"opgraft-{path.name}.lock")


def _with_others(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    by: Sequence[str],
    versions: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The records with today's date, and the others of a file."""
    before = json.loads(path.read_text()) if path.exists() else {"records": []}
    of_before = {name: before[name] for name in versions if name in before}
    apart = {} if of_before == versions else {"versions": of_before}
    measured = [{key: record[key] for key in by} for record in records]
    kept = [
        {"date": before.get("date"), **apart, **record}
        for record in before["records"]
        if {key: record.get(key) for key in by} not in measured
    ]
    today = datetime.date.today().isoformat()
    return [*kept, *({"date": today, **record} for record in records)]


def cpu_name() -> str:
    return processor.name().replace("(R)", "").replace("(TM)", "").replace("@", "at")
