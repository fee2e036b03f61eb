"""How programs walk over the tiles of a norm of permuted inputs: the chosen way against others.

    python benchmarks/permuted_tiles.py                # every kind of call, on a GPU
    python benchmarks/permuted_tiles.py --part 2/3     # a third of them, beside processes on others
    python benchmarks/permuted_tiles.py --seconds 200  # what is left is said
    python benchmarks/permuted_tiles.py --summary RESULTS  # no GPU is needed
    python benchmarks/permuted_tiles.py --smoke        # on the CPU: does this script work?

The rules that choose, `forward_walk` and `backward_walk` of the pack's `triton_permuted`, come
from these results. Inputs are images whose channels are normalised where they lie, and the gradient
is contiguous, as a layer behind the norm makes it. For each kind every sensible way takes its turn
with the chosen one, with native and with a copy of as many bytes. Wrong results are left out, and
said.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import _tiles
import torch
from _norms import IMAGES
from _tiles import Tensors

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from opgraft_kernels.integers import power_of_2
from opgraft_kernels.norms import ops, triton_permuted
from opgraft_kernels.norms.triton_permuted import Walk

EPS = 1e-6
DIRECTIONS = ("forward", "backward")
NORMS = ("layer norm", "rms norm")
#: Of a tile, and of each its elements of a thread; and programs of a multiprocessor.
ROWS = (8, 16, 32, 64)
EACH = (16, 32, 64)
PER_SM = (0, 2, 4, 6)
#: Elements of a tile, of rows of up to so many columns: fewer are not worth a program, more spill
#: registers.
ELEMENTS = {16: (1024, 1024), 256: (2048, 8192), 1024: (2048, 16384)}
#: Whether a tile is loaded ahead, and how many Triton has in shared memory.
AHEAD = ((False, 1), (True, 1), (False, 3))


class Kind(NamedTuple):
    """A kind of call: a norm over the channels of `count` square images, in bfloat16."""

    direction: str
    norm: str
    side: int
    count: int
    channels: int


def kinds() -> Iterator[Kind]:
    for image, direction, norm in itertools.product(IMAGES, DIRECTIONS, NORMS):
        yield Kind(direction, norm, *image)


def walks(kind: Kind) -> Iterator[Walk]:
    """Every sensible way.

    >>> [_name(walk) for walk in walks(Kind("backward", "rms norm", 28, 64, 16))][:3]
    ['64 rows, 16 each, 2', '64 rows, 16 each, 2 ahead', '64 rows, 16 each, 2 in 3 stages']
    """
    block = power_of_2(kind.channels)
    fewest, most = next(each for widest, each in ELEMENTS.items() if block <= widest)
    is_forward = kind.direction == "forward"
    # A wider row is in several warps' threads in any case.
    by_rows = (False, True) if is_forward and block <= 256 else (False,)
    for rows, each, per_sm in itertools.product(ROWS, EACH, PER_SM):
        has_warps = 1 <= rows * block // (32 * each) <= 16
        # A backward's programs write partial sums: one for each tile would write too many.
        if fewest <= rows * block <= most and has_warps and (is_forward or per_sm):
            for way in itertools.product(by_rows, AHEAD if per_sm else AHEAD[:1]):
                yield Walk(rows, each, per_sm, way[0], *way[1])


def _inputs(kind: Kind, device: str, is_small: bool) -> Tensors:
    # On a GPU always all of them: whether rows fill their tiles is compiled.
    count, side = (2, 8) if device == "cpu" else (kind.count, kind.side)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(count, kind.channels, side, side, device=device, dtype=dtype)
    x = x.permute(0, 2, 3, 1)
    mean = x.float().mean(-1, keepdim=True)
    if not _has_mean(kind):
        mean.zero_()
    rstd = torch.rsqrt((x.float() - mean).square().mean(-1, keepdim=True) + EPS)
    out = torch.empty(x.shape, device=device, dtype=dtype)
    moved = out.numel() if kind.direction == "forward" else out.numel() * 3 // 2
    parameters = torch.randn(2, kind.channels, device=device, dtype=dtype)
    to_copy = torch.empty(2, moved, device=device, dtype=dtype)
    return torch.randn_like(out), x, *parameters, mean, rstd, to_copy, out


def _has_mean(kind: Kind) -> bool:
    return kind.norm == "layer norm"


def _launch(kind: Kind, tensors: Tensors, walk: Walk | None) -> Callable[[], Any]:
    """The kernels' launches."""
    grad, x, weight, bias, mean, rstd, _, out = tensors
    # The results beside `out`.
    dw, db, new_mean, new_rstd = map(torch.empty_like, (weight, bias, mean, rstd))
    if not _has_mean(kind):
        bias = mean = db = new_mean = None
    hidden = kind.channels
    with _tiles.choosing(triton_permuted, f"{kind.direction}_walk", walk):
        if kind.direction == "forward":
            forward = ops.Forward(x, weight, bias, out, new_mean, new_rstd, hidden, EPS)
            return triton_permuted.plan_forward(forward, 1)
        backward = ops.Backward(grad, x, weight, mean, rstd, out, dw, db, hidden)
        launches = triton_permuted.plan_backward(backward, 1)
    return lambda: [launch() for launch in launches]


def _natively(kind: Kind, tensors: Tensors) -> torch.Tensor:
    grad, x, weight, bias, mean, rstd, *_ = tensors
    shape, aten = [kind.channels], torch.ops.aten
    if kind.direction == "forward":
        if _has_mean(kind):
            return aten.native_layer_norm(x, shape, weight, bias, EPS)[0]
        return aten._fused_rms_norm(x, shape, weight, EPS)[0]
    if _has_mean(kind):
        given = (grad, x, shape, mean, rstd, weight, bias, [True] * 3)
        return aten.native_layer_norm_backward(*given)[0]
    if x.device.type == "cpu":  # which has no such op
        leaf = x.detach().requires_grad_()
        normed = torch.nn.functional.rms_norm(leaf, shape, weight, EPS)
        return torch.autograd.grad(normed, leaf, grad)[0]
    return aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, [True] * 2)[0]


def _copy(kind: Kind, tensors: Tensors) -> object:
    source, target = tensors[-2]
    return target.copy_(source)


def _name(walk: Walk) -> str:
    ways = " by rows" * walk.by_rows + " ahead" * walk.is_ahead
    ways += f" in {walk.stages} stages" if walk.stages > 1 else ""
    return f"{walk.rows} rows, {walk.elements} each, {walk.per_sm}{ways}"


def _group(record: Mapping[str, Any]) -> str:
    return f"{record['norm']}, {record['direction']}"


STUDY = _tiles.Study(
    "permuted_tiles", kinds, walks, _name, _inputs, _launch, _natively, _copy, _group
)


if __name__ == "__main__":
    small = [Kind(*each, 56, 64, 16) for each in itertools.product(DIRECTIONS, NORMS)]
    _tiles.main(STUDY, small, __doc__)
