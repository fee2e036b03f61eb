"""Checks on a CUDA device."""

from __future__ import annotations

from typing import Any

import torch

from opgraft.ops.schema import Call
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    first_difference_from_run,
    needs_plain_hit,
    output_name,
)
from opgraft.verification.samples import run


def _needs_cuda(seen: Observation) -> None:
    if seen.subject.device.type != "cuda":
        raise NotApplicable("needs a CUDA device")
    if seen.is_random or seen.subject.op.mutates:
        raise NotApplicable("the op writes to its arguments or is random")
    needs_plain_hit(seen)


def _each_element_once(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that may be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _on_device_with_values(call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What may be written of each CUDA tensor of a call, with a copy of its values."""
    found = [_each_element_once(each) for each in call.tensors() if each.device.type == "cuda"]
    return [(tensor, tensor.clone()) for tensor in found]


@check("some")
def check_side_stream(seen: Observation) -> None:
    """It works on the current stream, whichever that is."""
    _needs_cuda(seen)
    call = seen.sample.call()
    late = _on_device_with_values(call)
    for tensor, _ in late:
        tensor.zero_()
    torch.cuda.synchronize(seen.subject.device)
    stream = torch.cuda.Stream(seen.subject.device)
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would run before the values come
        for tensor, values in late:
            tensor.copy_(values)
        result = run(call)
    torch.cuda.synchronize(seen.subject.device)
    _compare_late(seen, result, "on a side stream")


@check("some")
def check_cuda_graph(seen: Observation) -> None:
    """Captured into a CUDA graph and replayed, it computes from the values that are there then."""
    _needs_cuda(seen)
    call = seen.sample.call()
    late = _on_device_with_values(call)
    with torch.no_grad():
        for _ in range(3):
            run(call)
        torch.cuda.synchronize(seen.subject.device)
        hits = seen.subject.override.hits
        graph = torch.cuda.CUDAGraph()
        for tensor, _ in late:
            tensor.zero_()
        with torch.cuda.graph(graph):
            result = run(call)
        if seen.subject.override.hits == hits:
            raise Failed("the call had run before, and was declined while a graph was captured")
        for tensor, values in late:
            tensor.copy_(values)
        graph.replay()
        torch.cuda.synchronize(seen.subject.device)
    _compare_late(seen, result, "replayed from a CUDA graph")


@check("some")
def check_other_device(seen: Observation) -> None:
    """It works on tensors of a device that is not the current one."""
    _needs_cuda(seen)
    if torch.cuda.device_count() < 2:
        raise NotApplicable("needs two CUDA devices")
    other = torch.device("cuda", 1 if torch.cuda.current_device() == 0 else 0)
    call = seen.sample.call()
    moved = Call(call.op, tuple(_moved(value, other) for value in call.values))
    with torch.no_grad():
        result = run(moved)
    torch.cuda.synchronize(other)
    back = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for each in back:
        if isinstance(each, torch.Tensor) and each.device not in (other, torch.device("cpu")):
            raise Failed(f"an output is on {each.device}, the arguments are on {other}")
    _compare_late(
        seen,
        tuple(_moved(each, seen.subject.device) for each in back)
        if len(back) > 1
        else _moved(back[0], seen.subject.device),
        f"on {other}, which is not the current device",
    )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.device.type == "cuda" else value
    return [_moved(each, device) for each in value] if isinstance(value, (list, tuple)) else value


def _compare_late(seen: Observation, result: Any, where: str) -> None:
    index = first_difference_from_run(seen, result)
    if index is not None:
        raise Failed(f"{where}, {output_name(seen, index)} differs from an ordinary call's")
