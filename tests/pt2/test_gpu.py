"""Compiled graphs with the shipped kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import opgraft
from opgraft import Override, when

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

HIDDEN = 1024
#: The rows from which on the overrides take a call.
ROWS = 512
TAKES = (when.size("input", -1) == HIDDEN) & (when.numel("input") >= ROWS * HIDDEN)


def forward(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from opgraft_kernels.norms.triton_kernels import rms_norm_forward

    return rms_norm_forward(input, normalized_shape, weight, eps)


def backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    from opgraft_kernels.norms.triton_kernels import rms_norm_backward

    return rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask)


def register(compile: Any = "opaque") -> tuple[Override, Override]:
    def one(op: str, impl: Callable[..., Any]) -> Override:
        return opgraft.triton_utils.register_op_override(
            "aten", op, "CUDA", impl, cond=TAKES, name=op, compile=compile
        )

    return one("_fused_rms_norm", forward), one("_fused_rms_norm_backward", backward)


class Model(nn.Module):
    """Two blocks of normalise, project, activate."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.linspace(0.5, 1.5, HIDDEN) for _ in range(2)])
        self.projections = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, projection in zip(self.weights, self.projections, strict=True):
            normed = F.rms_norm(x, (HIDDEN,), weight.to(x.dtype), 1e-6)
            x = x + F.silu(projection(normed))
        return x


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Model().to("cuda", dtype)


def an_input(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn(rows, HIDDEN, device="cuda", generator=generator).to(dtype)


def step(function: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, the input's gradient, and the parameters'."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.float().pow(2).mean().backward()
    gradients = [x.grad, *(parameter.grad for parameter in module.parameters())]
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest error, relative to the largest value of its tensor."""
    return max(
        ((g.double() - w.double()).abs().max() / w.double().abs().max()).item()
        for g, w in zip(got, wanted, strict=True)
    )


def check(
    got: Sequence[torch.Tensor], native: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> None:
    """The error against float32 is at most twice the native kernels' own."""
    assert error(got, exact) <= 2 * error(native, exact) + 1e-6


def references(x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A step of the same model in eager PyTorch, in its own dtype and in float32."""
    with opgraft.disabled():
        module, wide = model(x.dtype), model(x.dtype).float()
        return step(module, module, x), step(wide, wide, x.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_training_step_under_inductor(dtype: torch.dtype) -> None:
    overrides = register()
    module = model(dtype)
    x = an_input(2048, dtype)
    got = step(torch.compile(module, fullgraph=True), module, x)
    assert [override.hits for override in overrides] == [2, 2]
    check(got, *references(x))


def test_one_graph_for_rows_on_both_sides_of_the_condition() -> None:
    overrides = register()
    module = model()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, hits in ((64, 0), (2048, 2), (ROWS, 2), (ROWS - 1, 0), (777, 2)):
            before = [override.hits for override in overrides]
            x = an_input(rows)
            got = step(compiled, module, x)
            assert [o.hits - b for o, b in zip(overrides, before, strict=True)] == [hits, hits]
            check(got, *references(x))


def doubled(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An RMSNorm that can be told from the native one by its values."""
    output, rstd = forward(*args)
    return output * 2, rstd


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,), None, 1e-6) + 1


def twice_the_norm(x: torch.Tensor) -> torch.Tensor:
    with opgraft.disabled():
        return (norm(x.float()) - 1) * 2 + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_hit_is_captured_in_a_cuda_graph_and_replayed(dynamic: bool) -> None:
    override = opgraft.triton_utils.register_op_override(
        "aten", "_fused_rms_norm", "CUDA", doubled, cond=TAKES, name="doubled", compile="opaque"
    )
    compiled = torch.compile(norm, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        compiled(an_input(2048))  # runs, and warms up
        compiled(an_input(2048))  # is captured
        captured = override.hits
        assert captured >= 2
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(2048, HIDDEN, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x).float(), twice_the_norm(x), rtol=2e-2, atol=2e-2)
        assert override.hits == captured, "replays run nothing on the host"


def test_a_captured_miss_replays_the_native_kernel() -> None:
    override = opgraft.triton_utils.register_op_override(
        "aten", "_fused_rms_norm", "CUDA", doubled, cond=TAKES, name="doubled", compile="opaque"
    )
    compiled = torch.compile(norm, mode="reduce-overhead", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            x = an_input(64)
            with opgraft.disabled():
                wanted = norm(x.float())
            torch.testing.assert_close(compiled(x).float(), wanted, rtol=2e-2, atol=2e-2)
    assert override.hits == 0


def test_training_under_reduce_overhead() -> None:
    overrides = register()
    module = model()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = an_input(2048)
        got = [tensor.clone() for tensor in step(compiled, module, x)]
    assert all(override.hits >= 4 for override in overrides)
    check(got, *references(x))


def test_autocast_to_bfloat16() -> None:
    overrides = register()
    module = model(torch.float32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module(x.bfloat16())

    x = an_input(2048)
    got = step(torch.compile(run, fullgraph=True), module, x)
    assert [override.hits for override in overrides] == [2, 2]
    with opgraft.disabled():
        native = step(run, module, x)
        wide = model(torch.float32)
        exact = step(wide, wide, x.float())
    check(got, native, exact)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_attention_is_opaque_under_auto(cpp_wrapper: bool) -> None:
    """torch's choice among these depends on the device, the dtype and the shape."""
    hit = []
    for op in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    ):
        native = getattr(torch.ops.aten, op).default
        hit.append(
            opgraft.register_op_override(
                "aten", op, "CUDA", native, cond=when.size("query", 0) >= 2, name=op
            )
        )

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(attend, fullgraph=True, options={"cpp_wrapper": cpp_wrapper})
    with torch.no_grad():
        got = compiled(x)
        hits = sum(override.hits for override in hit)
        with opgraft.disabled():
            torch.testing.assert_close(got, attend(x), rtol=2e-2, atol=2e-2)
    # Its C++ wrapper takes no op of ours that returns a number, as these return sequence lengths.
    assert hits == (0 if cpp_wrapper else 1)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_an_aotinductor_package_with_attention_has_the_native_one(tmp_path: Path) -> None:
    """Inductor's C++ wrapper takes no op of ours that returns numbers."""
    hit = []
    for op in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"):
        native = getattr(torch.ops.aten, op).default
        hit.append(
            opgraft.register_op_override("aten", op, "CUDA", native, unconditional_override=True)
        )
    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), opgraft.pt2.export_overrides():
        program = torch.export.export(Attention(), (x,))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "attention.pt2")
        )
    loaded = torch._inductor.aoti_load_package(path)
    before = sum(override.hits for override in hit)
    got = loaded(x)
    assert sum(override.hits for override in hit) == before
    with opgraft.disabled():
        torch.testing.assert_close(got, Attention()(x), rtol=2e-2, atol=2e-2)


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x)


def test_an_aotinductor_package_that_holds_overrides(tmp_path: Path) -> None:
    override, _ = register()
    rows = torch.export.Dim("rows", min=2, max=8192)
    with torch.no_grad(), opgraft.pt2.export_overrides():
        program = torch.export.export(Norm(), (an_input(2048),), dynamic_shapes=({0: rows},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "norm.pt2")
        )
    loaded = torch._inductor.aoti_load_package(path)
    for count, hits in ((2048, 1), (64, 1), (1024, 2)):
        x = an_input(count)
        got = loaded(x)
        assert override.hits == hits
        with opgraft.disabled():
            torch.testing.assert_close(got.float(), norm(x.float()), rtol=2e-2, atol=2e-2)


def test_the_shipped_kernels_are_traced_into_the_graph(
    decisions: pytest.LogCaptureFixture,
) -> None:
    overrides = register("traceable")
    module = model()
    counter = CompileCounterWithBackend("inductor")
    x = an_input(2048)
    got = step(torch.compile(module, fullgraph=True, backend=counter), module, x)
    assert "aten::_fused_rms_norm at CUDA is traced" in decisions.text
    assert overrides[0].hits == 0, "Inductor launches the kernel itself"
    check(got, *references(x))


def test_a_traced_kernel_is_guarded_by_its_condition() -> None:
    register("traceable")
    compiled = torch.compile(norm, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2048, 64, 1024, 100):
            x = an_input(rows)
            with opgraft.disabled():
                wanted = norm(x.float())
            torch.testing.assert_close(compiled(x).float(), wanted, rtol=2e-2, atol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
