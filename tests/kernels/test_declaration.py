"""What the pack's metadata declares is what it registers: `import torch` goes by it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
import opgraft_kernels
from opgraft_kernels.attention import overrides as attention

PROJECT = Path(__file__).resolve().parents[2] / "kernels" / "opgraft-kernels" / "pyproject.toml"


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
    # One with a derivative of its own must be there before the first call.
    assert not any(override.autograd for override in overrides)
    registered = {override.op for override in overrides}
    cudnn = "aten::_scaled_dot_product_cudnn_attention"
    without = set() if with_flash_attn else {cudnn, f"{cudnn}_backward"}
    assert registered == declared() - without
    assert opgraft.overrides(pack="opgraft-kernels") == []


def test_norms_are_inductors_in_graphs_but_for_very_wide_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    norms = {each.name: each for each in opgraft_kernels.register() if "norm" in each.name}
    assert len(norms) == 8
    for name, override in norms.items():
        if "layer_norm" in name:
            assert override.compile == "inductor"
            continue
        opaque = {
            shape: override.compile.holds({"input": torch.empty(shape, device="meta")})
            for shape in ((16384, 4096), (4096, 32768), (512, 65536), (1024, 65536), (512, 131072))
        }
        assert [shape for shape, holds in opaque.items() if holds] == [(1024, 65536), (512, 131072)]
