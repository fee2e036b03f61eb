"""The kernels' configurations compile for every architecture, and fit.

A sample of them, or with `COMPILE_ALL=1` all: see `covering.py`.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_only import SHARED_MEMORY, compiled_launches
from covering import covering

pytest.importorskip("triton")

import opgraft_kernels
from configurations import NORM_KERNELS
from opgraft_kernels.softmax import triton_kernels as kernels

# At the limit of registers ptxas parks some of them; these were measured with the spills.
ATTENTION_SPILL = 192
# In float32 six products of bfloat16 need three parts of each operand, and a bias that is not
# aligned is loaded element by element.
ATTENTION_SPILL_32 = 352
NORM_SPILL = 96
# A program that adds up 256 columns at once, after its rows: on sm_100 a few more are parked.
SUMS_SPILL = 128
# Rows that are not aligned to 16 bytes are loaded element by element, which takes more addresses
# and predicates than there are registers.
UNALIGNED_SPILL = 320
# Six programs of a split row fit into a multiprocessor, at 168 registers a thread: on sm_80 a few
# are parked.
SPLIT_SPILL = 40
SHIFTED_SPILL = 8
# Across lines, where 64 registers let a multiprocessor run two programs.
STRIDED_SPILL = 16


def _check(found: dict[str, Any], spill: int) -> None:
    assert found["spilled"] <= spill, found
    assert found["shared"] <= SHARED_MEMORY[found["capability"]], found
    assert found["registers"] * found["num_warps"] * 32 <= 65536, found


@pytest.mark.longest
def test_attention_fits() -> None:
    of_few_keys = {"short_backward_kernel", "short_forward_kernel"}
    for_cutedsl = {"_norms_kernel", "_list_kernel", "_mark_boolean_kernel", "_list_by_key_kernel"}
    on_hopper = {*of_few_keys, *for_cutedsl, "split_kernel"}
    compiled = compiled_launches("attention", hopper=on_hopper)
    assert {found["kernel"] for found in compiled} == {
        *on_hopper,
        "forward_kernel",
        "delta_kernel",
        "backward_keys_kernel",
        "backward_queries_kernel",
        "list_tiles_kernel",
        "mark_tiles_kernel",
        "norms_kernel",
    }
    for found in compiled:
        is_32 = found["constexprs"].get("PRECISION") == "bf16x6"
        _check(found, ATTENTION_SPILL_32 if is_32 else ATTENTION_SPILL)


def test_layer_norm_fits() -> None:
    compiled = compiled_launches("layer_norm")
    assert {found["kernel"] for found in compiled} == NORM_KERNELS
    for found in compiled:
        sizes = [int(each) for each in found["arguments"] if each.isdigit()]
        unaligned = any(size > 4000 and size % 2 for size in sizes)
        aligned_spill = SUMS_SPILL if found["constexprs"].get("SUM_BLOCK", 1) > 128 else NORM_SPILL
        _check(found, UNALIGNED_SPILL if unaligned else aligned_spill)


def test_softmax_fits() -> None:
    compiled = compiled_launches("softmax")
    assert {found["kernel"] for found in compiled} == {
        "_forward_kernel",
        "_forward_split_kernel",
        "_backward_kernel",
        "_backward_split_kernel",
    }
    for found in compiled:
        if "_split_" in found["kernel"]:
            _check_split(found)
            continue
        *_, size, inner = map(int, [each for each in found["arguments"] if each.isdigit()][:3])
        unaligned = (size if inner == 1 else inner) % 2
        aligned_spill = STRIDED_SPILL if found["constexprs"]["STRIDED"] else 0
        _check(found, NORM_SPILL if unaligned else aligned_spill)
        itemsize = min(getattr(torch, each).itemsize for each in _dtypes(found))
        if not found["constexprs"]["ENDS"]:
            assert found["narrowest"] == found["constexprs"]["UNIT"] * itemsize, found


def _check_split(found: dict[str, Any]) -> None:
    """So many programs of a multiprocessor are to run at once, or the launch fails."""
    is_forward = found["kernel"] == "_forward_split_kernel"
    part = kernels._FORWARD_PART if is_forward else kernels._BACKWARD_PART
    _check(found, SPLIT_SPILL)
    assert found["registers"] <= part.registers, found
    # 1 KB of each program's is the system's, and of a multiprocessor's what else it has more.
    taken = part.per_sm * (found["shared"] + 1024)
    assert taken <= SHARED_MEMORY[found["capability"]] + 1024, found
    stores = {"16": part.block // 16 // part.num_warps // 32}
    if found["constexprs"]["ENDS"]:  # an element at a time
        stores[str(getattr(torch, _dtypes(found)[0]).itemsize)] = 1
    assert found["stores"] == stores, found


def _units_of_a_thread(found: dict[str, Any]) -> int:
    """How many loads of 16 bytes a thread has of a tile."""
    return found["constexprs"]["BLOCK"] // found["constexprs"]["UNIT"] // found["num_warps"] // 32


def test_shifted_rows_of_softmax_are_loaded_and_stored_by_16_bytes() -> None:
    """Whole, a tile once; in blocks twice, of log-softmax's two tensors one of them once."""
    for found in compiled_launches("shifted softmax"):
        if "_split_" in found["kernel"]:
            _check_split(found)
            continue
        _check(found, SHIFTED_SPILL)
        itemsize = str(getattr(torch, _dtypes(found)[0]).itemsize)
        units = _units_of_a_thread(found)
        tensors = 2 if found["kernel"] == "_backward_kernel" else 1
        times = tensors if found["constexprs"]["WHOLE"] else 2 * tensors
        if tensors == 2 and found["constexprs"]["LOG"] and times == 4:
            times = 3
        assert found["loads"] == {"16": units * times, itemsize: tensors}, found
        assert found["stores"] == {"16": units, itemsize: 1}, found


def test_shifted_rows_of_cross_entropy_are_loaded_and_stored_by_16_bytes() -> None:
    """In a forward's blocks twice: the last one has masks. Where a backward loads ahead, into
    shared memory, those are other instructions."""
    for found in compiled_launches("shifted cross_entropy"):
        _check(found, 0)
        itemsize = str(getattr(torch, _dtypes(found)[0]).itemsize)
        units = _units_of_a_thread(found)
        times = 1 if found["constexprs"].get("WHOLE", True) else 2
        if found["constexprs"].get("STAGES"):
            times = 0
            assert found["shared"] > 0, found
        assert found["loads"].get("16", 0) == times * units, found
        if found["kernel"] == "_backward_kernel":
            assert found["stores"] == {"16": units, itemsize: 1}, found


def test_cross_entropy_fits() -> None:
    compiled = compiled_launches("cross_entropy")
    assert {found["kernel"] for found in compiled} == {
        "_forward_kernel",
        "_sum_kernel",
        "_backward_kernel",
    }
    for found in compiled:
        _check(found, NORM_SPILL)
        asserts = found["kernel"] == "_forward_kernel"
        assert found["asserts"] == asserts, found
        if not asserts:
            continue
        numbers = [int(each) for each in found["arguments"] if each.isdigit()]
        classes, itemsize = numbers[1], getattr(torch, _dtypes(found)[0]).itemsize
        block = min(found["constexprs"]["BLOCK"], classes)
        assert found["widest"] >= min(16, math.gcd(classes, block) * itemsize), found


def test_nll_loss_fits() -> None:
    compiled = compiled_launches("nll_loss")
    kernels = {found["kernel"] for found in compiled}
    assert kernels == {"_forward_kernel", "_sum_kernel", "_backward_kernel"}
    for found in compiled:
        _check(found, 0)
        assert found["asserts"] == (found["kernel"] != "_sum_kernel"), found
        if found["kernel"] == "_backward_kernel":
            assert found["stores"]["16"] > 0, found  # zeros


def test_permuted_norms_fit() -> None:
    compiled = compiled_launches("permuted")
    assert {found["kernel"] for found in compiled} == {
        *("_forward_kernel", "_backward_kernel", "sum_partials_kernel"),
    }
    for found in compiled:
        # Two tensors' elements, or two tiles' of 4 bytes, of as many as there are registers for.
        block, is_backward = found["constexprs"].get("BLOCK"), found["kernel"] == "_backward_kernel"
        is_full = block in (64, 1024) if is_backward else block in (1024, 2048)
        _check(found, NORM_SPILL if is_full else 0)


def test_permuted_norms_load_their_input_by_16_bytes() -> None:
    """Though several rows' elements are what is there at once, and the last ones are masked."""
    aligned = 0
    for found in compiled_launches("permuted"):
        if found["kernel"] == "sum_partials_kernel":
            continue
        constexprs, itemsize = found["constexprs"], getattr(torch, _dtypes(found)[0]).itemsize
        if constexprs["UNIT"] * itemsize == 16:
            elements = constexprs["ROWS"] * constexprs["BLOCK"] // (found["num_warps"] * 32)
            tensors = 2 if found["kernel"] == "_backward_kernel" else 1
            loads = found["loads"].get("16", 0) + found["copies"].get("16", 0)
            assert loads >= tensors * elements * itemsize // 16, found
            aligned += 1
    assert aligned


def test_copies_fit() -> None:
    compiled = compiled_launches("copies")
    assert {found["kernel"] for found in compiled} == {"_copy_kernel"}
    for found in compiled:
        _check(found, 0)
        assert found["widest"] == 16, found


def test_embedding_fits() -> None:
    compiled = compiled_launches("embedding")
    assert {found["kernel"] for found in compiled} == {
        "_sort_kernel",
        "_merge_kernel",
        "_starts_kernel",
        "_spans_kernel",
        "_gradient_kernel",
    }
    for found in compiled:
        _check(found, 0)
        if found["kernel"] == "_gradient_kernel":
            itemsize = getattr(torch, _dtypes(found)[0]).itemsize
            unit = found["constexprs"]["UNIT"] * itemsize
            assert found["widest"] == max(unit, 4), found
            # Seven programs of a multiprocessor at once, see `_TILE_BYTES`.
            assert found["registers"] <= 72 or unit < 16, found


@pytest.mark.parametrize("sizes", [range(4), (8, 1, 2, 4)])
def test_a_sample_has_each_value(sizes: Iterable[int]) -> None:
    combinations = list(itertools.product(("sm_80", "sm_90"), sizes, (True, False)))
    sampled = covering(combinations, enumerate)
    assert [set(values) for values in zip(*sampled, strict=True)] == [
        set(values) for values in zip(*combinations, strict=True)
    ]
    assert len(sampled) == 4
    assert sampled == covering(combinations, enumerate)


def test_a_value_that_one_combination_has_is_sampled() -> None:
    combinations = [("forward", 1), ("forward", 2), ("backward", 2), ("backward", 2)]
    assert covering(combinations, enumerate) == [("forward", 1), ("backward", 2)]


def _dtypes(found: dict[str, Any]) -> list[str]:
    arguments = [each.removeprefix("torch.") for each in found["arguments"]]
    return [each for each in arguments if not each.isdigit()]


# -------------------------------------------------------------------------------------- CuteDSL

# Of three warp groups a thread has 160 registers, which a bias beside scores and output fills.
BIASED_SPILL = 48
# Functions that differ in their tiles alone would overwrite each other's files.
_COMPILE_CUTEDSL = """
import os, pathlib
import configurations, covering
from opgraft_kernels.{package} import cutedsl_functions

def values(kind):
    return [(type(kind).__name__, *field) for field in kind._asdict().items()]

folder = pathlib.Path(os.environ["CUTE_DSL_DUMP_DIR"])
kinds = covering.sample(configurations.cutedsl_kinds("{family}"), values)
for number, kind in enumerate(kinds):
    cutedsl_functions.compile_kind(kind)
    (folder / str(number)).mkdir()
    for file in folder.glob("*.cubin"):
        file.rename(folder / str(number) / file.name)
    print(kind)
"""


@pytest.mark.parametrize(
    ("package", "family"),
    [("attention", "attention"), ("norms", "rms_norm"), ("norms", "layer_norm")],
)
def test_cutedsl_fits(package: str, family: str, cutedsl: list[str], tmp_path: Path) -> None:
    """For sm_90a alone: the kernels are Hopper's."""
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_ARCH": "sm_90",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, cutedsl)),
    }
    script = _COMPILE_CUTEDSL.format(package=package, family=family)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cubins, kinds = list(tmp_path.glob("*/*.cubin")), done.stdout.splitlines()
    assert len(cubins) == len(kinds) > 0
    for cubin in cubins:
        kind = kinds[int(cubin.parent.name)]
        most = {"STACK": BIASED_SPILL if "BiasKind" in kind else 0, "LOCAL": 0}
        for name, number in _resources(cubin):
            assert number <= most[name], kind


_COUNT_SHARED_MEMORY = """
from opgraft_kernels.norms import cutedsl_kernels as kernels
for tiles in kernels.TILES.values():
    for tile in tiles.forward.values():
        print(tile.per_sm, tile.shared_memory(1, sums=2))
    for tile in tiles.backward.values():
        print(tile.per_sm, tile.shared_memory(2 * tile.stages, sums=4))
    for tile in (*tiles.forward.values(), *tiles.backward.values()):
        assert tile.cluster <= 8, "a launch of larger clusters is not portable"
"""


def test_cutedsl_tiles_fit_into_shared_memory(cutedsl: list[str]) -> None:
    """As often as a multiprocessor is to hold them; 1024 bytes of each block are the system's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, cutedsl))}
    command = [sys.executable, "-c", _COUNT_SHARED_MEMORY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert lines
    for per_sm, size in lines:
        assert size <= SHARED_MEMORY[90]
        assert per_sm * (size + 1024) <= 228 * 1024


def test_defaults_of_what_kernels_call_are_no_names() -> None:
    """Inductor copies the source of a kernel that it traced, and no name that is a default."""
    package = Path(opgraft_kernels.__file__).parent
    functions = [
        node
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert len(functions) > 50
    named = {
        node.name: ast.unparse(default)
        for node in functions
        for default in node.args.defaults
        if not isinstance(default, ast.Constant)
    }
    assert not named


def _resources(cubin: Path) -> list[tuple[str, int]]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    dump = [str(tool), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    return [(name, int(number)) for name, number in re.findall(r"\b(STACK|LOCAL):(\d+)", text)]
