"""The calls of ops that PyTorch's own samples (OpInfo) make on the CPU, for tests to observe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from opgraft.errors import RegistrationError
from opgraft.ops.schema import Call, Op, resolve
from opgraft.router import composite
from opgraft.verification import opinfo

Watch = Callable[[Call], "Callable[[Any], None] | None"]


class _CallWatcher(TorchDispatchMode):
    """Tells of each call that goes to a backend, before and after it ran."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            after = self._watch(resolve(func).bind(args, kwargs))
        except RegistrationError:  # TorchScript's own ops
            after = None
        result = func(*args, **kwargs)
        if after is not None:
            after(result)
        return result


def watch_all(
    watch: Watch,
    *,
    samples: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.int64),
    chosen: Callable[[Any], bool] = lambda info: True,
) -> None:
    """Run PyTorch's samples, forward, backward and in place, and tell of every call below autograd.

    Args:
        watch: gets each call; what it returns is called with the result, after the call ran.
        samples: of each op, dtype and direction.
        dtypes: of the samples.
        chosen: which of PyTorch's operators, by their OpInfo.
    """
    device = torch.device("cpu")
    for info in filter(chosen, opinfo.all_infos()):
        for dtype in dtypes:
            for differentiate in (False, True) if dtype.is_floating_point else (False,):
                fronts = opinfo.function_calls(
                    info, dtype, device, 0, requires_grad=differentiate, limit=samples
                )
                for _, sample in fronts:
                    with warnings.catch_warnings(), torch.set_grad_enabled(differentiate):
                        warnings.simplefilter("ignore")
                        try:
                            with _CallWatcher(watch):
                                result = info(sample.input, *sample.args, **sample.kwargs)
                                if differentiate:
                                    opinfo.gradients(result, opinfo.grad_inputs(sample), 0)
                                elif (in_place := info.get_inplace()) is not None:
                                    given = sample.input.clone()
                                    in_place(given, *sample.args, **sample.kwargs)
                        except Exception:  # a sample that this backend does not do
                            continue


def calls(
    *, samples: int = 2, each: int = 2, chosen: Callable[[Any], bool] = lambda info: True
) -> dict[Op, list[Call]]:
    """Calls of each op that samples reach with dense tensors on the CPU, the first few of each.

    Of ops that can be overridden, and calls that native answers: some samples are refused.
    """
    found: dict[Op, list[Call]] = {}

    def watch(call: Call) -> Callable[[Any], None] | None:
        known = found.setdefault(call.op, [])
        tensors = list(call.tensors())
        if len(known) == each or not tensors or not all(map(_is_plain, tensors)):
            return None
        before = Call(call.op, tree_map_only(torch.Tensor, copied, call.values))
        return lambda result: known.append(before)

    watch_all(watch, samples=samples, dtypes=(torch.float32,), chosen=chosen)
    return {op: known for op, known in found.items() if known and may_be_overridden(op)}


def may_be_overridden(op: Op) -> bool:
    """Whether an override of an op at the CPU key is no error."""
    try:
        composite.check(op, "CPU")
    except RegistrationError:
        return False
    return True


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return dense and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's copy that lies as it does."""
    storage = tensor.untyped_storage().clone()
    copied = torch.empty(0, dtype=tensor.dtype)
    return copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def fresh(call: Call) -> Call:
    """The call with tensors of its own."""
    return Call(call.op, tree_map_only(torch.Tensor, copied, call.values))
