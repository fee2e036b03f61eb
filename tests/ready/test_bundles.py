"""Launch plans that a first process left on disk, and bundles of them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft.cache import bundles, entries, plans
from opgraft.core import loader
from tests import forked_programs
from tests.ready import impls

pytestmark = pytest.mark.skipif(loader.in_use() is None, reason="plans need the compiled core")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


#: Calls `neg` some times, and prints what came of it.
PROGRAM = """
import sys, torch, opgraft
from tests.ready import impls

override = opgraft.register_op_override(
    "aten", "neg", "CPU", impls.negated, unconditional_override=True, name="kept",
    launch_plan=True, when_not_ready="native",
)
for number in range({calls}):
    x = torch.full((4,), float(number))
    assert torch.equal(torch.neg(x), 0 - x)
    if {waits}:
        assert opgraft.wait_until_ready(200)
from opgraft.ready import pool
plans = [] if override.plans is None else list(override.plans)
states = [] if override.plans is None else override.plans.readiness.states()
print(override.hits, override.misses, pool.shared().workers() != [])
print([each.is_proven for each in plans], [each.status for each in states])
print([str(each) for each in states])
"""


def run(
    calls: int = 6, waits: bool = True, program: str = PROGRAM, **environment: str
) -> list[str]:
    program = program.replace("{calls}", str(calls)).replace("{waits}", str(waits))
    done = forked_programs.run(program, env=os.environ | environment, forks_workers=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that a first process leaves."""
    place = tmp_path_factory.mktemp("first") / "cache"
    assert run(OPGRAFT_CACHE=str(place))[0] == "3 3 True"
    return place


@pytest.fixture
def kept(first: Path, own_cache: Path) -> Path:
    """This test's own cache, with what a first process left in it."""
    shutil.copytree(first, own_cache)
    return own_cache


@pytest.mark.usefixtures("kept")
def test_a_second_process_starts_no_worker() -> None:
    counts, found, said = run()
    assert (counts, found) == ("3 3 False", "[True] ['ready']")
    assert said == "['its kernels are ready, compiled by another process']"


#: Ends as soon as a plan is being loaded, and has it loaded once more at its end.
ENDS = (
    PROGRAM[: PROGRAM.index("for number")]
    + """
import atexit
@atexit.register
def at_the_end():
    opgraft.disable(name="kept")
    opgraft.enable(name="kept")  # which drops the plans
    torch.neg(torch.ones(4))
    print("the end")
torch.neg(torch.ones(4))
"""
)


@pytest.mark.usefixtures("kept")
def test_calls_go_on_while_the_process_ends() -> None:
    assert run(program=ENDS) == ["the end"]


@pytest.mark.usefixtures("kept")
def test_what_would_be_compiled_otherwise_is_another_plan() -> None:
    assert run(TRITON_DEBUG="1")[0] == "3 3 True"


def test_none_is_kept_where_the_environment_says_so(own_cache: Path) -> None:
    assert run(OPGRAFT_KERNELS="none")[0].endswith("True")
    assert not list(own_cache.glob("kernels/*"))


def damaged(content: bytes) -> Iterator[bytes]:
    yield b""
    yield content[:-1]
    yield content + b"0"
    step = max(1, len(content) // 400)
    yield from (
        content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]
        for i in range(0, len(content), step)
    )


def test_no_damaged_file_gives_a_plan(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = kept.glob("kernels/*.json")
    right = path.read_bytes()
    key = json.loads(right.splitlines()[0])["key"]
    assert plans.find(key) is not None
    for wrong in damaged(right):
        path.write_bytes(wrong)
        caplog.clear()
        assert plans.find(key) is None
        assert len(caplog.records) == 1


@pytest.fixture
def bundle(kept: Path) -> Path:
    """A bundle of what this test's cache has."""
    (path,) = kept.glob("kernels/*.json")
    entry = entries.read(json.loads(path.read_text().splitlines()[0])["key"])
    assert entry is not None
    folder = kept.parent / "bundle"
    assert bundles.write(folder, [entry], {"made": "today"}) == 1
    return folder


def test_a_bundle_serves_a_process_with_an_empty_cache(bundle: Path, tmp_path: Path) -> None:
    other = {"OPGRAFT_KERNELS": str(bundle), "OPGRAFT_CACHE": str(tmp_path / "other")}
    assert run(**other)[:2] == ["3 3 False", "[True] ['ready']"]
    # From the first call on, with no time in between, on each of two ranks.
    alone = [run(waits=False, OPGRAFT_READY="bundle", **other) for _ in range(2)]
    assert [each[:2] for each in alone] == [["4 2 False", "[True] ['ready']"]] * 2
    assert "compiled by whoever made the bundle" in alone[0][2]
    assert not list((tmp_path / "other").glob("kernels/*"))


def test_what_no_bundle_holds_is_natives(bundle: Path, tmp_path: Path) -> None:
    other = {"OPGRAFT_READY": "bundle", "OPGRAFT_CACHE": str(tmp_path / "other")}
    assert run(**other)[:2] == ["0 6 False", "[] ['dropped']"]
    other["OPGRAFT_KERNELS"] = str(bundle)
    # The environment is part of the key, so that none of its plans fits.
    assert run(TRITON_DEBUG="1", **other)[:2] == ["0 6 False", "[] ['dropped']"]


def test_deterministic_programs_are_natives_where_a_bundle_alone_counts(
    bundle: Path, tmp_path: Path
) -> None:
    other = {"OPGRAFT_READY": "bundle", "OPGRAFT_KERNELS": str(bundle)}
    program = PROGRAM.replace("for number", "torch.use_deterministic_algorithms(True)\nfor number")
    assert run(program=program, OPGRAFT_CACHE=str(tmp_path / "other"), **other)[:2] == [
        "0 6 False",
        "[] []",
    ]


#: A pack, and a program that calls what it overrides; as `PROGRAM`, and prints the same.
PACK = """
def register():
    import opgraft
    from the_pack.impls import negated
    opgraft.register_op_override(
        "aten", "neg", "CPU", negated, unconditional_override=True, name="kept", launch_plan=True
    )
"""
PROGRAM_OF_PACK = PROGRAM.replace(
    PROGRAM[PROGRAM.index("from tests") : PROGRAM.index("for number")],
    'opgraft.packs.load("the-pack")\n(override,) = opgraft.overrides(name="kept")\n',
)


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of an installed pack, which processes find."""
    site, package = tmp_path / "site", tmp_path / "site" / "the_pack"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACK)
    (package / "impls.py").write_text(Path(impls.__file__).read_text())
    info = site / "the_pack-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: the-pack\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[opgraft.packs]\nthe-pack = the_pack:register\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), *sys.path]))
    monkeypatch.setenv("OPGRAFT_PACKS", "the-pack")
    return package


def warm_up(script: Path, folder: Path, *options: str) -> str:
    words = "warmup", "--bundle", folder, *options, script
    done = forked_programs.run_module("opgraft", *words, forks_workers=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_pack_ships_a_bundle_in_its_package(pack: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM_OF_PACK.replace("{calls}", "2").replace("{waits}", "False"))
    others = warm_up(script, tmp_path / "nothing", "--dsl", "triton")
    assert "0 launch plans are in" in others
    assert "1 launch plan is in" in warm_up(script, pack / "bundle", "--pack", "the-pack")
    other = {"OPGRAFT_CACHE": str(tmp_path / "other"), "program": PROGRAM_OF_PACK}
    assert run(**other)[:2] == ["3 3 False", "[True] ['ready']"]
    assert run(waits=False, OPGRAFT_READY="bundle", **other)[:2] == [
        "4 2 False",
        "[True] ['ready']",
    ]
    doctor = forked_programs.run_module("opgraft", "doctor")
    assert f"{pack / 'bundle'}: 1 launch plan" in doctor.stdout.replace("\n", " ")


def test_a_damaged_bundle_of_a_pack_is_not_used(pack: Path, tmp_path: Path) -> None:
    (pack / "bundle").mkdir()
    (pack / "bundle" / "manifest.json").write_text("{")
    assert run(program=PROGRAM_OF_PACK)[:2] == ["3 3 True", "[True] ['ready']"]


def bundle_in(package: Path) -> Path:
    """Put a bundle into a package, of which this process has nothing imported."""
    folder = package / "bundle"
    assert bundles.write(folder, [], {}) == 0
    return folder


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package without code of its own, in which distributions have theirs; and its folder."""
    for name in ("fast", "slow"):
        package = tmp_path / "site" / "the_company" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "overrides.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield tmp_path / "site" / "the_company"
    for name in [each for each in sys.modules if each.startswith("the_company")]:
        del sys.modules[name]


def test_a_bundle_is_that_of_the_innermost_package(company: Path) -> None:
    of_fast = bundle_in(company / "fast")
    importlib.import_module("the_company.fast.overrides")
    importlib.import_module("the_company.slow")
    found = bundles.of_module("the_company.fast.overrides")
    assert found is not None and found.folder == of_fast
    assert bundles.of_module("the_company.slow") is None
    of_all = bundle_in(company)
    found = bundles.of_module("the_company.fast")
    assert found is not None and found.folder == of_fast
    found = bundles.of_module("the_company.overrides")
    assert found is not None and found.folder == of_all


def test_a_package_may_be_imported_later(company: Path) -> None:
    bundle_in(company / "fast")
    assert bundles.of_module("the_company.fast") is None
    importlib.import_module("the_company.fast")
    assert bundles.of_module("the_company.fast") is not None


def test_a_bundle_that_this_user_may_not_read_is_said(
    company: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle_in(company / "fast")
    importlib.import_module("the_company.fast")

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(bundles.BundleError, match="Permission denied"):
        bundles.of_module("the_company.fast")


def test_a_bundle_names_the_devices_of_all_that_were_added(tmp_path: Path) -> None:
    """Each model of GPU adds its own: on none of them does `opgraft doctor` call it another's."""
    for devices in (["B"], ["A"], []):
        bundles.write(tmp_path / "bundle", [], {"devices": devices, "made": str(devices)})
    assert bundles.about(tmp_path / "bundle") == {"devices": ["A", "B"], "made": "[]"}


def test_warmup_asks_for_a_pack_that_there_is(tmp_path: Path) -> None:
    """Or it would leave a bundle with nothing in it."""
    words = "warmup", "--bundle", tmp_path / "made", "--pack", "the_pack", os.devnull
    done = forked_programs.run_module("opgraft", *words)
    assert done.returncode == 2 and "there is no pack 'the_pack' installed" in done.stderr
    assert not (tmp_path / "made").exists()


def test_warmup_tells_of_a_misspelt_dsl(tmp_path: Path) -> None:
    words = "warmup", "--bundle", tmp_path / "made", "--dsl", "tritn", os.devnull
    done = forked_programs.run_module("opgraft", *words)
    assert done.returncode == 2 and "--dsl" in done.stderr and "triton" in done.stderr
    assert not (tmp_path / "made").exists()


def test_an_override_without_plans_is_natives_where_a_bundle_alone_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPGRAFT_READY", "bundle")
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", impls.negated, unconditional_override=True, name="kept"
    )
    try:
        x = torch.ones(4)
        assert torch.equal(torch.neg(x), 0 - x) and override.hits == 0
        assert override.unavailable is not None and "OPGRAFT_READY" in override.unavailable
    finally:
        override.remove()


def test_nothing_is_compiled_here_where_a_bundle_alone_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the impl of a notebook either, which no worker can import."""
    monkeypatch.setenv("OPGRAFT_READY", "bundle")
    ran: list[torch.Tensor] = []

    def local(self: torch.Tensor) -> torch.Tensor:
        ran.append(self)
        return 0 - self

    override = opgraft.register_op_override(
        *("aten", "neg", "CPU", local),
        unconditional_override=True,
        name="local",
        launch_plan=True,
        when_not_ready="native",
    )
    try:
        x = torch.ones(4)
        for _ in range(3):
            assert torch.equal(torch.neg(x), -1 * x)
        assert opgraft.wait_until_ready(60)
        assert (override.hits, ran) == (0, [])
        assert override.plans is not None
        (state,) = override.plans.readiness.states()
        assert state.status == "dropped" and "OPGRAFT_READY" in state.reason
    finally:
        override.remove()


def say(folder: Path, **about: object) -> None:
    """Let a bundle tell something else of itself."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"about": about}))


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not used"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not used"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 99}'), "another version"),
        (lambda folder: say(folder, devices="one"), "for which devices"),
        (lambda folder: say(folder, devices=[1]), "for which devices"),
        (lambda folder: say(folder, versions=[]), "with which versions"),
        (lambda folder: (folder / "manifest.json").chmod(0o666), "chmod go-w"),
        (lambda folder: folder.chmod(0o777), "chmod go-w"),
    ],
    ids=[
        *("none", "half", "list", "version", "devices", "a device", "versions", "writable"),
        "folder",
    ],
)
def test_a_bundle_that_is_none_is_said(
    bundle: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(bundle)
    with pytest.raises(bundles.BundleError, match=why):
        bundles.place(bundle)


def test_a_file_that_the_manifest_does_not_name_is_not_read(bundle: Path) -> None:
    (path,) = (each for each in bundle.glob("*.json") if each.name != bundles.MANIFEST)
    place = bundles.place(bundle)
    assert place.read(path.name) and bundles.problems(bundle) == []
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(OSError, match="damaged"):
        place.read(path.name)
    assert len(bundles.problems(bundle)) == 1
    for name in ("other.json", "../kernels/x.json", ".", ""):
        with pytest.raises((OSError, ValueError)):
            place.read(name)


def test_warmup_leaves_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("{calls}", "2").replace("{waits}", "False"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    assert "1 launch plan is in" in warm_up(script, tmp_path / "made")
    other = {"OPGRAFT_KERNELS": str(tmp_path / "made"), "OPGRAFT_CACHE": str(tmp_path / "other")}
    assert run(waits=False, OPGRAFT_READY="bundle", **other)[0] == "4 2 False"
    doctor = forked_programs.run_module("opgraft", "doctor", env=os.environ | other)
    assert "1 launch plan, made on" in doctor.stdout.replace("\n", " ")
