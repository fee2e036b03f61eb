"""The contract check: an override that returns what native never would is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opgraft
from opgraft import ContractError
from opgraft.router import contract
from tests import ops


def register(impl: Callable[..., Any], op: str = "_softmax", **keywords: Any) -> opgraft.Override:
    return opgraft.register_op_override(
        "aten", op, "CPU", impl, unconditional_override=True, name="mine", **keywords
    )


BROKEN: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dtype": (lambda y: y.double(), r"dtype torch.float64, native's is torch.float32"),
    "shape": (lambda y: y[:1].clone(), r"shape torch.Size\(\[1, 4\]\), native's is"),
    "device": (lambda y: y.to("meta"), r"device meta, native's is cpu"),
    "strides": (lambda y: y.t().contiguous().t(), r"strides \(1, 3\), native's are \(4, 1\)"),
    "None instead of a tensor": (lambda y: None, r"None instead of a tensor"),
    "number of outputs": (lambda y: (y, y), r"tuple instead of a tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_output_unlike_natives_is_refused(name: str) -> None:
    change, message = BROKEN[name]
    override = register(lambda *args: change(ops.softmax(*args)))
    with pytest.raises(
        ContractError, match=rf"override 'mine' of aten::_softmax at CPU.*{message}"
    ):
        torch.softmax(torch.randn(3, 4), -1)
    assert override.hits == 1


def test_an_output_in_an_arguments_memory_is_refused() -> None:
    register(lambda self, dim, half_to_float: self)
    with pytest.raises(ContractError, match="output 0 in the memory of an argument"):
        torch.softmax(torch.randn(3, 4), -1)


def test_outputs_that_share_memory_are_refused() -> None:
    def impl(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.zeros(4, 5)
        return both[:, :4], both[:, 4:]

    register(impl, op="_fused_rms_norm")
    with pytest.raises(ContractError, match=r"strides|same memory"):
        torch.ops.aten._fused_rms_norm(torch.randn(4, 4), [4], None, None)


def test_too_few_outputs_are_refused_on_every_hit() -> None:
    results: list[Any] = []

    def impl(*args: Any) -> Any:
        return results.pop() if results else ops.rms_norm(*args)

    override = register(impl, op="_fused_rms_norm")
    x = torch.randn(4, 4)
    for _ in range(contract.CHECKED_HITS + 1):
        torch.ops.aten._fused_rms_norm(x, [4], None, None)
    results.append((x,))
    with pytest.raises(ContractError, match="returned 1 values; the op has 2 outputs"):
        torch.ops.aten._fused_rms_norm(x, [4], None, None)
    assert override.hits == contract.CHECKED_HITS + 2


def test_an_in_place_op_returns_its_argument() -> None:
    register(lambda self, other, alpha: self + other, op="add_.Tensor")
    x = torch.ones(3)
    with pytest.raises(ContractError, match="returned a new Tensor as output 0"):
        x += torch.ones(3)


def test_strides_count_only_where_native_agrees_with_its_own_meta() -> None:
    x = torch.randn(2, 3, 4, 5).transpose(1, 3)
    arguments = (None, None, None, None, True, 0.1, 1e-5)
    native = torch.native_batch_norm(x, *arguments)
    meta = torch.native_batch_norm(x.to("meta"), *arguments)
    assert native[0].stride() != meta[0].stride(), "pick another op: this one agrees by now"

    def impl(*args: Any) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = opgraft.native("aten::native_batch_norm")(*args)
        return torch.empty_like(meta[0], device="cpu").copy_(out), mean, rstd

    override = register(impl, op="native_batch_norm")
    assert torch.native_batch_norm(x, *arguments)[0].stride() == meta[0].stride()
    assert override.hits == 1


def test_a_view_may_alias_because_native_does() -> None:
    override = register(lambda self, size: self.as_strided(size, (1,)), op="view")
    x = torch.randn(3, 4)
    assert x.view(12).untyped_storage()._cdata == x.untyped_storage()._cdata
    assert override.hits == 1


def test_only_the_first_hits_of_a_signature_are_compared() -> None:
    override = register(ops.softmax)
    for rows in range(1, 6):
        torch.softmax(torch.randn(rows, 4), -1)  # sizes do not make a new signature
    assert list(override.checked.values()) == [contract.CHECKED_HITS]
    torch.softmax(torch.randn(4), -1)
    torch.softmax(torch.randn(4, 4).double(), -1)
    torch.softmax(torch.randn(4, 4)[:, :3], -1)
    assert len(override.checked) == 4
    assert override.hits == 8


def test_a_random_op_is_checked_without_touching_the_generator() -> None:
    def impl(self: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.rand(self.shape) > p
        return self * mask / (1 - p), mask

    override = register(impl, op="native_dropout")
    x = torch.randn(8)
    torch.manual_seed(0)
    first = torch.native_dropout(x, 0.5, True)
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(8)
    assert override.hits == 1
    assert torch.equal(torch.rand(1), after)
    assert first[0].shape == x.shape


def test_overrides_are_off_while_native_is_asked() -> None:
    inner = opgraft.register_op_override(
        "aten",
        "mean.dim",
        "CPU",
        lambda *args, **kwargs: opgraft.native("aten::mean.dim")(*args, **kwargs),
        unconditional_override=True,
    )

    def impl(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = args[0]
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
        return x * rstd, rstd

    # Natively `_fused_rms_norm` is composed of ops with `mean` among them.
    override = register(impl, op="_fused_rms_norm")
    torch.ops.aten._fused_rms_norm(torch.randn(4, 4), [4], None, 1e-6)
    assert (override.hits, inner.hits) == (1, 0)
