"""Reads what torch's profiler recorded: a tree of ops, with the kernels that they launched.

Note [What is read from a profile]
The tree is read from the trace that `export_chrome_trace` writes. That format is public and the
same in torch 2.11 to 2.15. For each op it has the dtypes, sizes, strides and scalars of its inputs,
and for each kernel the launch that it came from. `events()` has no dtypes before torch 2.13 and no
launches.

Two other ways were tried. `ExecutionTraceObserver` knows outputs and overloads as well, but adds a
quarter of a millisecond to each op. A TorchDispatchMode would keep overrides of composite ops from
being hit. The dtypes in lists of tensors are only in the profiler's own event tree, which is
private: `list_dtypes` reads them.
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

#: An op's name in a profile. Events of autograd's engine have more colons.
_OP = re.compile(r"\w+::\w+(\.\w+)?")
#: The name that both routers give the run of an impl: router/profile.py.
_HIT = re.compile(r"opgraft: (?P<override>.*) \[(?P<op>[^\[\]]*)\]")
#: The prefix of the annotations that `routing` writes; their time counts for no op.
ANNOTATION = "opgraft.profile"
#: The call of a graph that Inductor compiled.
_GRAPH = re.compile(r"#* ?Call (?P<graph>CompiledFxGraph \S+) ?#*")

_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("_runtime", "_driver")


@dataclass(frozen=True)
class Input:
    """An argument as a profile has it: a tensor's metadata, a list of those, or text."""

    dtype: str
    sizes: Any
    strides: Any
    value: str
    #: The dtypes of a list of tensors.
    dtypes: tuple[torch.dtype, ...] | None = None


@dataclass(eq=False)
class DeviceKernel:
    """A kernel, or a copy, that ran on a device."""

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
    #: The kernels that were launched directly in it.
    kernels: list[DeviceKernel] = field(default_factory=list)

    @property
    def is_op(self) -> bool:
        """Whether it is a call of an op."""
        return not self.is_annotation and _OP.fullmatch(self.name) is not None

    @property
    def is_own_annotation(self) -> bool:
        """Whether it is an annotation that opgraft's profiling wrote."""
        return self.name.startswith(ANNOTATION)

    @property
    def graph(self) -> str | None:
        """The compiled graph that it calls; None if it calls none."""
        found = _GRAPH.fullmatch(self.name)
        return found["graph"] if found else None

    @property
    def override(self) -> str | None:
        """The override that it runs; None if it runs none."""
        found = _HIT.fullmatch(self.name) if self.is_annotation else None
        return found["override"] if found else None

    @property
    def self_seconds(self) -> float:
        """Its time on the host without that of its children."""
        return max(self.end - self.start - sum(c.end - c.start for c in self.children), 0.0)

    def ancestors(self) -> Iterator[Node]:
        """The node itself and those that contain it, innermost first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass
class Timeline:
    """A recorded profile."""

    nodes: list[Node]
    #: Kernels whose launch was not in any node.
    kernels_outside_ops: list[DeviceKernel]

    @property
    def kernels(self) -> Iterator[DeviceKernel]:
        """All kernels that ran on devices."""
        yield from self.kernels_outside_ops
        for node in self.nodes:
            yield from node.kernels

    @property
    def seconds(self) -> float:
        """The time from the first to the last recorded event."""
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


def read_profile(profiler: torch.profiler.profile) -> Timeline:
    """The timeline of what a profiler has recorded."""
    descriptor, path = tempfile.mkstemp(suffix=".json", prefix="opgraft-profile-")
    os.close(descriptor)
    try:
        profiler.export_chrome_trace(path)
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    finally:
        os.unlink(path)
    return parse(json.loads(text, strict=False)["traceEvents"], list_dtypes(profiler))


def list_dtypes(profiler: torch.profiler.profile) -> dict[int, dict[int, Any]]:
    """The tensors in list arguments, by the id of an op's call and the argument's position.

    Empty where this torch does not record them: then it is unknown what such ops move.
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
    on_device: list[tuple[DeviceKernel, dict[str, Any]]] = []
    for event in events:
        category = event.get("cat", "")
        if event.get("ph") != "X":
            continue
        arguments = event.get("args", {})
        thread = (event.get("pid"), event.get("tid"))
        start, duration = float(event["ts"]) * 1e-6, float(event.get("dur", 0)) * 1e-6
        if category in _HOST:
            list_inputs = (lists or {}).get(arguments.get("External id"), {})
            node = Node(
                event["name"],
                start,
                start + duration,
                category != "cpu_op",
                _inputs(arguments, list_inputs),
            )
            threads[thread].append(node)
            if not node.is_annotation:
                by_id[arguments.get("External id")] = node
        elif category in _DEVICE:
            device = int(arguments.get("device", 0))
            on_device.append((DeviceKernel(event["name"], device, start, duration), arguments))
        elif category.endswith(_LAUNCHES) and "correlation" in arguments:
            launches[arguments["correlation"]] = (thread, start)
    starts = {thread: _nest(nodes) for thread, nodes in threads.items()}
    timeline = Timeline([node for nodes in threads.values() for node in nodes], [])
    for kernel, arguments in on_device:
        place = launches.get(arguments.get("correlation"))
        found = None
        if place is not None and place[0] in starts:
            found = _innermost(threads[place[0]], starts[place[0]], place[1])
        if found is None:  # the launch was not recorded, but the kernel still names its op
            found = by_id.get(arguments.get("External id"))
        (timeline.kernels_outside_ops if found is None else found.kernels).append(kernel)
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
            found.append(Input("TensorList", as_tuples(sizes), as_tuples(strides), value, dtypes))
        else:
            found.append(Input(dtype, as_tuples(sizes), as_tuples(strides), str(value)))
    return tuple(found)


def as_tuples(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _nest(nodes: list[Node]) -> list[float]:
    """Sort a thread's nodes by their starts and set parents and children; returns the starts."""
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
