"""Files of the kernel cache: whole or not there, damaged in no way unseen, and never too many."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opgraft.cache import entries

KEY = {"function": "a:b", "kind": ["Kind", 64, None]}
LIBRARY = bytes(range(256))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


LABEL = "function.so"


def write(
    key: dict[str, Any], library: bytes, facts: dict[str, Any] | None = None
) -> entries.Entry:
    return entries.write(key, {LABEL: library}, facts or {})


def content(entry: entries.Entry | None) -> bytes | None:
    if entry is None:
        return None
    assert entry.read(LABEL) == Path(entry.open(LABEL)).read_bytes()
    return entry.read(LABEL)


def files() -> list[Path]:
    return sorted(entries.folder().iterdir())


def test_what_was_written_is_read() -> None:
    assert entries.read(KEY) is None
    write(KEY, LIBRARY, {"tile": [64, 128]})
    entry = entries.read(KEY)
    assert content(entry) == LIBRARY
    assert entry is not None and entry.facts == {"tile": [64, 128]}


def test_another_key_has_none() -> None:
    write(KEY, LIBRARY)
    assert entries.read(KEY | {"kind": ["Kind", 64, 0]}) is None


def test_who_writes_later_is_read() -> None:
    write(KEY, LIBRARY)
    write(KEY, LIBRARY[::-1])
    assert content(entries.read(KEY)) == LIBRARY[::-1]


def test_what_is_open_stays(own_cache: Path) -> None:
    write(KEY, LIBRARY)
    entry = entries.read(KEY)
    assert entry is not None
    opened = entry.open(LABEL)
    shutil.rmtree(own_cache)
    assert Path(opened).read_bytes() == LIBRARY
    with pytest.raises(FileNotFoundError):
        entry.open(LABEL)


def test_what_changed_since_it_was_read_is_not_opened() -> None:
    write(KEY, LIBRARY)
    entry = entries.read(KEY)
    assert entry is not None
    (entry.place.folder / entry.files[LABEL].name).write_bytes(LIBRARY[::-1])
    with pytest.raises(OSError, match="damaged"):
        entry.open(LABEL)


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_no_damaged_byte_is_read(suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    """A byte that differs, a file that ends early, or goes on."""
    write(KEY, LIBRARY, {"tile": [64, 128]})
    (path,) = (each for each in files() if each.suffix == suffix)
    right = path.read_bytes()
    damaged = [right[:i] + bytes([right[i] ^ 1]) + right[i + 1 :] for i in range(len(right))]
    for wrong in (*damaged, *(right[:i] for i in range(0, len(right), 7)), right + b"0"):
        caplog.clear()
        path.write_bytes(wrong)
        assert entries.read(KEY) is None
        (line,) = caplog.records
        assert str(path) in line.getMessage() or "codec" in line.getMessage()
    path.write_bytes(right)
    assert content(entries.read(KEY)) == LIBRARY


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_what_others_may_write_is_not_read(suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    write(KEY, LIBRARY)
    (path,) = (each for each in files() if each.suffix == suffix)
    path.chmod(0o666)
    assert entries.read(KEY) is None
    assert "chmod go-w" in caplog.text


def test_a_folder_that_others_may_write_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    write(KEY, LIBRARY)
    entries.folder().chmod(0o777)
    assert entries.read(KEY) is None
    assert "chmod go-w" in caplog.text
    assert "others may write" in entries.why_unusable()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    ],
    ids=["folder", "pipe", "device"],
)
@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_what_is_no_file_is_not_read(suffix: str, spoil: Callable[[Path], object]) -> None:
    write(KEY, LIBRARY)
    (path,) = (each for each in files() if each.suffix == suffix)
    spoil(path)
    assert entries.read(KEY) is None


def test_a_library_that_was_removed_is_not_missed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    write(KEY, LIBRARY)
    next(each for each in files() if each.suffix == ".so").unlink()
    assert entries.read(KEY) is None
    assert not caplog.records


@pytest.mark.parametrize("code", [errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO])
def test_a_folder_that_cannot_be_looked_into_is_told(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stat(*_: object, **__: object) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert entries.read(KEY) is None
    (line,) = caplog.records
    assert os.strerror(code) in line.getMessage()


def test_a_cache_whose_folder_is_a_file_is_an_empty_one(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.write_bytes(b"")
    assert entries.read(KEY) is None
    assert not caplog.records


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x.so", "a/b.so", "/x.so", "x.so/", "a\0b.so", "\ud800.so"),
        3,
        None,
        b"x",
    ],
    ids=repr,
)
def test_a_name_of_no_file_of_the_folder_is_not_read(
    name: Any, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by an entry that names it, nor of a bundle whose manifest does."""
    write(KEY, LIBRARY)
    (own_cache / "x.so").write_bytes(LIBRARY)
    cache, bundle = entries.cache(), entries.Place(entries.folder(), {name: ""})
    for place in (cache, bundle):
        for get in (place.read, place.open):
            with pytest.raises((ValueError, TypeError)):
                get(name)
    assert not caplog.records


@pytest.mark.parametrize("name", ["é", "模型", "a b", "~", "-", "...", "\udcff"], ids=ascii)
def test_a_cache_may_have_any_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / name))
    write(KEY, LIBRARY)
    assert content(entries.read(KEY)) == LIBRARY
    assert (tmp_path / name / "kernels" / entries.file_of(KEY)).is_file()


def test_a_cache_may_be_a_link_that_leads_elsewhere_later(own_cache: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir(mode=0o700)
        own_cache.unlink(missing_ok=True)
        own_cache.symlink_to(name)
        assert entries.read(KEY) is None
        write(KEY, name.encode())
        assert content(entries.read(KEY)) == name.encode()


def test_what_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_BYTES", 3 * 2000)
    keys = [KEY | {"number": i} for i in range(4)]
    for age, (key, number) in zip((40, 30, 20), zip(keys, range(3), strict=False), strict=True):
        entry = write(key, bytes([number]) * 1000)
        for name in (entries.file_of(key), entry.files[LABEL].name):
            os.utime(entries.folder() / name, (time.time() - age,) * 2)
    assert entries.read(keys[0]) is not None  # it is used now
    write(keys[3], bytes(3500))
    assert [entries.read(key) is not None for key in keys] == [True, False, False, True]


def test_entries_share_files_that_are_the_same() -> None:
    others = [KEY | {"number": i} for i in range(3)]
    for key in others:
        write(key, LIBRARY)
    assert len(files()) == len(others) + 1
    assert all(content(entries.read(key)) == LIBRARY for key in others)


def test_what_a_writer_left_behind_is_removed() -> None:
    write(KEY, LIBRARY)
    old, young = entries.folder() / ".old", entries.folder() / ".young"
    for path, age in ((old, 2 * entries.LEFT_BEHIND_SECONDS), (young, 0.0)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    write(KEY, LIBRARY)
    assert young.exists() and not old.exists()


def test_nothing_is_left_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    write(KEY, LIBRARY)
    before = files()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        write(KEY | {"number": 1}, LIBRARY)
    assert files() == before


#: Writes and reads one key again and again, and ends where what it reads is not whole.
WRITE_AND_READ = """
import sys
from pathlib import Path
from opgraft.cache import entries
entries.MAX_BYTES = 3000
for i in range(150):
    library = bytes([int(sys.argv[1])]) * 1000
    entries.write({"key": i % 3}, {"function.so": library}, {"of": sys.argv[1]})
    entry = entries.read({"key": (i + 1) % 3})
    if entry is not None:
        try:
            found = Path(entry.open("function.so")).read_bytes()
        except FileNotFoundError:  # removed meanwhile, to make room
            continue
        assert len(found) == 1000 and set(found) == {int(entry.facts["of"])}, found[:9]
"""


def test_many_processes_read_whole_libraries(own_cache: Path) -> None:
    command = [sys.executable, "-c", WRITE_AND_READ]
    running = [
        subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(3)
    ]
    said = [each.communicate()[1] for each in running]
    assert [each.returncode for each in running] == [0, 0, 0], said
    assert not [line for each in said for line in each.splitlines() if "damaged" in line]
