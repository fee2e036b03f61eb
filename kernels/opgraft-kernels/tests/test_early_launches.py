"""Kernels that begin while the one before them ends: which do, and that they wait for it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import opgraft
import opgraft_kernels
from configurations import norm_launches
from opgraft.base import traced
from opgraft_kernels import launches as shared
from opgraft_kernels.norms import overrides as norms
from opgraft_kernels.softmax import overrides as softmax

SOURCES = sorted(Path(opgraft_kernels.__file__).parent.rglob("*.py"))


def _kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Triton's, by file and name."""
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if "triton.jit" in decorators:
                    yield f"{path.parent.name}/{path.stem}.{node.name}", node


KERNELS = dict(_kernels())


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_waits_before_anything_else(name: str) -> None:
    kernel = KERNELS[name]
    first, *_ = [
        each
        for each in kernel.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]
    assert ast.unparse(first) == "begin_program(EARLY)"
    assert kernel.args.args[-1].arg == "EARLY"


def test_all_kernels_are_looked_at() -> None:
    assert len(KERNELS) >= 33


@pytest.fixture
def can_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "can_begin_early", lambda device: True)


@pytest.mark.usefixtures("can_begin_early")
def test_a_launch_is_early_where_the_device_can() -> None:
    forward, backward, sums = norm_launches("layer_norm", torch.bfloat16, 3072, 4096)
    for launch in (forward, backward, sums):
        assert launch.keywords["EARLY"] and launch.keywords["launch_pdl"]


def test_a_launch_is_not_early_where_the_device_cannot() -> None:
    for launch in norm_launches("layer_norm", torch.bfloat16, 4096, 2048):
        assert not launch.keywords["EARLY"] and "launch_pdl" not in launch.keywords


@pytest.mark.usefixtures("can_begin_early")
def test_a_cooperative_launch_is_not_early() -> None:
    _, backward = norm_launches("layer_norm", torch.bfloat16, 1024, 1024)
    assert backward.keywords["launch_cooperative_grid"]
    assert not backward.keywords["EARLY"] and "launch_pdl" not in backward.keywords


@pytest.mark.usefixtures("can_begin_early")
def test_a_launch_in_a_graph_that_has_the_kernel_is_not_early() -> None:
    with traced.tracing(torch.ops.aten._fused_rms_norm.default):
        forward, *_ = norm_launches("rms_norm", torch.bfloat16, 4096, 2048)
        assert not forward.keywords["EARLY"] and "launch_pdl" not in forward.keywords


# ------------------------------------------------------------------ on a GPU


def _chain(x: torch.Tensor) -> torch.Tensor:
    """Kernels of ours and of torch, each of what the one before wrote, in place among them."""
    hidden = [x.shape[-1]]
    for _ in range(6):
        y = F.rms_norm(x, hidden)
        x.copy_(F.layer_norm(y * 3 + 1, hidden))
        x.mul_(0.5)
        x = torch.softmax(F.rms_norm(x, hidden), -1) + x.roll(1, 0)
    return x


def _on_a_stream(chain: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = chain(x)
    torch.cuda.current_stream().wait_stream(stream)
    return result


def _in_a_graph(chain: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    given = x.clone()
    for _ in range(3):  # kernels are compiled, and planned, before
        _on_a_stream(chain, given.copy_(x))
    graph = torch.cuda.CUDAGraph()
    given.copy_(x)
    with torch.cuda.graph(graph):
        result = chain(given)
    given.copy_(x)
    graph.replay()
    return result


@pytest.mark.gpu
@pytest.mark.parametrize(
    "run", [lambda chain, x: chain(x), _on_a_stream, _in_a_graph], ids=["eager", "stream", "graph"]
)
@pytest.mark.parametrize("shape", [(64, 256), (4096, 3072), (300, 1000)])
def test_a_kernel_reads_what_the_one_before_it_wrote(
    run: Callable[..., torch.Tensor], shape: tuple[int, int]
) -> None:
    ours = _registered()
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    with opgraft.disabled():
        expected = _chain(x.clone())
    before = sum(each.hits for each in ours)
    for _ in range(20):
        torch.testing.assert_close(run(_chain, x.clone()), expected, rtol=0.05, atol=0.05)
    assert sum(each.hits for each in ours) > before


def _registered() -> list[opgraft.Override]:
    made = [*norms.register(norms.RMS_NORM, "CUDA"), *norms.register(norms.LAYER_NORM, "CUDA")]
    return [*made, *softmax.register("CUDA")]
