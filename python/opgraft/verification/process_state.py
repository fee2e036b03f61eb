"""The state of a process besides tensors: generators, defaults, modes. Impls must not change it."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ProcessState", "keeping_settings"]


def _grad_mode(value: bool) -> None:
    torch._C._set_grad_enabled(value)  # not the context manager, which would end with its object


def _flush_denormals(value: bool) -> None:
    torch.set_flush_denormal(value)  # which returns whether this processor can


#: A subnormal number, in a list, so that Python does not compute with it at compile time.
_SUBNORMAL = [5e-324]


def _flushes_denormals() -> bool:
    # torch has no function that returns this setting, which is each thread's own.
    return _SUBNORMAL[0] * 1.0 == 0.0


def _environ() -> dict[bytes, bytes]:
    # What os.environ holds itself: as a mapping it encodes and decodes each variable each time, and
    # a verification looks thousands of times.
    return dict(getattr(os.environ, "_data", os.environb))


def _set_environ(values: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - values.keys():
        del os.environb[name]
    os.environb.update(values)


_ENVIRON = "os.environ"
#: By its name in messages: how to read a setting, and how to restore it.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the grad mode": (torch.is_grad_enabled, _grad_mode),
    "the precision of matrix products in float32": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        # A check may have set warn-only mode itself; keep it.
        lambda value: torch.use_deterministic_algorithms(
            value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
        ),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
    ),
    "the garbage collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the working directory": (os.getcwd, os.chdir),
    "torch.set_flush_denormal": (_flushes_denormals, _flush_denormals),
    _ENVIRON: (_environ, _set_environ),
}


def _settings() -> dict[str, Any]:
    # A DSL sets environment variables for itself when it is imported. The number of modules
    # distinguishes that from changes that an impl leaves behind.
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    return {**settings, _MODULES: len(sys.modules)}  # last: reading a setting may import modules


_MODULES = "sys.modules"


@dataclass(frozen=True)
class ProcessState:
    """The state at one time, to compare with a later one."""

    settings: dict[str, Any]
    generators: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device) -> ProcessState:
        """Read it.

        Args:
            device: the device whose generator is read, besides the CPU's, Python's and NumPy's.
        """
        generators = _generators(device)
        settings = _settings()
        if device.type == "cuda":
            settings["the current device"] = torch.cuda.current_device()
            settings["the current stream"] = torch.cuda.current_stream().cuda_stream
        return cls(settings, generators)

    def advanced(self, later: ProcessState) -> list[str]:
        """The random generators that have advanced."""
        return [
            name
            for name, state in self.generators.items()
            if not _same(state, later.generators[name])
        ]

    def changed(self, later: ProcessState) -> list[str]:
        """The settings that have changed."""
        own = _comparable(self.settings, later.settings)
        return [name for name in own if self.settings[name] != later.settings[name]]

    def restore(self) -> None:
        """Restore the settings, so that the next check runs with the user's own."""
        _restore(self.settings)


@contextmanager
def keeping_settings() -> Iterator[None]:
    """A scope that restores changed settings at its end."""
    stated = _settings()
    try:
        yield
    finally:
        _restore(stated)


def _restore(settings: dict[str, Any]) -> None:
    now = _settings()
    for name in _comparable(settings, now):
        if name in _SETTINGS and now[name] != settings[name]:
            _SETTINGS[name][1](settings[name])


def _comparable(before: dict[str, Any], later: dict[str, Any]) -> list[str]:
    """The settings that no import in between can have changed."""
    imported = before[_MODULES] != later[_MODULES]
    return [name for name in before if name != _MODULES and not (imported and name == _ENVIRON)]


def _generators(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch's": torch.get_rng_state(),
        "Python's": random.getstate(),
    }
    if device.type == "cuda":
        states["the device's"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["NumPy's"] = (name, keys.tobytes(), *rest)
    return states


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
