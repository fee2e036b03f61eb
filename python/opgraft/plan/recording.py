"""Recording one run of an impl: what is watched, and whether the plan of it does the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from opgraft.plan import ffi_calls, triton_launches
from opgraft.schema import Call

#: How far a replay may be off what Python computed, relative to its largest value: kernels that add
#: with atomics never give the same bits twice, and one that was not recorded leaves garbage.
TOLERANCE = 1e-2

# Outputs that hold no values, or need not hold the same ones.
_UNSPECIFIED = frozenset(
    {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask", "reserve"}
)


class Recording:
    """One run of an impl that is watched, to make a launch plan of it."""

    def __init__(
        self,
        core: Any,
        router: Any,
        call: Call,
        key: Any,
        device: torch.device,
        generation: int,
    ) -> None:
        self.call = call
        self.key = key
        #: The table's when the recording began: a plan of before a `clear` is not installed.
        self.generation = generation
        #: The core's half, which adapters tell of launches.
        self.recorder = router.recorder(call.values, device)
        #: What the plan keeps alive: compiled kernels.
        self.keep: list[Any] = []
        self._core = core
        self._router = router
        self._was_watched = False
        #: The current stream when the recording began.
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    @property
    def refusal(self) -> str:
        """Why no plan can be made of the run; empty where one can."""
        return str(self.recorder.refusal)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, what happens on this thread is recorded."""
        if self._core.current_recorder() is not None:
            self.recorder.refuse("it runs inside another impl that is being recorded")
            yield
            return
        with ExitStack() as stack:
            for adapter in (triton_launches, ffi_calls):
                stack.enter_context(adapter.watching(self))
            self.recorder.start()
            try:
                yield
            except BaseException as error:
                self.recorder.refuse(f"it raised {type(error).__name__}: {error}")
                raise
            finally:
                self.recorder.stop()
        self._was_watched = True

    def finish(self, result: Any) -> Any | None:
        """The plan of the run, or None and a :attr:`refusal`."""
        if not self._was_watched:
            self.recorder.refuse("it did not run to its end")
        return self._router.finish(self.recorder, result, self.keep)

    def verify(self, plan: Any, result: Any) -> str:
        """Replay the plan on the call's arguments, in memory full of garbage.

        Returns:
            How its outputs differ from those of the impl in Python; empty where they agree.
        """
        try:
            replayed = self._router.replay(plan, self.call.values, poisons=True)
            returns = self.call.op.returns
            pairs = (
                [(result, replayed)] if len(returns) == 1 else zip(result, replayed, strict=True)
            )
            for index, (mine, its) in enumerate(pairs):
                if returns[index].name not in _UNSPECIFIED and not agree(mine, its):
                    return (
                        f"output {index} of a replay is not what Python computed: does the impl "
                        "launch a kernel in a way that cannot be recorded?"
                    )
        except torch.OutOfMemoryError:
            return "there was no memory to try the plan out"
        except RuntimeError as error:
            return f"a replay failed: {error}"
        return ""


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs have the same metadata, and values that differ by rounding at most.

    >>> agree(torch.tensor([1.0, float("nan")]), torch.tensor([1.001, float("nan")]))
    True
    >>> agree(torch.ones(2), torch.zeros(2))
    False
    """
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    wide = torch.complex128 if one.is_complex() else torch.float32
    one, other = one.to(wide), other.to(wide)
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
