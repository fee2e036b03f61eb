"""What a worker is told of a call: the impl's name, and the arguments' metadata."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypedDict

import torch

from opgraft.cache import origins
from opgraft.ops.lazy_impl import Lazy
from opgraft.ops.schema import Call, resolve
from opgraft.packs import loading as packs
from opgraft.ready.derivative import Autograd
from opgraft.registry import Override, Selector, registry

#: Addresses are told modulo this many bytes: no kernel is specialised on a larger alignment.
ALIGNMENT = 256

Request = dict[str, Any]


class Compiled(TypedDict):
    """What a worker answers."""

    #: The names of the kernels, for people.
    compiled: list[str]
    #: What loads Triton's: see `triton_kernels.description`.
    triton: list[dict[str, Any]]
    #: Why the call's launch plan was not kept; empty where it was.
    no_plan: str


class CannotAsk(Exception):
    """A worker cannot be told of a call, or cannot import what it needs."""


def request(
    override: Override, call: Call, keyset: torch.DispatchKeySet, needs: Sequence[bool] = ()
) -> Request:
    """What a worker needs to know to compile the kernels of a call.

    Where the call's launch plan is to be kept, the caller sets `"plan"` to its key; and
    `"builds_launchers"` where Triton is to launch the kernels, and not a plan.

    Args:
        override: whose impl it is.
        call: the call; of its tensors only the metadata is read.
        keyset: the call's dispatch keys.
        needs: of each argument whether it gets a gradient, by the override's own derivative.

    Raises:
        CannotAsk: the impl cannot be imported by its name, or an argument has no JSON.
    """
    return {
        "impl": name_of(override),
        "autograd": _names_of_derivative(override) if any(needs) else None,
        "needs": list(needs),
        "op": override.op,
        "dsl": override.dsl,
        "keyset": keyset.raw_repr() if override.takes_keyset else None,
        "arguments": [encode(value) for value in call.values],
        "default_dtype": encode(torch.get_default_dtype()),  # of what the impl allocates
        "device": properties(call),
        "autocast": _autocast(call),
        "plan": None,
    }


def _autocast(call: Call) -> list[Any] | None:
    """For which type of device the thread casts, and to what; None where it does not."""
    kind = next((t.device.type for t in call.tensors() if t.device.type != "cpu"), "cpu")
    if not torch.is_autocast_enabled(kind):
        return None
    return [kind, encode(torch.get_autocast_dtype(kind))]


def modules_of(name: str | dict[str, str], impl: Any) -> set[str]:
    """The modules that an impl is made of, which have been imported.

    Args:
        name: the impl's in a request.
        impl: what :func:`load` returned for it.
    """
    found = set() if isinstance(name, dict) else {name.partition(":")[0]}
    waiting, seen = [impl], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Lazy):
            found.add(each.__module__)
            waiting.append(each.load())
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif isinstance(each, FunctionType):
            found.add(each.__module__)
            waiting += [cell.cell_contents for cell in each.__closure__ or ()]
            waiting += [each.__wrapped__] if hasattr(each, "__wrapped__") else []
        else:
            found.add(str(getattr(each, "__module__", None) or type(each).__module__))
    return {name for name in found if origins.is_looked_at(name)}


def name_of(override: Override) -> str | dict[str, str | None]:
    """By which name another process can find an override's impl.

    `module:qualified.name` of a function; of another callable that a pack registers, such as a
    `functools.partial` or a function inside another, the override's pack, name, op and dispatch
    key.

    Raises:
        CannotAsk: there is none.
    """
    impl = override.impl
    if reason := _why_no_name(impl):
        if override.pack is None:
            raise CannotAsk(reason)
        return override.identity
    return f"{impl.__module__}:{impl.__qualname__}"


def _names_of_derivative(override: Override) -> list[str] | dict[str, str | None]:
    assert override.derivative is not None
    for function in override.derivative:
        if reason := _why_no_name(function):
            if override.pack is None:
                raise CannotAsk(f"{reason} (a function of autograd=)")
            return override.identity
    return [f"{each.__module__}:{each.__qualname__}" for each in override.derivative]


def _why_no_name(impl: Any) -> str:
    """Why no name leads another process to an impl; empty where one does."""
    if not isinstance(impl, (FunctionType, Lazy)):
        return f"{impl!r} is no function of a module"
    module, name = impl.__module__, impl.__qualname__
    if module in ("__main__", "__mp_main__"):  # which is what a spawned process calls it
        return f"it is defined in {module}, which other processes do not import"
    if "<" in name:
        return f"{name} is defined inside a function, where no other process finds it"
    if isinstance(impl, FunctionType) and _called(module, name) is not impl:
        return f"{module}.{name} is another function"  # of a decorator's, or reloaded
    return ""


def _called(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def load(name: str | dict[str, str]) -> Callable[..., Any]:
    """The impl of a request, imported.

    Raises:
        CannotAsk: it cannot be imported.
    """
    with _importing(name):
        return _of_pack(name).impl if isinstance(name, dict) else _of_module(name)


def load_derivative(names: list[str] | dict[str, str]) -> Autograd:
    """The functions of a request's derivative, imported.

    Raises:
        CannotAsk: they cannot be imported.
    """
    with _importing(names):
        if isinstance(names, dict):
            found = _of_pack(names).derivative
            if found is None:  # another version of the pack
                raise CannotAsk("the override has no derivative of its own")
            return found
        setup_context, backward = map(_of_module, names)
        return setup_context, backward


@contextmanager
def _importing(name: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a module raises while it is imported
        why = f"{type(error).__name__}: {error}"
        raise CannotAsk(f"{name} cannot be imported: {why}") from error


def _of_module(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Callable[..., Any] = operator.attrgetter(path)(importlib.import_module(module))
    return found.load() if isinstance(found, Lazy) else found


def _of_pack(identity: dict[str, str]) -> Override:
    packs.load(identity["pack"])
    (found,) = registry.overrides(Selector(**identity))
    return found


def digest(asked: Request) -> str:
    """The name of a request: the same for the same request of any process."""
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def encode(value: Any) -> Any:
    """An argument as JSON has it; what JSON lacks is a dictionary of one key.

    Raises:
        CannotAsk: there is no way to say it.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) in (int, float):
        return {"number": repr(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (list, tuple)):
        return [encode(each) for each in value]
    if isinstance(value, torch.Tensor):
        return {"tensor": _encode_tensor(value)}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise CannotAsk(f"an argument of type {type(value).__name__} cannot be told")


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CannotAsk("a tensor is sparse or quantized")
    size = tensor.element_size()
    address = tensor.data_ptr() % ALIGNMENT if tensor.numel() else 0
    if address % size:
        raise CannotAsk("a tensor's address is no multiple of its element's size")
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": address // size,
        "device": tensor.device.type,
        **({"requires_grad": True} if tensor.requires_grad else {}),
    }


def decode(value: Any, shift: int = 0) -> Any:
    """What :func:`encode` was given; tensors are made on its device, under whatever mode is on.

    Args:
        value: what it returned.
        shift: bytes by which tensors begin later in their memory, which is as much larger.
    """
    if isinstance(value, list):
        return [decode(each, shift) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "number":
        return float(content) if any(c in content for c in ".enai") else int(content)
    if kind == "complex":
        return complex(*content)
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    return _decode_tensor(content, shift)


def _decode_tensor(content: dict[str, Any], shift: int) -> torch.Tensor:
    size, stride, offset = content["size"], content["stride"], content["offset"]
    spans = [(n - 1) * step for n, step in zip(size, stride, strict=True)]
    elements = 0 if 0 in size else 1 + sum(spans)
    dtype = getattr(torch, content["dtype"])
    offset += shift // dtype.itemsize
    length = offset + elements + shift // dtype.itemsize
    storage = torch.empty(length, dtype=dtype, device=content["device"])
    tensor = torch.as_strided(storage, size, stride, offset)
    return tensor.requires_grad_() if content.get("requires_grad") else tensor


def properties(call: Call) -> dict[str, Any] | None:
    """What a worker is to take for the properties of the call's GPU; None on the CPU."""
    device = next((t.device for t in call.tensors() if t.device.type != "cpu"), None)
    if device is None:
        return None
    if device.type != "cuda" or torch.version.hip:
        raise CannotAsk(f"workers know of no {device.type} device but NVIDIA's")
    return {"type": "cuda", "properties": _properties(device)}


@functools.cache
def _properties(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        name: value
        for name in dir(found)
        if not name.startswith(("_", "pci_"))  # the same for all of a machine's GPUs that are alike
        and isinstance(value := getattr(found, name), (bool, int, float, str))
    }


def call_of(asked: Request, shift: int = 0) -> Call:
    """The call of a request, on tensors that are made now.

    Args:
        asked: the request.
        shift: as for :func:`decode`.

    Raises:
        RegistrationError: there is no such op here.
    """
    return Call(resolve(asked["op"]), tuple(decode(each, shift) for each in asked["arguments"]))
