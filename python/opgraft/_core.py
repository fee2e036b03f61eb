"""Finds the compiled core for the running torch.

A core links against C++ that changes with every torch, and one built for another torch may load
without a complaint. So the module's name carries the torch that it is for, and what loads is asked
which torch it was compiled against before anyone uses it. Nothing is compiled here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

import torch

__all__ = ["CoreStatus", "in_use", "load", "module_name", "status"]

_log = logging.getLogger("opgraft")


@dataclass(frozen=True)
class CoreStatus:
    """What there is of a compiled core.

    Attributes:
        built: whether there is one that the running torch can use.
        module: the name that a core for the running torch has.
        reason: why there is none, with what to do about it; empty where there is one.
    """

    built: bool
    module: str
    reason: str = ""

    def __str__(self) -> str:
        return f"compiled core: {self.module if self.built else f'none ({self.reason})'}"


def module_name(torch_version: str) -> str:
    """The module that holds the core for a torch of that version.

    >>> module_name("2.13.0+cpu")
    'opgraft._C_torch2_13'
    """
    major, minor, *_ = _release(torch_version)
    return f"opgraft._C_torch{major}_{minor}"


def load() -> ModuleType | None:
    """The compiled core for the running torch, or None; the first call looks for it and logs."""
    return _find_once()[0]


@cache
def in_use() -> ModuleType | None:
    """The core that routes calls in this process; None where Python does."""
    from opgraft import env  # here, because setup.py runs this file before there is an opgraft

    return None if env.wants_python_router() else load()


def status() -> CoreStatus:
    """Whether :func:`load` has a core, and if not, why."""
    return _find_once()[1]


@lru_cache(maxsize=1)
def _find_once() -> tuple[ModuleType | None, CoreStatus]:
    return _find(torch.__version__)


def _find(torch_version: str) -> tuple[ModuleType | None, CoreStatus]:
    name = module_name(torch_version)
    if importlib.util.find_spec(name) is None:
        reason = (
            f"this install has none for torch {torch_version}: "
            "reinstall opgraft with pip install --no-build-isolation"
        )
        _log.info("opgraft: no compiled core: %s", reason)
        return None, CoreStatus(False, name, reason)
    try:
        module = importlib.import_module(name)
        reason = _mismatch(module, torch_version)
    except Exception as error:  # a broken build must cost the core, not the program
        reason = f"importing it failed ({type(error).__name__}: {error})"
    if reason:
        _log.warning("opgraft: compiled core %s is not used: %s", name, reason)
        return None, CoreStatus(False, name, f"{reason}: rebuild it for this torch")
    return module, CoreStatus(True, name)


def _mismatch(module: ModuleType, torch_version: str) -> str:
    """What the core was compiled for that the running torch is not; empty where they agree."""
    compiled_for = module.torch_version()
    if _release(compiled_for) != _release(torch_version):
        return f"it was compiled for torch {compiled_for}, and this is {torch_version}"
    if module.abi()["cxx11_abi"] != torch.compiled_with_cxx11_abi():
        return "it was compiled with another C++ ABI than this torch"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """Major, minor and patch: "2.13.0+cpu" and "2.13.0a0+git1234" are both (2, 13, 0)."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"not a torch version: {version!r}")
    return tuple(int(part or 0) for part in match.groups())
