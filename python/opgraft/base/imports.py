"""Callbacks for when a module is first imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with a module: now if it is imported, else right after its import.

    Args:
        name: the module.
        callback: called with the module. The importer of the module gets what it raises.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_initialising(module):
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


def _is_initialising(module: ModuleType) -> bool:
    # importlib sets this in the spec of a module while its code runs.
    return bool(getattr(module.__spec__, "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the finders after it, and wraps the loader's last step."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # called once; and the search below must not find this finder
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._callback(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
