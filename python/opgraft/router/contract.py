"""The contract: an override returns what the native kernel would have returned, values aside.

Number of outputs, on every hit. On the first hits of each signature the native kernel runs as well,
and dtype, shape, device, strides and aliasing of every output are compared. The native kernel
itself is the reference, not the op's meta function: native differs from its meta (strides, on CPU
even dtypes) for several ops, and the first meta run of some ops imports Inductor, which takes
seconds. Strides count only where native agrees with its meta.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from opgraft.errors import ContractError
from opgraft.registry import Override
from opgraft.schema import Call, Op

log = logging.getLogger(__name__)

#: Hits of each signature that are compared with native. Two, because a first run can differ from
#: the next ones (autotuning, a cached buffer that is returned twice).
CHECKED_HITS = 2
#: Signatures per override that are checked; past that an op is called in too many ways to go on.
MAX_SIGNATURES = 128

# Outputs that hold a random generator's state: a kernel may keep it in its own way.
RNG_OUTPUTS = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "seed", "offset", "unused", "reserve"}
)


def outputs(override: Override, result: Any) -> tuple[Any, ...]:
    """An impl's result as one value per output of the schema.

    Raises:
        ContractError: there are too many or too few, or the only one is no tensor where it must be.
    """
    returns = override.operator.returns
    if len(returns) == 1:
        if str(returns[0].type) == "Tensor" and not isinstance(result, torch.Tensor):
            _refuse(override, 0, f"{_describe(result)} instead of a tensor")
        return (result,)
    if not returns:
        return ()
    if not isinstance(result, (tuple, list)) or len(result) != len(returns):
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else _describe(result)
        raise ContractError(f"{who(override)} returned {got}; the op has {len(returns)} outputs")
    return tuple(result)


def is_due(override: Override, signature: Hashable) -> bool:
    """Whether this hit is one of the first of its signature."""
    done = override.checked.get(signature)
    if done is None:
        return len(override.checked) < MAX_SIGNATURES
    return done < CHECKED_HITS


def check(
    override: Override,
    signature: Hashable,
    call: Call,
    result: Any,
    run_native: Callable[[], Any],
) -> None:
    """Compare a hit's outputs with what native promises.

    Args:
        override: whose impl ran.
        signature: the call's, to count the check.
        call: the arguments.
        result: what the impl returned.
        run_native: runs the native kernel on the same arguments, with all overrides off.

    Raises:
        ContractError: they differ; the message names the override, the output and the difference.
    """
    got = outputs(override, result)
    if override.operator.mutates:
        _check_returned_arguments(override, call, got)
    else:
        expected = _native_outputs(override, call, run_native)
        if expected is not None:
            _compare(override, call, got, expected)
    # Last: what failed is compared again next time. Where native could not answer it does count,
    # so that native is not asked for ever.
    override.checked[signature] = override.checked.get(signature, 0) + 1


def _check_returned_arguments(override: Override, call: Call, got: tuple[Any, ...]) -> None:
    """An op that writes to its arguments returns those very arguments."""
    written = [value for a, value in zip(call.op.arguments, call.values, strict=True) if a.written]
    for index, (value, declared) in enumerate(zip(got, call.op.returns, strict=True)):
        if declared.alias_info is not None and not any(value is each for each in written):
            raise ContractError(
                f"{who(override)} returned a new {_describe(value)} as "
                f"{output_name(call.op, index)}; the op writes to an argument and returns that "
                "argument itself"
            )


def _native_outputs(
    override: Override, call: Call, run_native: Callable[[], Any]
) -> tuple[Any, ...] | None:
    try:
        with keeping_rng(call):
            result = run_native()
    except Exception as error:
        # Native cannot say: it lacks a kernel here, is out of memory, or refuses what the override
        # takes.
        log.debug("%s: not checked, native raised %r", override.name, error)
        return None
    return (result,) if len(call.op.returns) == 1 else tuple(result)


@contextmanager
def keeping_rng(call: Call) -> Iterator[None]:
    """Leave every random generator that a second run of the op would advance as it is."""
    if not call.op.is_random:
        yield
        return
    own = [(g, g.get_state()) for g in call.values if isinstance(g, torch.Generator)]
    devices = {t.device.index for t in call.tensors() if t.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        for generator, state in own:
            generator.set_state(state)


def _compare(
    override: Override, call: Call, got: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    for index, (mine, native) in enumerate(zip(got, expected, strict=True)):
        if call.op.returns[index].name in RNG_OUTPUTS:
            continue
        for difference in _differences(mine, native):
            _refuse(override, index, difference)
        if strides_differ(call, index, mine, native):
            _refuse(override, index, f"strides {mine.stride()}, native's are {native.stride()}")
    _check_aliasing(override, call, got, expected)


def _refuse(override: Override, index: int, difference: str) -> NoReturn:
    output = output_name(override.operator, index)
    raise ContractError(f"{who(override)} returned {output} with {difference}")


def _differences(mine: Any, native: Any) -> Iterator[str]:
    if isinstance(native, (list, tuple)) and isinstance(mine, (list, tuple)):
        if len(mine) != len(native):
            yield f"{len(mine)} items, native returns {len(native)}"
        for one, other in zip(mine, native, strict=False):
            yield from _differences(one, other)
        return
    if not isinstance(mine, torch.Tensor) or not isinstance(native, torch.Tensor):
        if type(mine) is not type(native):
            yield f"{_describe(mine)}, native returns {_describe(native)}"
        return
    for what in ("dtype", "shape", "device"):
        if getattr(mine, what) != getattr(native, what):
            yield f"{what} {getattr(mine, what)}, native's is {getattr(native, what)}"


def strides_differ(call: Call, index: int, mine: Any, native: Any) -> bool:
    """Whether an output's strides are not native's, where native's are those that it promises."""
    return _layouts_differ(mine, native) and _promises_strides(call, index, native)


def _layouts_differ(mine: Any, native: Any) -> bool:
    both = isinstance(mine, torch.Tensor) and isinstance(native, torch.Tensor)
    return both and _strides(mine) != _strides(native)


def _promises_strides(call: Call, index: int, native: torch.Tensor) -> bool:
    """Whether the strides of native's output are what the op's meta function says, too.

    Where they are not (softmax of a transposed tensor on CPU), nobody can rely on them. Asked only
    for an output whose strides differ, because a first meta run can take seconds.
    """
    try:
        with _disable_current_modes():
            result = call.op.overload(*map(_as_meta, call.args), **_meta_kwargs(call))
    except Exception:  # an op without a meta function, or one that depends on data
        return True
    promised = result if len(call.op.returns) == 1 else result[index]
    return not _layouts_differ(promised, native)


def _meta_kwargs(call: Call) -> dict[str, Any]:
    return {name: _as_meta(value) for name, value in call.kwargs.items()}


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta", requires_grad=False
        )
    if isinstance(value, (list, tuple)):
        return [_as_meta(item) for item in value]
    return torch.device("meta") if isinstance(value, torch.device) else value


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that matter: not those of dimensions with one element or of empty tensors."""
    if tensor.numel() == 0:
        return []
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _check_aliasing(
    override: Override, call: Call, got: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    """No output shares memory with an input or another output, unless native's does too."""
    for index, (mine, native) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(mine, torch.Tensor) or not isinstance(native, torch.Tensor):
            continue
        if shares(mine, call.tensors()) and not shares(native, call.tensors()):
            raise ContractError(
                f"{who(override)} returned {output_name(call.op, index)} in the memory of an "
                "argument; return a new tensor"
            )
        if shares(mine, got[:index]) and not shares(native, expected[:index]):
            raise ContractError(
                f"{who(override)} returned two outputs in the same memory; return separate tensors"
            )


def shares(tensor: torch.Tensor, others: Any) -> bool:
    """Whether a tensor lies in the memory of one of the others."""
    storage = _storage(tensor)
    return storage != 0 and any(
        _storage(other) == storage for other in others if isinstance(other, torch.Tensor)
    )


def _storage(tensor: torch.Tensor) -> int:
    # Layouts without a storage (sparse) never reach a dense backend's router.
    return tensor.untyped_storage()._cdata if tensor.numel() else 0


def who(override: Override) -> str:
    """How messages name an override."""
    return f"override {override.name!r} of {override.op} at {override.dispatch_key}"


def output_name(op: Op, index: int) -> str:
    """How messages name an output."""
    name = op.returns[index].name
    return f"output {index}" + (f" ({name})" if name else "")


def _describe(value: Any) -> str:
    return type(value).__name__ if value is not None else "None"
