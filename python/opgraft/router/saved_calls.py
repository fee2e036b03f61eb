"""Saved calls: what shadow mode logs of a call, and how a call is saved and loaded.

The metadata is JSON, and each tensor's bytes are in a file beside it. So loading a call cannot run
code.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
import threading
import zlib
from pathlib import Path
from typing import Any

import torch

from opgraft.base import files
from opgraft.errors import RegistrationError
from opgraft.ops.describing import device_name, dtype_name
from opgraft.ops.schema import Call, resolve
from opgraft.registry import Override
from opgraft.router import device


def describe(override: Override, call: Call, difference: str) -> dict[str, Any]:
    """Everything about a call but its values, as JSON types."""
    return {
        "op": override.op,
        "dispatch_key": override.dispatch_key,
        "name": override.name,
        "pack": override.pack,
        "dsl": override.dsl,
        "torch": torch.__version__,
        "device": device_name(device.of_tensors(call)),
        "difference": difference,
        "arguments": {name: _described(value) for name, value in call.named.items()},
    }


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {
            "dtype": dtype_name(value.dtype),
            "sizes": list(value.shape),
            "strides": list(value.stride()),
            "offset": value.storage_offset(),
        }
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def make_private(folder: Path) -> None:
    """Create a folder for saved calls, or check that nobody else can write to the existing one.

    Raises:
        RegistrationError: others can write to it.
    """
    files.make_folder(folder)
    info = folder.stat()
    if hasattr(os, "geteuid") and info.st_uid not in (os.geteuid(), 0):
        fault = f"belongs to user {info.st_uid}"
    elif os.name == "posix" and info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fault = "can be written to by others (chmod go-w makes it yours alone)"
    else:
        return
    raise RegistrationError(
        f"save={str(folder)!r}: the folder {fault}, who could put calls of their own there; name "
        "one that does not exist yet, which is then made private"
    )


def save(folder: Path, facts: dict[str, Any], call: Call) -> Path:
    """Save a call with its values: JSON, and each tensor's bytes beside it. No pickle."""
    name = f"{_label(facts)}-{os.getpid()}-{threading.get_native_id()}"
    number = sum(1 for _ in folder.glob(f"{name}-*.json"))
    path = folder / f"{name}-{number}.json"
    for index, tensor in enumerate(call.tensors()):
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        _write(path.with_suffix(f".{index}.bin"), raw.numpy().tobytes())
    _write(path, json.dumps(facts, indent=1).encode())
    return path


def _label(facts: dict[str, Any]) -> str:
    """The beginning of a file's name, for an override."""
    text = f"{facts['op']}-{facts['dispatch_key']}-{facts['name']}"
    plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in text)[:80]
    return f"{plain}-{zlib.crc32(text.encode()):08x}"


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def load(path: str | Path) -> Call:
    """A call that was saved by `shadow(save=...)`, its tensors on the CPU.

    Returns:
        The call: `.op`, `.args`, `.kwargs`.

    Raises:
        RegistrationError: there is no such op here.
        ValueError: the file was not written by `save`.
    """
    path = Path(path)
    facts = json.loads(path.read_text())
    indices = itertools.count()

    def loaded(value: Any) -> Any:
        if isinstance(value, dict):
            raw = bytearray(path.with_suffix(f".{next(indices)}.bin").read_bytes())
            dtype, sizes = _constant(value["dtype"]), value["sizes"]
            if not raw:
                return torch.empty(sizes, dtype=dtype)
            return _restrided(torch.frombuffer(raw, dtype=dtype).view(sizes), value["strides"])
        if isinstance(value, list):
            return [loaded(each) for each in value]
        if isinstance(value, str) and value.startswith("torch."):
            return _constant(value.removeprefix("torch."))
        return float(value) if value in ("nan", "inf", "-inf") else value

    op = resolve(facts["op"])
    return op.bind((), {name: loaded(value) for name, value in facts["arguments"].items()})


def _constant(name: Any) -> Any:
    """`torch.NAME` if it is a dtype, layout or memory format. A file must not name functions."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"{name!r} is no dtype, layout or memory format of torch")
    return found


def _restrided(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    shape = tensor.shape
    for dim, (stride, size) in enumerate(zip(strides, shape, strict=True)):
        if stride == 0 and size > 1:  # expanded: one element stands for all
            tensor = tensor.narrow(dim, 0, 1)
    laid_out = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    return laid_out.expand(shape)
