"""Products of FlashAttention-4's kernels that end after the columns that heads have.

Tiles of some head dimensions are wider than heads: of 72 and 80 they have 96 columns. The copy
engine fills the rest with 0. The library multiplies those, too.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from quack import sm90_utils

from opgraft_kernels.attention.cutedsl_renamed import renamed
from opgraft_kernels.integers import ceil_div

__all__ = ["NarrowBackward", "first_products", "fragments_of_wide_values", "steps_of"]

# Columns that one operation multiplies.
_STEP = 16


def steps_of(dim: int) -> int:
    """How many operations multiply the columns of a head."""
    return ceil_div(dim, _STEP)


def first_products(steps: int) -> Any:
    """The library's function of a product that begins with 0, which ends after so many steps."""

    def gemm_zero_init(
        tiled_mma: cute.TiledMma,
        shape: tuple[int, int],
        left: cute.Tensor,
        right: cute.Tensor,
        A_idx: Int32 | None = None,
        B_idx: Int32 | None = None,
        wg_wait: int = -1,
        swap_AB: bool = False,
    ) -> cute.Tensor:
        if swap_AB:
            return gemm_zero_init(tiled_mma, shape[::-1], right, left, B_idx, A_idx, wg_wait)
        left, right = (
            t if index is None else t[None, None, None, index]
            for t, index in ((left, A_idx), (right, B_idx))
        )
        total = cute.make_rmem_tensor(tiled_mma.partition_shape_C(shape), Float32)
        warpgroup.fence()
        operation = cute.make_mma_atom(tiled_mma.op)
        for step in range(steps):
            operation.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(operation, total, left[None, None, step], right[None, None, step], total)
        warpgroup.commit_group()
        if wg_wait >= 0:
            warpgroup.wait_group(wg_wait)
        return total

    return gemm_zero_init


def fragments_of_wide_values(wide: cute.TiledMma) -> Any:
    """The library's function of a product's operands, for values of more columns than it makes.

    Args:
        wide: the product as it would be with all columns. A layout of pieces of 128 bytes is
            divided by whole ones alone. What it makes of the values says where they begin, and how
            far pieces are apart, and not how many columns there are: an operation of fewer reads
            fewer.
    """

    def partition_fragment_ABC(
        thr_mma: cute.core.ThrMma,
        shape: tuple[int, int, int],
        left: cute.Tensor | None,
        right: cute.Tensor,
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        if thr_mma.op.a_src is not warpgroup.OperandSource.RMEM:
            return sm90_utils.partition_fragment_ABC(thr_mma, shape, left, right)
        queries, columns, keys = shape
        total = cute.make_rmem_tensor(thr_mma.partition_shape_C((queries, columns)), Float32)
        weights = thr_mma.make_fragment_A(thr_mma.partition_shape_A((queries, keys)))
        # Of the values all warp groups have the same part.
        of_values = wide.get_slice(0)
        return total, weights, of_values.make_fragment_B(of_values.partition_B(right))

    return partition_fragment_ABC


class NarrowBackward(FlashAttentionBackwardSm90):  # type: ignore[misc]
    """A backward for tiles wider than heads: the products of those columns end after them.

    Args:
        steps: how many operations multiply the columns of a head.
    """

    def __init__(self, *args: Any, steps: int, **keywords: Any) -> None:
        self.steps = steps
        super().__init__(*args, **keywords)

    def mma(self, *args: Any, **more: Any) -> None:
        # What scores, and their gradients, are computed by; dq is a product of keys.
        of_columns = args[0]
        narrow = first_products(self.steps)

        def gemm_zero_init(tiled_mma: cute.TiledMma, *args: Any, **more: Any) -> cute.Tensor:
            product = narrow if tiled_mma is of_columns else sm90_utils.gemm_zero_init
            return product(tiled_mma, *args, **more)

        mma = renamed(FlashAttentionBackwardSm90.mma, {"gemm_zero_init": gemm_zero_init})
        mma(self, *args, **more)
