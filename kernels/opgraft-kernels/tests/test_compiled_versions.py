"""A changed kernel has another version: else tables that were measured before would count."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import compiled_versions
from compiled_versions import Found, compiled_from, problem, updated

triton = pytest.importorskip("triton")

SOURCES = Path(__file__).parents[1] / "src" / "opgraft_kernels"
RECORDED = compiled_versions.read()
SCALE = """\
    rstd = tl.rsqrt(variance + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    (found,) = compiled_from()
    return found


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_changed_kernel_has_another_version(name: str, found: dict[str, Found]) -> None:
    recorded = RECORDED[name]
    is_known = triton.__version__ in recorded["compiled"]
    if not is_known and recorded["version"] == found[name].version:
        pytest.skip(
            f"not recorded for Triton {triton.__version__}, but for "
            f"{', '.join(recorded['compiled'])}: {compiled_versions.MEND}"
        )
    if wrong := problem(name, recorded, found[name], triton.__version__):
        pytest.fail(wrong)


def test_every_override_is_recorded(found: dict[str, Found]) -> None:
    assert sorted(found) == sorted(RECORDED), compiled_versions.MEND


# ------------------------------------------------------------------ what counts as a change


def edited(folder: Path, edit: Callable[[str], str]) -> Path:
    """A copy of the pack's sources with the norms' kernels edited."""
    shutil.copytree(
        SOURCES, folder / SOURCES.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    file = folder / SOURCES.name / "norms" / "triton_forward.py"
    before = file.read_text()
    file.write_text(edit(before))
    assert file.read_text() != before
    return folder


def with_comments(text: str) -> str:
    """Each line below moves, and so does the kernel's own code."""
    return "# Moved.\n\n" + text.replace(SCALE, f"    # A comment.\n\n{SCALE}")


def with_names(text: str) -> str:
    """The kernel, a variable of it and a function that it calls have other names."""
    for name in ("forward_rows_kernel", "in_row", "_center"):
        text = text.replace(name, f"{name}_renamed")
    # The launches are of the kernel by its name here.
    return f"{text}\n\nforward_rows_kernel = forward_rows_kernel_renamed\n"


def with_arithmetic(text: str) -> str:
    """The forward's kernel for rows that fit a program scales by something else."""
    assert text.count(SCALE) == 1
    return text.replace(SCALE, SCALE.replace("eps)", "eps) + 1.0"))


def test_a_change_of_the_arithmetic_is_seen_and_one_of_the_text_is_not(
    tmp_path: Path, found: dict[str, Found]
) -> None:
    edits = [with_comments, with_names, with_arithmetic]
    folders = [edited(tmp_path / edit.__name__, edit) for edit in edits]
    commented, renamed, changed = compiled_from(*folders)
    assert commented == found
    assert renamed == found
    differing = {
        (name, key)
        for name, each in found.items()
        for key in each.compiled
        if changed[name].compiled[key] != each.compiled[key]
    }
    of_both = ["bfloat16 2560", "bfloat16 3584", "bfloat16 4096", "float32 8192"]
    # Rows of RMSNorm of 13824 columns are split over programs.
    assert differing == {
        *(("rms_norm.forward", key) for key in of_both),
        *(("layer_norm.forward", key) for key in [*of_both, "bfloat16 13824"]),
    }


# ------------------------------------------------------------------ what is said and recorded

ONE = {"version": 3, "compiled": {"3.6.0": {"bfloat16 64": "a"}, "3.7.1": {"bfloat16 64": "b"}}}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Found(3, {"bfloat16 64": "b"}), ""),
        (Found(3, {"bfloat16 64": "c"}), r"\(bfloat16 64\): raise version= .*--record"),
        (Found(3, {"bfloat16 64": "b", "float32 64": "d"}), r"\(float32 64\): raise version="),
        (Found(4, {"bfloat16 64": "c"}), "has version 4, and that is not recorded: .*--record"),
        (Found(4, {"bfloat16 64": "b"}), "has version 4, and that is not recorded"),
    ],
)
def test_what_is_wrong_is_told(found: Found, said: str) -> None:
    assert re.search(said, problem("norm", ONE, found, "3.7.1"))
    assert bool(problem("norm", ONE, found, "3.7.1")) == bool(said)


@pytest.mark.parametrize(
    ("version", "kept"), [(3, {"3.6.0": {"bfloat16 64": "a"}}), (4, {})], ids=["same", "raised"]
)
def test_what_other_tritons_compile_a_version_to_stays(
    version: int, kept: dict[str, dict[str, str]]
) -> None:
    found = Found(version, {"bfloat16 64": "c"})
    content = {"version": version, "compiled": {**kept, "3.7.1": {"bfloat16 64": "c"}}}
    assert updated(ONE, found, "3.7.1") == content


def test_a_changed_kernel_is_not_recorded_under_its_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({"norm": ONE}))
    now = {"norm": Found(3, {"bfloat16 64": "c"})}
    monkeypatch.setattr(compiled_versions, "RECORD", file)
    monkeypatch.setattr(compiled_versions, "compiled_from", lambda: [now])
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    with pytest.raises(SystemExit, match="raise version="):
        compiled_versions.record()
    assert compiled_versions.read() == {"norm": ONE}
