"""LayerNorm: the override against native, and against quack and Liger where they are installed.

    python benchmarks/layer_norm.py              # bandwidth at the sizes of language models
    python benchmarks/layer_norm.py --crossover  # from which size the override pays, host included
    python benchmarks/layer_norm.py --clusters   # rows that clusters share: CuteDSL against Triton
    python benchmarks/layer_norm.py --tiles      # the same, CuteDSL by tile: what to choose
    python benchmarks/layer_norm.py --narrow     # narrow rows, and images' channels where they lie
    python benchmarks/layer_norm.py --smoke      # tiny, without a GPU: does this script work?

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

FORWARD, BACKWARD = "aten::native_layer_norm", "aten::native_layer_norm_backward"
IMPLS = (
    overrides.impl(overrides.LAYER_NORM, "forward", "triton_kernels"),
    overrides.impl(overrides.LAYER_NORM, "backward", "triton_kernels"),
)


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad_out: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor

    @property
    def forward(self) -> tuple[Any, ...]:
        return self.x, [self.x.shape[-1]], self.weight, self.bias, EPS

    @property
    def backward(self) -> tuple[Any, ...]:
        shape = [self.x.shape[-1]]
        statistics = (self.mean, self.rstd)
        return self.grad_out, self.x, shape, *statistics, self.weight, self.bias, [True] * 3


def make_inputs(rows: int, hidden: int, dtype: torch.dtype, device: str) -> Inputs:
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    weight, bias = torch.randn(2, hidden, dtype=dtype, device=device).unbind()
    _, mean, rstd = opgraft.native(FORWARD)(x, [hidden], weight, bias, EPS)
    return Inputs(x, weight, bias, torch.randn_like(x), mean, rstd)


def _clusters() -> Both:
    module = importlib.import_module("opgraft_kernels.norms.cutedsl_kernels")
    return (
        lambda i: module.layer_norm_forward(*i.forward),
        lambda i: module.layer_norm_backward(*i.backward),
    )


def _quack() -> Both:
    module = importlib.import_module("quack.rmsnorm")

    # It takes them in float32 alone.
    wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(i: Inputs) -> object:
        if id(i) not in wide:
            wide[id(i)] = i.weight.float(), i.bias.float()
        return module.layernorm_fwd(i.x, *wide[id(i)], eps=EPS, return_rstd=True, return_mean=True)

    def backward(i: Inputs) -> object:
        raise NotImplementedError("quack has no backward of LayerNorm")

    return forward, backward


def _liger() -> Both:
    module = importlib.import_module("liger_kernel.ops.layer_norm")

    def forward(i: Inputs) -> Any:
        return module.layer_norm_forward(i.x, i.weight, i.bias, EPS)

    def backward(i: Inputs) -> object:
        mean, rstd = i.mean.view(-1), i.rstd.view(-1)
        return module.layer_norm_backward(i.grad_out, i.x, i.weight, i.bias, mean, rstd)

    return forward, backward


LAYER_NORM = Norm(
    name="layer_norm",
    title="LayerNorm",
    ops=(FORWARD, BACKWARD),
    make_inputs=make_inputs,
    native=(
        lambda i: opgraft.native(FORWARD)(*i.forward),
        lambda i: opgraft.native(BACKWARD)(*i.backward),
    ),
    through_op=(
        lambda i: torch.ops.aten.native_layer_norm(*i.forward),
        lambda i: torch.ops.aten.native_layer_norm_backward(*i.backward),
    ),
    impls=(
        lambda i: IMPLS[0](*i.forward),
        lambda i: IMPLS[1](*i.backward),
    ),
    clusters=_clusters,
    register=partial(overrides.register, overrides.LAYER_NORM),
    impl_functions=IMPLS,
    peers={"quack": _quack, "liger": _liger},
)

if __name__ == "__main__":
    main(LAYER_NORM, __doc__)
