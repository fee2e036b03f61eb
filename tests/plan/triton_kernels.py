"""Kernels of every kind that Triton launches, and impls of an RMSNorm that launch them.

Used where there is a GPU, and by `triton_recording.py`, which has none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, rstd_ptr, stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + col, mask=col < N, other=0).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    w = tl.load(w_ptr + col, mask=col < N).to(tl.float32)
    tl.store(y_ptr + row * stride + col, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=col < N)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def every_argument(
    x_ptr, w_ptr, y_ptr, rstd_ptr, one, big, flag, nothing, pair, stride, eps, N: tl.constexpr
):
    """`one` is 1 and `nothing` None, which become constants; `big` needs 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, N)
    x = tl.load(x_ptr + row * stride + col * one).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    if flag:
        rstd = rstd * (big >> 33).to(tl.float32)
    y = x * rstd * tl.load(w_ptr + col).to(tl.float32) * pair[0] * pair[1]
    tl.store(y_ptr + row * stride + col, y.to(y_ptr.dtype.element_ty))
    if nothing is None:
        tl.store(rstd_ptr + row, rstd)


@triton.jit
def by_device_descriptors(x_ptr, w_ptr, y_ptr, rstd_ptr, rows, eps, N: tl.constexpr):
    """Tensor descriptors that the kernel makes: they live in scratch memory of Triton's."""
    row = tl.program_id(0)
    col = tl.arange(0, N)
    x_desc = tl.make_tensor_descriptor(x_ptr, shape=[rows, N], strides=[N, 1], block_shape=[1, N])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[rows, N], strides=[N, 1], block_shape=[1, N])
    x = x_desc.load([row, 0]).reshape(N).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    y = (x * rstd * tl.load(w_ptr + col).to(tl.float32)).to(y_ptr.dtype.element_ty)
    y_desc.store([row, 0], y.reshape(1, N))
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def by_host_descriptors(x_desc, w_ptr, y_desc, rstd_ptr, eps, N: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, N)
    x = x_desc.load([row, 0]).reshape(N).to(tl.float32)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    y = x * rstd * tl.load(w_ptr + col).to(tl.float32)
    y_desc.store([row, 0], y.to(x_desc.dtype).reshape(1, N))
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def squares(x_ptr, partial_ptr, stride, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * stride + tl.arange(0, N)).to(tl.float32)
    tl.store(partial_ptr + row, tl.sum(x * x, 0))


@triton.jit
def finish(x_ptr, w_ptr, partial_ptr, y_ptr, rstd_ptr, stride, eps, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, N)
    rstd = 1 / tl.sqrt(tl.load(partial_ptr + row) / N + eps)
    x = tl.load(x_ptr + row * stride + col).to(tl.float32)
    y = x * rstd * tl.load(w_ptr + col).to(tl.float32)
    tl.store(y_ptr + row * stride + col, y.to(y_ptr.dtype.element_ty))
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def tile(x_ptr, w_ptr, rstd_ptr, y_ptr, stride, N: tl.constexpr, ROWS: tl.constexpr):
    """For a cluster of thread blocks: it wants a tile of two dimensions, and no reduction."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + row * stride + col).to(tl.float32)
    y = x * tl.load(rstd_ptr + row) * tl.load(w_ptr + col).to(tl.float32)
    tl.store(y_ptr + row * stride + col, y.to(y_ptr.dtype.element_ty))


autotuned = triton.autotune([triton.Config({}, num_warps=warps) for warps in (2, 4, 8)], key=["N"])(
    triton.jit(rms_norm.fn)
)
heuristic = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["N"])})(
    triton.jit(rms_norm.fn)
)


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, mask=columns < n)
    tl.store(y_ptr + columns, x * factor, mask=columns < n)


def scale(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    """`y = factor * x`, for contiguous tensors."""
    scale_kernel[(triton.cdiv(x.numel(), 256),)](x, y, factor, x.numel(), BLOCK=256)


def _outputs(x: torch.Tensor) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    hidden = x.shape[-1]
    rstd = torch.empty((*x.shape[:-1], 1), device=x.device, dtype=torch.float32)
    return x.numel() // hidden, hidden, torch.empty_like(x), rstd


def plain(input: Any, normalized_shape: Any, weight: Any, eps: Any, **options: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    rms_norm[(rows,)](input, weight, y, rstd, n, eps, n, triton.next_power_of_2(n), **options)
    return y, rstd


def with_a_callable_grid(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    grid = lambda meta: (rows * meta["BLOCK"] // n, 1)  # noqa: E731
    rms_norm[grid](input, weight, y, rstd, n, eps, N=n, BLOCK=n)
    return y, rstd


def with_every_argument(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    every_argument[(rows,)](
        input, weight, y, rstd, 1, 2**33, True, None, (2.0, 0.5), n, eps, n, num_warps=4
    )
    return y, rstd


def with_two_launches(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, _ = _outputs(input)
    partial = torch.empty(rows, device=input.device, dtype=torch.float32)
    rstd = torch.empty(rows, device=input.device, dtype=torch.float32)
    squares[(rows,)](input, partial, n, n)
    finish[(rows,)](input, weight, partial, y, rstd, n, eps, n)
    return y, rstd.view(*input.shape[:-1], 1)


def with_autotuning(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    autotuned[(rows,)](input, weight, y, rstd, n, eps, n, n)
    return y, rstd


def with_heuristics(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    heuristic[(rows,)](input, weight, y, rstd, n, eps, n)
    return y, rstd


def with_dependent_launch(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    return plain(input, normalized_shape, weight, eps, launch_pdl=True)


def with_clusters(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    y, rstd = plain(input, normalized_shape, weight, eps)
    rows, n = input.numel() // input.shape[-1], input.shape[-1]
    tile[(rows // 4,)](input, weight, rstd, y, n, n, 4, num_ctas=2)
    return y, rstd


def with_cooperative_launch(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    return plain(input, normalized_shape, weight, eps, launch_cooperative_grid=True)


def with_device_descriptors(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    by_device_descriptors[(rows,)](input, weight, y, rstd, rows, eps, n)
    return y, rstd


def with_host_descriptors(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    descriptors = [TensorDescriptor(t, [rows, n], [n, 1], [1, n]) for t in (input, y)]
    by_host_descriptors[(rows,)](descriptors[0], weight, descriptors[1], rstd, eps, n)
    return y, rstd


def by_the_compiled_kernel(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows, n, y, rstd = _outputs(input)
    kernel = rms_norm.warmup(input, weight, y, rstd, n, eps, n, n, grid=(rows,))
    kernel[(rows, 1, 1)](input, weight, y, rstd, n, eps, n, n)
    return y, rstd


def with_an_empty_grid(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    _, n, y, rstd = _outputs(input)
    rms_norm[(0,)](input, weight, y, rstd, n, eps, n, n)
    return plain(input, normalized_shape, weight, eps)


RECORDABLE = {
    impl.__name__: impl
    for impl in (
        plain,
        with_a_callable_grid,
        with_every_argument,
        with_two_launches,
        with_autotuning,
        with_heuristics,
        with_dependent_launch,
        with_clusters,
        with_cooperative_launch,
        with_device_descriptors,
        with_host_descriptors,
        by_the_compiled_kernel,
        with_an_empty_grid,
    )
}


def around_the_front(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    """Refused: it launches by the launcher itself, with nobody told of the arguments."""
    rows, n, y, rstd = _outputs(input)
    kernel = rms_norm.warmup(input, weight, y, rstd, n, eps, n, n, grid=(rows,))
    kernel.run(
        rows,
        1,
        1,
        torch.cuda.current_stream().cuda_stream if input.is_cuda else 0,
        kernel.function,
        kernel.packed_metadata,
        None,
        None,
        None,
        *(input, weight, y, rstd, n, eps, n, n),
    )
    return y, rstd
