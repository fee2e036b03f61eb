"""Runs a Triton RMSNorm under PyTorch's own `F.rms_norm`; the caller's code does not change.

It registers the kernels of `opgraft-kernels` and calls `F.rms_norm` with shapes on both sides of
their condition. It shows where each call went, the error of each result against a float64 reference
and against PyTorch's own kernel, and on a GPU the speedup. Without a GPU the same Triton kernels
run in Triton's interpreter at the `CPU` key: the results are right, but it is slow.

    python examples/quickstart.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first hit does

import opgraft
import opgraft_kernels

EPS = 1e-6
#: The allowed error of an fp32 result, relative to the largest value of the reference.
TOLERANCE = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "cuda": [(64, 1024), (16384, 4096), (8192, 16384)],
    "cpu": [(8, 256), (128, 256), (96, 1000)],
}[DEVICE]

console = Console(width=None if os.isatty(1) else 120)


@dataclass
class Problem:
    """Inputs of one RMSNorm and of its backward, with the reference's results in float64."""

    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, rows: int, hidden: int) -> Problem:
        return cls(
            torch.randn(rows, hidden, device=DEVICE),
            torch.rand(hidden, device=DEVICE) + 0.5,
            torch.randn(rows, hidden, device=DEVICE),
        )

    def forward(self) -> torch.Tensor:
        return F.rms_norm(self.x, self.weight.shape, self.weight, EPS)

    def train(self) -> tuple[torch.Tensor, ...]:
        """Output, grad_input, grad_weight, as any model computes them."""
        x, weight = self.x.clone().requires_grad_(), self.weight.clone().requires_grad_()
        out = F.rms_norm(x, weight.shape, weight, EPS)
        return (out.detach(), *torch.autograd.grad(out, (x, weight), self.grad))

    def backward_op(self) -> tuple[torch.Tensor, ...]:
        """The same by the two ops themselves: on CPU autograd composes the derivative of others."""
        shape = list(self.weight.shape)
        out, rstd = torch.ops.aten._fused_rms_norm(self.x, shape, self.weight, EPS)
        return (
            out,
            *torch.ops.aten._fused_rms_norm_backward(
                self.grad, self.x, shape, rstd, self.weight, [True, True]
            ),
        )

    def reference(self) -> tuple[torch.Tensor, ...]:
        x, weight = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        return (out.detach(), *torch.autograd.grad(out, (x, weight), self.grad.double()))


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (result.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())


def titled(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def show_registered(overrides: list[opgraft.Override]) -> None:
    table = titled("What is registered", "op", "dispatch key", "DSL", "override")
    for override in overrides:
        table.add_row(override.op, override.dispatch_key, override.dsl, override.name)
    console.print(table)


def show_routes(forward: opgraft.Override) -> bool:
    table = titled("F.rms_norm", "rows x hidden", "hits", "misses", "ran")
    routes = set()
    for rows, hidden in SHAPES:
        hits, misses = forward.hits, forward.misses
        with torch.no_grad():
            Problem.of(rows, hidden).forward()
        hits, misses = forward.hits - hits, forward.misses - misses
        routes.add("Triton" if hits else "native")
        table.add_row(f"{rows} x {hidden}", str(hits), str(misses), "Triton" if hits else "native")
    console.print(table)
    return routes == {"Triton", "native"}


def show_errors(overrides: list[opgraft.Override]) -> bool:
    what = "F.rms_norm" if DEVICE == "cuda" else "_fused_rms_norm and _fused_rms_norm_backward"
    columns = ("rows x hidden", "result", "to float64", "native's own", "to native", "hits")
    table = titled(f"Errors of {what} in float32, relative to the largest value", *columns)
    fine = True
    for rows, hidden in SHAPES[1:]:
        problem = Problem.of(rows, hidden)
        before = [override.hits for override in overrides]
        results = problem.train() if DEVICE == "cuda" else problem.backward_op()
        hits = [override.hits - was for override, was in zip(overrides, before, strict=True)]
        with opgraft.disabled():
            natives = problem.train()
        names = ("output", "grad_input", "grad_weight")
        hits_of = (hits[0], hits[1], hits[1])
        for name, mine, native, true, hit in zip(
            names, results, natives, problem.reference(), hits_of, strict=True
        ):
            to_true, to_native = error(mine, true), error(mine, native)
            fine &= to_true < TOLERANCE and to_native < TOLERANCE and hit == 1
            table.add_row(
                f"{rows} x {hidden}", name, f"{to_true:.1e}", f"{error(native, true):.1e}",
                f"{to_native:.1e}", str(hit),
            )  # fmt: skip
    console.print(table)
    return fine


def show_speed() -> None:
    from triton.testing import do_bench

    table = titled("Forward, bf16", "rows x hidden", "native us", "opgraft us", "speed-up")
    for rows, hidden in SHAPES:
        x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)

        def call(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return F.rms_norm(x, weight.shape, weight, EPS)

        mine = do_bench(call, return_mode="median")
        with opgraft.disabled():
            native = do_bench(call, return_mode="median")
        table.add_row(
            f"{rows} x {hidden}", f"{native * 1e3:.1f}", f"{mine * 1e3:.1f}", f"{native / mine:.2f}"
        )
    console.print(table)


def main() -> None:
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "the CPU, in Triton's interpreter"
    console.print(f"opgraft quickstart: torch {torch.__version__}, Triton kernels on {where}\n")
    overrides = opgraft_kernels.register()
    show_registered(overrides)
    routed = show_routes(overrides[0])
    exact = show_errors(overrides)
    if DEVICE == "cuda":
        show_speed()
    small = Problem.of(*SHAPES[0])
    arguments = (small.x, [SHAPES[0][1]], small.weight, EPS)
    explanation = opgraft.explain("aten::_fused_rms_norm", *arguments)
    console.print(str(explanation), highlight=False, markup=False, soft_wrap=True)
    if not routed or not exact:
        raise SystemExit("quickstart: a call went where it should not, or a result is off")
    console.print(f"\nLarge calls ran Triton, small ones the native kernel, errors < {TOLERANCE}.")


if __name__ == "__main__":
    main()
