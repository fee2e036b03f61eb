"""Explains functions, modules and composite ops, which call several ops.

They are called on stand-ins for their arguments (:mod:`opgraft.explanation.stand_ins`). Each op
that would reach a backend is explained with the arguments that it would get there.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from opgraft.explanation import op_calls
from opgraft.explanation.result import Explanation
from opgraft.explanation.stand_ins import Recorder
from opgraft.ops.schema import Call, Op, qualified_name
from opgraft.registry import Chain, registry
from opgraft.router import dispatcher, observers


def explain_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    backward: bool,
    target: Op | None = None,
) -> Explanation:
    """Explain each op with overrides that a call of `function` reaches; no kernel runs.

    `target`: an op to explain even where it has no overrides.
    """
    found = _ReachedOps(target, compiled=_is_compiled(function))
    notes: list[str] = []
    recorder = Recorder(found.on_call, _is_overridden)
    with (
        _collected_warnings() as warned,
        observers.observing(found.on_derivative_kept, exclusive=True),
    ):
        result = recorder.run(function, args, kwargs)
        if backward and recorder.stopped is None:
            found.backward = True
            if not recorder.run_backward(result):
                notes.append("nothing that it returns requires grad: there is no backward")
    notes += _reasons_not_reached(function, args, kwargs, found) or [
        f"torch warns: {text}" for text in warned
    ]
    del result
    if recorder.release():
        notes.append(
            "the code kept stand-ins for tensors in its own objects, such as a cache or an "
            "optimizer's state: create those objects again before it runs"
        )
    if recorder.stopped is not None:
        notes.append(f"followed only up to here: {recorder.stopped}. opgraft.trace() sees the rest")
    return Explanation(
        name_of(function),
        None,
        notes=tuple(notes),
        reached=found.reached(),
        others=tuple(found.others),
        complete=recorder.stopped is None,
    )


class _ReachedOps:
    """The ops that a function reached; calls with the same explanation are counted together."""

    def __init__(self, target: Op | None, *, compiled: bool) -> None:
        self._target = target
        self._compiled = compiled
        self.backward = False
        #: Names of ops without overrides, in the order of their first call.
        self.others: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self._explained: dict[str, Explanation] = {}

    def on_call(self, call: Call) -> None:
        chain = registry.find(call.op, op_calls.key_of_call(call))
        if call.op is self._target:
            chain = registry.chain(call.op, op_calls.key_of_call(call))
        if chain is not None and (chain.members or call.op is self._target):
            self._add(call, op_calls.explain_op_call(call, chain, keeps_derivative=False))
        elif not call.op.overload.is_view:
            self.others[call.op.name] = None

    def on_derivative_kept(
        self, chain: Chain, call: Call, keeps_derivative: bool
    ) -> Callable[[observers.Outcome], None]:
        if keeps_derivative:
            self._add(call, op_calls.explain_op_call(call, chain, keeps_derivative=True))
        return lambda outcome: None

    def _add(self, call: Call, explanation: Explanation) -> None:
        notes = explanation.notes
        if self._compiled and explanation.verdicts:
            notes = (*notes, f"in a compiled graph: {_in_a_graph(call)}")
        explanation = replace(explanation, backward=self.backward, notes=notes)
        text = str(explanation)
        self._explained.setdefault(text, explanation)
        self._counts[text] = self._counts.get(text, 0) + 1

    def reached(self) -> tuple[Explanation, ...]:
        counts = self._counts
        return tuple(replace(e, calls=counts[text]) for text, e in self._explained.items())

    def names(self) -> set[str]:
        return {*self.others, *(each.op for each in self._explained.values())}


def name_of(function: Any) -> str:
    """The name of a function as a user writes it.

    >>> import torch
    >>> name_of(torch.softmax), name_of(torch.nn.functional.rms_norm)
    ('torch.softmax', 'torch.nn.functional.rms_norm')
    """
    if isinstance(function, OpOverload):
        return qualified_name(function)
    if isinstance(function, OpOverloadPacket):
        return str(function._qualified_op_name)
    name = getattr(function, "__name__", type(function).__name__)
    for module in (F, torch):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    if isinstance(function, torch.nn.Module):
        return type(function).__qualname__
    owner = getattr(function, "__module__", None)
    qualified = getattr(function, "__qualname__", name)
    return f"{owner}.{qualified}" if owner else qualified


def _is_overridden(op: Op, dispatch_key: str) -> bool:
    chain = registry.find(op, dispatch_key)
    return chain is not None and bool(chain.members)


# ------------------------------------------------------------------ why an op is not reached


def _reasons_not_reached(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: _ReachedOps
) -> list[str]:
    names = found.names()
    if isinstance(function, torch.nn.RMSNorm):
        return _why_no_fused_rms_norm(args[0], function.weight, names) if args else []
    if function in (F.rms_norm, torch.rms_norm, torch.ops.aten.rms_norm.default):
        given = _RMS_NORM.bind_partial(*args, **kwargs).arguments
        return _why_no_fused_rms_norm(given.get("input"), given.get("weight"), names)
    if function in (F.scaled_dot_product_attention, _SDPA):
        return _why_no_fused_attention(names)
    return _why_compiled(function)


_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> None: ...


_RMS_NORM = inspect.signature(_rms_norm)


def _why_no_fused_rms_norm(input: Any, weight: Any, names: set[str]) -> list[str]:
    if "aten::_fused_rms_norm" in names or weight is None or weight.dtype == input.dtype:
        return []
    return [
        f"input is {input.dtype} and weight is {weight.dtype}: aten::rms_norm then calls other ops "
        "and never aten::_fused_rms_norm; give the weight the input's dtype to reach it"
    ]


def _why_no_fused_attention(names: set[str]) -> list[str]:
    if any(name.startswith("aten::_scaled_dot_product") for name in names):
        return []
    return [
        "torch chose its math backend for this call, which calls other ops: none of its fused "
        "attention ops supports the call"
    ]


def _is_compiled(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def _why_compiled(function: Any) -> list[str]:
    if not _is_compiled(function):
        return []
    return [
        "it is compiled; this explains the eager code that it was compiled from. Ops that Inductor "
        "fuses do not reach a backend's kernel; each call says what becomes of it in a graph"
    ]


def _in_a_graph(call: Call) -> str:
    """What becomes of a call in a compiled graph, by the overrides' compile policies."""
    # Not at the top: it is needed for compiled functions only.
    from opgraft.pt2 import policy

    decision = policy.decide(call)
    return f"{_ACTIONS[decision.action]}{decision.reason}"


_ACTIONS = {
    "opaque": "called as it is and routed at run time: ",
    "traced": "the impl is traced into the graph: ",
    "left": "",
}


# ------------------------------------------------------------------ what torch says meanwhile


class _WarningCollector:
    """The message pattern of a `warnings` filter: it matches the warnings of this thread only."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}
        self._thread = threading.get_ident()

    def match(self, text: str) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self.texts[re.sub(r"\s*\(Triggered internally at .*?\)", "", text).strip()] = None
        return True


@contextmanager
def _collected_warnings() -> Iterator[dict[str, None]]:
    """Collect this thread's warnings instead of showing them; once-only ones still come later.

    They are about a call that did not happen. Torch's own say why it chose no fused kernel.
    """
    listener = _WarningCollector()
    rule: Any = ("ignore", listener, Warning, None, 0)
    # Remove it from this same list: another thread's `catch_warnings` may replace the list.
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, rule)
    try:
        with dispatcher.warning_always():
            yield listener.texts
    finally:
        filters.remove(rule)
