"""The command: `opgraft verify [PACK|OP]`, also `python -m opgraft.verification`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from opgraft import packs
from opgraft.errors import OpgraftError
from opgraft.verification import verify
from opgraft.verification.report import Report, show

__all__ = ["add_arguments", "main", "run"]

SUMMARY = "check overrides against PyTorch's own kernels"
DESCRIPTION = """Check each override against the native kernel that it stands in for: on PyTorch's
own samples (OpInfo), on the pack's, and on samples made from its condition, on both sides of every
boundary. Exit status: 0 if everything passed, 1 if something failed, 2 if something could not be
verified here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "what",
        nargs="?",
        metavar="PACK|OP",
        help="a pack, or an op such as aten::_softmax; default: all packs that are installed",
    )
    parser.add_argument("--dispatch-key", help="only at this key, such as CUDA")
    parser.add_argument("--name", help="only the override of this name")
    parser.add_argument("--dsl", help="only overrides of this DSL")
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import this first: it registers the overrides; may be repeated",
    )  # fmt: skip
    parser.add_argument("--check", dest="checks", action="append", help="only this check; repeat")
    parser.add_argument("--k", type=float, default=2.0, help="times native's own error (2)")
    parser.add_argument("--seed", type=int, default=0, help="of all values (0)")
    parser.add_argument("--max-samples", type=int, default=120, help="for each override (120)")
    parser.add_argument("--no-opinfo", action="store_true", help="without PyTorch's own samples")
    parser.add_argument("--compile", action="store_true", help="under torch.compile too: slow")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write it as JUnit XML")


def run(options: argparse.Namespace) -> int:
    """Verify, print the report, write the files asked for; returns the exit status."""
    for module in options.modules:
        # As `python -m` has it: a user's module is looked for where the command is run.
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
        __import__(module)
    is_pack = options.what is not None and "::" not in options.what
    if not is_pack and not options.modules:
        for pack in packs.installed():
            packs.load(pack)
    report = verify(
        options.what,
        dispatch_key=options.dispatch_key,
        name=options.name,
        dsl=options.dsl,
        checks=options.checks,
        k=options.k,
        seed=options.seed,
        max_samples=options.max_samples,
        opinfo=not options.no_opinfo,
        compile=options.compile,
        progress=True,
    )
    show(report)
    _write(report, options)
    return report.exit_code


def _write(report: Report, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(report.json() + "\n")
    if options.junit is not None:
        options.junit.write_text(report.junit() + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on its own; returns its exit status."""
    parser = argparse.ArgumentParser(prog="opgraft verify", description=DESCRIPTION)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except (OpgraftError, ImportError, OSError) as error:
        print(f"opgraft: {error}", file=sys.stderr)
        return 2
