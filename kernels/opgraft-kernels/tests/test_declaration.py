"""What the pack's metadata declares is what it registers: `import torch` goes by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opgraft
import opgraft_kernels
from opgraft.ops.schema import resolve
from opgraft.router import has_own_kernel
from opgraft_kernels.attention import overrides as attention

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def declared() -> set[str]:
    tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    groups = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    assert [group for group in groups if group.startswith("opgraft.ops.")] == ["opgraft.ops.CUDA"]
    return {value.replace(":", "::", 1) for value in groups["opgraft.ops.CUDA"].values()}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib reads the metadata")
@pytest.mark.parametrize("with_flash_attn", [True, False])
def test_every_op_is_declared(monkeypatch: pytest.MonkeyPatch, with_flash_attn: bool) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(attention, "_has_flash_attn_4", lambda: with_flash_attn)
    overrides = opgraft_kernels.register()
    assert {override.dispatch_key for override in overrides} == {"CUDA"}
    # One with a derivative of its own must be there before the first call, but for composite ops.
    with_derivative = {override.op for override in overrides if override.autograd}
    assert not any(has_own_kernel(resolve(op), "CUDA") for op in with_derivative)
    ours = {override.op for override in overrides if override.op.startswith("opgraft_kernels::")}
    # Which nothing else calls.
    assert {override.op for override in overrides} - ours == declared()
    assert opgraft.overrides(pack="opgraft-kernels") == []


def test_every_named_impl_of_the_pack_is_there() -> None:
    """In a process of its own: registering imports no DSL, and Triton's functions can be found."""
    script = """
import os, sys
os.environ["OPGRAFT_PACKS"] = "none"
os.environ.pop("TRITON_INTERPRET", None)
import opgraft, opgraft_kernels
from opgraft.ops.lazy_impl import Lazy
from opgraft.ops.schema import check_accepts
overrides = opgraft_kernels.register()
assert not {"triton", "cutlass"} & set(sys.modules)
named = [each for each in overrides if isinstance(each.impl, Lazy)]
assert len(named) >= 8
for override in named:
    if override.dsl == "triton":
        check_accepts(override.impl.load(), override.operator, what=override.name)
print("found", sum(override.dsl == "triton" for override in named))
"""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 4
