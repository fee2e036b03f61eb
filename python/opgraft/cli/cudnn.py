"""Which cuDNN torch runs, and whether it is its own.

``F.scaled_dot_product_attention`` prefers cuDNN on Hopper and Blackwell, but only a cuDNN that is
new enough at run time (`check_prefer_cudnn_attention` in torch's ``sdp_utils.cpp``). A second one
that the loader finds first, such as a system's on ``LD_LIBRARY_PATH``, brings FlashAttention-2
back without a word (huggingface/transformers#48163).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from opgraft.base import distributions

__all__ = ["NEWEST_WITHOUT_ATTENTION", "Libraries", "Wheel", "libraries", "spelled"]

Version = tuple[int, ...]

#: Up to this version torch prefers FlashAttention-2 to cuDNN's attention.
NEWEST_WITHOUT_ATTENTION: Version = (9, 15, 0)

# Not `nvidia-cudnn-frontend`, which has no cuDNN in it.
_WHEEL = re.compile(r"nvidia-cudnn-cu\d+")
_LIBRARY = re.compile(r"libcudnn\w*\.so\.(\d+)")
_MAPS = Path("/proc/self/maps")


class Wheel(NamedTuple):
    """An installed distribution of cuDNN.

    Attributes:
        name: its name, `"nvidia-cudnn-cu13"`.
        version: its version.
        folder: where its libraries are; None if it does not say.
    """

    name: str
    version: Version
    folder: Path | None

    def __str__(self) -> str:
        return f"{self.name} {spelled(self.version)}"


class Libraries(NamedTuple):
    """What there is of cuDNN for this process.

    Attributes:
        version: of the cuDNN that answers torch.
        own: the version that torch requires or, if it requires no wheel, was compiled with.
        compiled: the version that torch was compiled with.
        loaded: the folders of the libraries that this process has loaded.
        own_folder: the folder of the wheel that torch requires; None if it requires none.
        wheels: the installed wheels, the one that torch requires first.
        searched: folders on ``LD_LIBRARY_PATH`` that have a cuDNN and are not torch's own.
    """

    version: Version
    own: Version
    compiled: Version
    loaded: tuple[Path, ...]
    own_folder: Path | None
    wheels: tuple[Wheel, ...]
    searched: tuple[Path, ...]

    @property
    def strays(self) -> tuple[Path, ...]:
        """Folders of loaded libraries that are not torch's own."""
        if self.own_folder is not None:
            return tuple(each for each in self.loaded if each != self.own_folder)
        return self.loaded if len(self.loaded) > 1 else ()

    @property
    def is_other_version(self) -> bool:
        """Whether the cuDNN that answers torch is of another version than torch's own."""
        return self.version[:3] != self.own[:3]

    @property
    def loses_attention(self) -> bool:
        """Whether torch would prefer its own cuDNN's attention, and does not prefer this one's."""
        return self.version <= NEWEST_WITHOUT_ATTENTION < self.own[:3]

    @property
    def is_refused(self) -> bool:
        """Whether ``torch.backends.cudnn`` raises an error, this cuDNN being too old for it."""
        return self.version[0] != self.compiled[0] or self.version[1] < self.compiled[1]


def libraries() -> Libraries | None:
    """What there is of cuDNN for this process; None if this torch has no use for it.

    It loads nothing: a torch with cuDNN is linked to it.
    """
    binding = getattr(torch._C, "_cudnn", None)
    if binding is None or not binding.is_cuda:  # ROCm has MIOpen in its place
        return None
    required = _required()
    wheels = tuple(sorted(_wheels(), key=lambda each: (each.name,) != required[:1]))
    own_folder = next((each.folder for each in wheels if (each.name,) == required[:1]), None)
    compiled = tuple(binding.getCompileVersion())
    loaded = tuple(dict.fromkeys(_loaded(compiled[0])))
    own_folders = loaded if own_folder is None else (own_folder,)
    return Libraries(
        tuple(binding.getRuntimeVersion()),
        _numbers(required[1]) if required else compiled,
        compiled,
        loaded,
        own_folder,
        wheels,
        tuple(each for each in dict.fromkeys(_searched(compiled[0])) if each not in own_folders),
    )


def spelled(version: Iterable[int]) -> str:
    """A version as it is written.

    >>> spelled((9, 15, 0))
    '9.15.0'
    """
    return ".".join(map(str, version))


def _numbers(version: str) -> Version:
    return tuple(int(each) for each in re.findall(r"\d+", version))


def _required() -> tuple[str, ...]:
    """The name and version of the wheel that torch requires; empty if it requires none."""
    try:
        headers = distributions.headers(metadata.distribution("torch"))
    except metadata.PackageNotFoundError:
        return ()
    for requirement in headers.get("requires-dist", []):
        if found := re.match(rf"({_WHEEL.pattern})\s*\(?==\s*([\d.]+)", requirement):
            return found.groups()
    return ()


def _wheels() -> Iterator[Wheel]:
    names = set()
    for distribution in metadata.distributions():
        headers = distributions.headers(distribution)
        # What was half removed may have neither.
        name, version = (str((headers.get(key) or [""])[0]) for key in ("name", "version"))
        name = re.sub(r"[-_.]+", "-", name.lower())
        if _WHEEL.fullmatch(name) and name not in names:
            names.add(name)
            yield Wheel(name, _numbers(version), _folder(distribution))


def _folder(distribution: metadata.Distribution) -> Path | None:
    for file in distribution.files or ():
        if _LIBRARY.match(file.name):
            return Path(str(distribution.locate_file(file))).parent.resolve()
    return None


def _is_library(name: str, major: int) -> bool:
    # Another major version has other names, so it is in nobody's way.
    found = _LIBRARY.match(name)
    return found is not None and int(found[1]) == major


def _loaded(major: int) -> Iterator[Path]:
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        # Address, permissions, offset, device, inode, and the path, which may have spaces.
        place = Path(line.split(maxsplit=5)[-1])
        if _is_library(place.name, major):
            yield place.parent.resolve()


def _searched(major: int) -> Iterator[Path]:
    for name in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        folder = Path(name)
        try:
            if any(_is_library(each, major) for each in os.listdir(folder)):
                yield folder.resolve()
        except OSError:
            continue
