"""A copy to another dtype in Triton.

It is bound by memory. Native, where it reads 16 bits, loads an element at a time, as the dtypes
differ; here a thread loads 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from opgraft_kernels.integers import ceil_div
from opgraft_kernels.launches import Launch
from opgraft_kernels.rows import begin_program

__all__ = ["copy_", "plan"]

# Elements of a program, the fastest of those tried on an H200; and of a thread, so that it has one
# load of 16 bit elements.
_BLOCK = 1024
_A_THREAD = 8


@triton.jit(do_not_specialize=["elements"])
def _copy_kernel(src_ptr, dst_ptr, elements, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_program(EARLY)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offset = first + tl.arange(0, BLOCK)
    # A mask would split the loads where `elements` is odd.
    if first + BLOCK <= elements:
        tl.store(dst_ptr + offset, _convert(tl.load(src_ptr + offset), dst_ptr))
    else:
        mask = offset < elements
        x = tl.load(src_ptr + offset, mask=mask, other=0.0)
        tl.store(dst_ptr + offset, _convert(x, dst_ptr), mask=mask)


@triton.jit
def _convert(x, dst_ptr):
    # By way of float32, as native: it holds both 16 bit dtypes exactly.
    return x.to(tl.float32).to(dst_ptr.dtype.element_ty)


def plan(target: Tensor, source: Tensor) -> Launch:
    """The launch that fills `target` with `source`, in the order of their memory."""
    elements, warps = target.numel(), _BLOCK // _A_THREAD // 32
    programs = ceil_div(elements, _BLOCK)
    return Launch(_copy_kernel, programs, (source, target, elements), {"BLOCK": _BLOCK}, warps)


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::copy_`` between two dtypes of one device, of equal numbers of elements."""
    if self.shape != src.shape or _overlap(self, src):
        # Native raises its error, or has its own answer.
        return self.copy_(src, non_blocking)
    plan(self, src)()
    return self


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors share memory: programs would read what others have written."""
    is_one_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    (begin, end), (other_begin, other_end) = _span(a), _span(b)
    return is_one_storage and begin < other_end and other_begin < end


def _span(t: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a dense tensor has."""
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + t.numel() * t.element_size()
