"""Row-wise ops other than norms: the overrides against native, and the limit of the memory.

    python benchmarks/rows.py            # some minutes; needs a CUDA device
    python benchmarks/rows.py --smoke    # tiny, without a GPU: does this script work?

Softmax and log-softmax, forward and backward, cross-entropy with its backward, the gradient of an
embedding's weight, and copies to another dtype. The limit is a device-to-device copy of as many
bytes as must be moved: each input read once, each output written once (cross-entropy: its logits
read twice, their gradient written once). The share of it is the copy's time over a contestant's.

Times are the GPU's, medians over rounds in which every contestant takes its turn, native twice: how
far its two times differ is what means nothing. Inputs rotate among sets that together are larger
than any L2. Whatever tables say, the overrides take all that they are right for.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _common  # keeps packs out, if torch comes after it
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from _gpu import Call, gpu_times, natively

import opgraft
from opgraft import lazy, triton_utils
from opgraft_kernels.copies.overrides import condition as copy_condition
from opgraft_kernels.cross_entropy import overrides as cross_entropy
from opgraft_kernels.embedding.overrides import condition as embedding_condition
from opgraft_kernels.nll_loss import overrides as nll_loss
from opgraft_kernels.softmax.overrides import OPS, condition

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
L2_BYTES = 2**28  # more than any has


class Row(NamedTuple):
    """A call to measure."""

    op: str  # of `OPS`, "cross_entropy", "nll_loss", "embedding", or "copy"
    shape: tuple[int, ...]  # of an embedding: its weight's
    dim: int
    dtype: torch.dtype  # of a copy: what is read
    target: torch.dtype | None = None  # of a copy

    @property
    def bytes(self) -> int:
        """What must be moved."""
        if self.op == "embedding":
            return (_TOKENS + self.shape[0]) * self.shape[1] * self.dtype.itemsize
        if self.target is not None:
            return math.prod(self.shape) * (self.dtype.itemsize + self.target.itemsize)
        if self.op == "nll_loss":
            return math.prod(self.shape) * self.dtype.itemsize
        passes = 2 if self.op in ("_softmax", "_log_softmax") else 3
        return passes * math.prod(self.shape) * self.dtype.itemsize


_TOKENS = 16384  # of an embedding
_SOFTMAX = [op.name for op in OPS]
_CASES = [
    # Logits: a Llama's, GPT-2's (odd), Gemma's, and of few tokens.
    *((shape, 1, dtype) for dtype in (FLOAT32, BFLOAT16) for shape in ((8192, 128256),)),
    *((shape, 1, BFLOAT16) for shape in ((8192, 50257), (4096, 262144), (8192, 32000))),
    *((shape, 1, FLOAT32) for shape in ((8192, 50257), (8192, 32000), (64, 128256))),
    # Attention's weights.
    ((8, 32, 1024, 1024), 3, BFLOAT16),
    ((8, 32, 1024, 1024), 3, FLOAT32),
    ((8, 12, 197, 197), 3, BFLOAT16),
    ((2, 32, 4096, 4096), 3, BFLOAT16),
    ((64, 12, 128, 128), 3, BFLOAT16),
    # Routers and classes.
    ((65536, 16), 1, BFLOAT16),
    ((65536, 64), 1, FLOAT32),
    ((4096, 1000), 1, FLOAT32),
    # Pixels' classes, and the first of two dimensions.
    ((8, 21, 512, 512), 1, FLOAT32),
    ((4, 150, 128, 128), 1, BFLOAT16),
    ((8192, 1024), 0, BFLOAT16),
]
ROWS = [
    *(Row(op, *case) for op in _SOFTMAX for case in _CASES),
    *(Row("cross_entropy", *case) for case in _CASES if len(case[0]) == 2 and case[1] == 1),
    # A model's that returns log-probabilities: of words, of pixels, of a graph's nodes.
    *(
        Row("nll_loss", *case)
        for case in (
            ((8192, 128256), 1, FLOAT32),
            ((8192, 32000), 1, BFLOAT16),
            ((524288, 21), 1, FLOAT32),
            ((169343, 40), 1, FLOAT32),
            ((4096, 1000), 1, FLOAT32),
        )
    ),
    # Embeddings of a Llama 3, a Llama 2, and a GPT-2.
    *(
        Row("embedding", shape, 0, BFLOAT16)
        for shape in ((128256, 2048), (32000, 4096), (50257, 1024))
    ),
    # Logits to float32, as Hugging Face's losses begin; activations and weights under autocast.
    *(
        Row("copy", shape, 0, *dtypes)
        for dtypes in ((BFLOAT16, FLOAT32), (BFLOAT16, torch.float16), (FLOAT32, BFLOAT16))
        for shape in ((8192, 128256), (8192, 50257), (4096, 4096), (1024, 4096), (64, 4096))
    ),
]


def register(dispatch_key: str) -> list[opgraft.Override]:
    """The overrides without their crossovers."""
    embedding = triton_utils.register_op_override(
        "aten",
        "embedding_dense_backward",
        dispatch_key,
        lazy("opgraft_kernels.embedding.triton_kernels:embedding_dense_backward"),
        cond=embedding_condition(dispatch_key),
        name="embedding",
        launch_plan=dispatch_key == "CUDA",
    )
    copy = triton_utils.register_op_override(
        "aten",
        "copy_",
        dispatch_key,
        lazy("opgraft_kernels.copies.triton_kernels:copy_"),
        cond=copy_condition(dispatch_key),
        name="copy",
        launch_plan=dispatch_key == "CUDA",
    )
    softmax = [
        triton_utils.register_op_override(
            "aten",
            op.name,
            dispatch_key,
            lazy(f"opgraft_kernels.softmax.triton_kernels:{op.function}_{op.direction}"),
            cond=condition(op, dispatch_key),
            name=f"{op.function}.{op.direction}",
            launch_plan=dispatch_key == "CUDA",
        )
        for op in OPS
    ]
    losses = cross_entropy.register(dispatch_key, by_table=False)
    losses += nll_loss.register(dispatch_key, by_table=False)
    return [*losses, embedding, *softmax, copy]


def _call(row: Row, device: str) -> Call:
    """One call, with inputs of its own."""
    if row.op == "embedding":
        rows, width = row.shape
        tokens = _TOKENS if device == "cuda" else 40
        g = torch.randn(tokens, width, dtype=row.dtype, device=device)
        indices = torch.randint(rows, (tokens,), device=device)
        backward = torch.ops.aten.embedding_dense_backward
        return lambda: backward(g, indices, rows, -1, False)
    x = torch.randn(row.shape, dtype=row.dtype, device=device)
    if row.target is not None:
        return lambda: x.to(row.target)
    if row.op in ("cross_entropy", "nll_loss"):
        x.requires_grad_()
        loss, target = getattr(F, row.op), torch.randint(row.shape[1], row.shape[:1], device=device)
        return lambda: torch.autograd.grad(loss(x, target), x)
    op = getattr(torch.ops.aten, row.op)
    if row.op in ("_softmax", "_log_softmax"):
        return lambda: op(x, row.dim, False)
    function = torch.log_softmax if "log" in row.op else torch.softmax
    y, grad = function(x, row.dim), torch.randn_like(x)
    return lambda: op(grad, y, row.dim, row.dtype)


def _copy(row: Row) -> Call:
    source, target = torch.empty(2, row.bytes // 2, dtype=torch.uint8, device="cuda").unbind()
    return lambda: target.copy_(source)


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """The record of a row."""
    sets = max(2, min(16, L2_BYTES // row.bytes + 1))
    calls = [_call(row, "cuda") for _ in range(sets)]
    native: Sequence[Call] = [natively(call) for call in calls]
    contenders: dict[str, Sequence[Call]] = {
        "copy": [_copy(row) for _ in range(sets)],
        "native": native,
        "native again": native,
        "opgraft": calls,
    }
    before = _hits()
    times = gpu_times(contenders, rounds)
    hits = _hits() - before
    assert hits >= (rounds + 1) * sets, f"{row}: {hits} hits"
    return {
        "op": row.op,
        "shape": list(row.shape),
        "dim": row.dim,
        "dtype": str(row.dtype).removeprefix("torch."),
        **({} if row.target is None else {"target": str(row.target).removeprefix("torch.")}),
        "microseconds": {name: time * 1e3 for name, time in times.items()},
        "share": {name: times["copy"] / time for name, time in times.items()},
        "native / opgraft": times["native"] / times["opgraft"],
        "native / native": times["native"] / times["native again"],
    }


def _hits() -> int:
    return sum(override.hits for override in opgraft.overrides())


def _line(record: dict[str, Any]) -> str:
    shape = "x".join(map(str, record["shape"]))
    who = f"{record['op']:26} {shape:>18} dim {record['dim']} {record['dtype']:8}"
    if "target" in record:
        who += f" to {record['target']}"
    times, shares = record["microseconds"], record["share"]
    numbers = (f"{name} {times[name]:7.1f} us {shares[name]:.2f}" for name in ("native", "opgraft"))
    ratios = f"{record['native / opgraft']:.2f} (control {record['native / native']:.2f})"
    return " | ".join([who, *numbers, ratios])


#: Those that are hit for the inputs of the backwards, too.
_FORWARDS = ["softmax.forward", "log_softmax.forward"]


def smoke() -> None:
    """Every op at the CPU key under the interpreter: whether the script works."""
    overrides = register("CPU")
    rows = [
        Row(op, (33, 40), 1, FLOAT32)
        for op in [*_SOFTMAX, "cross_entropy", "nll_loss", "embedding"]
    ]
    for row in [*rows, Row("copy", (33, 400), 1, FLOAT32, torch.float16)]:
        call: Callable[[], Any] = _call(row, "cpu")
        torch.testing.assert_close(call(), natively(call)())
    hits = {override.name: override.hits for override in overrides}
    assert set(hits.values()) == {1, 2}, hits
    assert [name for name, count in hits.items() if count == 2] == _FORWARDS, hits
    print("the overrides were hit and agree with native; nothing was measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="run on the CPU, measure nothing")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="rows whose op has this in its name")
    options = parser.parse_args()
    if options.smoke:
        smoke()
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs without one")
    register("CUDA")
    records = []
    for row in ROWS:
        if options.only in row.op:
            records.append(measure(row, options.rounds))
            print(_line(records[-1]), flush=True)
            torch.cuda.empty_cache()
    import triton

    versions = {"triton": triton.__version__}
    name = torch.cuda.get_device_name()
    path = _common.add("rows", name, records, "op", "shape", "dim", "dtype", versions=versions)
    print("written to", path)


if __name__ == "__main__":
    main()
