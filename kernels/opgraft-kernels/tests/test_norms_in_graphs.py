"""The norms in compiled graphs: opaque where the H200's table says so, and right on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import opgraft
import opgraft_kernels
from opgraft.crossover import models, sources
from opgraft.ops.schema import Call
from opgraft.pt2 import policy
from opgraft_kernels.norms.overrides import LAYER_NORM, RMS_NORM
from opgraft_kernels.norms.samples import calls

pytestmark = [pytest.mark.crossovers, pytest.mark.filterwarnings("ignore")]

H200 = models.Model("NVIDIA H200", (9, 0))
HAS_H200 = torch.cuda.is_available() and torch.cuda.get_device_name() == H200.name


@pytest.fixture(autouse=True)
def no_tables_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path))
    sources.forget()


@pytest.fixture
def overrides(monkeypatch: pytest.MonkeyPatch) -> dict[str, opgraft.Override]:
    """The norms' overrides by the end of their names, on an H200 whatever is here."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(models, "of_device", lambda device: H200)
    names = {
        each.name.removeprefix("opgraft_kernels."): each for each in opgraft_kernels.register()
    }
    return {name: each for name, each in names.items() if "_norm." in name}


NORMS = {norm.name: norm for norm in (RMS_NORM, LAYER_NORM)}
META = torch.device("meta")


def call_of(override: opgraft.Override, rows: int, hidden: int) -> Call:
    _, norm, direction = override.name.split(".")
    direction = direction.removesuffix("_by_cluster")
    (sample,) = calls(NORMS[norm], direction, META, elements=rows * hidden, hidden=hidden)
    return override.operator.bind((), sample)


def is_opaque(override: opgraft.Override, call: Call) -> bool:
    return policy.resolve(override, call)[0] == "opaque"


#: By the override that takes the calls, rows and widths.
OPAQUE = {
    "rms_norm.forward": [(2, 16384), (64, 16384), (256, 16384)],
    "rms_norm.forward_by_cluster": [(1, 65536), (16, 65536), (512, 65536), (2048, 65536)],
    "rms_norm.backward": [(1024, 1024), (1024, 4096), (4096, 8192), (2048, 16384)],
    "rms_norm.backward_by_cluster": [(1024, 32768), (512, 65536)],
    "layer_norm.forward": [(2, 16384), (256, 16384), (32, 32768)],
    "layer_norm.forward_by_cluster": [(1, 65536), (16, 65536), (64, 65536), (2048, 65536)],
    "layer_norm.backward": [(1024, 1024), (1024, 4096), (8192, 4096), (4096, 8192)],
    "layer_norm.backward_by_cluster": [(2048, 16384), (1024, 32768), (512, 65536)],
}
INDUCTORS = {
    "rms_norm.forward": [(256, 1024), (8192, 4096), (2048, 16384), (32, 32768)],
    # Faster, but by less than the margin.
    "rms_norm.forward_by_cluster": [(64, 65536)],
    "rms_norm.backward": [(32, 1024), (32768, 1024), (8192, 4096), (128, 8192), (256, 16384)],
    "rms_norm.backward_by_cluster": [(1, 65536), (64, 65536)],
    "layer_norm.forward": [(256, 1024), (8192, 4096), (1, 32768)],
    "layer_norm.forward_by_cluster": [(2048, 16384)],
    "layer_norm.backward": [(32, 1024), (32768, 1024), (128, 8192), (256, 16384)],
    "layer_norm.backward_by_cluster": [(1, 65536), (64, 65536)],
}


@pytest.mark.parametrize("name", OPAQUE)
def test_the_table_of_the_h200_says_what_is_opaque(
    overrides: dict[str, opgraft.Override], name: str
) -> None:
    found = {
        shape: is_opaque(overrides[name], call_of(overrides[name], *shape))
        for shape in (*OPAQUE[name], *INDUCTORS[name])
    }
    assert found == dict.fromkeys(OPAQUE[name], True) | dict.fromkeys(INDUCTORS[name], False)


@pytest.mark.parametrize("name", [name for name in OPAQUE if not name.endswith("_by_cluster")])
def test_what_was_measured_in_bfloat16_says_nothing_of_other_dtypes(
    overrides: dict[str, opgraft.Override], name: str
) -> None:
    for shape in OPAQUE[name]:
        call = call_of(overrides[name], *shape)
        single = [each.float() if isinstance(each, torch.Tensor) else each for each in call.values]
        assert not is_opaque(overrides[name], Call(call.op, tuple(single)))


def with_any_rows(call: Call, at_least: int = 0) -> Call:
    """The same with fake tensors, whose number of rows is a symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    rows: list[Any] = []

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return value
        if not rows:
            dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            source = ConstantSource("input")
            rows.append(mode.from_tensor(value, symbolic_context=dynamic, source=source).shape[0])
            torch._check(rows[0] >= at_least)
        with mode:
            return torch.empty(rows[0], value.shape[1], dtype=value.dtype, device="meta")

    return Call(call.op, tuple(map(fake, call.values)))


#: By the widths above, whatever the rows.
ALWAYS_OPAQUE = "layer_norm.forward_by_cluster"


@pytest.mark.parametrize("name", [name for name in OPAQUE if name != ALWAYS_OPAQUE])
def test_with_any_number_of_rows_a_norm_is_inductors(
    overrides: dict[str, opgraft.Override], name: str
) -> None:
    call = call_of(overrides[name], *OPAQUE[name][-1])
    assert is_opaque(overrides[name], call)
    assert not is_opaque(overrides[name], with_any_rows(call))


def test_a_norm_that_is_opaque_with_all_rows_is_so_with_any(
    overrides: dict[str, opgraft.Override],
) -> None:
    override = overrides[ALWAYS_OPAQUE]
    assert is_opaque(override, with_any_rows(call_of(override, *OPAQUE[ALWAYS_OPAQUE][-1])))


def test_where_every_number_of_rows_agrees_a_norm_is_opaque(
    overrides: dict[str, opgraft.Override],
) -> None:
    override = overrides["rms_norm.forward_by_cluster"]
    call = call_of(override, 512, 65536)
    assert is_opaque(override, with_any_rows(call, at_least=512))
    assert not is_opaque(override, with_any_rows(call, at_least=64))


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest error, relative to the largest value of its tensor."""
    return max(
        ((one - right).abs().max() / right.abs().max()).item()
        for one, right in zip(found, exact, strict=True)
    )


def step(
    function: Callable[..., torch.Tensor], x: torch.Tensor, parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Output and gradients of a norm behind a residual connection."""
    x, residual, *parameters = (t.detach().requires_grad_() for t in (x, x.flip(0), *parameters))
    output = function(x, residual, *parameters)
    output.pow(2).sum().backward()
    return [output.detach(), *(t.grad for t in (x, residual, *parameters) if t.grad is not None)]


@pytest.mark.parametrize(
    ("rows", "hidden", "opaque"),
    [
        (32, 1024, set()),
        (1024, 1024, {"backward"}),
        (8192, 2048, set()),
        (512, 8192, {"backward"}),
        (256, 16384, {"forward"}),
        (2048, 16384, {"backward"}),
        (512, 65536, {"forward", "backward"}),
    ],
)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_H200, reason="it is the H200's table")
def test_a_norm_is_opaque_where_that_was_faster(
    norm: str, rows: int, hidden: int, opaque: set[str]
) -> None:
    torch._dynamo.reset()

    def function(
        x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        h = x + residual
        return getattr(F, norm)(h, (hidden,), *parameters, eps=1e-5) + h

    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = [(rows, hidden), *[(hidden,)] * (2 if norm == "layer_norm" else 1)]
    exact_inputs = [
        torch.randn(shape, device="cuda", generator=generator).bfloat16().double()
        for shape in shapes
    ]
    exact = step(function, exact_inputs[0], exact_inputs[1:])
    x, *parameters = (t.bfloat16() for t in exact_inputs)
    native = step(function, x, parameters)
    overrides = [each for each in opgraft_kernels.register() if f".{norm}." in each.name]
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    for _ in range(4):  # small calls are hits from the first launch plan on
        before = {override.name: override.hits for override in overrides}
        found = step(compiled, x, parameters)
    hits = {each.name.split(".")[2] for each in overrides if each.hits > before[each.name]}
    assert {name.removesuffix("_by_cluster") for name in hits} == opaque
    assert error(found, exact) <= 2 * error(native, exact)


@pytest.mark.gpu
def test_with_sizes_that_vary_a_norm_is_inductors() -> None:
    torch._dynamo.reset()
    overrides = opgraft_kernels.register()

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (1024,), weight, 1e-5)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    weight = torch.ones(1024, device="cuda", requires_grad=True)
    for rows in (64, 1024, 4096):
        for _ in range(3):
            compiled(torch.randn(rows, 1024, device="cuda"), weight).sum().backward()
    assert sum(override.hits for override in overrides) == 0
