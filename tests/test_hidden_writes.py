"""Ops that write to arguments without saying so: which they are, and nothing runs them twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import opgraft
from opgraft import ContractError, when
from opgraft.ops.schema import HIDDEN_WRITES, Call, resolve
from opgraft.registry.state import CHECKED_HITS
from tests import opinfo_calls
from tests.python_router import run_again, where_the_core_routes

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------ which they are


@pytest.mark.slow
def test_every_op_that_writes_says_so_or_is_known() -> None:
    """Everything that PyTorch's samples reach, before and after: a new torch may bring new ones."""
    hidden = defaultdict(set)
    seen = set()

    def watch(call: Call) -> Callable[[Any], None]:
        seen.add(call.op.name)
        written = {t.untyped_storage()._cdata for _, t in call.written() if has_storage(t)}
        kept = [
            (argument.name, tensor, facts(tensor))
            for argument, tensor in call.named_tensors()
            if has_storage(tensor) and tensor.untyped_storage()._cdata not in written
        ]

        def after(result: Any) -> None:
            for name, tensor, before in kept:
                if not same(before, facts(tensor)):
                    hidden[call.op.name].add(name)

        return after

    opinfo_calls.watch_all(watch, samples=4)
    assert len(seen) > 500
    assert dict(hidden) == {}
    assert "aten::native_batch_norm" in seen


def has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).clone()  # type: ignore[call-overload]
    return raw, (tensor.shape, tensor.stride(), tensor.storage_offset(), storage._cdata)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[1] == other[1] and torch.equal(one[0], other[0])


def schemas() -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        op, _, overload = name.partition(".")
        if op.startswith("aten::"):
            try:
                found.append(torch._C._get_schema(op, overload))
            except RuntimeError:  # the same op under a name that torch does not list
                continue
    assert len(found) > 2000
    return found


def declared(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def test_what_torch_itself_knows_to_be_written_is_known() -> None:
    found = 0
    for schema in schemas():
        known = HIDDEN_WRITES.get(schema.name)
        info = torch._C._SchemaInfo(schema)
        for argument in schema.arguments:
            if info.is_mutable(argument.name) and not declared(argument):
                found += 1
                assert known is not None and argument.name in known.arguments, schema
    assert found >= 10


#: Ops with arguments of such names that read them.
READERS = {
    *("aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward"),
    *("aten::miopen_batch_norm_backward", "aten::batch_norm_backward"),
    *("aten::_batch_norm_impl_index_backward", "aten::_batch_norm_no_update"),
    *("aten::_native_batch_norm_legit_functional", "aten::_batch_norm_with_update_functional"),
    *("aten::rrelu_with_noise_backward", "aten::rrelu_with_noise_functional"),
    *("aten::_native_batch_norm_legit_no_training",),
}


def test_ops_with_arguments_of_the_same_names_are_known() -> None:
    """An op for another backend that has `running_mean` writes to it as its kin do, or reads it."""
    names = {name for known in HIDDEN_WRITES.values() for name in known.arguments}
    unknown = {
        (schema.name, argument.name)
        for schema in schemas()
        for argument in schema.arguments
        if argument.name in names - {"dst", "reserve"} and not declared(argument)
        if schema.name not in READERS
        if argument.name not in getattr(HIDDEN_WRITES.get(schema.name), "arguments", ())
    }
    assert unknown == set()


@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_the_table_names_arguments_that_there_are(name: str) -> None:
    namespace, _, symbol = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), symbol, None)
    if packet is None:
        pytest.skip("this torch does not have it")
    known = HIDDEN_WRITES[name]
    for overload in packet.overloads():
        op = resolve(getattr(packet, overload))
        assert op.writes
        assert set(known.arguments) <= set(op.index)
        assert not known.only_if or op.kinds[known.only_if] == "bool"


# ------------------------------------------------------------------ nothing runs them twice


def impl(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """`native_batch_norm`, by other ops."""
    dims = [dim for dim in range(input.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(input.ndim)]
    if not training:
        assert running_mean is not None and running_var is not None
        rstd = torch.rsqrt(running_var + eps)
        centred = input - running_mean.view(shape)
        return affine(centred * rstd.view(shape), weight, bias, shape), *[input.new_empty(0)] * 2
    variance, mean = torch.var_mean(input, dims, correction=0)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        running_var.mul_(1 - momentum).add_(variance * count / (count - 1), alpha=momentum)
    rstd = torch.rsqrt(variance + eps)
    out = (input - mean.view(shape)) * rstd.view(shape)
    return affine(out, weight, bias, shape), mean, rstd


def affine(
    out: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: list[int]
) -> torch.Tensor:
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def on_batch_norm(by: Callable[..., Any] = impl, **keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    return opgraft.register_op_override(
        "aten", "native_batch_norm", "CPU", by, name="mine", **keywords
    )


def statistics(steps: int, *, training: bool = True) -> list[torch.Tensor]:
    """What some steps of batch normalisation leave: the running statistics, and the last output."""
    torch.manual_seed(0)
    mean, variance = torch.zeros(3), torch.ones(3)
    out = mean
    for _ in range(steps):
        x = torch.randn(8, 3) * 2 + 1
        out = F.batch_norm(x, mean, variance, torch.ones(3), torch.zeros(3), training, 0.3)
    return [mean, variance, out]


STEPS = CHECKED_HITS + 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [None, 1.0])
def test_running_statistics_are_right(rate: float | None, training: bool) -> None:
    expected = statistics(STEPS, training=training)
    override = on_batch_norm()
    if rate is None:
        found = statistics(STEPS, training=training)
    else:
        with opgraft.shadow(rate=rate, on_mismatch="raise"):
            found = statistics(STEPS, training=training)
        assert (override.shadowed, override.mismatches) == (STEPS, 0)
    assert (override.hits, override.fallbacks) == (STEPS, 0)
    torch.testing.assert_close(found, expected)


def test_they_are_right_where_shadow_mode_quarantines() -> None:
    expected = statistics(STEPS)

    def wrong(*args: Any) -> tuple[torch.Tensor, ...]:
        out, mean, rstd = impl(*args)
        args[3].add_(1)
        return out, mean, rstd

    override = on_batch_norm(wrong)
    with opgraft.shadow(rate=1.0, on_mismatch="quarantine"), pytest.warns(opgraft.OverrideWarning):
        found = statistics(STEPS)
    assert (override.hits, override.mismatches) == (1, 1)
    torch.testing.assert_close(found, expected)


def test_shadow_mode_compares_what_is_written() -> None:
    def wrong(*args: Any) -> tuple[torch.Tensor, ...]:
        outputs = impl(*args)
        args[4].mul_(1.01)
        return outputs

    override = on_batch_norm(wrong)
    with (
        opgraft.shadow(rate=1.0, on_mismatch="raise"),
        pytest.raises(ContractError, match="argument 'running_var': "),
    ):
        statistics(1)
    assert override.mismatches == 1


def failing(*args: Any) -> Any:
    if args[5]:
        args[3].add_(100)  # half of its work
    raise RuntimeError("no compiler")


def test_a_call_that_writes_raises_where_its_impl_does() -> None:
    override = on_batch_norm(failing, on_error="fallback")
    with pytest.raises(RuntimeError, match="no compiler"):
        statistics(1)
    assert (override.hits, override.fallbacks, override.state.quarantined) == (1, 0, {})


def test_a_call_that_writes_nothing_falls_back() -> None:
    expected = statistics(2, training=False)
    override = on_batch_norm(failing, on_error="fallback")
    with pytest.warns(opgraft.OverrideWarning, match="no compiler"):
        found = statistics(2, training=False)
    assert (override.hits, override.fallbacks) == (1, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_the_number_of_hits_changes_nothing(steps: int) -> None:
    expected = statistics(steps)
    override = on_batch_norm(opgraft.native("aten::native_batch_norm"))
    torch.testing.assert_close(statistics(steps), expected, rtol=0, atol=0)
    assert override.hits == steps


def test_an_impl_that_forgets_them_is_refused() -> None:
    override = on_batch_norm(lambda *args: impl(*[*args[:3], None, None, *args[5:]]))
    with pytest.raises(
        ContractError, match=r"override 'mine' .* left argument 'running_mean' as it was"
    ):
        statistics(1)
    assert override.hits == 1


def test_an_impl_that_writes_them_out_of_training_is_refused() -> None:
    def wrong(*args: Any) -> Any:
        args[3].add_(1)
        return impl(*args)

    override = on_batch_norm(wrong)
    with pytest.raises(ContractError, match=r"mine' .* wrote to argument 'running_mean'"):
        statistics(1, training=False)
    assert override.hits == 1


def test_a_bound_on_compiling_does_not_run_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = statistics(STEPS)
    monkeypatch.setenv("OPGRAFT_COMPILE_TIMEOUT", "10")
    override = on_batch_norm()
    torch.testing.assert_close(statistics(STEPS), expected)
    assert override.hits == STEPS


def test_verification_takes_them_for_what_they_are() -> None:
    native = opgraft.native("aten::native_batch_norm")

    def by_copies(*args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(opinfo_calls.copied, native(*args)))

    override = on_batch_norm(by_copies, cond=when.ndim("input") == 2)
    checks = ["hit", "aliasing", "inputs", "values"]
    report = opgraft.verify(override, checks=checks, max_samples=60)
    assert report.ok, str(report)
    assert override.hits > 0


@pytest.mark.parametrize("policy", ["opaque", "traceable"])
def test_in_compiled_graphs_they_are_what_they_are_without_overrides(policy: Any) -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        out = F.batch_norm(x, mean, variance, training=True, momentum=0.3)
        return out, mean * 2

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        mean, variance = torch.zeros(3), torch.ones(3)
        out, twice = torch.compile(step, backend="aot_eager")(torch.randn(8, 3), mean, variance)
        return [out, twice, mean, variance]

    expected = run()
    on_batch_norm(compile=policy)
    torch.testing.assert_close(run(), expected)


@where_the_core_routes
def test_the_same_in_the_python_router() -> None:
    run_again(__file__, selected="not python_router and not known and not compiled")
