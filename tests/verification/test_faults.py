"""`opgraft.verify` catches what was planted, and lets pass what is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft.verification.checks import CHECKS
from opgraft.verification.verification_report import VerificationReport
from tests.verification.faults import FAULTS, RIGHT, Planted

#: As many samples show most faults. A verification begins with the same ones, however many it
#: takes.
FEW = 60
#: The check that reports what it finds in special values under another name.
CHECK_OF = {"special": "values"}
TRUST = Path(__file__).parent.parent.parent / "docs" / "trust.md"


def by_name(planted: Planted) -> str:
    return planted.name.replace(" ", "_")


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> Iterator[None]:
    """Its own threads wait for each other where other processes have the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("planted", FAULTS, ids=by_name)
def test_a_planted_fault_is_caught(planted: Planted) -> None:
    # What the other checks say of it is not asked; of what is right, each says that it is.
    options = {"checks": [CHECK_OF.get(planted.check, planted.check)]} if planted.check else {}
    report = verified(planted, max_samples=FEW, **options) if planted.check else verified(planted)
    if planted.check and planted.check not in failed(report):
        report = verified(planted, **options)
    assert torch.get_default_dtype() == torch.float32
    if planted.check is None:
        assert report.ok, str(report)
    else:
        assert planted.check in failed(report), str(report)
        assert report.exit_code == 1


def verified(planted: Planted, **options: Any) -> VerificationReport:
    override = planted.register()
    report = opgraft.verify(override, **options)
    assert override.hits > 0
    override.remove()
    return report


def failed(report: VerificationReport) -> set[str]:
    return {failure.check for failure in report.failures}


@pytest.mark.parametrize("planted", RIGHT, ids=by_name)
def test_an_override_that_is_right_passes(planted: Planted) -> None:
    with planted.op_defined():
        override = planted.register()
        report = opgraft.verify(override, max_samples=100)
        assert report.ok, str(report)
        assert report.overrides[0].hits > 0


def table() -> str:
    """The faults, as the documentation has them."""
    rows = [
        f"| {planted.name} | `{planted.op}` | {planted.check or 'nothing: it is rounding'} |"
        for planted in FAULTS
    ]
    return "\n".join(["| fault | op | caught by |", "|---|---|---|", *rows])


def test_the_documentation_has_the_table_of_faults() -> None:
    found = re.search(r"<!-- faults -->\n(.*?)<!-- end of faults -->", TRUST.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == table(), "write what tests.verification.test_faults.table() gives"


def test_each_fault_is_of_its_own_name_and_of_a_check_that_there_is() -> None:
    names = [planted.name for planted in (*FAULTS, *RIGHT)]
    assert len(set(names)) == len(names)
    checks = {planted.check for planted in FAULTS} - {None}
    assert checks <= {*CHECKS, "special"}
