"""Folders and tables that this user alone can write to, whatever the umask, and several at once."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from opgraft.base import files
from opgraft.core import store
from opgraft.crossover.models import Model
from opgraft.crossover.tables import parse
from opgraft.ready.claims import Claim
from opgraft.router import saved_calls
from opgraft.tuning import writing
from tests.crossover.tables import cell, entry

MODEL = Model("Some GPU")


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("cache", [None, "", "~/x", "~", "x", "~root/x", "./~/x"], ids=repr)
@pytest.mark.parametrize("home", ["home", "", "/", "/home/somebody/", "..", None, "~"], ids=repr)
def test_the_cache_is_where_the_environment_says_now(
    cache: str | None, home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After another home, and from another working folder."""
    for number, each in enumerate(("/other", home, home)):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        for name, value in (("OPGRAFT_CACHE", cache), ("HOME", each)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        try:
            expected = Path(cache or "~/.cache/opgraft").expanduser().absolute()
        except RuntimeError:
            with pytest.raises(RuntimeError, match="home"):
                store.root()
        else:
            assert store.root() == expected


def test_the_cache_is_in_the_home_of_the_user_that_the_process_has_become(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing but the user says which home that is."""
    monkeypatch.delenv("OPGRAFT_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    for home in ("/home/root", "/home/somebody"):
        user = SimpleNamespace(pw_dir=home)
        monkeypatch.setattr(pwd, "getpwuid", lambda _, user=user: user)
        assert store.root() == Path(home, ".cache/opgraft")


@pytest.fixture(params=[0o002, 0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _write_table(folder: Path) -> Path:
    return writing.write(folder, MODEL, {"mine": entry(cell(4))})


def _save_call(folder: Path) -> Path:
    saved_calls.make_private(folder)
    files.replace(folder / "call.json", "{}")
    return folder / "call.json"


def _claim(folder: Path) -> Path:
    assert Claim("a key", folder).take()
    return folder


@pytest.mark.usefixtures("own_cache", "umask")
@pytest.mark.parametrize("make", [_write_table, _save_call, _claim])
def test_what_is_written_below_missing_folders_is_trusted(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    assert store.why_untrusted(make(tmp_path / "some" / "folders" / "below")) == ""


@pytest.mark.usefixtures("umask")
def test_a_folder_that_is_there_stays_what_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    files.make_folder(there / "new")
    files.make_folder(there)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (there, there / "new")]
    assert modes == [0o755, 0o700]


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        files.make_folder(tmp_path / "file" / "below")


@pytest.mark.usefixtures("own_cache")
def test_several_that_write_to_one_table_lose_nothing(tmp_path: Path) -> None:
    names = [f"override {index}" for index in range(40)]
    with ThreadPoolExecutor(8) as pool:
        written = pool.map(lambda name: writing.write(tmp_path, MODEL, {name: entry()}), names)
        (path,) = set(written)
    assert sorted(parse(path, path.read_text()).overrides) == sorted(names)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_interruption_while_a_file_is_replaced_is_that_interruption(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*paths: str | Path) -> None:
        if replaced:
            own(*paths)
        raise KeyboardInterrupt

    own = os.replace
    (tmp_path / "a").write_text("before")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.replace(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == ("after" if replaced else "before")
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]
