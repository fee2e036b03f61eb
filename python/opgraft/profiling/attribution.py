"""Attributes time, bytes and flops to ops: groups the calls of a timeline by op and kind.

Note [Which op a kernel's time belongs to]
A kernel belongs to the innermost op in which it was launched, on the profiling thread or on one of
autograd's. Where an override ran, everything inside belongs to the overridden op: its bytes and
flops are compared with all of that time. A kernel that was launched outside any op (a Triton kernel
of Inductor's or of the user's, a collective) has a row under its own name. On the CPU an op's time
is what it spent outside the ops that it called.

Bytes and flops go where the time is. An op that only calls others moves nothing itself. Some ops
have no known flops or outputs, such as cuDNN's own ops. They get them from the op that called them
and spent nearly nothing itself, such as `aten::convolution`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from opgraft.ops.describing import dtype_name
from opgraft.profiling import routing
from opgraft.profiling.routing import Reason, VerdictRecorder
from opgraft.profiling.timeline import DeviceKernel, Input, Node, Timeline
from opgraft.profiling.work import DTYPES, NOTHING, Work, is_composed, knows_flops, work_of

#: What a row says instead of an override's name.
NATIVE = "native"
#: How many times its own time an op with a kernel for the CPU spends in ops that do its work, as
#: `mean` does in `sum`.
_NEARLY_ALL = 4

#: An op with what the profile knows of its arguments.
_Kind: TypeAlias = "tuple[str, tuple[Input, ...]]"


@dataclass
class Group:
    """The calls of one kind that went the same way."""

    op: str
    inputs: str
    taken_by: str
    is_op: bool
    count: int = 0
    seconds: float = 0.0
    #: The work of the calls, with how many calls had it.
    work: Counter[Work] = field(default_factory=Counter)
    #: Hits that ended in the native kernel.
    fell_back: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)


@dataclass(eq=False)
class _TimedCall:
    """A call with its time, which includes the time inside it that has no row of its own."""

    node: Node
    seconds: float = 0.0
    override: str | None = None


def groups(timeline: Timeline, recorder: VerdictRecorder, *, on_device: bool) -> list[Group]:
    """Everything that took time, in groups without an order.

    Args:
        timeline: what was recorded.
        recorder: what recorded why overrides did not take calls.
        on_device: whether times are those of kernels; if not, they are those of ops on the CPU.
    """
    timed_calls: dict[Node, _TimedCall] = {}
    found: dict[tuple[str, str, str], Group] = {}
    for node in timeline.nodes:
        owner, override = _owning_call(node, on_device=on_device)
        if owner is None:
            _add_kernels(found, node.kernels)
            continue
        timed_call = timed_calls.setdefault(owner, _TimedCall(owner))
        timed_call.override = timed_call.override or override
        timed_call.seconds += (
            sum(k.seconds for k in node.kernels) if on_device else node.self_seconds
        )
    _add_kernels(found, timeline.kernels_outside_ops)
    worked = {
        node: timed_call
        for node, timed_call in timed_calls.items()
        if not on_device or timed_call.seconds > 0
    }
    light_callers = _light_callers(worked)
    work = _WorkOfCalls(worked, light_callers, on_device=on_device)
    for node, timed_call in worked.items():
        group = _group_of(found, node, timed_call)
        group.count += 1
        group.seconds += timed_call.seconds
        group.work[work.of(node)] += 1
        group.fell_back += routing.fell_back(node)
        group.reasons.update(recorder.reasons(node))
    return list(found.values())


def _kind(node: Node) -> _Kind:
    return node.name, node.inputs


def _owning_call(node: Node, *, on_device: bool) -> tuple[Node | None, str | None]:
    """The call that a node's own time belongs to, and the override that ran there."""
    inner: Node | None = None
    outer: Node | None = None
    override: str | None = None
    label: str | None = None
    for each in node.ancestors():
        if each.is_own_annotation:
            return None, None
        if each.override is not None:
            label = each.override
        elif each.is_op or _is_other_kernel(each) or (each.graph and not on_device):
            inner = inner or each
            if label is not None:  # the outermost hit counts
                outer, override, label = each, label, None
    return (outer, override) if outer is not None else (inner, None)


def _is_other_kernel(node: Node) -> bool:
    """Whether it is a kernel that the profiler records like an op, as it does Inductor's."""
    return not node.is_annotation and node.name.startswith(("triton_", "cpp_", "graph_"))


def _add_kernels(found: dict[tuple[str, str, str], Group], kernels: list[DeviceKernel]) -> None:
    for kernel in kernels:
        group = found.setdefault((kernel.name, "", ""), Group(kernel.name, "", "", is_op=False))
        group.count += 1
        group.seconds += kernel.seconds
        group.work[Work(None, reason="launched in no op: its tensors are not known")] += 1


def _group_of(
    found: dict[tuple[str, str, str], Group], node: Node, timed_call: _TimedCall
) -> Group:
    name = node.graph or node.name
    inputs = format_inputs(node.inputs)
    taken_by = (timed_call.override or NATIVE) if node.is_op else ""
    key = (name, inputs, taken_by)
    return found.setdefault(key, Group(name, inputs, taken_by, is_op=node.is_op))


def _light_callers(timed_calls: dict[Node, _TimedCall]) -> dict[_Kind, frozenset[_Kind]]:
    """For each kind of call, the ops that called it and took less than half of its time themselves.

    The calls of a kind vote, because a single call's time says little: it may contain an interrupt.
    """
    inside: dict[Node, float] = defaultdict(float)
    for node, timed_call in timed_calls.items():
        for each in node.ancestors():
            inside[each] += timed_call.seconds
    votes: dict[tuple[_Kind, _Kind], int] = defaultdict(int)
    for node, timed_call in timed_calls.items():
        for each in node.ancestors():
            if each is not node and each.is_op:
                votes[_kind(node), _kind(each)] += (
                    1 if inside[each] < 2 * timed_call.seconds else -1
                )
    found: dict[_Kind, set[_Kind]] = defaultdict(set)
    for (kind, caller), vote in votes.items():
        if vote > 0:
            found[kind].add(caller)
    return {kind: frozenset(callers) for kind, callers in found.items()}


class _WorkOfCalls:
    """The work of each call."""

    def __init__(
        self,
        timed_calls: dict[Node, _TimedCall],
        light_callers: dict[_Kind, frozenset[_Kind]],
        *,
        on_device: bool,
    ) -> None:
        self._light_callers = light_callers
        self._pure_callers = frozenset() if on_device else _pure_callers(timed_calls)

    def of(self, node: Node) -> Work:
        """The work of the call itself, without that of the ops that it calls."""
        if not node.is_op:
            return Work(None, reason="a compiled kernel: its tensors are not known")
        if _kind(node) in self._pure_callers:
            return NOTHING
        work = work_of(node.name, node.inputs)
        if work.bytes is not None and (work.flops is not None or knows_flops(node.name)):
            return work
        light_callers = self._light_callers.get(_kind(node), frozenset())
        for other in node.ancestors():
            if _kind(other) not in light_callers:
                continue
            callers_work = work_of(other.name, other.inputs)
            if callers_work.flops is not None and work.flops is None:
                return callers_work
            if work.bytes is None and callers_work.bytes:
                work = callers_work
        return work


def _pure_callers(timed_calls: dict[Node, _TimedCall]) -> frozenset[_Kind]:
    """Kinds of calls that leave their work to ops that they call.

    They spend most of their time there. For an op with a CPU kernel it must be nearly all: an op
    may first copy a gradient, which takes as long as the op itself. The calls vote, as above.
    """
    below: dict[Node, float] = defaultdict(float)
    for node, timed_call in timed_calls.items():
        for each in node.ancestors():
            if each is not node and each in timed_calls:
                below[each] += timed_call.seconds
    votes: dict[_Kind, int] = defaultdict(int)
    hit: set[_Kind] = set()
    for node, timed_call in timed_calls.items():
        kind = _kind(node)
        if timed_call.override is not None:
            hit.add(kind)
        required_ratio = 1 if is_composed(*kind) else _NEARLY_ALL
        votes[kind] += 1 if below[node] > required_ratio * timed_call.seconds else -1
    return frozenset(kind for kind, vote in votes.items() if vote > 0 and kind not in hit)


def format_inputs(inputs: tuple[Input, ...]) -> str:
    """A call's tensors, as a graph of torch prints them.

    >>> format_inputs((Input("float", (8, 64), (64, 1), ""), Input("Scalar", (), (), "1")))
    'f32[8,64]'
    """
    texts: list[str] = []
    for each in inputs:
        if each.dtype in DTYPES:
            texts.append(_short_dtype(DTYPES[each.dtype]) + _format_sizes(each.sizes))
        elif each.dtypes is not None:
            texts.append(_format_list(each))
        elif each.dtype == "TensorList" and each.sizes:
            texts.append(f"[{len(each.sizes)} tensors]")
    return ", ".join(texts)


def _format_list(each: Input) -> str:
    """A list of tensors, equal ones once with their number: an optimizer gets hundreds."""
    alike = Counter(
        _short_dtype(dtype) + _format_sizes(sizes)
        for dtype, sizes in zip(each.dtypes or (), each.sizes, strict=True)
    )
    if len(alike) > 4:
        return f"[{sum(alike.values())} tensors]"
    return "[" + ", ".join(f"{n} x {t}" if n > 1 else t for t, n in alike.items()) + "]"


def _format_sizes(sizes: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"


def _short_dtype(dtype: torch.dtype) -> str:
    """A dtype as torch's graphs print it: bf16, f32, i64."""
    name = dtype_name(dtype)
    for long, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "i"),
        ("complex", "c"),
    ):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
