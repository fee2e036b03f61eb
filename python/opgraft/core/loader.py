"""Finds the compiled core for the running torch.

A core links against C++ that changes with every torch, and a core for another torch may load
without an error. So the module's name contains its torch version, and after loading, the core's
torch version and commit are compared with the running torch's. Nothing is compiled here.

A core that `opgraft build` compiled takes precedence over an installed one: the user asked for it,
and it is for exactly this torch and these sources. An installed core is for one patch release of
each torch version. Two cores cannot be tried in turn, because they define the same types.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import sys
from functools import cache, lru_cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from opgraft.base import env
from opgraft.core import store
from opgraft.core.building import TorchBuild, module_name

if TYPE_CHECKING:
    from opgraft.core.interface import Core

__all__ = ["CoreStatus", "in_use", "load", "module_name", "shut_down_at_exit", "status"]

_log = logging.getLogger("opgraft")


class CoreStatus(NamedTuple):
    """The status of the compiled core.

    Attributes:
        built: whether there is a core that the running torch can use.
        module: the name of a core for the running torch.
        reason: why there is none, and what to do about it; empty if there is one.
    """

    built: bool
    module: str
    reason: str = ""

    def __str__(self) -> str:
        return f"compiled core: {self.module if self.built else f'none ({self.reason})'}"


def load() -> Core | None:
    """The compiled core for the running torch, or None. The first call finds it and logs."""
    return _find_once()[0]


@cache
def in_use() -> Core | None:
    """The core that routes calls in this process; None if the Python router does."""
    return None if env.wants_python_router() else load()


@cache
def shut_down_at_exit(core: Core) -> None:
    """Stop calls from entering Python once the interpreter begins to exit."""
    atexit.register(core.shut_down)


def status() -> CoreStatus:
    """Whether :func:`load` returns a core, and if not, why."""
    return _find_once()[1]


@lru_cache(maxsize=1)
def _find_once() -> tuple[Core | None, CoreStatus]:
    return _find(torch.__version__)


def _find(
    torch_version: str, commit: str | None = torch.version.git_version
) -> tuple[Core | None, CoreStatus]:
    """The core for a torch, and its status. The commit defaults to the running torch's."""
    running = TorchBuild(str(torch_version), str(commit))
    name = module_name(torch_version)
    path, refused = store.find(torch_version)
    if refused:
        _log.warning("opgraft: %s", refused)
    if path is None and importlib.util.find_spec(name) is None:
        reason = refused or (
            f"this install has none for torch {torch_version}: `python -m opgraft build` compiles "
            "one"
        )
        _log.info("opgraft: no compiled core: %s", reason)
        return None, CoreStatus(False, name, reason)
    try:
        module = importlib.import_module(name) if path is None else _import_file(name, path)
        reason = _mismatch(module, running)
    except Exception as error:  # without a core the program still runs
        reason = f"importing it failed ({type(error).__name__}: {error})"
    if reason:
        _log.warning("opgraft: compiled core %s is not used: %s", path or name, reason)
        reason = f"{reason}: `python -m opgraft build` compiles one for this torch"
        return None, CoreStatus(False, name, reason)
    return cast("Core", module), CoreStatus(True, name)


def _import_file(name: str, path: Path) -> ModuleType:
    # Load the file that was checked, even if another one is at `path` by now.
    loader = ExtensionFileLoader(name, store.open_trusted(path))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"{path} is no extension module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.__file__ = spec.origin = str(path)
    sys.modules[name] = module
    return module


def _mismatch(module: ModuleType, running: TorchBuild) -> str:
    """Why the core does not fit the running torch; empty if it does."""
    compiled_for = TorchBuild(*module.torch_build())
    if not compiled_for.agrees_with(running):
        return f"it was compiled for torch {compiled_for}, and this is {running}"
    if module.abi()["cxx11_abi"] != torch.compiled_with_cxx11_abi():
        return "it was compiled with another C++ ABI than this torch"
    return ""
