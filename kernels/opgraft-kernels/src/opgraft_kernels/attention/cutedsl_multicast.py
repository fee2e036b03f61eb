"""FlashAttention-4's forward for Hopper by programs that load keys and values for two.

A program that walks over tiles reads all keys and values of a head for each of them, from the
second-level cache, and of some head dimensions it waits for them. Here two programs, a cluster,
compute two neighbouring tiles of a head at a time. Each loads half of a block, which the copy
engine writes into the shared memory of both: so half as much is read.

Whatever the two do together depends on their having the same blocks in the same order, so heads
have an even number of tiles here. Where the last one has no query, its program loads and computes
all the same, and nothing comes of it: the copy engine reads 0 beyond the last query and writes
nothing there, and the library writes the logsumexp of rows that are there.

Importing this imports CuteDSL and the library.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
from cutlass import Int16, pipeline
from cutlass.cute.nvgpu import cpasync
from flash_attn.cute import pipeline as library_pipeline
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack import copy_utils

from opgraft_kernels.attention.cutedsl_renamed import renamed
from opgraft_kernels.attention.cutedsl_walking import Walk, WalkingForward, walking_forward

__all__ = ["multicast_forward"]

# Programs of a cluster. Shared memory is swizzled in groups of 8 rows: as a block's keys are a
# multiple of 16, its halves are of whole ones.
_SHARING = 2
# One bit for each of them.
_TO_ALL = (1 << _SHARING) - 1


class WalkTogether(Walk):
    """The tiles of one program, where those of a cluster have neighbouring tiles of a head.

    As there is an even number of programs, and of tiles of a head, a program of even number has a
    tile of even number, and the next program the next tile, from the first to the last.
    """

    @classmethod
    def to_underlying_arguments(cls, asked: Any, **more: Any) -> Walk.Params:
        assert not asked.lpt, "two tiles of a cluster would see different keys"
        asked = copy.copy(asked)
        asked.num_block = (asked.num_block + _SHARING - 1) // _SHARING * _SHARING
        return super().to_underlying_arguments(asked, **more)


# --------------------------------------------------------------------------------------------------
# What the library's methods call, by the same names
# --------------------------------------------------------------------------------------------------


class _SharedBytes(int):
    """The length of a block that two programs load, by which its pipeline is told from others."""


def _make_pipeline(*, tx_count: int, consumer_group: Any, **how: Any) -> Any:
    """The library's pipeline: of queries as it is, of keys or values for both programs.

    A program waits for all bytes of a block, half of which the other one sends. A program's loads
    overwrite the memory of both, so it waits until both have released it: a warp that has read a
    block says so to both programs, by a thread for each, where the library's says so to its own.
    So bytes that come before a program has said how many it waits for are never of another block:
    it had released the last one.
    """
    if isinstance(tx_count, _SharedBytes):
        warps = consumer_group.size
        consumer_group = pipeline.CooperativeGroup(pipeline.Agent.Thread, _SHARING * warps)
        # The cluster's programs differ in queries, which CuteDSL calls m, and keys are n: who
        # loads for a program is who has the same n.
        how["cta_layout_vmnk"] = cute.make_layout((1, _SHARING, 1, 1))
        how["mcast_mode_mn"] = (0, 1)
    return library_pipeline.PipelineTmaAsync.create(
        tx_count=int(tx_count), consumer_group=consumer_group, **how
    )


def _tma_get_copy_fn(atom: Any, place: Any, places: Any, *tensors: Any, **how: Any) -> Any:
    """The library's function of a copy; where it is for both programs, of this one's half."""
    if isinstance(atom.op, cpasync.CopyBulkTensorTileG2SMulticastOp):
        place = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        places = cute.make_layout(_SHARING)
        how["mcast_mask"] = Int16(_TO_ALL)
    return copy_utils.tma_get_copy_fn(atom, place, places, *tensors, **how)


_COPIES = SimpleNamespace(
    tma_get_copy_fn=_tma_get_copy_fn, tma_producer_copy_fn=copy_utils.tma_producer_copy_fn
)
_PIPELINES = SimpleNamespace(PipelineTmaAsync=SimpleNamespace(create=_make_pipeline))


# --------------------------------------------------------------------------------------------------
# The kernel
# --------------------------------------------------------------------------------------------------


class _InClusters:
    """The library's launch, of clusters."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher

    def launch(self, **how: Any) -> None:
        self.launcher.launch(cluster=[_SHARING, 1, 1], **how)


_kernel = renamed(FlashAttentionForwardSm90.kernel, {"pipeline_custom": _PIPELINES}, cute.kernel)


class MulticastForward(WalkingForward):
    """The library's kernel with keys and values that two programs load for both.

    What one program does to the other's memory begins when that one has made its barriers, which
    the library waits for by `cluster_shape_mn`. It ends before that one does: the warp that loads
    waits last of all until both programs have released every block of values. By then all blocks
    have come; and of the other program's threads, each of which releases a block's keys before its
    values, none has anything left to say.

    Neither waits for the other forever: both load the same blocks in one order, and read them in
    that order. Of what is not loaded yet, the first block waits for memory whose blocks come before
    it, which both programs have loaded and thus can read.
    """

    tma_copy_bytes: dict[str, int]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        assert not (self.is_causal or self.is_local) and self.qhead_per_kvhead == 1
        self.cluster_shape_mn = (_SHARING, 1)

    def kernel(self, *args: Any) -> _InClusters:
        """The library's method of this name, called as it is decorated: launched afterwards."""
        for name in "KV":
            self.tma_copy_bytes[name] = _SharedBytes(self.tma_copy_bytes[name])
        return _InClusters(_kernel(self, *args))

    def make_tiled_tma_atom(
        self, copy: Any, tensor: cute.Tensor, layout: Any, shape: tuple[int, int], *more: int
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        # Of keys and values alone the library says for how many programs they are: for one.
        if more:
            copy, more = cpasync.CopyBulkTensorTileG2SMulticastOp(), (_SHARING,)
        return super().make_tiled_tma_atom(copy, tensor, layout, shape, *more)

    library_load = renamed(FlashAttentionForwardSm90.load, {"copy_utils": _COPIES})


@functools.cache
def multicast_forward(programs: int) -> type[MulticastForward]:
    """The kernel's class for so many programs; for one fewer where they are odd, but for two.

    Raises:
        RuntimeError: this version of the library cannot walk.
    """
    even = max(programs // _SHARING, 1) * _SHARING
    walk = type("WalkTogether", (WalkTogether,), {"programs": even, "is_like_causal": False})
    return type("MulticastForward", (MulticastForward, walking_forward(even)), {"walk": walk})
