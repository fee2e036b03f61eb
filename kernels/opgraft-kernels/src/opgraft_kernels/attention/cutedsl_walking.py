"""FlashAttention-4's forward for Hopper by programs that walk over tiles.

The library's kernel is written as a loop over tiles, and has one program for each. This gives it
fewer, and what they need then: the output has memory of its own, as the next tile's queries come
where it was before, and no program begins to write it before the last one has been read.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import FastDivmodDivisorV2
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import flash_fwd, flash_fwd_sm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.mask import AttentionMask, sm90_col_to_r2p_idx
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo
from quack import layout_utils, sm90_utils
from quack.cute_dsl_utils import ParamsBase

from opgraft_kernels.attention.cutedsl_products import (
    first_products,
    fragments_of_wide_values,
    steps_of,
)
from opgraft_kernels.attention.cutedsl_renamed import renamed

__all__ = ["LastKeysMask", "LongestFirst", "walking_forward"]

# Blocks are of such widths that of one that holds a row no more keys than these are not there.
_LAST_KEYS = 32


class Walk:
    """The tiles of one program, as the library asks for them: every so many units.

    A unit is a tile, or where causal the two of a head that see as many keys as any other two: the
    first and the last, the second and the last but one. The one in the middle is alone.
    """

    #: How many programs there are.
    programs: int
    #: Whether tiles may differ in their keys as causal ones do, though the library is not told.
    is_like_causal: bool

    @dataclass
    class Params(ParamsBase):
        tiles: Int32
        units: FastDivmodDivisorV2
        heads: FastDivmodDivisorV2
        all_units: Int32
        is_paired: cutlass.Constexpr[bool]

    def __init__(self, params: Params, unit: Int32, half: Int32) -> None:
        self.params = params
        self.unit = unit
        #: 0 for the tile of a pair that sees more keys, 1 for the other one.
        self.half = half

    @classmethod
    def to_underlying_arguments(cls, asked: Any, **_: Any) -> Params:
        is_paired = asked.lpt or cls.is_like_causal
        units = (asked.num_block + 1) // 2 if is_paired else asked.num_block
        return cls.Params(
            asked.num_block,
            FastDivmodDivisorV2(units),
            FastDivmodDivisorV2(asked.num_head),
            units * asked.num_head * asked.num_batch,
            is_paired,
        )

    @classmethod
    def get_grid_shape(cls, params: Params, **_: Any) -> tuple[Int32, Int32, Int32]:
        return cutlass.min(Int32(cls.programs), params.all_units), Int32(1), Int32(1)

    @classmethod
    def create(cls, params: Params, _ctx: Any = None, **__: Any) -> Walk:
        return cls(params, cute.arch.block_idx()[0], Int32(0))

    def _place(self) -> tuple[Any, Any]:
        """The head, those of all batches in a row, and the unit in it."""
        return divmod(self.unit, self.params.units)

    def get_current_work(self, **_: Any) -> WorkTileInfo:
        head_of_all, tile = self._place()
        batch, head = divmod(head_of_all, self.params.heads)
        if cutlass.const_expr(self.params.is_paired):
            tile += (1 - self.half) * (self.params.tiles - 1 - 2 * tile)
        is_there = self.unit < self.params.all_units
        return WorkTileInfo((Int32(tile), Int32(head), Int32(batch), Int32(0)), is_there)

    def initial_work_tile_info(self, **_: Any) -> WorkTileInfo:
        return self.get_current_work()

    def advance_to_next_work(self, **_: Any) -> WorkTileInfo:
        unit_ends = Int32(1)
        if cutlass.const_expr(self.params.is_paired):
            _head, tile = self._place()
            unit_ends = self.half | Int32(2 * tile + 1 == self.params.tiles)
            self.half = 1 - unit_ends
        self.unit += unit_ends * cute.arch.grid_dim()[0]
        return self.get_current_work()

    def prefetch_next_work(self, **_: Any) -> None:
        """Nothing: what comes next is known."""

    def producer_tail(self, **_: Any) -> None:
        """Nothing: nobody waits for it."""

    # CuteDSL carries what changes through a loop as a list of values.

    def __extract_mlir_values__(self) -> list[Any]:
        parts = [cutlass.extract_mlir_values(part) for part in self._parts()]
        self._lengths = [len(part) for part in parts]
        return [value for part in parts for value in part]

    def __new_from_mlir_values__(self, values: list[Any]) -> Walk:
        made = []
        for part, length in zip(self._parts(), self._lengths, strict=True):
            made.append(cutlass.new_from_mlir_values(part, values[:length]))
            values = values[length:]
        return type(self)(*made)

    def _parts(self) -> tuple[Any, ...]:
        return self.params, self.unit, self.half


@dataclass(frozen=True)
class LastKeysMask(AttentionMask):  # type: ignore[misc]
    """The library's mask, which looks at no more scores of a row's last block than it must.

    The library selects each of them. Most are of keys, and of a short row that block is all.
    """

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Any] = None,
        aux_data: Any = None,
        fastdiv_mods: Any = (None, None),
    ) -> None:
        """As the library has it; of all its ways scores of no key become -inf here."""
        if cutlass.const_expr(self.swap_AB or mask_causal or mask_local or mask_mod is not None):
            AttentionMask.apply_mask(
                self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen,
                mask_causal, mask_local, mask_mod, aux_data, fastdiv_mods,
            )  # fmt: skip
        elif cutlass.const_expr(mask_seqlen):
            self.mask_no_keys(acc_S, n_block, thr_mma)

    @cute.jit
    def mask_no_keys(self, acc_S: cute.Tensor, n_block: Int32, thr_mma: cute.TiledMma) -> None:
        """Scores of no key become -inf."""
        # The library's first block of no keys at all is -1.
        keys = self.seqlen_k - cutlass.max(n_block, 0) * self.tile_n
        if keys < self.tile_n:
            scores = layout_utils.reshape_acc_to_mn(acc_S)
            shape = cute.make_identity_tensor((self.tile_m, self.tile_n))
            place = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(shape))
            # How many of a thread's scores in a row are of keys: the four threads of a row take
            # turns with pairs.
            there = sm90_col_to_r2p_idx(keys - place[0][1])
            last = cute.size(scores.shape[1]) - _LAST_KEYS // 4
            if keys < self.tile_n - _LAST_KEYS:
                self._mask_columns(scores, 0, last, there)
            self._mask_columns(scores, last, cute.size(scores.shape[1]), there)

    @cute.jit
    def _mask_columns(
        self,
        scores: cute.Tensor,
        begin: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
        there: Int32,
    ) -> None:
        for col in cutlass.range_constexpr(begin, end):
            is_key = col < there
            for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                scores[row, col] = scores[row, col] if is_key else -Float32.inf


class WalkingForward(FlashAttentionForwardSm90):
    """The library's kernel with an output that shares no memory with the queries."""

    #: The tiles that a program has.
    walk: type[Walk]
    #: How many operations multiply the columns of a head.
    steps: int
    #: Columns of values in shared memory; the product with them, and the output, have `tile_hdimv`.
    value_columns: int
    tile_hdim: int
    tile_hdimv: int
    tile_n: int

    #: What loads the tiles of a program.
    library_load = FlashAttentionForwardSm90.load

    def __call__(self, *args: Any, **keywords: Any) -> None:
        # To replace names in the library's module would change the kernels that others compile
        # meanwhile.
        call = renamed(FlashAttentionForwardSm90.__call__, self.names_in_call())
        call(self, *args, **keywords)

    def names_in_call(self) -> dict[str, Any]:
        """What names mean in the library's `__call__`."""
        return {
            "SingleTileScheduler": self.walk,
            "SingleTileLPTScheduler": self.walk,
            "sm90_utils": SimpleNamespace(make_smem_layout=self._make_smem_layout),
            "cpasync": SimpleNamespace(
                CopyBulkTensorTileG2SOp=cpasync.CopyBulkTensorTileG2SOp,
                CopyBulkTensorTileS2GOp=cpasync.CopyBulkTensorTileS2GOp,
                make_tiled_tma_atom=self.make_tiled_tma_atom,
            ),
        }

    def _make_smem_layout(
        self, dtype: Any, layout: Any, shape: tuple[int, int], stages: int | None = None
    ) -> Any:
        # The output's tile, which may be of the same shape, has no stages.
        shape = shape if stages is None else self._shape_in_memory(shape)
        return sm90_utils.make_smem_layout(dtype, layout, shape, stages)

    def make_tiled_tma_atom(
        self, copy: Any, tensor: cute.Tensor, layout: Any, shape: tuple[int, int], *more: int
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        """A copy of a tile, as the library asks for it."""
        loads = not isinstance(copy, cpasync.CopyBulkTensorTileS2GOp)
        shape = self._shape_in_memory(shape) if loads else shape
        return cpasync.make_tiled_tma_atom(copy, tensor, layout, shape, *more)

    def _shape_in_memory(self, shape: tuple[int, int]) -> tuple[int, int]:
        """That of a block of values, if `shape` is that of what is multiplied of one."""
        is_of_values = shape == (self.tile_n, self.tile_hdimv)
        return (self.tile_n, self.value_columns) if is_of_values else shape

    @contextlib.contextmanager
    def _as_wide_as_values(self) -> Iterator[None]:
        narrow, self.tile_hdimv = self.tile_hdimv, self.value_columns
        try:
            yield
        finally:
            self.tile_hdimv = narrow

    def load(self, *args: Any) -> None:
        with self._as_wide_as_values():
            self.library_load(*args)

    def mma(self, *args: Any) -> None:
        known = args[20]
        assert known.func is AttentionMask
        mask_class = functools.partial(LastKeysMask, *known.args, **known.keywords)
        with self._as_wide_as_values():
            _, wide = self._get_tiled_mma()
        products = SimpleNamespace(
            partition_fragment_ABC=fragments_of_wide_values(wide),
            gemm_w_idx=sm90_utils.gemm_w_idx,
            gemm_zero_init=first_products(self.steps),
        )
        mma = FlashAttentionForwardSm90.mma
        if self.steps < steps_of(self.tile_hdim):
            mma = renamed(mma, {"sm90_utils": products})
        mma(self, *args[:20], mask_class, *args[21:])

    sQ_layout: Any

    def _get_shared_storage_cls(self) -> Any:
        layout: Any = self.sQ_layout
        #: Elements of a tile of queries; behind them is one of the output.
        self.queries = cute.cosize(layout)
        self.sQ_layout = cute.make_layout(self.queries + cute.cosize(self.sO_layout))
        storage = super()._get_shared_storage_cls()
        self.sQ_layout = layout
        return storage

    @cute.jit
    def epilogue(
        self,
        acc_O: cute.Tensor,
        lse: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        sO: cute.Tensor,
        seqlen: Any,
        gmem_tiled_copy_O: cute.TiledCopy,
        tma_atom_O: cute.CopyAtom | None,
        tiled_mma: cute.TiledMma,
        tidx: Int32,
        m_block: Int32,
        head_idx: Int32,
        batch_idx: Int32,
    ):
        # The warp that stores the output arrives here when the last one has been read, and when
        # it has left the barrier that the library uses for two purposes.
        cute.arch.barrier(
            barrier_id=int(NamedBarrierFwd.PFull), number_of_threads=self.num_epilogue_threads
        )
        sO = cute.make_tensor(sO.iterator + self.queries, sO.layout)
        FlashAttentionForwardSm90.epilogue(
            self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
            m_block, head_idx, batch_idx,
        )  # fmt: skip


class LastQueriesFirst(SingleTileScheduler):  # type: ignore[misc]
    """A program for each tile, of which those of a head's last queries begin first."""

    @staticmethod
    def create(params: Any, _ctx: Any = None, **__: Any) -> LastQueriesFirst:
        return LastQueriesFirst(params, cute.arch.block_idx())

    def get_current_work(self, **_: Any) -> WorkTileInfo:
        tile, head, batch = self._blk_coord
        place = (self.params.num_block - 1 - tile, head, batch, Int32(0))
        return WorkTileInfo(place, self._is_first_block)

    def __new_from_mlir_values__(self, values: list[Any]) -> LastQueriesFirst:
        made = super().__new_from_mlir_values__(values)
        made.__class__ = LastQueriesFirst
        return made


def _check_barrier() -> None:
    """That the library's kernel leaves the barrier alone which the epilogue above takes."""
    name = NamedBarrierFwd.PFull.name
    for module in (flash_fwd, flash_fwd_sm90):
        if name in inspect.getsource(module):
            raise RuntimeError(
                f"flash-attn-4 {version('flash-attn-4')} uses the barrier {name} in "
                f"{module.__name__}, with which programs of opgraft-kernels wait for their own "
                "output: install 4.0.0b36"
            )


@functools.cache
def walking_forward(programs: int, is_like_causal: bool = False) -> type[WalkingForward]:
    """The kernel's class for so many programs.

    The library's method names the class that says which tiles a program has. Here it is the same
    method with other names: to replace them in the library's module would change the kernels that
    others compile meanwhile.

    Raises:
        RuntimeError: this version of the library cannot walk.
    """
    _check_barrier()
    walk = type("Walk", (Walk,), {"programs": programs, "is_like_causal": is_like_causal})
    return type("WalkingForward", (WalkingForward,), {"walk": walk})


class LongestFirst(FlashAttentionForwardSm90):  # type: ignore[misc]
    """The library's kernel, which begins with the tiles that see the most keys in most masks."""

    __call__ = renamed(
        FlashAttentionForwardSm90.__call__, {"SingleTileScheduler": LastQueriesFirst}
    )
