"""`opgraft doctor` on cuDNN: whether torch runs its own, and what another one does to attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from opgraft.cli import cudnn, doctor

OWN = "nvidia-cudnn-cu13"


@dataclass
class Machine:
    """A made-up torch of CUDA 13 with cuDNN 9.20.0, its wheels, and what is loaded."""

    root: Path
    patch: pytest.MonkeyPatch
    site: Path
    own: Path

    def install(self, name: str, version: str, folder: str = "nvidia/cudnn/lib") -> Path:
        """A distribution with a cuDNN, or without one where `folder` is empty."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n\n")
        (info / "RECORD").write_text(f"{folder}/libcudnn.so.9,,\n" if folder else "")
        return self.library(self.site / folder) if folder else self.site

    def library(self, folder: Path, name: str = "libcudnn.so.9") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        return folder

    def load(self, *files: Path) -> None:
        line = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42                 {}\n"
        maps = self.root / "maps"
        maps.write_text("".join(line.format(each) for each in files))
        self.patch.setattr(cudnn, "_MAPS", maps)

    def answers(self, *version: int) -> None:
        """The version of the cuDNN that answers torch."""
        binding = SimpleNamespace(
            is_cuda=True,
            getRuntimeVersion=lambda: version,
            getCompileVersion=lambda: (9, 20, 0),
        )
        self.patch.setattr(torch._C, "_cudnn", binding, raising=False)

    def has_gpu(self, major: int) -> None:
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.setattr("opgraft.cli.doctor.facts.capabilities", lambda: [(major, 0)])

    def shadow(self, *version: int) -> Path:
        """A system's cuDNN, on ``LD_LIBRARY_PATH`` and loaded in place of torch's own."""
        folder = self.library(self.root / "usr" / "cuda")
        self.patch.setenv("LD_LIBRARY_PATH", f"/nowhere:{folder}")
        self.load(folder / "libcudnn.so.9")
        self.answers(*version)
        return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    site = tmp_path / "site"
    info = site / "torch-2.13.0.dist-info"
    info.mkdir(parents=True)
    needs = f'Requires-Dist: {OWN}==9.20.0.48; platform_system == "Linux"'
    (info / "METADATA").write_text(f"Name: torch\nVersion: 2.13.0\n{needs}\n\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    found = Machine(tmp_path, monkeypatch, site, site)
    found.own = found.install(OWN, "9.20.0.48").resolve()
    found.load(found.own / "libcudnn.so.9", found.own / "libcudnn_graph.so.9")
    found.answers(9, 20, 0)
    found.has_gpu(9)
    return found


def check() -> doctor.Check:
    (found,) = doctor._cudnn()
    return found


def test_torchs_own_cudnn_is_ok(machine: Machine) -> None:
    assert check() == ("cuDNN", "ok", f"cuDNN 9.20.0 from {machine.own}, torch's own", "")


@pytest.mark.parametrize("binding", [None, SimpleNamespace(is_cuda=False)], ids=["CPU", "ROCm"])
def test_a_torch_without_cudnn_has_no_line(
    binding: SimpleNamespace | None, machine: Machine
) -> None:
    machine.patch.setattr(torch._C, "_cudnn", binding)
    assert list(doctor._cudnn()) == []


def test_an_old_cudnn_on_the_library_path_costs_hopper_its_attention(machine: Machine) -> None:
    folder = machine.shadow(9, 10, 2)
    topic, level, text, mend = check()
    assert (topic, level) == ("cuDNN", "problem")
    assert text == (
        f"cuDNN 9.10.2 from {folder}, where torch's own is 9.20.0.48 from {machine.own}; "
        f"LD_LIBRARY_PATH has one in {folder}; "
        "scaled_dot_product_attention runs FlashAttention-2 on Hopper and Blackwell, "
        "in place of cuDNN, which torch prefers if newer than 9.15.0"
    )
    assert mend == f"take {folder} out of LD_LIBRARY_PATH"


def test_the_limit_is_the_one_in_torch(machine: Machine) -> None:
    """`cudnn_version > 91500`."""
    machine.shadow(9, 15, 0)
    assert "FlashAttention-2" in check().text
    machine.answers(9, 15, 1)
    assert "FlashAttention-2" not in check().text


@pytest.mark.parametrize("major", [8, 12])
def test_gpus_where_torch_does_not_prefer_cudnn_lose_nothing(major: int, machine: Machine) -> None:
    machine.has_gpu(major)
    # As new as what torch was compiled with asks for, so that nothing refuses it.
    machine.shadow(9, 10, 2)
    machine.patch.setattr(torch._C._cudnn, "getCompileVersion", lambda: (9, 10, 0))
    assert check().level == "note"


def test_without_a_gpu_nothing_is_a_problem(machine: Machine) -> None:
    machine.shadow(9, 10, 2)
    machine.patch.setattr(torch.cuda, "is_available", lambda: False)
    assert check().level == "note"


def test_a_newer_cudnn_is_a_note(machine: Machine) -> None:
    machine.shadow(9, 23, 0)
    assert check().level == "note"
    assert "another cuDNN than torch was tested with" in check().text


def test_a_cudnn_that_torch_refuses_is_a_problem(machine: Machine) -> None:
    machine.has_gpu(8)
    machine.shadow(9, 19, 0)
    assert check().level == "problem"
    assert "torch.backends.cudnn refuses it" in check().text


def test_libraries_of_two_folders_are_a_problem(machine: Machine) -> None:
    """cuDNN opens its own parts by name, and may find those of another version."""
    folder = machine.library(machine.root / "usr", "libcudnn_graph.so.9")
    machine.load(machine.own / "libcudnn.so.9", folder / "libcudnn_graph.so.9")
    assert check().level == "problem"
    assert f"from {machine.own} and {folder}, where torch's own is" in check().text
    assert check().mend == "import torch before whatever else loads a cuDNN"


def test_one_on_the_library_path_that_is_not_loaded_is_a_note(machine: Machine) -> None:
    folder = machine.library(machine.root / "usr")
    machine.patch.setenv("LD_LIBRARY_PATH", str(folder))
    assert check().level == "note"
    assert "attention is not affected here" in check().text


def test_a_cudnn_8_on_the_library_path_shadows_nothing(machine: Machine) -> None:
    folder = machine.library(machine.root / "usr", "libcudnn.so.8")
    machine.patch.setenv("LD_LIBRARY_PATH", str(folder))
    assert check().level == "ok"


def test_torchs_own_folder_on_the_library_path_shadows_nothing(machine: Machine) -> None:
    machine.patch.setenv("LD_LIBRARY_PATH", str(machine.own))
    assert check().level == "ok"


def test_wheels_of_two_cudas_overwrite_each_other(machine: Machine) -> None:
    machine.install("nvidia-cudnn-cu12", "9.10.2.21")
    machine.answers(9, 10, 2)
    assert (
        "installed are nvidia-cudnn-cu13 9.20.0.48 and nvidia-cudnn-cu12 9.10.2.21, "
        "each of which overwrites the other's files; scaled_dot_product_attention runs Flash"
    ) in check().text
    assert check().mend == (
        "pip uninstall nvidia-cudnn-cu12, "
        "pip install --force-reinstall --no-deps nvidia-cudnn-cu13==9.20.0.48"
    )


def test_the_wheel_in_another_version_than_torch_requires(machine: Machine) -> None:
    for file in machine.site.glob("nvidia*/METADATA"):
        file.write_text(f"Name: {OWN}\nVersion: 9.10.2.21\n\n")
    machine.answers(9, 10, 2)
    assert f"from {machine.own}, where torch's own is 9.20.0.48" in check().text
    assert check().mend == ("pip install --force-reinstall --no-deps nvidia-cudnn-cu13==9.20.0.48")


def test_cudnn_frontend_is_no_cudnn(machine: Machine) -> None:
    machine.install("nvidia-cudnn-frontend", "1.24.0", folder="")
    assert check().level == "ok"


def test_a_torch_that_requires_no_wheel_has_the_cudnn_that_it_was_compiled_with(
    machine: Machine,
) -> None:
    """As in NVIDIA's images, and by conda."""
    for file in machine.site.glob("*.dist-info/*"):
        file.write_text("Name: torch\nVersion: 2.13.0\n\n" if "torch" in str(file) else "")
    folder = machine.shadow(9, 20, 0)
    assert check() == ("cuDNN", "ok", f"cuDNN 9.20.0 from {folder}, torch's own", "")
    machine.answers(9, 10, 2)
    assert "where torch's own is 9.20.0;" in check().text
