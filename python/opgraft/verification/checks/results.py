"""Checks of what a call returns and of its arguments, on every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opgraft.errors import ContractError
from opgraft.registry import Override
from opgraft.router import contract, outputs
from opgraft.router.decision import why_not
from opgraft.router.outputs import same_bits
from opgraft.verification.accuracy import check_accuracy
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    contract_check,
    first_difference,
    has_values,
    needs_hit,
    needs_run,
    output_name,
    output_pairs,
    reference_at,
    unless_refused,
)
from opgraft.verification.reference import NATIVE, native

#: How much larger than native's an output's storage may be: times, and bytes beside.
_PADDED = 2
_PADDING = 4096


@check("each")
def check_hit(seen: Observation) -> None:
    """It runs where its condition holds, and only there."""
    ran, override = seen.override_run, seen.subject.override
    if ran.error is not None:
        if isinstance(ran.error, ContractError) and contract_check(ran.error) != "hit":
            return  # another check's business
        if seen.refused or not (seen.wanted or ran.hits):
            raise NotApplicable("the native kernel refuses the call")
        raise Failed(f"it raised {type(ran.error).__name__}: {ran.error}")
    if seen.wanted and ran.hits == 0:
        raise Failed(f"its condition holds and it did not run: {_why(override, seen)}")
    if not seen.wanted and ran.hits:
        raise Failed("it ran, and its condition does not hold")


def _why(override: Override, seen: Observation) -> str:
    if reason := override.why_off():
        return reason
    decline = why_not(override, seen.sample.call(), capturing=False)
    if decline is not None:
        return decline.reason
    from opgraft import router
    from opgraft.registry import registry
    from opgraft.router import composite

    installed = router.installed(registry.chain(override.operator, override.dispatch_key))
    if installed is not None and installed.is_composite:
        return f"the op is {composite.NOTE}"
    return "the call does not reach it (opgraft.explain says where it goes)"


@check("each")
def check_miss(seen: Observation) -> None:
    """Where it declines, the result is the native kernel's, bit for bit (but for random states)."""
    if seen.wanted or seen.override_run.hits:
        raise NotApplicable("it takes the call")
    if seen.override_run.error is not None:
        raise NotApplicable("the native kernel refuses the call")
    if seen.is_random:
        raise NotApplicable("the op is random")
    expected = unless_refused(lambda: seen.native).outputs
    index = first_difference(seen, seen.override_run.outputs, expected, same_bits)
    if index is None:
        return
    if not seen.native_is_deterministic:
        raise NotApplicable("native's own results differ from run to run")
    raise Failed(f"{output_name(seen, index)} is not what the native kernel returns")


@check("each")
def check_dtype(seen: Observation) -> None:
    """Outputs have the dtypes that native's have."""
    _compare_metadata(seen, "dtype")


@check("each")
def check_shape(seen: Observation) -> None:
    """Outputs have the shapes that native's have."""
    _compare_metadata(seen, "shape")


def _compare_metadata(seen: Observation, what: str) -> None:
    needs_hit(seen, what)
    for index, (mine, expected) in enumerate(output_pairs(seen)):
        one, other = getattr(mine, what, None), getattr(expected, what, None)
        if one != other:
            raise Failed(f"{output_name(seen, index)} has {what} {one}, native's is {other}")


@check("each")
def check_strides(seen: Observation) -> None:
    """Outputs have native's strides, wherever native's are those that the op promises."""
    needs_hit(seen, "strides")
    pairs = output_pairs(seen)
    if seen.native.what != NATIVE:
        raise NotApplicable("the backend has no native kernel, and a decomposition's are nobody's")
    for index, (mine, expected) in enumerate(pairs):
        if not isinstance(mine, torch.Tensor) or mine.shape != expected.shape:
            continue
        if index < len(seen.subject.op.returns) and contract.promised_strides_differ(
            seen.sample.call(), index, mine, expected
        ):
            raise Failed(
                f"{output_name(seen, index)} has strides {mine.stride()}, native's are "
                f"{expected.stride()}"
            )


@check("each")
def check_aliasing(seen: Observation) -> None:
    """Outputs share no memory with arguments or each other, unless native's do."""
    needs_hit(seen, "aliasing")
    if seen.subject.op.mutates:
        raise NotApplicable("the op returns what it writes to")
    call = seen.override_run.call
    fresh = seen.sample.call()
    with torch.no_grad():
        expected = unless_refused(lambda: native(fresh)).outputs
    # What the call writes to comes behind its outputs.
    for index, (mine, theirs) in enumerate(zip(seen.override_run.outputs, expected, strict=False)):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            continue
        if outputs.shares_memory(mine, call.tensors()) and not outputs.shares_memory(
            theirs, fresh.tensors()
        ):
            raise Failed(f"{output_name(seen, index)} is in the memory of an argument")
        if outputs.shares_memory(
            mine, seen.override_run.outputs[:index]
        ) and not outputs.shares_memory(theirs, expected[:index]):
            raise Failed(f"{output_name(seen, index)} is in the memory of another output")


@check("each")
def check_storage(seen: Observation) -> None:
    """Outputs keep no more memory alive than native's, but for some padding."""
    needs_hit(seen, "storage")
    for index, (mine, expected) in enumerate(output_pairs(seen)):
        if not (_is_dense(mine) and _is_dense(expected)):
            continue
        size, theirs = (each.untyped_storage().nbytes() for each in (mine, expected))
        if size > _PADDED * theirs + _PADDING:
            raise Failed(
                f"{output_name(seen, index)} keeps a storage of {size} bytes alive, native's one "
                f"of {theirs}: return a tensor of its own"
            )


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


@check("each")
def check_form(seen: Observation) -> None:
    """Outputs are plain tensors: in class, layout, and in the bits that say what is still to do."""
    needs_hit(seen, "form")
    for index, (mine, expected) in enumerate(output_pairs(seen)):
        if not isinstance(mine, torch.Tensor) or not isinstance(expected, torch.Tensor):
            continue
        for what, read in _FORMS.items():
            one, other = read(mine), read(expected)
            if one != other:
                raise Failed(f"{output_name(seen, index)} has {what} {one}, native's is {other}")


_FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "class": lambda tensor: type(tensor).__name__,
    "layout": lambda tensor: tensor.layout,
    "the negative bit": torch.Tensor.is_neg,
    "the conjugate bit": torch.Tensor.is_conj,
    "requires_grad": lambda tensor: tensor.requires_grad,
}


@check("each")
def check_state(seen: Observation) -> None:
    """The process is as it was: its settings, and random generators where native leaves them."""
    needs_run(seen)
    ran = seen.override_run
    if ran.settings:
        raise Failed(f"it left {' and '.join(ran.settings)} changed")
    if not seen.subject.op.is_random:
        if ran.advanced:
            raise Failed(f"it advanced {' and '.join(ran.advanced)} random generator, native none")
    elif seen.took and seen.is_random and not ran.advanced and seen.native_advances_rng:
        raise Failed("native advances a random generator, and it none: two calls draw the same")


@check("each")
def check_inputs(seen: Observation) -> None:
    """Arguments, and the memory around them, are as they were."""
    needs_run(seen)
    if seen.override_run.changed:
        raise Failed(f"it wrote to {', '.join(map(repr, seen.override_run.changed))}, or beside it")


@check("each")
def check_values(seen: Observation) -> None:
    """No output is further from the reference than k times native's own distance."""
    needs_hit(seen, "values")
    if seen.is_random:
        raise NotApplicable("the op is random: its values cannot be compared")
    for index, (mine, expected) in enumerate(output_pairs(seen)):
        exact = reference_at(seen.reference.outputs, index, expected)
        if not isinstance(mine, torch.Tensor) or not isinstance(exact, torch.Tensor):
            continue
        if mine.dtype != expected.dtype or mine.shape != expected.shape:
            continue  # another check says so
        if not has_values(seen, index):
            continue
        check_accuracy(seen, index, mine, expected, exact)
