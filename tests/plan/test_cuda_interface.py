"""The core declares the few structures of the CUDA driver that it uses: they must be CUDA's own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
HEADER = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"

PROGRAM = """
#include <array>
#include <cstddef>
#include <cstdint>
#include <cuda.h>
{declarations}
using Ours = cuda::LaunchConfig;
static_assert(sizeof(Ours) == sizeof(CUlaunchConfig));
static_assert(offsetof(Ours, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(Ours, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(Ours, shared) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(Ours, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(Ours, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(Ours, attribute_count) == offsetof(CUlaunchConfig, numAttrs));
using Attribute = cuda::LaunchAttribute;
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));
static_assert(alignof(Attribute) == alignof(CUlaunchAttribute));
static_assert(offsetof(Attribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(Attribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(int(Attribute::kCooperative) == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(int(Attribute::kClusterDimension) == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(int(Attribute::kClusterSchedulingPolicyPreference) ==
              CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
static_assert(int(Attribute::kProgrammaticStreamSerialization) ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(int(Attribute::kSpread) == CU_CLUSTER_SCHEDULING_POLICY_SPREAD);
static_assert(sizeof(CUtensorMap) == 128 && alignof(CUtensorMap) <= 128);
static_assert(CUDA_ERROR_INVALID_CONTEXT == 201);
using FunctionAttribute = cuda::FunctionAttribute;
static_assert(int(FunctionAttribute::kMaxDynamicSharedSize) ==
              CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(int(FunctionAttribute::kNonPortableClusterSizeAllowed) ==
              CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(cuda::kRelaxedCapture == CU_STREAM_CAPTURE_MODE_RELAXED);
"""


def declarations() -> str:
    text = (ROOT / "csrc" / "plan_steps.h").read_text()
    start, end = text.index("namespace cuda {"), text.index("}  // namespace cuda")
    return text[start:end] + "}"


@pytest.mark.skipif(not HEADER.is_file(), reason="this Triton has no cuda.h")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    source = tmp_path / "interface.cpp"
    source.write_text(PROGRAM.replace("{declarations}", declarations()))
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{HEADER.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
