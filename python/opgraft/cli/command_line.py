"""What can be written after `opgraft`: the commands, their arguments and options, their help.

A command's own module, in this folder, is imported when the command runs, and torch with it: that
takes seconds, and neither help nor an error in the command line needs them.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

import opgraft as package
from opgraft.base import distributions

__all__ = ["opgraft"]


class _Group(click.Group):
    """Lists its commands in the order of their declarations, with the first paragraph of each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _first_paragraph(each)) for name, each in self.commands.items()]
            )


def _first_paragraph(command: click.Command) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(distributions.version("opgraft") or "unknown", prog_name="opgraft")
def opgraft() -> None:
    """Kernels written in Triton or CuteDSL under PyTorch's own operators."""


def _import_and_run(
    module: str, options: Mapping[str, Any], *, needs_torch: bool = True
) -> int | None:
    """Import the module of a command, and run it; returns its exit status, None for 0."""
    if needs_torch:
        package._import_torch()
    status: int | None = importlib.import_module(f"opgraft.cli.{module}").command(**options)
    return status


# ------------------------------------------------------------------ what several commands take

Command = TypeVar("Command", bound=Callable[..., Any])

#: Everything after the script's name belongs to the script, options as well.
_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_import_option = click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import a module that registers overrides first; can be repeated.",
)


class _NewFile(click.Path):
    """A file to write when all is done: that its folder is there is known before anything runs."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            self.fail(f"there is no folder {folder!r} to write {path!r} into", param, ctx)
        if not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{path!r} cannot be written into {folder!r}", param, ctx)
        return path


def _script_options(command: Command) -> Command:
    """Add `-m`, `-o`, SCRIPT and ARGUMENTS to a command."""
    command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
    command = click.argument("script")(command)
    command = click.option(
        "-o", "--output", "path", type=_NewFile(), help="Write the table to a file."
    )(command)
    return click.option(
        "-m", "is_module", is_flag=True, help="Run a module by its name, as python -m does."
    )(command)


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(duration: str | float) -> float:
    if isinstance(duration, float):  # the default
        return duration
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", duration)
    if match is None:
        raise click.BadParameter(f"{duration!r} is no duration: write 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _part(text: str) -> tuple[int, int] | None:
    """Which part of how many; None: the only one."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise click.BadParameter(f"{text!r} is no part: write 1/4, or 4/4 for the last of four")
    part = int(match[1]), int(match[2])
    return None if part == (1, 1) else part


# ------------------------------------------------------------------ the commands


@opgraft.command("list")
@click.option("--op", help="Only overrides of this op, such as aten::mul.Tensor, all of aten::mul.")
@click.option("--pack", help="Only this pack and its overrides.")
@click.option("--dsl", help="Only overrides of this DSL.")
@_json_option
def _list(**options: Any) -> int | None:
    """List the installed packs, and the overrides that `import torch` brings here.

    In a pipe each is a line, with its cells separated by tabs: `opgraft list | cut -f 1,3`.
    """
    return _import_and_run("listing", options)


@opgraft.command("explain")
@click.argument("op")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="8192x4096[:DTYPE]",
    help="A tensor's shape; repeat it for the op's other tensors, in their order.",
)
@click.option(
    "--arg",
    "named",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any argument: a number, a list, a tensor's shape, none.",
)
@click.option(
    "--dtype", default="float32", show_default=True, help="Of tensors whose shape names none."
)
@click.option("--device", help="Of the tensors.  [default: cuda where there is one, else cpu]")
@click.option("--requires-grad", is_flag=True, help="The tensors require grad, as in training.")
@click.option("--backward", is_flag=True, help="Explain what the backward calls, too.")
@click.option("--real", is_flag=True, help="Allocate the tensors, for a cond that needs memory.")
@_json_option
def _explain(**options: Any) -> int | None:
    """Say which override would take a call of OP, and why each other one would not.

    No kernel runs. OP is named as torch prints it, such as aten::_fused_rms_norm. Arguments that
    are not given get the schema's default, or a value that such a call usually has.

    opgraft explain aten::_fused_rms_norm --shape 8192x4096 --dtype bf16
    """
    return _import_and_run("explain", options)


@opgraft.command("doctor")
@_json_option
def _doctor(**options: Any) -> int | None:
    """Check torch, the DSLs, the GPU, cuDNN, the core, the packs, caches and neighbours.

    The exit status is 0 if everything that is installed works, and 1 if something does not.
    """
    return _import_and_run("doctor", options)


@opgraft.command("verify")
@click.argument("what", required=False, metavar="[PACK|OP]")
@click.option("--dispatch-key", help="Only at this key, such as CUDA.")
@click.option("--op", help="Only overrides of this op, where PACK is given.")
@click.option("--name", help="Only the override of this name.")
@click.option("--dsl", help="Only overrides of this DSL.")
@_import_option
@click.option("--check", "checks", multiple=True, help="Only this check; can be repeated.")
@click.option(
    "--k",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The allowed error, as a multiple of native's own.",
)
@click.option("--seed", default=0, show_default=True, help="The seed of all values.")
@click.option(
    "--max-samples",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples for each override.",
)
@click.option(
    "--max-seconds", default=math.inf, help="Begin no sample of an override after this time."
)
@click.option("--opinfo/--no-opinfo", default=True, help="Use PyTorch's own samples, or not.")
@click.option("--compile", is_flag=True, help="Also under torch.compile: seconds for each.")
@click.option(
    "--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Processes at a time."
)
@click.option("--junit", type=_NewFile(), help="Write JUnit XML to a file.")
@click.option("--journal", "journal_path", hidden=True, help="Write the sample it is at to a file.")
@click.option("--leave-out", multiple=True, hidden=True, help="Do not make this sample.")
@click.option("--only-native", hidden=True, help="Run native on this sample, and nothing else.")
@_json_option
def _verify(**options: Any) -> int | None:
    """Check overrides against the native kernels that they replace.

    It checks the overrides of a PACK, those of an OP such as aten::_softmax, or all that are
    registered. The samples are those of PyTorch's own tests, those of the pack, and samples made
    from each override's condition, on both sides of every boundary. The exit status is 0 if
    everything passed, 1 if something failed, 3 if something could not be verified here.

    With --jobs above 1 each override has a process of its own. What one override does to the device
    or to the process then does not affect the others. A sample on which the native kernel itself
    ends the process is left out.
    """
    return _import_and_run("verify", options)


@opgraft.command("tune", context_settings={"allow_interspersed_args": True})
@click.argument("what", metavar="[PACK | OP | SCRIPT.py]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", help="Only the override of this name.")
@_import_option
@click.option(
    "--budget",
    type=_seconds,
    metavar="DURATION",
    default=float("inf"),
    help="Begin no cell that would end after so long, by the longest so far: 90s, 10m, 2h.  "
    "[default: until all is measured]",
)
@click.option(
    "--graphs",
    is_flag=True,
    help="Measure compiled graphs too: Inductor's code, and the override as an opaque op in it. "
    "Each takes seconds to compile.",
)
@click.option("--again", is_flag=True, help="Measure anew what the tables have already.")
@click.option(
    "--part",
    type=_part,
    metavar="K/N",
    help="Measure only the K-th of N parts of each grid: on each of N GPUs one, at a time.",
)
@click.option(
    "--check",
    "count",
    type=click.IntRange(min=1),
    help="Measure so many random cells again, and say how many would be decided otherwise.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random cells.")
@click.option(
    "--output",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write tables into this folder, such as a pack's own.  [default: the user's tables]",
)
@click.option(
    "--png",
    "pictures",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw a picture for each override into this folder; needs matplotlib.",
)
@click.option(
    "--anyway",
    is_flag=True,
    help="Measure even if others use the device, or in Triton's interpreter.",
)
@_json_option
def _tune(**options: Any) -> int | None:
    """Measure from where on overrides are faster than native, and write tables.

    It measures the overrides of a PACK, those of an OP, or all that are registered, of those that
    declare a crossover=. It begins with the corners of each grid of sizes, and goes on where
    decisions change. With SCRIPT.py it runs the script first, with the ARGUMENTS behind --, and
    measures the sizes that the script calls. Each cell is written to the table for this model of
    device: what is interrupted goes on where it stopped. New processes use the tables.
    """
    return _import_and_run("tune", options)


@opgraft.command("run", context_settings=_SCRIPT)
@_script_options
@_json_option
def _run(**options: Any) -> int | None:
    """Run SCRIPT with its ARGUMENTS and print to stderr where the calls of its ops went.

    Packs are active, as after `import torch`. The exit status is the script's.
    """
    return _import_and_run("run", options)


@opgraft.command("profile", context_settings=_SCRIPT)
@_script_options
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Leave out everything before the end of an optimizer's Nth step.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Profile N steps of an optimizer.  [default: to the script's end]",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="N",
    help="How many kinds of call to print, those with most time.",
)
@click.option("--json", "json_path", type=_NewFile(), help="Write JSON to a file.")
@click.option("--html", "html_path", type=_NewFile(), help="Write a page with a plot.")
def _profile(**options: Any) -> int | None:
    """Run SCRIPT and print to stderr what its ops cost, who took them, and the device's limit.

    The whole script is profiled, or with --warmup and --steps some steps of its training: a step
    ends where an optimizer's step does. A script without an optimizer can mark its steps itself,
    with opgraft.profile(). Packs are active. The exit status is the script's.

    opgraft profile --warmup 3 --steps 5 --html profile.html train.py
    """
    return _import_and_run("profile", options)


@opgraft.command("warmup", context_settings=_SCRIPT)
@click.option(
    "--wait",
    is_flag=True,
    help="Let each call wait for its kernels, which also tunes them and records launch plans.",
)
@click.option(
    "--bundle",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave the launch plans and kernels there, for OPGRAFT_KERNELS=DIR of other processes.",
)
@click.option("--pack", metavar="NAME", help="Only the launch plans of this pack, in the bundle.")
@click.option("--dsl", metavar="NAME", help="Only those of this DSL, such as triton.")
@_script_options
@_json_option
def _warmup(**options: Any) -> int | None:
    """Run SCRIPT with its ARGUMENTS, to compile the kernels that it needs in advance.

    The caches on disk keep what is compiled for the next process. The script runs once. Where an
    override has launch_plan=True, the native kernel serves its calls meanwhile, and workers compile
    for several calls at a time; calls of other overrides wait for their kernels. What became of
    them is printed to stderr. With --wait all calls wait, and the launch plans that a run of the
    script records are told, too: they belong to their process. Packs are active, as after `import
    torch`. The exit status is the script's.

    With --bundle the launch plans that workers recorded are left in a folder, with their kernels.
    It serves processes on this machine and on others with the same GPU, torch and packs. A pack may
    ship one, as the folder `bundle` of its package: --pack leaves out the plans of others.
    """
    return _import_and_run("warmup", options)


@opgraft.command("new")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The folder in which the pack's folder is created.  [default: this one]",
)
@_json_option
def _new(**options: Any) -> int | None:
    """Make a kernel pack called NAME: a Triton kernel with its conditions and tests.

    The pack works without a change: `make test` in it passes. Its override takes no call before
    `opgraft tune` has measured which calls it makes faster.
    """
    return _import_and_run("new", options, needs_torch=False)


@opgraft.command("build")
@click.option("--force", is_flag=True, help="Compile it even if there is one already.")
@_json_option
def _build(**options: Any) -> int | None:
    """Compile the core for the torch that is installed.

    The core goes into a cache that only this user can write to: OPGRAFT_CACHE, or ~/.cache/opgraft.
    CXX, CXXFLAGS, LDFLAGS and MAX_JOBS have their usual meaning.
    """
    return _import_and_run("build", options)
