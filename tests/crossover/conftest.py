"""Tables of a test's own: neither the user's nor those of another test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from opgraft.base import env
from opgraft.crossover import sources


@pytest.fixture(autouse=True)
def user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's own tables, for overrides of no pack."""
    monkeypatch.setenv("OPGRAFT_TABLES", str(tmp_path / "tables"))
    sources.forget()
    env.warn_once.cache_clear()
    yield tmp_path / "tables" / "user"
    sources.forget()
