"""What is recorded of Triton's launches: compiled for real, on a driver that launches nothing."""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opgraft.dsl import triton_launch, triton_versions

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@functools.cache
def recorded(capability: int) -> dict[str, Any]:
    """What `triton_recording.py` prints for a compute capability."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.triton_recording", str(capability)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


X, W, RSTD = ["pointer", [64, 1024]], ["pointer", [1024]], ["pointer", [64, 1]]
NULL = ["pointer", None]
EPS = ["value", bits(1e-6)]


def launches(name: str, capability: int = 90) -> list[dict[str, Any]]:
    found = recorded(capability)[name]
    assert not found["refusal"]
    return list(found["launches"])


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "with_a_callable_grid",
        "with_heuristics",
        "by_the_compiled_kernel",
        "with_an_empty_grid",
        "with_dependent_launch",
        "with_cooperative_launch",
    ],
)
def test_one_launch(name: str) -> None:
    (launch,) = launches(name)
    assert launch["parameters"] == [X, W, X, RSTD, ["value", 1024], EPS, NULL, NULL]
    assert (launch["grid"], launch["threads"], launch["shared"]) == ([64, 1, 1], 128, 16)
    assert launch["dependent"] is (name == "with_dependent_launch")
    assert launch["cooperative"] is (name == "with_cooperative_launch")
    assert launch["cluster"] == 1
    assert launch["watches_hooks"]


def test_constants_64_bits_booleans_and_tuples() -> None:
    (launch,) = launches("with_every_argument")
    numbers = [["value", value] for value in (2**33, 1, bits(2.0), bits(0.5), 1024)]
    assert launch["parameters"] == [X, W, X, RSTD, *numbers, EPS, NULL, NULL]


def test_two_launches_with_a_temporary() -> None:
    first, second = launches("with_two_launches")
    partial = ["pointer", [64]]
    assert first["parameters"] == [X, partial, ["value", 1024], NULL, NULL]
    assert second["parameters"] == [X, W, partial, X, partial, ["value", 1024], EPS, NULL, NULL]


def test_a_first_run_that_tunes_differs_from_the_next() -> None:
    assert [launch["threads"] for launch in launches("with_autotuning")] == [64, 128, 256, 64]


def test_a_cluster() -> None:
    _, launch = launches("with_clusters")
    assert (launch["grid"], launch["cluster"]) == ([16, 1, 1], 2)


def test_scratch_memory_for_descriptors_that_the_kernel_makes() -> None:
    (launch,) = launches("with_device_descriptors")
    assert launch["parameters"][-2:] == [["scratch", 64 * 256], NULL]


def test_descriptors_of_the_host_where_there_is_no_tma() -> None:
    (launch,) = launches("with_host_descriptors", 80)
    parameters = launch["parameters"]
    numbers = [["value", value] for value in (64, 1024, 1024, 1)]
    assert parameters[:5] == [X, *numbers]
    assert W in parameters and parameters[-3:] == [EPS, NULL, NULL]
    assert parameters.count(X) == 2


def test_a_launch_around_the_front_is_refused() -> None:
    assert "it does not use Triton's own" in recorded(90)["around_the_front"]["refusal"]


@pytest.mark.parametrize(
    ("type_", "value", "expected", "size"),
    [
        ("i1", True, 1, 1),
        ("i8", -1, 2**64 - 1, 1),
        ("i32", 7, 7, 4),
        ("u64", 2**64 - 1, 2**64 - 1, 8),
        ("fp16", 1.5, 0x3E00, 2),
        ("bf16", 1.5, 0x3FC0, 2),
        ("fp32", 1.5, 0x3FC00000, 4),
        ("fp64", 1.5, 0x3FF8000000000000, 8),
    ],
)
def test_numbers_as_the_launcher_packs_them(
    type_: str, value: Any, expected: int, size: int
) -> None:
    parameter = triton_launch.parameter(type_, value)
    assert parameter == (("value", expected), size)


@pytest.mark.parametrize(("type_", "value"), [("*fp32", 1234), ("nvTmaDesc", object())])
def test_what_has_no_provenance_is_refused(type_: str, value: Any) -> None:
    with pytest.raises(triton_launch.NotRecordable):
        triton_launch.parameter(type_, value)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"profile_scratch_size": 0}, False),
        ({"profile_scratch_size": 0, "instrumentation_mode": ""}, False),
        ({"profile_scratch_size": 128}, True),
        ({"profile_scratch_size": 0, "instrumentation_mode": "gsan"}, True),
    ],
)
def test_instrumented_kernels_are_told(metadata: dict[str, Any], expected: bool) -> None:
    assert triton_versions.is_instrumented(SimpleNamespace(**metadata)) is expected


@pytest.mark.parametrize(
    "make",
    [lambda descriptor, meta: [descriptor, meta], lambda descriptor, meta, _: [descriptor, meta]],
    ids=["until 3.7", "from 3.9"],
)
def test_descriptors_as_each_triton_makes_them(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    assert triton_versions.launch_arguments("descriptor", "meta") == ["descriptor", "meta"]
