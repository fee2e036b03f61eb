"""Whose time it was: the calls of a timeline by op and kind, with what they had to do.

Note [Whose time a kernel's is]
A kernel belongs to the innermost op in which it was launched, whichever thread that was: the one
that profiles, or one of autograd's. Where an override ran, all that ran in it is the overridden
op's: its bytes and flops are to be compared with all of that time. What was launched in no op (a
Triton kernel of Inductor's or of the user's, a collective) is a row by the kernel's name. On the
CPU an op's time is what it spent outside the ops that it called.

What a call has to do is charged where its time is. An op that only calls others moves nothing
itself; one of which torch does not know the flops, or the output, gets them from the op that called
it and spent nothing (cuDNN's own ops from `aten::convolution`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from opgraft.ops.describing import dtype_name
from opgraft.profiling import routing
from opgraft.profiling.routing import Reason, Watch
from opgraft.profiling.timeline import Input, Kernel, Node, Timeline
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
    #: Each call's work, with how often there was such a call.
    work: Counter[Work] = field(default_factory=Counter)
    #: Hits that ended in the native kernel.
    fell_back: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)


@dataclass(eq=False)
class _Unit:
    """A call whose time is told, and what was inside it that is told with it."""

    node: Node
    seconds: float = 0.0
    override: str | None = None


def groups(timeline: Timeline, watch: Watch, *, on_device: bool) -> list[Group]:
    """Everything that took time, grouped, in no order.

    Args:
        timeline: what was recorded.
        watch: what noted the reasons.
        on_device: whether the time is that of kernels; else it is that of ops on the CPU.
    """
    units: dict[Node, _Unit] = {}
    found: dict[tuple[str, str, str], Group] = {}
    for node in timeline.nodes:
        owner, override = _owner(node, on_device=on_device)
        if owner is None:
            _add_kernels(found, node.kernels)
            continue
        unit = units.setdefault(owner, _Unit(owner))
        unit.override = unit.override or override
        unit.seconds += sum(k.seconds for k in node.kernels) if on_device else node.self_seconds
    _add_kernels(found, timeline.loose)
    worked = {node: unit for node, unit in units.items() if not on_device or unit.seconds > 0}
    stands_in = _stand_ins(worked)
    work = _Works(worked, stands_in, on_device=on_device)
    for node, unit in worked.items():
        group = _group(found, node, unit)
        group.count += 1
        group.seconds += unit.seconds
        group.work[work.of(node)] += 1
        group.fell_back += routing.fell_back(node)
        group.reasons.update(watch.reasons(node))
    return list(found.values())


def _kind(node: Node) -> _Kind:
    return node.name, node.inputs


def _owner(node: Node, *, on_device: bool) -> tuple[Node | None, str | None]:
    """The call that a node's own time is told with, and the override that ran there."""
    inner: Node | None = None
    outer: Node | None = None
    override: str | None = None
    label: str | None = None
    for each in node.ancestors():
        if each.is_mark:
            return None, None
        if each.override is not None:
            label = each.override
        elif each.is_op or _is_other_kernel(each) or (each.graph and not on_device):
            inner = inner or each
            if label is not None:  # the outermost hit counts
                outer, override, label = each, label, None
    return (outer, override) if outer is not None else (inner, None)


def _is_other_kernel(node: Node) -> bool:
    """Whether it is a kernel that is recorded as if it were an op: Inductor's are."""
    return not node.is_annotation and node.name.startswith(("triton_", "cpp_", "graph_"))


def _add_kernels(found: dict[tuple[str, str, str], Group], kernels: list[Kernel]) -> None:
    for kernel in kernels:
        group = found.setdefault((kernel.name, "", ""), Group(kernel.name, "", "", is_op=False))
        group.count += 1
        group.seconds += kernel.seconds
        group.work[Work(None, reason="launched in no op: its tensors are not known")] += 1


def _group(found: dict[tuple[str, str, str], Group], node: Node, unit: _Unit) -> Group:
    name = node.graph or node.name
    inputs = described(node.inputs)
    taken_by = (unit.override or NATIVE) if node.is_op else ""
    key = (name, inputs, taken_by)
    return found.setdefault(key, Group(name, inputs, taken_by, is_op=node.is_op))


def _stand_ins(units: dict[Node, _Unit]) -> dict[_Kind, frozenset[_Kind]]:
    """For each kind of call, the ops that called it and spent less than half of what it did.

    The calls of a kind vote: one call's time says little, as whatever interrupts it is in there.
    """
    inside: dict[Node, float] = defaultdict(float)
    for node, unit in units.items():
        for each in node.ancestors():
            inside[each] += unit.seconds
    votes: dict[tuple[_Kind, _Kind], int] = defaultdict(int)
    for node, unit in units.items():
        for each in node.ancestors():
            if each is not node and each.is_op:
                votes[_kind(node), _kind(each)] += 1 if inside[each] < 2 * unit.seconds else -1
    found: dict[_Kind, set[_Kind]] = defaultdict(set)
    for (kind, caller), vote in votes.items():
        if vote > 0:
            found[kind].add(caller)
    return {kind: frozenset(callers) for kind, callers in found.items()}


class _Works:
    """What each call has to do."""

    def __init__(
        self,
        units: dict[Node, _Unit],
        stands_in: dict[_Kind, frozenset[_Kind]],
        *,
        on_device: bool,
    ) -> None:
        self._stands_in = stands_in
        self._only_call = frozenset() if on_device else _only_call(units)

    def of(self, node: Node) -> Work:
        """What it has to do itself."""
        if not node.is_op:
            return Work(None, reason="a compiled kernel: its tensors are not known")
        if _kind(node) in self._only_call:
            return NOTHING
        work = work_of(node.name, node.inputs)
        if work.bytes is not None and (work.flops is not None or knows_flops(node.name)):
            return work
        stand_ins = self._stands_in.get(_kind(node), frozenset())
        for other in node.ancestors():
            if _kind(other) not in stand_ins:
                continue
            theirs = work_of(other.name, other.inputs)
            if theirs.flops is not None and work.flops is None:
                return theirs
            if work.bytes is None and theirs.bytes:
                work = theirs
        return work


def _only_call(units: dict[Node, _Unit]) -> frozenset[_Kind]:
    """Kinds of calls that leave their work to ops that they call.

    Most of their time is spent there. Of an op with a kernel for the CPU nearly all of it must be:
    a gradient that it copies first may take as long as the op itself. The calls vote, as above.
    """
    below: dict[Node, float] = defaultdict(float)
    for node, unit in units.items():
        for each in node.ancestors():
            if each is not node and each in units:
                below[each] += unit.seconds
    votes: dict[_Kind, int] = defaultdict(int)
    hit: set[_Kind] = set()
    for node, unit in units.items():
        kind = _kind(node)
        if unit.override is not None:
            hit.add(kind)
        least = 1 if is_composed(*kind) else _NEARLY_ALL
        votes[kind] += 1 if below[node] > least * unit.seconds else -1
    return frozenset(kind for kind, vote in votes.items() if vote > 0 and kind not in hit)


def described(inputs: tuple[Input, ...]) -> str:
    """A call's tensors, as a graph of torch prints them.

    >>> described((Input("float", (8, 64), (64, 1), ""), Input("Scalar", (), (), "1")))
    'f32[8,64]'
    """
    texts: list[str] = []
    for each in inputs:
        if each.dtype in DTYPES:
            texts.append(_short(DTYPES[each.dtype]) + _sizes(each.sizes))
        elif each.dtypes is not None:
            texts.append(_described_list(each))
        elif each.dtype == "TensorList" and each.sizes:
            texts.append(f"[{len(each.sizes)} tensors]")
    return ", ".join(texts)


def _described_list(each: Input) -> str:
    """Tensors that are alike once: an optimizer gets hundreds."""
    alike = Counter(
        _short(dtype) + _sizes(sizes)
        for dtype, sizes in zip(each.dtypes or (), each.sizes, strict=True)
    )
    if len(alike) > 4:
        return f"[{sum(alike.values())} tensors]"
    return "[" + ", ".join(f"{n} x {t}" if n > 1 else t for t, n in alike.items()) + "]"


def _sizes(sizes: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, sizes)) + "]"


def _short(dtype: torch.dtype) -> str:
    """As torch's graphs write it: bf16, f32, i64."""
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
