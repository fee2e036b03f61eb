"""The norms in compiled graphs on a GPU: opaque where their `compile=` says so, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import opgraft_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest error, relative to the largest value of its tensor."""
    return max(
        ((one - right).abs().max() / right.abs().max()).item()
        for one, right in zip(found, exact, strict=True)
    )


def step(
    function: Callable[..., torch.Tensor], x: torch.Tensor, parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Output and gradients of a norm behind a residual connection."""
    x, residual, *parameters = (t.detach().requires_grad_() for t in (x, x.flip(0), *parameters))
    output = function(x, residual, *parameters)
    output.pow(2).sum().backward()
    return [output.detach(), *(t.grad for t in (x, residual, *parameters) if t.grad is not None)]


@pytest.mark.parametrize(
    ("rows", "hidden", "opaque"),
    [
        (32, 1024, set()),
        (1024, 1024, {"backward"}),
        (8192, 2048, set()),
        (512, 8192, {"backward"}),
        (256, 16384, {"forward"}),
        (2048, 16384, {"backward"}),
        (512, 65536, {"forward", "backward"}),
    ],
)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_norm_is_opaque_where_that_was_faster(
    norm: str, rows: int, hidden: int, opaque: set[str]
) -> None:
    torch._dynamo.reset()

    def function(
        x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        h = x + residual
        return getattr(F, norm)(h, (hidden,), *parameters, eps=1e-5) + h

    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = [(rows, hidden), *[(hidden,)] * (2 if norm == "layer_norm" else 1)]
    exact_inputs = [
        torch.randn(shape, device="cuda", generator=generator).bfloat16().double()
        for shape in shapes
    ]
    exact = step(function, exact_inputs[0], exact_inputs[1:])
    x, *parameters = (t.bfloat16() for t in exact_inputs)
    native = step(function, x, parameters)
    overrides = [each for each in opgraft_kernels.register() if f".{norm}." in each.name]
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    for _ in range(4):  # small calls are hits from the first launch plan on
        before = {override.name: override.hits for override in overrides}
        found = step(compiled, x, parameters)
    hits = {each.name.split(".")[2] for each in overrides if each.hits > before[each.name]}
    assert {name.removesuffix("_by_cluster") for name in hits} == opaque
    assert error(found, exact) <= 2 * error(native, exact)


def test_with_sizes_that_vary_a_norm_is_inductors() -> None:
    torch._dynamo.reset()
    overrides = opgraft_kernels.register()

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (1024,), weight, 1e-5)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    for rows in (64, 1024, 4096):
        for _ in range(3):
            compiled(torch.randn(rows, 1024, device="cuda"), weight).sum().backward()
    assert sum(override.hits for override in overrides) == 0
