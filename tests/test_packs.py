"""Packs: found by metadata, loaded one by one, whole or not at all."""

from __future__ import annotations

import gc
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

import opgraft
from opgraft import RegistrationError, packs
from opgraft.packs import discovery, loading
from tests import ops

GOOD = """
    import opgraft
    def softmax(self, dim, half_to_float):
        weights = (self - self.amax(dim, keepdim=True)).exp()
        return weights / weights.sum(dim, keepdim=True)
    def register(**keywords):
        return opgraft.register_op_override(
            "aten", "_softmax", "CPU", softmax, unconditional_override=True, **keywords)
"""
Install = Callable[..., str]


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Install]:
    """Puts a distribution that is a pack where packs are looked for, and returns its module."""
    modules: list[str] = []

    def put(
        name: str,
        code: str = GOOD,
        *,
        function: str = "register",
        requires: tuple[str, ...] = (),
        value: str = "",
    ) -> str:
        module = f"{name.replace('-', '_')}_of_{abs(hash(request.node.nodeid))}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{module}-1.5.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.5"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: not-a-header\n")
        entry = f"{name} = {value or f'{module}:{function}'}"
        (info / "entry_points.txt").write_text(
            f"[console_scripts]\nx = y:z\n\n[opgraft.packs]\n{entry}\n"
        )
        return module

    # Those that are really installed here are no part of a test.
    find = metadata.distributions
    monkeypatch.setattr(
        metadata, "distributions", lambda: find(path=[str(tmp_path), str(tmp_path / "later")])
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "_statuses", {})
    monkeypatch.setattr(loading, "_activated", False)
    monkeypatch.delenv("OPGRAFT_PACKS")
    discovery.scan.cache_clear()
    yield put
    discovery.scan.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


def states() -> dict[str, tuple[str, str]]:
    return {status.pack.name: (status.state, status.reason) for status in packs.statuses()}


# ------------------------------------------------------------------------------ discovery


def test_a_pack_is_found_with_what_its_metadata_says_and_nothing_is_imported(
    install: Install,
) -> None:
    module = install("norms", requires=("torch>=2.11", 'triton>=3; extra == "triton"'))
    (pack,) = discovery.scan()
    assert (pack.name, pack.distribution, pack.version) == ("norms", "norms-dist", "1.5")
    assert pack.requires == ("torch>=2.11", 'triton>=3; extra == "triton"')
    assert packs.installed() == ["norms"]
    assert module not in sys.modules
    assert states() == {"norms": ("inactive", "nothing has activated it")}


def test_an_egg_info_counts(install: Install, tmp_path: Path) -> None:
    info = tmp_path / "old.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old\nVersion: 3\n")
    (info / "requires.txt").write_text("torch>=2.11\n\n[triton]\ntriton>=3\n")
    (info / "entry_points.txt").write_text("[opgraft.packs]\nold = old:register\n")
    discovery.scan.cache_clear()
    (pack,) = discovery.scan()
    assert (pack.distribution, pack.version) == ("old", "3")
    assert [line.replace(" ", "") for line in pack.requires] == [
        "torch>=2.11",
        'triton>=3;extra=="triton"',
    ]


def test_a_damaged_distribution_does_not_hide_the_others(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("norms")
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"\xff\xfe[opgraft.packs]")
    assert packs.installed() == ["norms"]
    assert "cannot be read" in caplog.text


def test_the_same_distribution_twice_counts_once(install: Install, tmp_path: Path) -> None:
    module = install("norms")
    copy = tmp_path / "later"
    (copy / f"{module}-1.5.dist-info").mkdir(parents=True)
    for file in (tmp_path / f"{module}-1.5.dist-info").iterdir():
        (copy / file.parent.name / file.name).write_text(file.read_text().replace("1.5", "1.4"))
    discovery.scan.cache_clear()
    assert [pack.version for pack in discovery.scan()] == ["1.5"]


# -------------------------------------------------------------------------------- loading


def test_activating_loads_every_pack_and_says_so(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("norms")
    install("attention")
    with caplog.at_level("INFO", logger="opgraft"):
        packs.activate()
    torch.softmax(torch.randn(2, 3), -1)
    first, second = opgraft.overrides()
    assert (first.pack, second.pack) == ("attention", "norms")
    assert (first.hits, second.hits) == (1, 0)
    assert first.on_error == "fallback"
    assert states() == {"attention": ("active", ""), "norms": ("active", "")}
    assert "active: pack 'attention' (attention-dist 1.5), pack 'norms'" in caplog.text


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ending", ["", "raise ValueError"])
def test_no_garbage_is_collected_while_packs_register(
    install: Install, enabled: bool, ending: str
) -> None:
    before = gc.isenabled()
    code = f"""
        import gc
        during = []
        def register():
            during.append(gc.isenabled())
            {ending}
    """
    module = install("norms", code)
    try:
        gc.enable() if enabled else gc.disable()
        packs.activate()
        assert sys.modules[module].during == [False]
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize("frozen", [True, False])
def test_the_next_collection_does_not_search_what_packs_make(
    install: Install, frozen: bool
) -> None:
    module = install("norms", "made = []\ndef register(): made.append([made])")
    gc.freeze() if frozen else gc.unfreeze()
    try:
        packs.activate()
        # What the program has frozen stays frozen.
        assert (gc.get_freeze_count() > 0) == frozen
        young = gc.get_objects(generation=0)
        assert any(each is sys.modules[module].made for each in young) == frozen
    finally:
        gc.unfreeze()


def test_order_is_user_then_priority_then_name(install: Install) -> None:
    urgent = GOOD + "\n    def urgent(): register(priority=5)"
    install("zulu", urgent, function="urgent")
    install("yak")
    install("aardvark")
    packs.activate()
    assert [o.pack for o in opgraft.overrides()] == ["zulu", "aardvark", "yak"]
    own = opgraft.register_op_override(
        "aten", "_softmax", "CPU", ops.softmax, unconditional_override=True, priority=-9
    )
    assert [o.pack for o in opgraft.overrides()] == [None, "zulu", "aardvark", "yak"]
    torch.softmax(torch.randn(2, 3), -1)
    assert own.hits == 1


def test_two_packs_on_one_op_under_one_name_both_stay(install: Install) -> None:
    code = GOOD + "\n    def named(): register(name='softmax')"
    install("alpha", code, function="named")
    install("beta", code, function="named")
    packs.activate()
    named = opgraft.overrides(name="softmax")
    assert [override.pack for override in named] == ["alpha", "beta"]
    named[0].remove()
    torch.softmax(torch.randn(2, 3), -1)
    assert named[1].hits == 1


def test_loading_again_changes_nothing(install: Install) -> None:
    install("norms")
    packs.activate()
    torch.softmax(torch.randn(2, 3), -1)
    packs.load("norms")
    packs.activate()
    (override,) = opgraft.overrides()
    assert override.hits == 1


def test_a_pack_whose_overrides_were_removed_can_be_loaded_again(install: Install) -> None:
    install("norms")
    packs.activate()
    opgraft.overrides()[0].remove()
    packs.load("norms")
    torch.softmax(torch.randn(2, 3), -1)
    assert [override.hits for override in opgraft.overrides()] == [1]


def test_a_pack_that_loads_itself_or_another_one(install: Install) -> None:
    install("inner")
    code = """
        from opgraft import packs
        def register():
            packs.load("outer")
            packs.load("inner")
    """
    install("outer", code)
    packs.load("outer")
    assert [override.pack for override in opgraft.overrides()] == ["inner"]
    assert states()["outer"] == ("active", "")


def test_registering_from_the_packs_module_by_hand_is_the_users_own(install: Install) -> None:
    module = install("norms")
    packs.activate()
    sys.modules[module].register()
    assert [override.pack for override in opgraft.overrides()] == [None, "norms"]
    torch.softmax(torch.randn(2, 3), -1)
    assert [override.hits for override in opgraft.overrides()] == [1, 0]


def test_a_pack_that_is_installed_later_can_be_loaded(install: Install) -> None:
    install("norms")
    assert packs.installed() == ["norms"]
    install("late")
    packs.load("late")
    assert [override.pack for override in opgraft.overrides()] == ["late"]


def test_a_pack_that_does_not_exist_is_an_error_that_names_those_that_do(install: Install) -> None:
    install("norms")
    with pytest.raises(RegistrationError, match=r"no pack 'norm' installed; there is: norms"):
        packs.load("norm")


# --------------------------------------------------------------------- packs that do not work

HALF = (
    GOOD
    + """
    def half():
        register()
        opgraft.register_op_override("aten", "no_such_op", "CPU", softmax)
"""
)
BROKEN = {
    "raises at import": ("raise ValueError('no\\nway')", "", "ValueError: no way"),
    "ends the process at import": ("raise SystemExit(3)", "", "SystemExit: 3"),
    "does not compile": ("def register(:", "", "SyntaxError"),
    "imports what is not there": ("import no_such_module", "", "ModuleNotFoundError"),
    "raises at registration": ("def register(): 1 / 0", "", "ZeroDivisionError: division by zero"),
    "names no module": ("", "no_such_module_at_all:register", "ModuleNotFoundError"),
    "names no function": ("", "", "has no attribute 'register'"),
    "names what cannot be called": ("register = 1", "", "is 1: name a function that takes nothing"),
    "wants an argument": ("def register(x): pass", "", "missing 1 required positional argument"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_pack_that_fails_is_left_out_in_one_line_and_the_others_load(
    install: Install, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, value, reason = BROKEN[how]
    install("broken", code, value=value)
    install("norms")
    packs.activate()
    state, why = states()["broken"]
    assert state == "failed"
    assert reason in " ".join(why.split())
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    line = record.getMessage()
    assert line.startswith("opgraft: pack 'broken' (broken-dist 1.5) is left out: ")
    assert reason in line
    assert "\n" not in line
    assert [override.pack for override in opgraft.overrides()] == ["norms"]
    packs.activate()  # does not try again, and does not say it again
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    report = opgraft.explain("aten::bmm", torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    assert "note: pack broken is not active: " in str(report)


def test_what_a_pack_registered_before_it_failed_is_taken_back(install: Install) -> None:
    install("half", HALF, function="half")
    with pytest.raises(RegistrationError, match="there is no op aten::no_such_op"):
        packs.load("half")
    assert opgraft.overrides() == []
    torch.softmax(torch.randn(2, 3), -1)
    state, reason = states()["half"]
    assert (state, "no op aten::no_such_op" in reason) == ("failed", True)


def test_a_pack_that_failed_can_be_loaded_when_it_is_mended(install: Install) -> None:
    module = install("broken", "def register(): 1 / 0")
    with pytest.raises(ZeroDivisionError):
        packs.load("broken")
    sys.modules[module].register = lambda: None  # type: ignore[attr-defined]
    packs.load("broken")
    assert states()["broken"] == ("active", "")


def test_loading_by_hand_survives_a_pack_that_ends_the_process(install: Install) -> None:
    install("broken", "raise SystemExit(3)")
    with pytest.raises(RegistrationError, match="tried to end the process"):
        packs.load("broken")


def test_ctrl_c_is_handed_on_and_leaves_nothing_behind(install: Install) -> None:
    code = GOOD + "\n    def interrupted(): register(); raise KeyboardInterrupt"
    install("slow", code, function="interrupted")
    with pytest.raises(KeyboardInterrupt):
        packs.activate()
    assert opgraft.overrides(pack="slow") == []
    assert states()["slow"] == ("failed", "KeyboardInterrupt: ")


def test_a_name_that_two_distributions_claim(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("norms")
    info = tmp_path / f"{install('other')}-1.5.dist-info" / "entry_points.txt"
    info.write_text(info.read_text().replace("other =", "norms ="))
    discovery.scan.cache_clear()
    packs.activate()
    assert len(opgraft.overrides()) == 1
    first, second = sorted(packs.statuses(), key=lambda status: status.state)
    assert (first.state, second.state) == ("active", "failed")
    assert f"{first.pack.distribution} has a pack of that name" in second.reason
    assert second.reason in caplog.text


# ------------------------------------------------------------------------ what a pack needs


def test_a_pack_for_another_torch_is_left_out_unimported(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    module = install("future", requires=("torch>=99",))
    packs.activate()
    assert states() == {"future": ("unmet", f"needs torch>=99, and this is {torch.__version__}")}
    assert module not in sys.modules
    assert "pack 'future' (future-dist 1.5) is left out: needs torch>=99" in caplog.text
    with pytest.raises(RegistrationError, match="needs torch>=99"):
        packs.load("future")


def test_overrides_of_a_dsl_that_is_too_old_are_there_and_unavailable(install: Install) -> None:
    code = (
        GOOD
        + """
    def both():
        register(dsl="triton", name="triton")
        register(dsl="mine", name="mine")
    """
    )
    install("mixed", code, function="both", requires=('triton>=99; extra == "triton"',))
    packs.load("mixed")
    torch.softmax(torch.randn(2, 3), -1)
    triton, mine = (opgraft.overrides(name=name)[0] for name in ("triton", "mine"))
    assert (triton.hits, mine.hits) == (0, 1)
    assert not triton.enabled
    assert triton.unavailable is not None
    assert triton.unavailable.startswith("pack mixed needs triton>=99, and this is 3.")
    report = opgraft.explain("aten::_softmax", torch.randn(2, 3), -1, False)
    assert "pack mixed needs triton>=99" in str(report)


def test_what_a_dsl_of_its_own_needs(install: Install) -> None:
    code = GOOD + "\n    def mine(): register(dsl='mine')"
    install("own", code, function="mine", requires=('no-such-thing; extra == "mine"',))
    packs.load("own")
    (override,) = opgraft.overrides()
    assert override.unavailable == "pack own needs no-such-thing, which is not installed"


def test_what_a_pack_needs_does_not_concern_the_user(install: Install) -> None:
    module = install("norms", requires=('triton>=99; extra == "triton"',))
    packs.load("norms")
    override = sys.modules[module].register(dsl="triton")
    assert override.enabled


# --------------------------------------------------------------------------------- control


def test_opgraft_packs_says_which(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("norms")
    install("attention")
    monkeypatch.setenv("OPGRAFT_PACKS", "attention, nromal")
    packs.activate()
    assert states() == {
        "attention": ("active", ""),
        "norms": ("inactive", "OPGRAFT_PACKS leaves it out"),
    }
    packs.activate()  # says it once
    assert len(caplog.records) == 1
    assert "OPGRAFT_PACKS names what is not installed: nromal; there is: attention, norms" in (
        caplog.text
    )
    packs.load("norms")  # who asks for it by name gets it
    assert states()["norms"] == ("active", "")


@pytest.mark.parametrize("value", ["", "none", " none ,"])
def test_no_pack_at_all(install: Install, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    module = install("norms")
    monkeypatch.setenv("OPGRAFT_PACKS", value)
    packs.activate()
    assert states() == {"norms": ("inactive", "OPGRAFT_PACKS leaves it out")}
    assert module not in sys.modules


def test_opgraft_disable_activates_nothing(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = install("norms")
    monkeypatch.setenv("OPGRAFT_DISABLE", "1")
    packs.activate()
    assert states() == {"norms": ("inactive", "OPGRAFT_DISABLE=1")}
    assert module not in sys.modules


def test_without_a_compiled_core_nothing_is_activated_and_one_line_says_so(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opgraft.core import loader

    module = install("norms")
    install("attention")
    monkeypatch.delenv("OPGRAFT_ROUTER", raising=False)
    monkeypatch.setattr(loader, "load", lambda: None)
    monkeypatch.setattr(loader, "status", lambda: loader.CoreStatus(False, "m", "none was built"))
    packs.activate()
    assert module not in sys.modules
    assert states()["norms"] == ("unmet", "no compiled core: none was built")
    (record,) = caplog.records
    assert (
        "not active (norms, attention): no compiled core: none was built" in (record.getMessage())
        or "not active (attention, norms): no compiled core" in record.getMessage()
    )
    monkeypatch.setenv("OPGRAFT_ROUTER", "python")  # who asks for the router in Python gets it
    packs.activate()
    assert states()["norms"] == ("active", "")
