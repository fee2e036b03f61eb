"""What a process has beside tensors: generators, defaults, modes. An impl leaves it as it is."""

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


#: A subnormal number; an attribute, so that Python does not know what becomes of it.
_SUBNORMAL = [5e-324]


def _flushes_denormals() -> bool:
    # Of this thread, as torch's own setting is; torch does not tell.
    return _SUBNORMAL[0] * 1.0 == 0.0


def _environ(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


_ENVIRON = "os.environ"
#: By what it is called in a message: how to read it and how to put it back.
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
        # In a warn-only mode, if that is the one: what is put back is what a check has set itself.
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
    _ENVIRON: (lambda: dict(os.environ), _environ),
}


def _settings() -> dict[str, Any]:
    # A DSL that is imported sets variables for itself, and goes by them: how many modules there are
    # tells that from what an impl leaves changed.
    settings = {name: read() for name, (read, _) in _SETTINGS.items()}
    return {**settings, _MODULES: len(sys.modules)}  # afterwards: to read a setting may import


_MODULES = "sys.modules"


@dataclass(frozen=True)
class ProcessState:
    """The state at one time, to be compared with what it is later."""

    settings: dict[str, Any]
    generators: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device) -> ProcessState:
        """Read it.

        Args:
            device: whose generator counts, beside the CPU's and those of Python and NumPy.
        """
        generators = _generators(device)
        settings = _settings()
        if device.type == "cuda":
            settings["the current device"] = torch.cuda.current_device()
            settings["the current stream"] = torch.cuda.current_stream().cuda_stream
        return cls(settings, generators)

    def advanced(self, later: ProcessState) -> list[str]:
        """The random generators that are further on."""
        return [
            name
            for name, state in self.generators.items()
            if not _same(state, later.generators[name])
        ]

    def changed(self, later: ProcessState) -> list[str]:
        """The settings that are others."""
        own = _comparable(self.settings, later.settings)
        return [name for name in own if self.settings[name] != later.settings[name]]

    def restore(self) -> None:
        """Put the settings back, so that what is checked next is checked as a user has it."""
        _restore(self.settings)


@contextmanager
def keeping_settings() -> Iterator[None]:
    """Put back at the end what was changed meanwhile."""
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
    """The settings that no import has changed in between."""
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
