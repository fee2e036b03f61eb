"""Whether composite ops do what they do without overrides: run as a program.

Every composite op of aten gets an override that never holds, and PyTorch's own samples are run
before and after: what they return, what autograd knows of it, which ops modes and subclasses see.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import opgraft
from opgraft import when
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, resolve_symbol
from opgraft.verification import opinfo
from tests.garbage import collect_seldom
from tests.modes import RecordOps

Call = Callable[..., Any]

#: Whose results depend on what memory holds, on time, or on what ran before.
RANDOM = re.compile("empty|_like|new_|bernoulli|uniform|normal|rand|dropout|multinomial|cauchy")


def composites() -> Iterator[Op]:
    """Every op of aten that is composite on the CPU."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or has(name, "CPU"):
            continue
        if has(name, "CompositeImplicitAutograd"):
            try:
                yield resolve_symbol(*name.split("::"))
            except RegistrationError:  # TorchScript's own
                continue


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("its condition never holds")


def cond_of(op: Op) -> Any:
    """A condition that no call meets."""
    tensors = [a.name for a in op.arguments if a.kind == "Tensor"]
    if tensors:
        return when.ndim(tensors[0]) == 99
    return lambda *args, **kwargs: False


def register() -> list[opgraft.Override]:
    """An override that never holds for each composite op that can have one."""
    registered = []
    for op in composites():
        try:
            registered.append(
                opgraft.register_op_override(
                    *op.name.split("::"), "CPU", never, cond=cond_of(op), name=f"never {op.name}"
                )
            )
        except RegistrationError as error:
            refused = ("autograd", "subclasses", "uninitialized")
            assert any(each in str(error) for each in refused), error
    return registered


# ------------------------------------------------------------------ samples


def programs(shard: int, shards: int) -> Iterator[tuple[str, Call, Any]]:
    """PyTorch's own calls: a name, what is called, and a sample."""
    for number, info in enumerate(op_db):
        if number % shards != shard % shards or RANDOM.search(info.name):
            continue
        for dtype in (torch.float32, torch.int64):
            if dtype in info.dtypes:
                yield from _of_info(info, dtype)
                break
    yield from _by_hand()


def _of_info(info: Any, dtype: torch.dtype) -> Iterator[tuple[str, Call, Any]]:
    cpu = torch.device("cpu")
    samples = opinfo.function_calls(info, dtype, cpu, 0, requires_grad=False, limit=2)
    for index, (_, sample) in enumerate(samples):
        for each in (info, *info.aliases):
            kinds = ["op", "method_variant", "inplace_variant"][: 3 if index == 0 else 1]
            calls = {kind: getattr(each, kind) for kind in kinds}
            if info.supports_out and index == 0 and each.op is not None:
                calls["out"] = partial(_to_out, each.op)
            for kind, call in calls.items():
                if call is not None and (kind == "op" or call is not calls["op"]):
                    yield f"{each.name}[{info.variant_test_name}] {index} {kind}", call, sample


class Sample(NamedTuple):
    """Arguments, as PyTorch's own samples have them."""

    input: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  # never written to


def _by_hand() -> Iterator[tuple[str, Call, Sample]]:
    """Calls of those that write or alias and that nothing else reaches."""
    x, y = torch.tensor([-1.5, 0.5, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    m, c = torch.tensor([[2.0, 1.0], [0.5, 3.0]]), torch.tensor([1 + 2j, 3 - 1j])
    i, flags, images = torch.tensor([6, 3]), torch.tensor([True, False]), torch.ones(1, 2, 3, 3)
    table: dict[str, tuple[Any, ...]] = {
        **{f"__{name}__.Scalar": (i, 3) for name in ("iand", "ior", "ixor")},
        **{f"__{name}__.Tensor": (flags, ~flags) for name in ("iand", "ior", "ixor")},
        **{f"{name}_.Scalar": (y, 2.0) for name in ("divide", "multiply", "subtract")},
        **{f"{name}_.Scalar": (y, 2.0) for name in ("true_divide", "not_equal", "less")},
        **{f"{name}_.Scalar": (y, 2.0) for name in ("less_equal", "greater", "greater_equal")},
        **{f"{name}dropout_": (images, 0.0, True) for name in ("", "alpha_", "feature_")},
        "feature_alpha_dropout_": (images, 0.0, True),
        "float_power_.Scalar": (y.double(), 2),
        "divide_.Scalar_mode": (y, 2.0, {"rounding_mode": "floor"}),
        **{"clip_": (x, -1.0, 1.0), "relu6_": (x,), "fill_diagonal_": (m, 9.0)},
        **{"movedim.int": (m, 0, 1), "split.sizes": (m, [1, 1]), "to.other": (x, y.double())},
        **{"imag": (c,), "conj": (c,), "set_.source_Tensor_storage_offset": (x, y, 1, [2], [1])},
        **{f"{name}.Scalar_out": (x, 1.0, flags.new_zeros(3)) for name in ("less", "greater")},
        **{f"{name}_equal.Scalar_out": (x, 1, flags.new_zeros(3)) for name in ("less", "not")},
        "greater_equal.Scalar_out": (x, 1.0, flags.new_zeros(3)),
        **{f"{name}.out": (m, [0], True, False, x.new_zeros(2)) for name in ("std", "var")},
        **{f"{name}quantile.out": (x, y / 4, x.new_zeros(3)) for name in ("", "nan")},
        **{"clip.out": (x, -1.0, 1.0, x.new_zeros(3)), "nuclear_norm.out": (m, x.new_zeros(()))},
        "frobenius_norm.out": (m, [0, 1], False, x.new_zeros(())),
        "nuclear_norm.dim_out": (m, [0, 1], False, x.new_zeros(())),
        "linalg_norm.ord_str_out": (m, "fro", x.new_zeros(())),
        "linalg_cond.p_str_out": (m, "fro", x.new_zeros(())),
        "linalg_matrix_norm.out": (m, 2, x.new_zeros(())),
        "linalg_matrix_rank.out": (m, 1e-3, i.new_zeros(())),
        "linalg_pinv.out": (m, 1e-3, x.new_zeros(2, 2)),
        "chain_matmul.out": ([m, m, m], x.new_zeros(2, 2)),
        "argsort.stable_out": (x, {"stable": True, "dim": 0}, i.new_zeros(3)),
        "float_power.Tensor_Scalar_out": (y, 2, x.double()),
        "float_power.Scalar_out": (2, y, x.double()),
        "special_xlogy.other_scalar_out": (y, 2, x.new_zeros(3)),
        "special_xlogy.self_scalar_out": (2, y, x.new_zeros(3)),
        "slogdet.out": (m, {"sign": x.new_zeros(()), "logabsdet": x.new_zeros(())}),
        "nll_loss.out": (m, i % 2, {}, x.new_zeros(())),
    }
    for symbol, (first, *args) in table.items():
        name, _, overload = symbol.partition(".")
        kwargs = {k: v for arg in args if isinstance(arg, dict) for k, v in arg.items()}
        plain = [arg for arg in args if not isinstance(arg, dict)]
        if overload.endswith("out") and symbol != "slogdet.out":
            kwargs["out"] = plain.pop()
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        yield f"by hand: {symbol}", op, Sample(first, tuple(plain), kwargs)


def _to_out(op: Call, *args: Any, **kwargs: Any) -> Any:
    outs = pytree.tree_map_only(torch.Tensor, torch.zeros_like, op(*args, **kwargs))
    return op(*args, **kwargs, out=tuple(outs) if isinstance(outs, tuple) else outs)


# ------------------------------------------------------------------ what is seen of a call


class Wrapper(torch.Tensor):
    """A tensor around another, which notes every op that it is given."""

    inner: torch.Tensor
    ops: list[str] = []  # noqa: RUF012  # one list throughout
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.ops.append(str(func))
        args, kwargs = pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _facts(value: Any, bases: list[torch.Tensor]) -> Any:
    """All that tells two tensors apart."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (int, float, bool, str)) else type(value).__name__
    base = value._base
    return {
        "dtype": str(value.dtype),
        "shape": tuple(value.shape),
        "stride": value.stride() if value.layout == torch.strided else None,
        "values": value.detach().clone(),
        "view": value._is_view(),
        "base": next((i for i, t in enumerate(bases) if base is t or base is t._base), None)
        if base is not None
        else None,
        "same": next((i for i, t in enumerate(bases) if value is t), None),
        "inference": value.is_inference(),
        "version": None if value.is_inference() else value._version,
        "requires_grad": value.requires_grad,
        "grad_fn": value.grad_fn.name() if value.grad_fn is not None else None,
    }


def _all_facts(result: Any, inputs: list[torch.Tensor]) -> list[Any]:
    return [_facts(each, inputs) for each in (*pytree.tree_leaves(result), *inputs)]


def _written_to(result: Any, inputs: list[torch.Tensor]) -> Any:
    """What comes of writing a tensor with a gradient to the results, and differentiating that."""
    w = torch.full((), 2.0, requires_grad=True)
    for each in pytree.tree_leaves(result):
        if _is_differentiable(each) and not each.requires_grad:
            each.add_(w)
    total = sum(t.double().sum() * 3 for t in inputs if _is_differentiable(t))
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return "no gradient"
    return torch.autograd.grad(total, w, allow_unused=True)[0]


def _sample(sample: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    inputs: list[torch.Tensor] = []

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        inputs.append(change(tensor.detach().clone()))
        return inputs[-1]

    given = (sample.input, sample.args, sample.kwargs)
    first, args, kwargs = pytree.tree_map_only(torch.Tensor, fresh, given)
    return (first, *args), kwargs, inputs


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(_is_differentiable(tensor))


def _plain(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, lambda t: t)
    result = op(*args, **kwargs)
    return _all_facts(result, inputs), _written_to(result, inputs), _all_facts((), inputs)


def _views(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, lambda t: t.view_as(t))
    return _all_facts(op(*args, **kwargs), inputs)


def _differentiated(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, _grad)
    result = op(*args, **kwargs)
    facts = _all_facts(result, inputs)
    ends = [t for t in pytree.tree_leaves(result) if _is_differentiable(t) and t.requires_grad]
    starts = [t for t in inputs if t.requires_grad]
    if not ends or not starts:
        return facts
    return facts, torch.autograd.grad([t.sum() for t in ends], starts, allow_unused=True)


def _no_grad(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, _grad)
    with torch.no_grad():
        result = op(*args, **kwargs)
    return _all_facts(result, inputs)


def _inference(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, lambda t: t)
    with torch.inference_mode():
        return _all_facts(op(*args, **kwargs), inputs)


def _autocast(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16):
        return _all_facts(op(*args, **kwargs), inputs)


def _mode(op: Call, sample: Any) -> Any:
    args, kwargs, inputs = _sample(sample, lambda t: t)
    with RecordOps() as seen:
        result = op(*args, **kwargs)
    return _all_facts(result, inputs), seen.ops


def _subclass(op: Call, sample: Any) -> Any:
    args, kwargs, _ = _sample(sample, lambda t: t)
    args, kwargs = pytree.tree_map_only(torch.Tensor, Wrapper, (args, kwargs))
    Wrapper.ops.clear()
    result = pytree.tree_map_only(Wrapper, lambda t: t.inner, op(*args, **kwargs))
    return [_facts(t, []) for t in pytree.tree_leaves(result)], list(Wrapper.ops)


def _forward_mode(op: Call, sample: Any) -> Any:
    def dual(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_differentiable(tensor):
            return tensor
        return torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))

    with torch.autograd.forward_ad.dual_level():
        args, kwargs, _ = _sample(sample, dual)
        results = pytree.tree_leaves(op(*args, **kwargs))
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        return [
            [t.detach().clone() if t is not None else None for t in pair]
            for pair in map(torch.autograd.forward_ad.unpack_dual, tensors)
        ]


def _functorch(op: Call, sample: Any) -> Any:
    def total(first: torch.Tensor) -> torch.Tensor:
        leaves = pytree.tree_leaves(op(first, *sample.args, **sample.kwargs))
        return sum(t.sum() for t in leaves if _is_differentiable(t))  # type: ignore[return-value]

    first = sample.input.detach().clone()
    return torch.func.grad(total)(first), torch.vmap(total)(torch.stack([first, first * 2]))


WAYS: dict[str, Callable[[Call, Any], Any]] = {
    "plain": _plain,
    "views": _views,
    "differentiated": _differentiated,
    "no_grad": _no_grad,
    "inference": _inference,
    "autocast": _autocast,
    "mode": _mode,
    "subclass": _subclass,
    "forward mode": _forward_mode,
    "functorch": _functorch,
}


def outcome(way: str, op: Call, sample: Any) -> Any:
    """What a call comes to; an error, as its type and what it says."""
    torch.manual_seed(0)
    try:
        return WAYS[way](op, sample)
    except Exception as error:
        return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '', str(error))[:300]}"


def same(one: Any, other: Any) -> bool:
    """Whether two outcomes are the same, bit for bit."""
    leaves, spec = pytree.tree_flatten(one)
    others, its = pytree.tree_flatten(other)
    return spec == its and all(map(_same, leaves, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout != other.layout or one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = (t.to_dense() if t.layout != torch.strided else t for t in (one, other))
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other) or (one != one and other != other)


def main(shard: int, shards: int, ways: list[str]) -> None:
    """Print, as JSON, what differed, and which ops were reached."""
    warnings.simplefilter("ignore")
    collect_seldom()
    runs = [
        (*program, way)
        for program in programs(shard, shards)
        for way in ways or WAYS
        # Stock PyTorch does not outlive a wrapper subclass that is set to another one's memory.
        if not (way == "subclass" and "set_" in program[0])
    ]
    stock = [outcome(way, op, sample) for _, op, sample, way in runs]
    # What differs from itself says nothing.
    steady = [
        same(before, outcome(way, op, sample))
        for before, (_, op, sample, way) in zip(stock, runs, strict=True)
    ]
    overrides = register()
    differences = []

    def compare(stage: str) -> None:
        for before, steadily, (name, op, sample, way) in zip(stock, steady, runs, strict=True):
            if not steadily:
                continue
            after = outcome(way, op, sample)
            if not same(before, after):
                differences.append(f"{stage}, {way}: {name}: {before} | {after}"[:1500])

    compare("missed")
    reached = [o for o in overrides if o.misses]
    with opgraft.disabled():
        compare("disabled")
    for override in overrides:
        override.remove()
    compare("removed")
    print(
        json.dumps(
            {
                "differences": differences,
                "runs": len(runs),
                "steady": sum(steady),
                "registered": len(overrides),
                "reached": [o.op for o in reached],
                "hits": sum(o.hits for o in overrides),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
