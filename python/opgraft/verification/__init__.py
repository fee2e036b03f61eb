"""Verifies overrides against the native kernel, on samples on both sides of their conditions.

Use `opgraft.verify(...)` on any machine, and `opgraft verify` in a pack's CI. Nothing here is
imported before the first verification.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from opgraft.errors import RegistrationError
from opgraft.registry import Override, registry

if TYPE_CHECKING:
    from opgraft.verification.reproduction import Reproduction
    from opgraft.verification.verification_report import VerificationReport

__all__ = ["sample", "verify"]


def verify(
    what: Any = None,
    *,
    dsl: str | None = None,
    op: Any = None,
    dispatch_key: str | None = None,
    pack: str | None = None,
    name: str | None = None,
    checks: Collection[str] | None = None,
    k: float = 2.0,
    seed: int = 0,
    max_samples: int = 300,
    max_seconds: float = math.inf,
    max_bytes: int = 2**30,
    opinfo: bool = True,
    compile: bool = False,
    progress: bool = False,
) -> VerificationReport:
    """Verify overrides against the native kernels that they replace.

    The samples of an override are those of PyTorch's own tests (OpInfo) that reach its op, those
    that it was registered with, and those made from its condition, on both sides of every boundary.
    They have every dtype of the condition and every memory layout.

    On each sample the override must run if its condition holds, and only then. Values (an error of
    at most `k` times native's own, against a float64 reference), dtype, shape, strides and aliasing
    are checked, and that arguments do not change. On some samples `out=`, gradients, gradcheck,
    determinism, uninitialised memory, FakeTensors, `torch.library.opcheck`, autocast, threads and
    the functions that users call (`F.softmax`) are checked; on CUDA also side streams, graphs and
    other devices.

    Args:
        what: an op (`"aten::_softmax"`), a pack (`"opgraft-kernels"`, which is loaded if needed),
            an :class:`Override`, or None for all that the keywords match.
        dsl, op, dispatch_key, pack, name: only overrides that match every keyword given.
        checks: the names of the checks to run; default: all but the slow ones.
        k: an output's largest error may be `k` times native's largest.
        seed: the seed of all values; the same seed makes the same samples.
        max_samples: the most samples for each override.
        max_seconds: after this time no new sample of an override is begun. The most useful samples
            come first. Checks on a few samples run after that.
        max_bytes: no sample has a tensor that is much larger than this.
        opinfo: use PyTorch's own samples, if `torch.testing._internal` can be imported.
        compile: also verify under `torch.compile`, which takes seconds for each override.
        progress: show a bar on the terminal.

    Returns:
        The report: `str()` is a table, `.ok`, `.failures` (each with five lines that reproduce it),
        `.as_dict()`, `.junit()`, `.exit_code`. An override that no sample hits fails.

    Raises:
        RegistrationError: there is no such op, pack or check.

    >>> import opgraft, torch
    >>> override = opgraft.register_op_override(
    ...     "aten", "relu", "CPU", lambda self: self.clamp(min=0), unconditional_override=True,
    ...     name="doc",
    ... )
    >>> report = opgraft.verify(override, opinfo=False, checks=["hit", "values", "strides"])
    >>> report.ok, report.overrides[0].hits > 0
    (True, True)
    >>> override.remove()
    """
    from opgraft.verification import runner

    check_names(checks or ())
    overrides = select(what, dsl=dsl, op=op, dispatch_key=dispatch_key, pack=pack, name=name)
    options = runner.Options(
        k=k,
        seed=seed,
        max_samples=max_samples,
        max_seconds=max_seconds,
        max_bytes=max_bytes,
        only=None if checks is None else frozenset(checks),
        use_opinfo=opinfo,
        compile=compile,
    )
    results = runner.verify_all(overrides, options, progress=progress)
    return runner.report_of(results, k, seed)


def sample(
    sample_id: str,
    *,
    op: Any = None,
    dispatch_key: str | None = None,
    name: str | None = None,
    pack: str | None = None,
    seed: int = 0,
    k: float = 2.0,
) -> Reproduction:
    """Make a sample of a verification again; the reproducers in a report call this.

    Args:
        sample_id: the sample's id, as the report prints it.
        op, dispatch_key, name, pack: the keywords of the override, which must be registered.
        seed, k: the arguments of the verification.

    Returns:
        The call: `.args`, `.kwargs`, `.run()`, `.native()`, `.check(name)`.

    Raises:
        RegistrationError: no override, or several, match.
        LookupError: there is no such sample here.
    """
    from opgraft.verification import reproduction

    found = select(None, dsl=None, op=op, dispatch_key=dispatch_key, pack=pack, name=name)
    if len(found) != 1:
        raise RegistrationError(
            f"{len(found)} overrides match op={op!r}, dispatch_key={dispatch_key!r}, "
            f"name={name!r}: register the one that failed first"
        )
    return reproduction.reproduce(found[0], sample_id, seed=seed, k=k)


def check_names(checks: Collection[str]) -> None:
    """Raise an error for a name that no check has."""
    from opgraft.verification.checks import CHECKS

    unknown = sorted(set(checks) - set(CHECKS))
    if unknown:
        raise RegistrationError(
            f"there is no check {unknown[0]!r}: choose from {', '.join(CHECKS)}"
        )


def select(what: Any, **keywords: Any) -> list[Override]:
    """The overrides that :func:`verify` is to verify; a named pack is loaded."""
    from opgraft import packs
    from opgraft.control import overrides

    if isinstance(what, Override):
        if what not in registry.overrides(_everything()):
            raise RegistrationError(f"{what!r} is not registered any more")
        return [what]
    if isinstance(what, str) and "::" not in what:
        keywords["pack"] = what
    elif what is not None:
        keywords["op"] = what
    _check_selector_value("op", keywords["op"])
    pack = keywords.get("pack")
    if pack is not None and not overrides(pack=pack):
        packs.load(pack)
    found = overrides(**keywords)
    for key, value in keywords.items() if not found else ():
        _check_selector_value(key, value)
    return found


def _check_selector_value(key: str, value: Any) -> None:
    from opgraft import spelling

    if isinstance(value, str) and (problem := spelling.problem_with(key, value)):
        raise RegistrationError(f"no override matches {key}={value!r}: {problem}")


def _everything() -> Any:
    from opgraft.router import threads

    return threads.EVERYTHING
