"""`opgraft tune`: measures from where on overrides are faster than native, and writes tables."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import opgraft
from opgraft import verification
from opgraft.base import files
from opgraft.cli import modules as named_modules
from opgraft.cli import output, scripts
from opgraft.core import store
from opgraft.crossover import models, sources
from opgraft.crossover.tables import BadTable, Cell
from opgraft.ready import claims
from opgraft.registry import Override
from opgraft.tuning import busy, heat, tuner, watching
from opgraft.verification.runner import device_of, progress_bar, why_no_device
from opgraft.verification.single_override import is_interpreted

#: Seconds between two looks whether another process has ended what it tunes.
_LOOK_SECONDS = 0.5


def command(
    what: str | None,
    arguments: tuple[str, ...],
    name: str | None,
    modules: tuple[str, ...],
    budget: float,
    graphs: bool,
    again: bool,
    part: tuple[int, int] | None,
    count: int | None,
    seed: int,
    folder: Path | None,
    pictures: Path | None,
    anyway: bool,
    as_json: bool,
) -> int:
    """Measure overrides, and write and print tables."""
    if count is not None:
        given = {"--again": again, "--graphs": graphs, "--part": part, "--png": pictures}
        given["--budget"] = budget != math.inf
        _refuse_with_check([option for option, is_given in given.items() if is_given])
    named_modules.import_all(modules)
    script = what if what is not None and what.endswith(".py") else None
    if script is not None:
        what = None
    elif arguments:
        raise click.UsageError(f"only a script has arguments: {' '.join(arguments)}")
    if what is None or "::" in what:
        opgraft.packs.activate()
    try:
        chosen = verification.select(
            what, pack=None, op=None, dispatch_key=None, name=name, dsl=None
        )
    except opgraft.RegistrationError as error:
        raise click.UsageError(str(error)) from error
    deciding = [each for each in chosen if each.crossover is not None and each.why_off() is None]
    found = [each for each in deciding if each.table_name == each.name]
    if deciding and not found:
        raise click.ClickException(_measured_as(deciding))
    if not found:
        of = f" of {what}" if what else ""
        raise click.ClickException(
            f"no override{of} here declares a crossover=: nothing to tune (opgraft list names "
            "them; what a module registers needs --import MODULE)"
        )
    found = _with_device(found)
    _check_names(found, folder)
    if not anyway:
        _check_fit(found)
    try:
        seen = None if script is None else _run(script, arguments, deciding)
        if count is not None:
            return _check(found, folder, count, seed, as_json)
        _make_folders(found, folder)
        if pictures is not None:
            _check_pictures(pictures)
        terms = {"again": again, "graphs": graphs, "part": part}
        status, results = _tune(found, folder, budget, seen, terms, progress=not as_json)
    except (opgraft.RegistrationError, BadTable, OSError) as error:
        raise click.ClickException(str(error)) from error
    in_order = [results[each] for each in found if each in results]
    if as_json:
        output.print_json([each.as_dict() for each in in_order])
    else:
        _print(in_order)
    if pictures is not None:
        _draw(found, results, pictures)
    return status or int(any(map(_failed, in_order)))


def _failed(result: tuner.Result) -> bool:
    """Whether nothing is known of an override, since its calls failed."""
    is_known = result.measured or result.known
    return not is_known and not tuner.NOT_MEANT.issuperset(result.skipped)


def _with_device(overrides: list[Override]) -> list[Override]:
    """Those that can run here; the others are told. An error if none can."""
    there: list[Override] = []
    missing: dict[str, list[str]] = {}
    for each in overrides:
        reason = why_no_device(each.dispatch_key)
        if reason is None:
            there.append(each)
        else:
            missing.setdefault(reason, []).append(each.name)
    if not there:
        raise click.ClickException(f"nothing can be measured: {'; '.join(missing)}")
    for reason, names in missing.items():
        click.echo(f"not measured: {', '.join(names)}: {reason}", err=True)
    return there


def _refuse_with_check(options: list[str]) -> None:
    if options:
        names = " and ".join(options)
        raise click.UsageError(
            f"--check measures random cells again and writes nothing: leave {names} away"
        )


def _measured_as(overrides: list[Override]) -> str:
    """Where else to look: none of these is measured itself."""
    pairs = [f"{each.name} by that of {each.table_name}" for each in overrides]
    return f"decided by another override's part of the tables: {'; '.join(pairs)}: tune that one"


def _check_fit(overrides: list[Override]) -> None:
    """Raise an error where measured times would say nothing."""
    for override in overrides:
        if is_interpreted(override):
            raise click.ClickException(
                f"{override.name} would run in Triton's interpreter, whose times say nothing of "
                "the kernel: unset TRITON_INTERPRET (--anyway)"
            )
    for device in dict.fromkeys(device_of(each.dispatch_key) for each in overrides):
        reason = busy.why_unfit(device)
        if reason is not None:
            raise click.ClickException(f"{device} is not fit to measure on: {reason} (--anyway)")


def _make_folders(overrides: list[Override], folder: Path | None) -> None:
    """Make the folders of the tables, or raise an error before hours are measured in vain."""
    for place in dict.fromkeys(_options(each, folder).folder for each in overrides):
        try:
            files.make_folder(place, mode=0o755)
        except OSError as error:
            raise click.ClickException(
                f"tables cannot be written into {place}: {error.strerror} (--output)"
            ) from error
        if not os.access(place, os.W_OK | os.X_OK):
            raise click.ClickException(f"tables cannot be written into {place} (--output)")
        if folder is None and (reason := store.why_untrusted(place)):
            raise click.ClickException(
                f"tables in {place} would not be used: {reason}; or set OPGRAFT_TABLES"
            )


def _check_names(overrides: list[Override], folder: Path | None) -> None:
    """Raise an error where two overrides would have one place in a table, which is by name."""

    def in_table(override: Override) -> tuple[Path, str, str]:
        return _options(override, folder).folder, override.dispatch_key, override.name

    for each in overrides:
        # Not only those that are measured now: the others of its owner were, or will be.
        for other in opgraft.overrides():
            if other is each or other.crossover is None or in_table(other) != in_table(each):
                continue
            if other.table_name != other.name:  # it writes nothing
                continue
            if other in overrides or other.pack == each.pack:
                raise click.ClickException(
                    f"{_origin(each)} and {_origin(other)} are both named {each.name!r}, and would "
                    "overwrite each other in the table: give one of them another name="
                )


def _origin(override: Override) -> str:
    return f"{override.pack or 'user'}'s {override.op} at {override.dispatch_key}"


def _check_pictures(folder: Path) -> None:
    """Raise an error before hours are measured whose pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--png needs it: {error}; pip install matplotlib") from None
    except OSError as error:
        raise click.ClickException(f"--png {folder}: {error.strerror}") from error


def _draw(
    overrides: list[Override], results: Mapping[Override, tuner.Result], folder: Path
) -> None:
    for override, name in zip(overrides, _picture_names(overrides), strict=True):
        each = results.get(override)
        if each is not None:  # else interrupted
            heat.save(folder / f"{name}.png", each.name, each.axes, each.cells)


def _picture_names(overrides: list[Override]) -> list[str]:
    """A file's name for each override: its own name, with more where that says not which it is."""

    def plain(text: str) -> str:
        return re.sub(r"[^\w.-]+", "_", text)

    short = Counter(plain(each.name) for each in overrides)
    names = [
        plain(each.name if short[plain(each.name)] == 1 else f"{each.name} of {_origin(each)}")
        for each in overrides
    ]
    return [
        name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)
    ]


def _run(script: str, arguments: tuple[str, ...], overrides: list[Override]) -> watching.Seen:
    """Run a script, and note the calls that it makes of the overrides' ops."""
    script_main = scripts.prepare(script, arguments, is_module=False)
    with watching.watching(overrides) as seen:
        status = scripts.run(script_main)
    if status:
        raise click.ClickException(f"{script} ended with {status}: nothing was measured")
    return seen


def _options(override: Override, folder: Path | None, **terms: Any) -> tuner.Options:
    """The user's tables are in a folder for each owner of overrides."""
    return tuner.Options(folder or sources.user_folder() / (override.pack or "user"), **terms)


def _tune(
    overrides: list[Override],
    folder: Path | None,
    budget: float,
    seen: watching.Seen | None,
    terms: Mapping[str, Any],
    *,
    progress: bool,
) -> tuple[int, dict[Override, tuner.Result]]:
    results: dict[Override, tuner.Result] = {}
    waiting = list(overrides)
    status, deadline = 0, time.monotonic() + budget
    # What another process measures anew meanwhile is not measured a third time.
    stale = {each: _known(each, folder) for each in overrides} if terms.get("again") else {}
    with progress_bar(progress) as tell:
        while waiting:
            try:
                override, claim = _next(waiting, folder, deadline, tell, terms.get("part"))
                seconds = (deadline - time.monotonic()) / len(waiting)
                waiting.remove(override)
                calls = None if seen is None else seen.of(override)
                own = {"seconds": seconds, "calls": calls, "stale": stale.get(override)}
                options = _options(override, folder, **own, **terms)
                device = device_of(override.dispatch_key)
                try:
                    results[override] = tuner.tune_override(
                        override, device, options, functools.partial(tell, override.name)
                    )
                finally:
                    claim.release()
            except KeyboardInterrupt:
                status = scripts.INTERRUPTED
                break
    sources.forget()
    return status, results


def _known(override: Override, folder: Path | None) -> dict[tuner.Corner, Cell]:
    device = device_of(override.dispatch_key)
    return tuner.known(override, device, _options(override, folder).folder)


def _next(
    waiting: Sequence[Override],
    folder: Path | None,
    deadline: float,
    tell: Callable[[str, str], object],
    part: tuple[int, int] | None = None,
) -> tuple[Override, claims.Claim]:
    """The first override of which no other process tunes the same part into the same table, and
    that is claimed.

    Where others are at all of them, it waits: what they leave open when they end is ours to do.
    When the time is up it is the first one, of which no cell will be begun.
    """
    while True:
        for override in waiting:
            claim = _claim(override, folder, part)
            if claim.take() or time.monotonic() > deadline:
                return override, claim
        tell(waiting[0].name, "another process tunes it")
        time.sleep(_LOOK_SECONDS)


def _claim(
    override: Override, folder: Path | None, part: tuple[int, int] | None = None
) -> claims.Claim:
    place = _options(override, folder).folder.resolve()
    model = models.of_device(device_of(override.dispatch_key))
    what = f"{place} {model.name} {_origin(override)} {override.name} {part}"
    return claims.Claim(f"tuning-{hashlib.sha256(what.encode()).hexdigest()[:32]}")


def _print(results: list[tuner.Result]) -> None:
    output.print_table(
        "opgraft tune",
        ["override", "measured", "known", "open", "decided otherwise", "not measured", "table"],
        [
            [
                *(each.name, each.measured, each.known, each.left, "; ".join(each.changed)),
                _counted(each.skipped),
                each.path,
            ]
            for each in results
        ],
        prose=["decided otherwise", "not measured"],
    )
    console = output.console()
    if not sys.stdout.isatty():  # for people alone
        return
    for each in results:
        for grid in heat.grids(each.axes, each.cells):
            console.print()
            console.print(each.name)
            console.print(grid)


def _counted(skipped: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {reason}" for reason, count in skipped.items())


def _check(
    overrides: list[Override], folder: Path | None, count: int, seed: int, as_json: bool
) -> int:
    rows: list[dict[str, Any]] = []
    for override in overrides:
        device = device_of(override.dispatch_key)
        checked = tuner.check(override, device, _options(override, folder), count, seed)
        rows.append({"name": override.name, **checked._asdict()})
    if as_json:
        output.print_json(rows)
    else:
        output.print_table(
            "opgraft tune --check",
            ["override", "measured", "decided otherwise", "which", "not measured"],
            [
                [
                    *(row["name"], row["measured"], len(row["otherwise"])),
                    "; ".join(row["otherwise"]),
                    _counted(row["skipped"]),
                ]
                for row in rows
            ],
            prose=["which", "not measured"],
        )
    if not any(row["measured"] for row in rows):
        raise click.ClickException("no cell of a table could be measured again: run opgraft tune")
    return 0
