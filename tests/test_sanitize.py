"""What threads share without a lock, under the sanitizers; `make sanitize` runs the whole core."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("c++") is None or not sys.platform.startswith("linux"),
        reason="needs a C++ compiler, and Linux",
    ),
]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(kind: str, place: Path, sources: Path) -> subprocess.CompletedProcess[str]:
    sanitize = tool()
    try:
        program = sanitize.parts(kind, place, sources=sources)
    except subprocess.CalledProcessError:
        pytest.skip(f"this compiler has no libraries for -fsanitize={kind}")
    command = sanitize.under(kind, program, "1500")
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("kind", ["thread", "address,undefined"])
def test_reclamation_and_counters_are_sound(kind: str, tmp_path: Path) -> None:
    done = run(kind, tmp_path, ROOT / "csrc")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "as it should be\n"


FAULTS = {
    "frees at once": ("if (entry.first <= oldest)", "if (true)", "epochs.h"),
    "does not announce": (
        "slot.began.store(epoch_.load",
        "if (false) slot.began.store(epoch_.load",
        "epochs.h",
    ),
    "does not announce quickly": (
        "QuickReader() : slot_(*current_) { announce(slot_); }",
        "QuickReader() : slot_(*current_) {}",
        "epochs.h",
    ),
    "keeps a count": (
        "chunk->counts[index_ % kChunk].store(0, std::memory_order_relaxed);",
        ";",
        "counter.h",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    """The program and the sanitizer find what they are there for."""
    sources = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    right, wrong, name = FAULTS[fault]
    text = (sources / name).read_text()
    assert text.count(right) == 1
    (sources / name).write_text(text.replace(right, wrong))
    done = run("address,undefined", tmp_path, sources)
    assert done.returncode != 0, done.stdout
