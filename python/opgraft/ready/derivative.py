"""Running an override's derivative on stand-ins: its backward's kernels are compiled, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Autograd = tuple[Callable[..., Any], Callable[..., Any]]


class Context:
    """The `ctx` that an author's functions get, as `torch.autograd.Function` has it."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Nothing is differentiated here."""

    def set_materialize_grads(self, value: bool) -> None:
        """All gradients are tensors here."""


def run(autograd: Autograd, inputs: tuple[Any, ...], output: Any, needs: Sequence[bool]) -> None:
    """Run `setup_context` and `backward`, with gradients like the outputs.

    Args:
        autograd: the override's.
        inputs: the op's arguments, in the order of its schema.
        output: what the impl returned.
        needs: of each argument whether it gets a gradient.

    Raises:
        Exception: the author's.
    """
    setup_context, backward = autograd
    context = Context(needs)
    setup_context(context, inputs, output)
    outputs = output if isinstance(output, tuple) else (output,)
    backward(context, *map(_gradient, outputs))


def _gradient(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor) and (output.is_floating_point() or output.is_complex()):
        return torch.ones_like(output)
    return None
