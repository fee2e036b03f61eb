"""Shared by the pack's tests: a registry without overrides, the devices, and the dtypes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: an installed pack would be active beside what a test registers.
os.environ["OPGRAFT_PACKS"] = "none"

# Inductor makes C++ without vector instructions, whose headers take a compiler longer than its
# loops. To know whether there are any it would start a process, which imports torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch

# Before Triton is first imported: without a GPU its kernels run in its interpreter, at the CPU key.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import opgraft
from opgraft import triton_utils
from opgraft.verification.opinfo import seed_torch
from opgraft_kernels.attention import overrides as attention
from opgraft_kernels.copies import overrides as copies
from opgraft_kernels.cross_entropy import overrides as cross_entropy
from opgraft_kernels.embedding import overrides as embedding
from opgraft_kernels.nll_loss import overrides as nll_loss
from opgraft_kernels.norms import overrides as norms
from opgraft_kernels.softmax import overrides as softmax


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_override_outlives_its_test() -> Iterator[None]:
    yield
    for override in opgraft.overrides():
        override.remove()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whether a bound holds is not left to chance, nor to the tests that ran before."""
    seed_torch(0)


@pytest.fixture(autouse=True)
def calls_wait_for_their_kernels() -> Iterator[None]:
    with opgraft.when_not_ready("wait"):
        yield


@pytest.fixture(autouse=True)
def whatever_tables_say(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overrides take all calls that they are right for, but in tests marked `crossovers`."""
    if request.node.get_closest_marker("crossovers") is None:
        for family in (attention, norms, softmax, cross_entropy, nll_loss, embedding, copies):
            monkeypatch.setattr(family, "_crossover", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def few_programs_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over rows have few wide programs in the interpreter, where each takes milliseconds.

    Hundreds of narrow ones, as a GPU wants them, took half of the time of the norms' tests. The
    bits are the same: test_interpreter.py compares them.
    """
    if triton_utils.interpreted() and importlib.util.find_spec("triton"):
        from opgraft_kernels.launches import Launch
        from wide_sums import with_wide_sums

        run = Launch.__call__
        monkeypatch.setattr(Launch, "__call__", lambda launch: run(with_wide_sums(launch)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that is there."""
    return torch.device(request.param)


@pytest.fixture
def dispatch_key(device: torch.device) -> str:
    return device.type.upper()


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Every dtype that the kernels take, but those that the interpreter computes wrongly."""
    if device.type == "cpu" and request.param is torch.bfloat16:
        pytest.skip("the interpreter computes on the bits of bfloat16")
    return request.param


@pytest.fixture(scope="session")
def cutedsl() -> list[str]:
    """The path by which CuteDSL and FlashAttention-4 are found."""
    beside = Path(sys.prefix) / "cutedsl"
    if all((beside / name).is_dir() for name in ("nvidia_cutlass_dsl", "flash_attn", "tvm_ffi")):
        return [str(beside), str(beside / "nvidia_cutlass_dsl" / "dsl_packages"), *sys.path]
    if importlib.util.find_spec("cutlass") and importlib.util.find_spec("flash_attn"):
        return sys.path
    pytest.skip("needs CuteDSL and FlashAttention-4: make cutedsl")
