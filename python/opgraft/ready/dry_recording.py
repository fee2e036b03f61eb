"""What an impl does that is run dry, recorded as a launch plan for other processes.

The core's recorder sees the ops, as it does in a process with a device (`plan/recording.py`). What
the impl would launch, the stand-ins of `dry.py` report here. In the plan a function is a number:
its place in `functions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from opgraft.cache import plans
from opgraft.cache.cutedsl import LIBRARY
from opgraft.cache.entries import Entry
from opgraft.ops.schema import Call

if TYPE_CHECKING:
    from opgraft.core.interface import Core


class DryRecording:
    """One dry run that is recorded.

    Args:
        core: the core.
        call: the call, of fake tensors.
        device: where they are.
    """

    def __init__(self, core: Core, call: Call, device: torch.device) -> None:
        self._core = core
        self._schema = call.op.overload._schema
        names = self._schema.name, self._schema.overload_name
        self._recorder = core.dry_recorder(*names, call.values, device)
        self.functions: list[plans.Cubin | plans.Library] = []
        #: The sources of what was compiled elsewhere than by the impl's own modules.
        self.sources: dict[str, str] = {}
        self._numbers: dict[plans.Cubin | plans.Library, int] = {}

    @property
    def refusal(self) -> str:
        """Why the run gives no plan; empty if it gives one."""
        return str(self._recorder.refusal)

    def refuse(self, reason: str) -> None:
        """The run gives no plan."""
        self._recorder.refuse(reason)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the ops that are called on this thread."""
        self._recorder.start()
        try:
            yield
        finally:
            self._recorder.stop()

    def launch(self, kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, int, int]) -> None:
        """Record a launch of Triton's.

        Args:
            kernel: the `CompiledKernel`.
            arguments: those of `launch_metadata`.
            grid: of the launch.
        """
        from opgraft.dsl import triton_launch

        if 0 in grid or self._recorder.inside_op:
            return
        try:
            shape = triton_launch.shape(kernel, grid)
            found = list(triton_launch.parameters(kernel, arguments, grid))
        except Exception as error:  # whatever an argument's conversion raises
            self.refuse(f"a Triton launch: {error}")
            return
        image = kernel.asm["cubin"]
        number = self._number(plans.Cubin(image, shape["name"], shape["shared"], shape["cluster"]))
        self._recorder.watch_hooks()
        self._recorder.cuda_launch(
            function=number, parameters=[each.description for each in found], **shape
        )

    def call_cutedsl(self, entry: Entry, arguments: tuple[Any, ...]) -> None:
        """Record a call of a function that CuteDSL compiled.

        Args:
            entry: the function, in the cache.
            arguments: those of the call.
        """
        needs = tuple(entry.facts["libraries"])
        number = self._number(plans.Library(entry.files[LIBRARY], needs))
        self.sources.update(entry.facts["sources"])
        self._recorder.dry_ffi_call(number, arguments)

    def _number(self, function: plans.Cubin | plans.Library) -> int:
        if function not in self._numbers:
            self._numbers[function] = len(self.functions)
            self.functions.append(function)
        return self._numbers[function]

    def finish(self, result: Any) -> dict[str, Any] | None:
        """The plan of the run, or None and a :attr:`refusal`.

        Args:
            result: what the impl returned.
        """
        names = self._schema.name, self._schema.overload_name
        try:
            return self._core.finish_dry(self._recorder, *names, result)
        except Exception as error:  # no result of this op, or no JSON: what was compiled is
            self.refuse(str(error))
            return None
