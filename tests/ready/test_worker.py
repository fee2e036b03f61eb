"""The program of a worker process."""

from __future__ import annotations

from unittest import mock

import pytest

from opgraft.ready import worker


def test_a_worker_starts_where_its_priority_cannot_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = mock.Mock(side_effect=PermissionError)
    monkeypatch.setattr("opgraft.ready.worker.os.nice", refused)
    worker._be_nice()
    refused.assert_called_once()
