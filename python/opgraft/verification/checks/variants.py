"""The check of an op's `out=` variants."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from opgraft.ops.schema import Op, resolve
from opgraft.router import threads
from opgraft.verification.accuracy import check_accuracy
from opgraft.verification.checks.registry import check
from opgraft.verification.observation import (
    Failed,
    NotApplicable,
    Observation,
    has_values,
    reference_at,
)
from opgraft.verification.samples import functional_of, run


@check("some")
def check_out(seen: Observation) -> None:
    """The `out=` variants write what native's write, into what they are given."""
    op = seen.subject.op
    variants = list(_out_variants(op))
    if not variants:
        raise NotApplicable("the op has no out= variant")
    for variant in variants:
        for fits in (True, False):
            _check_variant(seen, variant, fits)


def _out_variants(op: Op) -> Iterator[Op]:
    if op.mutates:
        return
    packet = op.overload.overloadpacket
    for name in packet.overloads():
        variant = resolve(getattr(packet, name))
        if variant.mutates and functional_of(variant) is op:
            yield variant


def _check_variant(seen: Observation, variant: Op, fits: bool) -> None:
    expected = seen.native.outputs[: len(variant.returns)]
    if not all(isinstance(each, torch.Tensor) for each in expected):
        raise NotApplicable("native returns no tensor")
    outs = [a.name for a in variant.arguments if a.declares_write]
    given = [torch.empty_like(e) if fits else e.new_empty(0) for e in expected]
    arguments = {**seen.sample.call().named, **dict(zip(outs, given, strict=True))}
    call = variant.bind((), arguments)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resizing
        try:
            result = run(call)
        except Exception as error:
            with threads.scope(threads.EVERYTHING):
                try:
                    run(variant.bind((), arguments))
                except Exception:
                    raise NotApplicable(f"native refuses out=: {error}") from None
            raise Failed(f"{variant.name} raised {type(error).__name__}: {error}") from error
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    for index, (out, returned, theirs) in enumerate(zip(given, results, expected, strict=True)):
        if returned is not out:
            raise Failed(f"{variant.name} returned another tensor than its out=")
        if out.shape != theirs.shape:
            raise Failed(f"{variant.name} left out= at shape {tuple(out.shape)}")
        if has_values(seen, index) and not seen.is_random:
            exact = reference_at(seen.reference.outputs, index, theirs)
            if isinstance(exact, torch.Tensor):
                check_accuracy(seen, index, out, theirs, exact)
