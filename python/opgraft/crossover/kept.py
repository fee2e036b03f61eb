"""Grids that processes keep for those after them.

Making a grid takes a look at each cell of its tables, and the first calls of a program wait for
it. What comes out is a byte a bucket. It holds for the same tables, the same declaration and the
same code, torch among it, whose hash is in its file. One that is missing, damaged, or that others
could have written, is made anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from opgraft.base import files
from opgraft.core import loader, store
from opgraft.crossover import rule
from opgraft.crossover.declaration import Crossover
from opgraft.crossover.models import Model
from opgraft.ops.describing import dtype_name
from opgraft.when import grid as grids
from opgraft.when.grid import Axis, ExactAxis, Grid, SteppedAxis

log = logging.getLogger(__name__)


class Kept:
    """The place of an override's grid on a model of device.

    Args:
        name: the override's name in tables.
        owner: its pack, or `"user"`.
        crossover: what it declares.
        model: of the device.
        texts: hashes of the user's tables, and of the author's.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        crossover: Crossover,
        model: Model,
        texts: Sequence[Sequence[str]],
    ) -> None:
        # Several overrides have one name in tables: those of other ops, and what is measured as
        # another one.
        features = [[*each] for each in _repr_of(crossover.features).items()]
        is_measured = crossover.measured_as is None
        place = [name, owner, model.name, model.capability, is_measured, features]
        declared = [
            *(crossover.version, sorted(crossover.exact)),
            *(sorted(crossover.open_ended), _repr_of(crossover.ranges)),
        ]
        # Of the dtypes that a table may name some torches have not all.
        code = [_CODE, str(torch.__version__), _core()]
        self._name = _hash(json.dumps(place))[:32]
        self._key = _hash(json.dumps([place, declared, texts, code]))

    def load(self) -> Grid | None:
        """The grid that a process kept; None if there is none that holds."""
        if _CODE is None:
            return None
        try:
            body, _, sha256 = store.read_trusted(self._path()).rpartition("\n")
            if sha256 != _hash(body):
                raise ValueError("it is damaged")
            found = json.loads(body)
            if found["key"] != self._key:
                return None
            return Grid([*map(_axis, found["axes"])], base64.b64decode(found["cells"]))
        except FileNotFoundError:
            return None
        # No home, no access, damaged, of a torch with other dtypes.
        except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            log.debug("a kept grid is not used: %s", error)
            return None

    def save(self, grid: Grid) -> None:
        """Keep a grid, in place of the one that is there."""
        if _CODE is None:
            return
        cells = base64.b64encode(grid.cells).decode()
        axes = [*map(_described, grid.axes)]
        body = json.dumps({"key": self._key, "axes": axes, "cells": cells})
        try:
            folder = self._path().parent
            files.make_folder(folder)
            if reason := store.why_untrusted(folder):  # no process would read it
                log.debug("a grid is not kept: %s", reason)
                return
            files.replace(self._path(), f"{body}\n{_hash(body)}")
        except (OSError, RuntimeError) as error:  # no home, a disk that is full or read only
            log.debug("a grid is not kept: %s", error)

    def _path(self) -> Path:
        return store.root() / "grids" / f"{self._name}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _repr_of(features: Mapping[str, object]) -> dict[str, str]:
    return {name: repr(each) for name, each in features.items()}


def _hash_of_code() -> str | None:
    """Of what makes grids of tables; None if it cannot be read."""
    folder = Path(rule.__file__).parent
    try:
        code = (*sorted(folder.glob("*.py")), Path(grids.__file__))
        return hashlib.sha256(b"".join(path.read_bytes() for path in code)).hexdigest()
    except OSError:
        return None


# Of what this process has imported just now: what is there later may be another version's.
_CODE = _hash_of_code()


@cache
def _core() -> list[Any]:
    """Which core fills grids in, if one does."""
    core = loader.in_use()
    if core is None:
        return []
    path = vars(core)["__file__"]
    try:
        info = os.stat(path)
    except OSError:  # removed since it was loaded
        return [path]
    return [path, info.st_size, info.st_mtime_ns]


def _described(axis: Axis) -> Any:
    if isinstance(axis, SteppedAxis):
        last = axis.lower(axis.count - 1)
        return {"steps": [axis.steps, axis.lower(0), last], "open_ended": axis.open_ended}
    return [
        dtype_name(value) if isinstance(value, torch.dtype) else int(value) for value in axis.values
    ]


def _axis(described: Any) -> Axis:
    if isinstance(described, dict):
        return SteppedAxis(*described["steps"], open_ended=described["open_ended"])
    return ExactAxis(vars(torch)[each] if isinstance(each, str) else each for each in described)
