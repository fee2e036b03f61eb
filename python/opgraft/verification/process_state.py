"""What a process has beside tensors: generators, defaults, modes. An impl leaves it as it is."""

from __future__ import annotations

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
}


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
        settings = {name: read() for name, (read, _) in _SETTINGS.items()}
        if device.type == "cuda":
            settings["the current device"] = torch.cuda.current_device()
            settings["the current stream"] = torch.cuda.current_stream().cuda_stream
        return cls(settings, _generators(device))

    def advanced(self, later: ProcessState) -> list[str]:
        """The random generators that are further on."""
        return [
            name
            for name, state in self.generators.items()
            if not _same(state, later.generators[name])
        ]

    def changed(self, later: ProcessState) -> list[str]:
        """The settings that are others."""
        return [name for name, value in self.settings.items() if value != later.settings[name]]

    def restore(self) -> None:
        """Put the settings back, so that what is checked next is checked as a user has it."""
        _restore(self.settings)


@contextmanager
def keeping_settings() -> Iterator[None]:
    """Put back at the end what was changed meanwhile."""
    stated = {name: read() for name, (read, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        _restore(stated)


def _restore(settings: dict[str, Any]) -> None:
    for name, (read, write) in _SETTINGS.items():
        if read() != settings[name]:
            write(settings[name])


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
