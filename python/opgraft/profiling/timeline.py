"""What torch's profiler wrote down: a tree of what ran in what, with the kernels it launched.

Note [What is read of a profile]
It is read from the trace that `export_chrome_trace` writes. That is public, the same in torch 2.11
to 2.15, and holds for each op its inputs' dtypes, sizes, strides and scalars, and for each kernel
the launch that it came from; `events()` has no dtypes before torch 2.13 and no launches. What was
tried and left: `ExecutionTraceObserver`, which knows outputs and overloads as well, costs each op a
quarter of a millisecond; a TorchDispatchMode would keep composite overrides from being hit. The
dtypes in lists of tensors are nowhere but in the profiler's own tree of events, which is private:
`list_dtypes`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

#: An op, as a profile names it; what autograd's engine records has more colons.
_OP = re.compile(r"\w+::\w+(\.\w+)?")
#: What the compiled router and the Python one call the run of an impl: router/profile.py.
_HIT = re.compile(r"opgraft: (?P<override>.*) \[(?P<op>[^\[\]]*)\]")
#: What `routing` puts into a profile, whose time is nobody's.
MARK = "opgraft.profile"
#: The call of a graph that Inductor compiled.
_GRAPH = re.compile(r"#* ?Call (?P<graph>CompiledFxGraph \S+) ?#*")

_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("_runtime", "_driver")


@dataclass(frozen=True)
class Input:
    """What a profile knows of one argument: a tensor's metadata, a list of such, or its text."""

    dtype: str
    sizes: Any
    strides: Any
    value: str
    #: Of a list of tensors, each one's.
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(eq=False)
class Kernel:
    """What ran on a device."""

    name: str
    device: int
    start: float
    seconds: float


@dataclass(eq=False)
class Node:
    """An op, an annotation, or another range on a thread. Times are in seconds."""

    name: str
    start: float
    end: float
    is_annotation: bool
    inputs: tuple[Input, ...] = ()
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    #: Those that were launched right in it.
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def is_op(self) -> bool:
        """Whether it is a call of an op."""
        return not self.is_annotation and _OP.fullmatch(self.name) is not None

    @property
    def is_mark(self) -> bool:
        """Whether it is what this profile itself did."""
        return self.name.startswith(MARK)

    @property
    def graph(self) -> str | None:
        """The compiled graph whose call it is."""
        found = _GRAPH.fullmatch(self.name)
        return found["graph"] if found else None

    @property
    def override(self) -> str | None:
        """The override whose run it is."""
        found = _HIT.fullmatch(self.name) if self.is_annotation else None
        return found["override"] if found else None

    @property
    def self_seconds(self) -> float:
        """Its time on the host without that of its children."""
        return max(self.end - self.start - sum(c.end - c.start for c in self.children), 0.0)

    def ancestors(self) -> Iterator[Node]:
        """It, and what it is in, innermost first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass
class Timeline:
    """A recorded profile."""

    nodes: list[Node]
    #: Kernels whose launch was not in any node.
    loose: list[Kernel]

    @property
    def kernels(self) -> Iterator[Kernel]:
        """All that ran on devices."""
        yield from self.loose
        for node in self.nodes:
            yield from node.kernels

    @property
    def seconds(self) -> float:
        """From the first to the last that was recorded."""
        ends = [(node.start, node.end) for node in self.nodes]
        ends += [(kernel.start, kernel.start + kernel.seconds) for kernel in self.kernels]
        if not ends:
            return 0.0
        return max(end for _, end in ends) - min(start for start, _ in ends)

    @property
    def busy_seconds(self) -> float:
        """How long at least one kernel was running."""
        total, until = 0.0, float("-inf")
        for kernel in sorted(self.kernels, key=attrgetter("start")):
            end = kernel.start + kernel.seconds
            total += max(end - max(kernel.start, until), 0.0)
            until = max(until, end)
        return total


def recorded(profiler: torch.profiler.profile) -> Timeline:
    """What a profiler has recorded, which it is about to forget."""
    descriptor, path = tempfile.mkstemp(suffix=".json", prefix="opgraft-profile-")
    os.close(descriptor)
    try:
        profiler.export_chrome_trace(path)
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    finally:
        os.unlink(path)
    return parse(json.loads(text, strict=False)["traceEvents"], list_dtypes(profiler))


def list_dtypes(profiler: torch.profiler.profile) -> dict[int, dict[int, Any]]:
    """By the id of an op's call and the position of an argument, the tensors of that list.

    Empty where this torch does not say: what such ops move is then unknown.
    """
    found: dict[int, dict[int, Any]] = {}
    try:
        events = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
        while events:
            event = events.pop()
            events += event.children
            for position, value in enumerate(getattr(event.extra_fields, "inputs", None) or ()):
                if isinstance(value, list) and value and hasattr(value[0], "dtype"):
                    found.setdefault(event.correlation_id, {})[position] = [
                        (each.dtype, list(each.sizes), list(each.strides)) for each in value
                    ]
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return found


def parse(
    events: Iterable[dict[str, Any]], lists: dict[int, dict[int, Any]] | None = None
) -> Timeline:
    """A trace's events as a timeline.

    Args:
        events: `traceEvents` of a Chrome trace that torch's profiler wrote.
        lists: what `list_dtypes` found.
    """
    threads: dict[tuple[Any, Any], list[Node]] = defaultdict(list)
    by_id: dict[Any, Node] = {}
    launches: dict[Any, tuple[tuple[Any, Any], float]] = {}
    on_device: list[tuple[Kernel, dict[str, Any]]] = []
    for event in events:
        category = event.get("cat", "")
        if event.get("ph") != "X":
            continue
        arguments = event.get("args", {})
        thread = (event.get("pid"), event.get("tid"))
        start, duration = float(event["ts"]) * 1e-6, float(event.get("dur", 0)) * 1e-6
        if category in _HOST:
            own = (lists or {}).get(arguments.get("External id"), {})
            node = Node(
                event["name"],
                start,
                start + duration,
                category != "cpu_op",
                _inputs(arguments, own),
            )
            threads[thread].append(node)
            if not node.is_annotation:
                by_id[arguments.get("External id")] = node
        elif category in _DEVICE:
            device = int(arguments.get("device", 0))
            on_device.append((Kernel(event["name"], device, start, duration), arguments))
        elif category.endswith(_LAUNCHES) and "correlation" in arguments:
            launches[arguments["correlation"]] = (thread, start)
    starts = {thread: _nest(nodes) for thread, nodes in threads.items()}
    timeline = Timeline([node for nodes in threads.values() for node in nodes], [])
    for kernel, arguments in on_device:
        place = launches.get(arguments.get("correlation"))
        found = None
        if place is not None and place[0] in starts:
            found = _innermost(threads[place[0]], starts[place[0]], place[1])
        if found is None:  # a launch that was not recorded: the op is named all the same
            found = by_id.get(arguments.get("External id"))
        (timeline.loose if found is None else found.kernels).append(kernel)
    return timeline


def _inputs(arguments: dict[str, Any], lists: dict[int, Any]) -> tuple[Input, ...]:
    columns = [
        arguments.get(name, ())
        for name in ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")
    ]
    if len({len(column) for column in columns}) != 1:
        return ()
    found = []
    for position, (dtype, sizes, strides, value) in enumerate(zip(*columns, strict=True)):
        if position in lists:
            dtypes, sizes, strides = zip(*lists[position], strict=True)
            found.append(Input("TensorList", frozen(sizes), frozen(strides), value, dtypes))
        else:
            found.append(Input(dtype, frozen(sizes), frozen(strides), str(value)))
    return tuple(found)


def frozen(value: Any) -> Any:
    """Lists, and lists in them, as tuples."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def _nest(nodes: list[Node]) -> list[float]:
    """Put a thread's nodes into each other, in the order of their starts, which are returned."""
    nodes.sort(key=lambda node: (node.start, -node.end))
    open_nodes: list[Node] = []
    for node in nodes:
        while open_nodes and open_nodes[-1].end <= node.start and open_nodes[-1].end < node.end:
            open_nodes.pop()
        if open_nodes:
            node.parent = open_nodes[-1]
            node.parent.children.append(node)
        open_nodes.append(node)
    return [node.start for node in nodes]


def _innermost(nodes: list[Node], starts: list[float], when: float) -> Node | None:
    index = bisect_right(starts, when) - 1
    node: Node | None = nodes[index] if index >= 0 else None
    while node is not None and node.end < when:
        node = node.parent
    return node
