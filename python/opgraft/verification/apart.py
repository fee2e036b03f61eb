"""Each override verified in a process of its own, several at a time.

What one of them does to the device or to the process (an illegal address, a crash) then stays with
it, and on a machine with many cores kernels are compiled side by side.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opgraft.registry import Override
from opgraft.verification.report import Failure, OverrideReport, Report
from opgraft.verification.runner import report_of

#: Of what a process that died wrote, what is told.
_LAST_LINES = 12


def verify_apart(
    overrides: Sequence[Override],
    arguments: Sequence[str],
    jobs: int,
    *,
    k: float,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Verify overrides by `opgraft verify`, each in a process of its own.

    Args:
        overrides: what to verify.
        arguments: of the command, for what must be registered and on which terms.
        jobs: how many processes at a time.
        k, seed: as in the arguments.
        tell: told of each override that is done.

    Returns:
        As of :func:`opgraft.verify`; of a process that died it says so as a failure.
    """

    def verify(override: Override) -> OverrideReport:
        report = _verify(override, arguments)
        tell(f"{report.name}: {report.verdict}, {report.seconds:.0f} s")
        return report

    with ThreadPoolExecutor(jobs) as pool:
        return report_of(list(pool.map(verify, overrides)), k, seed)


def _verify(override: Override, arguments: Sequence[str]) -> OverrideReport:
    command = [sys.executable, "-m", "opgraft", "verify", *arguments, "--json"]
    command += ["--op", override.op, "--dispatch-key", override.dispatch_key]
    command += ["--name", override.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        (found,) = json.loads(done.stdout)["overrides"]
    except (ValueError, KeyError):
        return _died(override, done, command)
    return OverrideReport.of_dict(found)


def _died(override: Override, done: Any, command: Sequence[str]) -> OverrideReport:
    how = f"ended with {done.returncode}"
    if done.returncode < 0:
        how = f"died of {signal.Signals(-done.returncode).name}"
    last = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
    message = f"the process that verified it {how}:\n{last}"
    report = OverrideReport(
        override.name, override.op, override.dispatch_key, override.dsl, override.pack
    )
    report.failures.append(Failure("process", "", message, " ".join(command)))
    return report
