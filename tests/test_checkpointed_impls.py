"""Checkpointing's two forwards go the same way where impls that autograd differentiates fail.

Checkpointing compares what the two save: where they went different ways, a backward would raise a
`CheckpointError`, or make wrong gradients of what the two have in common.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import opgraft
from opgraft import when
from opgraft.errors import OpgraftError
from tests.python_router import run_again, where_the_core_routes

OP = "scaled_dot_product_attention"
Tensors = list[torch.Tensor]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention, of ops that have derivatives."""
    weights = (query * query.shape[-1] ** -0.5) @ key.mT
    return weights.softmax(-1) @ value


def first_impl(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """Three times native's result."""
    return 3 * attention(query, key, value)


def impl_behind(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """Twice native's result, and another number of saved tensors."""
    return attention(query, key.exp().log(), value.exp().log()) * 2


class Fails:
    """The impl of an override, which raises an error for tensors of one length."""

    def __init__(self, length: int, *, saves: bool = False) -> None:
        self.length: int | None = length
        self.saves = saves

    def __call__(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.shape[-2] == self.length:
            kept = query.sin().exp() if self.saves else query
            raise ValueError(f"no kernel for {tuple(kept.shape)}")
        return first_impl(query, *args, **kwargs)


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output)


def ones(ctx: Any, grad: torch.Tensor) -> Any:
    return (*(torch.ones_like(each) for each in ctx.saved_tensors[:3]), *[None] * 5)


BEHIND: dict[str, Any] = {"none": None, "impl": "impl", "pair": (save_inputs, ones)}
every_kind_behind = pytest.mark.parametrize("behind", [None, *BEHIND])


def override(impl: Callable[..., Any], **terms: Any) -> opgraft.Override:
    terms = {"unconditional_override": "cond" not in terms, "on_error": "fallback"} | terms
    return opgraft.register_op_override("aten", OP, "CPU", impl, **terms)


def register(impl: Callable[..., Any], behind: str | None, **terms: Any) -> list[opgraft.Override]:
    """An override that autograd differentiates, and perhaps another one behind it."""
    found = [override(impl, autograd="impl", name="first", priority=1, **terms)]
    if behind is not None:
        found.append(override(impl_behind, autograd=BEHIND[behind], name="behind"))
    return found


def inputs(length: int = 5, batch: int = 2) -> Tensors:
    shape = (batch, 3, length, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.fixture(params=[True, False], ids=["stops early", "runs to the end"], autouse=True)
def early_stop(request: pytest.FixtureRequest) -> Iterator[None]:
    with set_checkpoint_early_stop(request.param):
        yield


def block(*tensors: torch.Tensor) -> torch.Tensor:
    """What is checkpointed: it saves something before the call, and after it."""
    query, *rest = tensors
    return F.scaled_dot_product_attention(query.exp(), *rest).square()


def checkpointed(tensors: Tensors) -> torch.Tensor:
    out: torch.Tensor = checkpoint(block, *tensors, use_reentrant=False)
    return out


def gradients(out: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.sum(), tensors)


def natively(tensors: Tensors, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    """The gradients of a block whose attention is multiplied by a factor."""
    with opgraft.disabled():
        return tuple(each * factor**2 for each in gradients(block(*tensors), tensors))


def fail(tensors: Tensors) -> None:
    """A call of the same kind outside of a checkpoint, for which the first override fails."""
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        F.scaled_dot_product_attention(*tensors)


@pytest.mark.parametrize("warm", [False, True], ids=["first hit", "later hit"])
@pytest.mark.parametrize("saves", [False, True], ids=["at once", "after it saved tensors"])
@every_kind_behind
def test_what_fails_in_a_checkpoint_leaves_both_forwards_to_native(
    behind: str | None, saves: bool, warm: bool
) -> None:
    first, *then = register(Fails(5, saves=saves), behind)
    for _ in range(3 * warm):
        F.scaled_dot_product_attention(*inputs(7))
    tensors = inputs()
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        out = checkpointed(tensors)
    torch.testing.assert_close(gradients(out, tensors), natively(tensors))
    assert (first.hits, first.fallbacks) == (1 + 3 * warm, 1)
    assert all(each.hits == 0 for each in then)


@every_kind_behind
def test_what_fails_between_the_forwards_takes_the_second_one(behind: str | None) -> None:
    """Kinds of calls have no sizes: another call puts this one into quarantine."""
    first, *then = register(Fails(7), behind)
    tensors = inputs()
    for _ in range(3):
        out = checkpointed(tensors)
    fail(inputs(7))
    torch.testing.assert_close(gradients(out, tensors), natively(tensors, 3))
    assert (first.hits, first.fallbacks) == (5, 1)
    assert all(each.hits == 0 for each in then)


@every_kind_behind
def test_what_failed_before_a_checkpoint_leaves_both_forwards_to_native(behind: str | None) -> None:
    first, *then = register(Fails(7), behind)
    fail(inputs(7))
    tensors = inputs()
    out = checkpointed(tensors)
    torch.testing.assert_close(gradients(out, tensors), natively(tensors))
    assert (first.hits, first.fallbacks) == (1, 1)
    assert all(each.hits == 0 for each in then)


@pytest.mark.parametrize("between", [False, True], ids=["in it", "between the forwards"])
@every_kind_behind
def test_what_is_given_up_keeps_its_place_in_a_checkpoint(
    behind: str | None, between: bool
) -> None:
    """It fails for more kinds of calls than may fail at first."""
    first, *then = register(Fails(5), behind)
    ranks = [torch.randn(*[1] * n, 5, 4, dtype=torch.float64, requires_grad=True) for n in range(4)]

    def run(*tensors: torch.Tensor) -> Any:
        return [F.scaled_dot_product_attention(each.exp(), each, each) for each in tensors]

    count = 1 if between else 4
    with opgraft.disabled():
        expected = torch.autograd.grad(sum(o.sum() for o in run(*ranks[:count])), ranks[:count])
    with pytest.warns(opgraft.OverrideWarning, match="no kernel"):
        outs = checkpoint(run, *ranks[:count], use_reentrant=False)
        run(*ranks[count:])
    grads = torch.autograd.grad(sum(out.sum() for out in outs), ranks[:count])
    torch.testing.assert_close(grads, expected)
    assert first.fallbacks > 2 and (between or all(each.hits == 0 for each in then))


@every_kind_behind
def test_what_natively_left_a_call_does_so_again(behind: str | None) -> None:
    def impl(*args: Any, **kwargs: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)

    first, *then = register(impl, behind)
    tensors = inputs()
    for _ in range(3):
        torch.testing.assert_close(gradients(checkpointed(tensors), tensors), natively(tensors))
    assert (first.hits, first.fallbacks) == (6, 6)
    assert all(each.hits == 0 for each in then)


@every_kind_behind
def test_a_result_that_breaks_the_contract_leaves_both_forwards_to_native(
    behind: str | None,
) -> None:
    """The impl has saved all that it saves by then."""
    first, *then = register(lambda *a, **k: first_impl(*a, **k).float(), behind)
    tensors = inputs()
    with pytest.warns(opgraft.OverrideWarning, match="dtype"):
        out = checkpointed(tensors)
    torch.testing.assert_close(gradients(out, tensors), natively(tensors))
    assert (first.hits, first.fallbacks) == (1, 1)
    assert all(each.hits == 0 for each in then)


@every_kind_behind
def test_what_fails_between_the_forwards_of_reentrant_checkpointing(behind: str | None) -> None:
    """Its first forward saves nothing, so that nothing is compared."""
    register(Fails(7), behind)
    tensors = inputs()
    out = checkpoint(block, *tensors, use_reentrant=True)
    fail(inputs(7))
    out.sum().backward()
    assert all(each.grad is not None for each in tensors)


class FailsOnce(Fails):
    """Fails when it is told to, for calls that it took before, and works again after that."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fails_next = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails_next:
            self.fails_next = False
            raise ValueError("no kernel this time")
        return super().__call__(*args, **kwargs)


@every_kind_behind
def test_what_fails_in_the_second_forward_alone_is_an_error_that_says_what_to_do(
    behind: str | None,
) -> None:
    impl = FailsOnce()
    first, *then = register(impl, behind)
    tensors = inputs()
    out = checkpointed(tensors)
    impl.fails_next = True
    with pytest.raises(
        OpgraftError, match=r"override 'first' of .*disable\(name='first'\)"
    ) as error:
        gradients(out, tensors)
    assert "no kernel this time" in str(error.value.__cause__)
    torch.testing.assert_close(gradients(checkpointed(tensors), tensors), natively(tensors, 3))
    assert first.fallbacks == 0 and all(each.hits == 0 for each in then)


@every_kind_behind
def test_what_fails_in_a_first_forward_that_worked_before_leaves_both_to_native(
    behind: str | None,
) -> None:
    impl = FailsOnce()
    first, *then = register(impl, behind)
    tensors = inputs()
    checkpointed(tensors)
    impl.fails_next = True
    with pytest.warns(opgraft.OverrideWarning, match="no kernel this time"):
        out = checkpointed(tensors)
    torch.testing.assert_close(gradients(out, tensors), natively(tensors))
    assert first.fallbacks == 1 and all(each.hits == 0 for each in then)


@pytest.mark.parametrize("seconds", ["0", "60"])
@every_kind_behind
def test_what_autograd_differentiates_is_waited_for_however_long_it_compiles(
    behind: str | None, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", seconds)
    first, *then = register(Fails(0), behind)
    tensors = inputs()
    for _ in range(3):
        torch.testing.assert_close(gradients(checkpointed(tensors), tensors), natively(tensors, 3))
    assert (first.hits, first.fallbacks) == (6, 0)
    assert all(each.hits == 0 for each in then)


def is_short(query: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return query.shape[-2] < 7


@pytest.mark.parametrize("cond", [when.size("query", -2) < 7, is_short], ids=["when", "python"])
def test_who_is_quarantined_keeps_no_place_for_calls_that_its_condition_declines(cond: Any) -> None:
    first, then = register(Fails(5), "impl", cond=cond)
    fail(inputs())
    tensors = inputs(7)
    torch.testing.assert_close(gradients(checkpointed(tensors), tensors), natively(tensors, 2))
    assert (first.hits, then.hits) == (1, 2)


def test_a_condition_that_fails_between_the_forwards_fails_for_its_own_call_alone() -> None:
    def odd(query: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if query.shape[-2] == 7:
            raise ValueError("no kernel")
        return True

    first, then = register(Fails(0), "impl", cond=odd)
    tensors = inputs()
    out = checkpointed(tensors)
    fail(inputs(7))
    torch.testing.assert_close(gradients(out, tensors), natively(tensors, 3))
    assert (first.hits, then.hits) == (2, 1)


def test_without_hooks_who_is_behind_takes_over_from_what_failed() -> None:
    first, then = register(Fails(7), "impl")
    fail(inputs(7))
    tensors = inputs()
    F.scaled_dot_product_attention(*tensors)
    with torch.no_grad():
        checkpointed(tensors)  # hooks get nothing of it
    assert (first.hits, then.hits) == (1, 2)


def hooked() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_explain_says_that_native_runs_in_place_of_what_is_quarantined() -> None:
    _, then = register(Fails(7), "impl")
    fail(inputs(7))
    tensors = inputs()
    assert opgraft.explain(f"aten::{OP}", *tensors).winner is then
    with hooked():
        explained = opgraft.explain(f"aten::{OP}", *tensors)
        F.scaled_dot_product_attention(*tensors)
    assert explained.winner is None and then.hits == 0
    assert [each.status for each in explained.verdicts] == ["quarantined", "not asked"]
    assert "native runs its forward" in explained.verdicts[1].reason


def test_explain_says_that_what_took_a_call_takes_it_again() -> None:
    first, _ = register(Fails(7), "impl")
    tensors = inputs()
    with hooked():
        F.scaled_dot_product_attention(*tensors)
        fail(inputs(7))
        assert opgraft.explain(f"aten::{OP}", *tensors).winner is first
        F.scaled_dot_product_attention(*tensors)
    assert (first.hits, first.fallbacks) == (3, 1)


# ------------------------------------------------------------------ what hooks get


def saved_by(run: Callable[[], torch.Tensor]) -> list[tuple[int, ...]]:
    """The shapes of what hooks get, in order."""
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return shapes


def test_hooks_get_what_an_impl_saves_in_its_order() -> None:
    first, *_ = register(Fails(0), None)
    query, key, value = inputs()
    found = [saved_by(lambda: F.scaled_dot_product_attention(query, key, value)) for _ in range(4)]
    with opgraft.disabled():
        expected = saved_by(lambda: first_impl(query, key, value))
    assert found == [expected] * 4  # also while native runs beside it, to be compared
    assert first.hits == 4


def test_hooks_that_keep_tensors_elsewhere_give_them_back() -> None:
    first, *_ = register(Fails(0), None)
    tensors = inputs()
    for _ in range(4):
        with torch.autograd.graph.save_on_cpu():
            out = block(*tensors)
        torch.testing.assert_close(gradients(out, tensors), natively(tensors, 3))
    assert first.hits == 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_what_hooks_made_is_freed_with_the_result() -> None:
    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()

    first, *_ = register(Fails(0), None)
    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        found = Packed(tensor)
        packed.append(weakref.ref(found))
        return found

    for _ in range(4):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
            out = block(*inputs())
        assert packed and any(each() is not None for each in packed)
        del out
        assert all(each() is None for each in packed)
    assert first.hits == 4


@pytest.mark.usefixtures("no_collector")
def test_what_an_impl_saved_before_it_failed_is_freed() -> None:
    saved = []

    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = query.sin().exp().exp()
        saved.append(StorageWeakRef(kept.untyped_storage()))
        raise ValueError("no kernel")

    register(impl, None)
    with hooked(), pytest.warns(opgraft.OverrideWarning, match="no kernel") as caught:
        F.scaled_dot_product_attention(*inputs())
    caught.clear()
    assert saved[0].expired()


@pytest.mark.usefixtures("no_collector")
def test_what_hooks_have_not_got_where_one_raised_is_freed() -> None:
    saved = []

    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = query.exp().exp()
        saved.append(StorageWeakRef(kept.untyped_storage()))
        return first_impl(kept, *args, **kwargs)

    def pack(tensor: torch.Tensor) -> Any:
        raise MemoryError("no room")

    first, *_ = register(impl, None)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, pytest.raises(MemoryError, match="no room"):
        F.scaled_dot_product_attention(*inputs())
    assert saved[0].expired()
    assert (first.hits, first.fallbacks) == (1, 0)


def test_where_hooks_are_disabled_inside_others_an_impl_may_fail() -> None:
    first, _ = register(Fails(7), "impl")
    for length in (5, 7):
        tensors = inputs(length)
        with hooked():
            torch._C._autograd._saved_tensors_hooks_disable("none here", False)
            try:
                if length == 7:
                    fail(tensors)
                else:
                    F.scaled_dot_product_attention(*tensors)
            finally:
                torch._C._autograd._saved_tensors_hooks_enable()
    assert (first.hits, first.fallbacks) == (2, 1)


def test_an_impl_may_run_a_backward_of_its_own() -> None:
    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (ones,) = torch.autograd.grad((query.exp().log()).sum(), query)
        return first_impl(query * ones, *args, **kwargs)

    first, *_ = register(impl, None)
    tensors = inputs()
    torch.testing.assert_close(gradients(checkpointed(tensors), tensors), natively(tensors, 3))
    assert (first.hits, first.fallbacks) == (2, 0)


@pytest.mark.parametrize("is_needed", [False, True])
def test_what_is_written_to_after_it_was_saved_is_an_error_where_it_is_needed(
    is_needed: bool,
) -> None:
    def impl(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        exponential = query.exp()
        exponential.detach().zero_()
        other = exponential.sum() if is_needed else exponential.detach().sum()
        return first_impl(query, *args, **kwargs) + other

    first, *_ = register(impl, None)
    tensors = inputs()
    with hooked():
        out = block(*tensors)
    if is_needed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(out, tensors)
    else:
        torch.testing.assert_close(gradients(out, tensors), natively(tensors, 3))
    assert (first.hits, first.fallbacks) == (1, 0)


def test_a_derivative_that_is_lost_where_hooks_get_what_is_saved_is_missed() -> None:
    loses = False

    def impl(*args: Any, **kwargs: Any) -> Any:
        out = first_impl(*args, **kwargs)
        return out.detach() if loses else out

    first, *_ = register(impl, None)
    tensors = inputs()
    for _ in range(3):
        F.scaled_dot_product_attention(*tensors)
    loses = True
    with pytest.warns(opgraft.OverrideWarning, match="cannot differentiate"):
        out = checkpointed(tensors)
    torch.testing.assert_close(gradients(out, tensors), natively(tensors))
    assert (first.hits, first.fallbacks) == (4, 1)


@where_the_core_routes
def test_the_python_router_does_the_same() -> None:
    run_again(__file__)
