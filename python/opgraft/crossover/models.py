"""Models of devices: what a table was measured on."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import torch

from opgraft.base import processor
from opgraft.when.nodes import cuda_capability


class Model(NamedTuple):
    """A model of device: its name as torch prints it, and its CUDA compute capability, if any."""

    name: str
    capability: tuple[int, int] | None = None


def file_name(model_name: str) -> str:
    """The name of a model's table.

    >>> file_name("NVIDIA H200")
    'nvidia_h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "_", model_name.lower()).strip("_") + ".json"


@cache
def of_device(device: torch.device) -> Model:
    """The model of a device. It initialises the device, which a call's tensor has done already."""
    if device.type == "cpu":
        return Model(processor.name())
    module = getattr(torch, device.type, None)
    get_name = getattr(module, "get_device_name", None)
    if get_name is None or not module.is_available():  # type: ignore[union-attr]
        return Model(device.type)
    # On ROCm the device type is "cuda" too, but its (major, minor) is no CUDA capability.
    is_cuda = device.type == "cuda" and not torch.version.hip
    capability = cuda_capability(device.index or 0) if is_cuda else None
    return Model(str(get_name(device)), capability)


def of_dispatch_key(dispatch_key: str) -> list[Model]:
    """The models of the devices here whose tensors dispatch to a key."""
    device_type = "cuda" if dispatch_key == "HIP" else dispatch_key.lower()
    if device_type == "cpu":
        return [of_device(torch.device("cpu"))]
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, "device_count"):
        return []
    devices = [torch.device(device_type, index) for index in range(module.device_count())]
    return list(dict.fromkeys(map(of_device, devices)))
