"""RMSNorm: the override against native, and against quack and Liger where they are installed.

    python benchmarks/rms_norm.py              # bandwidth at the sizes of language models
    python benchmarks/rms_norm.py --crossover  # from which size the override pays, host included
    python benchmarks/rms_norm.py --clusters   # rows that clusters share: CuteDSL against Triton
    python benchmarks/rms_norm.py --tiles      # the same, CuteDSL by tile: what to choose
    python benchmarks/rms_norm.py --narrow     # narrow rows, and images' channels where they lie
    python benchmarks/rms_norm.py --smoke      # tiny, without a GPU: does this script work?

benchmarks/_norms.py says what is measured, and how.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any, NamedTuple

import _common  # noqa: F401 (keeps packs out, if torch comes after it)
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from _norms import EPS, Both, Norm, main

import opgraft
from opgraft_kernels.norms import overrides

FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
IMPLS = (
    overrides.impl(overrides.RMS_NORM, "forward", "triton_kernels"),
    overrides.impl(overrides.RMS_NORM, "backward", "triton_kernels"),
)


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    grad_out: torch.Tensor
    rstd: torch.Tensor

    @property
    def forward(self) -> tuple[Any, ...]:
        return self.x, [self.x.shape[-1]], self.weight, EPS

    @property
    def backward(self) -> tuple[Any, ...]:
        return self.grad_out, self.x, [self.x.shape[-1]], self.rstd, self.weight, [True, True]


def make_inputs(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Inputs:
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    weight = torch.randn(hidden, dtype=dtype, device=device)
    _, rstd = opgraft.native(FORWARD)(x, [hidden], weight, EPS)
    return Inputs(x, weight, torch.randn_like(x), rstd)


def _clusters() -> Both:
    module = importlib.import_module("opgraft_kernels.norms.cutedsl_kernels")
    return (
        lambda i: module.rms_norm_forward(*i.forward),
        lambda i: module.rms_norm_backward(*i.backward),
    )


def _quack() -> Both:
    module = importlib.import_module("quack.rmsnorm")

    def forward(i: Inputs) -> object:
        return module.rmsnorm_fwd(i.x, i.weight, eps=EPS, store_rstd=True)

    def backward(i: Inputs) -> object:
        return module.rmsnorm_bwd(i.x, i.weight, i.grad_out, i.rstd.view(-1))

    return forward, backward


def _liger() -> Both:
    module = importlib.import_module("liger_kernel.ops.rms_norm")

    def forward(i: Inputs) -> Any:
        return module.rms_norm_forward(i.x, i.weight, EPS, 0.0, "llama", None)

    settings: dict[int, tuple[Any, ...]] = {}

    def backward(i: Inputs) -> object:
        hidden = i.x.shape[-1]
        if hidden not in settings:
            settings[hidden] = forward(i)[3:]
        block, warps, mode = settings[hidden]
        rstd = i.rstd.view(-1)
        return module.rms_norm_backward(
            i.grad_out, i.x, i.weight, rstd, 0.0, mode, block, warps, False, None
        )

    return forward, backward


RMS_NORM = Norm(
    name="rms_norm",
    title="RMSNorm",
    ops=(FORWARD, BACKWARD),
    make_inputs=make_inputs,
    native=(
        lambda i: opgraft.native(FORWARD)(*i.forward),
        lambda i: opgraft.native(BACKWARD)(*i.backward),
    ),
    through_op=(
        lambda i: torch.ops.aten._fused_rms_norm(*i.forward),
        lambda i: torch.ops.aten._fused_rms_norm_backward(*i.backward),
    ),
    impls=(
        lambda i: IMPLS[0](*i.forward),
        lambda i: IMPLS[1](*i.backward),
    ),
    clusters=_clusters,
    register=partial(overrides.register, overrides.RMS_NORM),
    impl_functions=IMPLS,
    peers={"quack": _quack, "liger": _liger},
)

if __name__ == "__main__":
    main(RMS_NORM, __doc__)
