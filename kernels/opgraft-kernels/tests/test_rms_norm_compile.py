"""The configurations of RMSNorm's Triton kernels compile for every architecture, and fit."""

from __future__ import annotations

from typing import Any

import pytest

from compile_only import SHARED_MEMORY, compiled_launches

pytest.importorskip("triton")

import triton

from configurations import NORM_KERNELS

_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# Rows that are not aligned to 16 bytes are loaded element by element, which takes more addresses
# and predicates than there are registers once a thread holds 16 to 32 elements of a row.
UNALIGNED_SPILL = 320
# Anything else: at 64 registers and less, ptxas parks one or two of them now and then.
SPILL = 8
# The widest tile of a backward, 16 elements for each of 1024 threads, which may have 64 registers
# and need all of them. Triton's code for it is another one from 3.9 on, and ptxas parks up to ten
# values; of 3.7's code, the same ptxas parks none. There is no tile between this one and splitting
# the rows over programs.
WIDEST_SPILL = 40
# Rows of 12288 as a block of 8192 and a tail of 4096, with the sums in the same launch: of 128
# registers for each of 512 threads, for Blackwell alone ptxas parks four values.
TAIL_SPILL = 16


def _is_unaligned(found: dict[str, Any]) -> bool:
    """Whether the rows' width is odd."""
    sizes = [int(each) for each in found["arguments"] if each.isdigit()]
    return any(size > 4000 and size % 2 for size in sizes)


def test_configurations_fit() -> None:
    compiled = compiled_launches("rms_norm")
    kernels = {found["kernel"] for found in compiled}
    assert kernels == NORM_KERNELS
    for found in compiled:
        assert found["spilled"] <= _allowed_spill(found), found
        programs = _resident(found)
        assert found["shared"] * programs <= SHARED_MEMORY[found["capability"]], found
        assert found["registers"] * found["num_warps"] * 32 * programs <= 65536, found


def _allowed_spill(found: dict[str, Any]) -> int:
    if _is_unaligned(found):
        return UNALIGNED_SPILL
    tile = (found["kernel"], found["constexprs"]["BLOCK"], found["num_warps"])
    if _TRITON >= (3, 9) and tile == ("backward_rows_kernel", 16384, 32):
        return WIDEST_SPILL
    if (*tile, found["constexprs"].get("TAIL")) == ("backward_rows_kernel", 8192, 16, 4096):
        return TAIL_SPILL if found["capability"] == 100 else SPILL
    return SPILL


def _resident(found: dict[str, Any]) -> int:
    """How many such programs a multiprocessor has to hold, for those that wait for one another."""
    from opgraft_kernels.norms.triton_kernels import tiling

    sizes = tiling(has_mean=False)
    split = {
        "forward_split_kernel": sizes.forward_split,
        "backward_split_kernel": sizes.backward_split,
    }.get(found["kernel"])
    return split(2).per_sm if split else 1
