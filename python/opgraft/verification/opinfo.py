"""Records the calls of an op that PyTorch's own tests make: those of OpInfo's samples.

OpInfo is in `torch.testing._internal`, which imports `expecttest` and NumPy. If it cannot be
imported, a verification that should use it is incomplete, and its verdict is "not run".
"""

from __future__ import annotations

import random
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from opgraft.ops.describing import dtype_name
from opgraft.ops.schema import Op
from opgraft.router import threads
from opgraft.verification.random_values import RandomValues
from opgraft.verification.samples import Values

#: Samples that are run for each OpInfo and dtype.
MAX_SAMPLES = 40
#: Those that are run of every OpInfo there is.
_FEW_SAMPLES = 2


@dataclass(frozen=True)
class FunctionCall:
    """One sample of an OpInfo: a call of a function that users call, such as `F.softmax`."""

    info: Any
    dtype: torch.dtype
    index: int

    @property
    def id(self) -> str:
        return f"{label(self.info)}:{dtype_name(self.dtype)}:{self.index}"


@dataclass(frozen=True)
class OpCall:
    """A call of the op that a function call made."""

    function_call: FunctionCall
    number: int  #: its index among the function call's calls of the op
    values: Values
    differentiated: bool

    @property
    def id(self) -> str:
        mode = "opinfo-grad" if self.differentiated else "opinfo"
        return f"{mode}:{self.function_call.id}.{self.number}"


@cache
def missing() -> str | None:
    """Why OpInfo cannot be imported here; None where it can."""
    try:
        _database()
    except Exception as error:  # whatever an internal module raises
        return (
            f"torch.testing._internal cannot be imported ({type(error).__name__}: {error}); "
            "`pip install expecttest numpy` mends it where one of them is missing, and "
            "--no-opinfo (opinfo=False) verifies without"
        )
    return None


@cache
def _database() -> Sequence[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db  # type: ignore[no-any-return]


def label(info: Any) -> str:
    """An OpInfo's name in one word."""
    variant = f"-{info.variant_test_name}" if info.variant_test_name else ""
    return re.sub(r"\s", "_", f"{info.name}{variant}").replace(":", "_")


def infos_by_name(op: Op) -> list[Any]:
    """The OpInfos whose name is similar to the op's, the most similar first."""
    wanted = _name_parts(op.name.split("::", 1)[1].partition(".")[0])
    scored = []
    for info in _database():
        names = [info.name, info.aten_name or "", *(alias.name for alias in info.aliases)]
        score = max(_similarity(_name_parts(name.rpartition(".")[2]), wanted) for name in names)
        if score > 0:
            scored.append((-score, label(info), info))
    return [info for _, _, info in sorted(scored, key=lambda each: each[:2])]


def _name_parts(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of words in common, where one name is part of the other."""
    if not one or not other or not (one <= other or other <= one):
        return 0.0
    return len(one & other) / len(one | other)


def all_infos() -> Sequence[Any]:
    """Every OpInfo there is."""
    return _database()


def op_calls(
    op: Op,
    info: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    differentiate: bool,
    limit: int = MAX_SAMPLES,
) -> Iterator[OpCall]:
    """The calls of `op` that an OpInfo's samples make, recorded below autograd.

    Args:
        op: the op.
        info: the OpInfo.
        dtype: the dtype of its samples.
        device: their device.
        seed: the seed of their values.
        differentiate: whether to run them in grad mode, with a backward.
        limit: how many samples to run.
    """
    runs = _runs(op, info, dtype, device, seed, differentiate, limit)
    for function_call, recorder in runs:
        for number, values in enumerate(recorder.calls):
            yield OpCall(function_call, number, values, differentiate)


#: What `called` has found. An OpInfo cannot be hashed, and lives as long as its database.
_called: dict[Hashable, set[Any]] = {}


def called(
    info: Any, dtype: torch.dtype, device: torch.device, seed: int, *, differentiate: bool
) -> set[Any]:
    """The overloads that an OpInfo's first samples call, recorded below autograd.

    All OpInfos are run to find those that call an op of another name: once for all ops.
    """
    key = id(info), dtype, device, seed, differentiate
    if key not in _called:
        runs = _runs(None, info, dtype, device, seed, differentiate, _FEW_SAMPLES)
        _called[key] = {each for _, recorder in runs for each in recorder.called}
    return _called[key]


def _runs(
    op: Op | None,
    info: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    differentiate: bool,
    limit: int,
) -> Iterator[tuple[FunctionCall, _Recorder]]:
    """What an OpInfo's samples call, of those that this backend supports."""
    samples = function_calls(info, dtype, device, seed, requires_grad=differentiate, limit=limit)
    for function_call, sample in samples:
        with _Recorder(op) as recorder:
            try:
                with threads.scope(threads.EVERYTHING), torch.set_grad_enabled(differentiate):
                    result = info(sample.input, *sample.args, **sample.kwargs)
                    if differentiate:
                        gradients(result, grad_inputs(sample), seed)
            except Exception:  # this backend does not support the sample
                continue
        yield function_call, recorder


def function_calls(
    info: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    requires_grad: bool,
    limit: int = MAX_SAMPLES,
) -> Iterator[tuple[FunctionCall, Any]]:
    """An OpInfo's samples, the same ones for the same seed."""
    kind = device.type
    supported = info.supported_backward_dtypes(kind) if requires_grad else ()
    if dtype not in (supported if requires_grad else info.supported_dtypes(kind)):
        return
    with seeded(seed):
        # Not `info.sample_inputs`: it searches the stack for a test's name, which takes longer than
        # making the samples.
        stream = info.sample_inputs_func(info, str(device), dtype, requires_grad)
        samples = []
        try:
            for sample in stream:
                samples.append(sample)
                if len(samples) == limit:
                    break
        except Exception:  # some sample functions need what is not installed
            pass
    for index, sample in enumerate(samples):
        yield FunctionCall(info, dtype, index), sample


def grad_inputs(sample: Any) -> list[torch.Tensor]:
    """The tensors of a sample that gradients are asked for."""
    all_infos = tree_leaves((sample.input, list(sample.args), sample.kwargs))
    return [each for each in all_infos if isinstance(each, torch.Tensor) and each.requires_grad]


def gradients(result: Any, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    """The gradients of a fixed random combination of all outputs."""
    outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    outputs = [each for each in outputs if each.requires_grad]
    if not outputs or not inputs:
        return []
    rng = RandomValues(seed)
    seeds = [rng.normal(each) for each in outputs]
    return list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A scope that seeds every random generator a sample function may use, and restores it."""
    python = random.getstate()
    try:
        import numpy
    except ImportError:
        numpy = None  # type: ignore[assignment]
    state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        seed_torch(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None and state is not None:
                numpy.random.set_state(state)


def seed_torch(seed: int) -> None:
    """Seed PyTorch's generators, of which most machines have one alone. For each kind of device
    that is not there `torch.manual_seed` writes down the stack of the call."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class _Recorder(TorchDispatchMode):
    """Keeps which ops are called, below autograd and above the backend, and the arguments of every
    call of one of them."""

    def __init__(self, op: Op | None) -> None:
        super().__init__()
        self._op = op
        self.calls: list[Values] = []
        self.called: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.called.add(func)
        if self._op is not None and func is self._op.overload:
            call = self._op.bind(args, kwargs)
            self.calls.append(tree_map_only(torch.Tensor, _copied, call.values))
        return func(*args, **kwargs)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
