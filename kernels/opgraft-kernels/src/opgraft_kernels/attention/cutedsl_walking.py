"""FlashAttention-4's forward for Hopper by programs that walk over tiles.

The library's kernel is written as a loop over tiles, and has one program for each. This gives it
fewer, and what they need then: the output has memory of its own, as the next tile's queries come
where it was before, and no program begins to write it before the last one has been read.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib.metadata import version
from types import FunctionType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import FastDivmodDivisorV2
from flash_attn.cute import flash_fwd, flash_fwd_sm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo
from quack.cute_dsl_utils import ParamsBase

__all__ = ["LongestFirst", "renamed", "walking_forward"]


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


class WalkingForward(FlashAttentionForwardSm90):
    """The library's kernel with an output that shares no memory with the queries."""

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
    names = {"SingleTileScheduler": walk, "SingleTileLPTScheduler": walk}
    call = renamed(FlashAttentionForwardSm90.__call__, names)
    return type("WalkingForward", (WalkingForward,), {"__call__": call})


def renamed(function: Any, names: dict[str, Any], compiled: Any = cute.jit) -> Any:
    """One of the library's functions, in which some names of its module mean something else.

    Args:
        function: the library's.
        names: what they mean.
        compiled: what the library decorates it with.
    """
    known = inspect.unwrap(function)
    same = FunctionType(
        known.__code__,
        {**known.__globals__, **names},
        known.__name__,
        known.__defaults__,
        known.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__annotations__"):
        setattr(same, name, getattr(known, name))
    return compiled(same)


class LongestFirst(FlashAttentionForwardSm90):  # type: ignore[misc]
    """The library's kernel, which begins with the tiles that see the most keys in most masks."""

    __call__ = renamed(
        FlashAttentionForwardSm90.__call__, {"SingleTileScheduler": LastQueriesFirst}
    )
