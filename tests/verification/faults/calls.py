"""Faults in some calls: by number, mode, thread, and what else a process has."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable

import torch

from opgraft import when
from tests.verification.faults import kernels
from tests.verification.faults.registry import Impl, fault


@fault("aten::relu", "values")
def every_50th_call() -> Impl:
    calls = itertools.count(1)

    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out + 1 if next(calls) % 50 == 0 else out

    return impl


@fault("aten::relu", "modes")
def inference_mode_only() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out + 1 if torch.is_inference_mode_enabled() else out

    return impl


@fault("aten::relu", "values")
def without_gradients_only() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out if torch.is_grad_enabled() else out + 1

    return impl


@fault("aten::relu", "modes")
def with_gradients_only() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out + 1 if torch.is_grad_enabled() else out

    return impl


@fault("aten::relu", "modes", cond=when.dtype("self", torch.float32))
def a_constant_of_the_default_dtype() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        return self * (self > 0).to(torch.tensor(1.0).dtype) if self.numel() else self.clone()

    return impl


@fault("aten::relu", "threads")
def another_thread_only() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out if threading.current_thread() is threading.main_thread() else out + 1

    return impl


@fault("aten::relu", "threads")
def a_buffer_that_threads_share() -> Impl:
    buffers: dict[object, torch.Tensor] = {}

    def impl(self: torch.Tensor) -> torch.Tensor:
        kind = (self.shape, self.stride(), self.dtype)
        buffer = buffers.setdefault(kind, torch.empty_like(self))
        buffer.copy_(self)
        buffer.clamp_(min=0)
        return buffer.clone()

    return impl


@fault("aten::relu", "state")
def advances_the_random_generator() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return kernels.relu(self)

    return impl


@fault("aten::native_dropout", "state")
def the_same_random_numbers_in_each_call() -> Impl:
    def impl(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, ...]:
        if train is False or p == 0 or input.numel() == 0 or not input.is_floating_point():
            return torch.ops.aten.native_dropout.default(input, p, train)  # type: ignore[no-any-return]
        generator = torch.Generator().manual_seed(0)
        mask = torch.rand(input.shape, generator=generator) > p
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return input * mask * scale, kernels.like(input, mask)

    return impl


@fault("aten::relu", "state")
def leaves_another_number_of_threads() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(3)
        return kernels.relu(self)

    return impl


@fault("aten::relu", "state")
def leaves_another_default_dtype() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return kernels.relu(self)

    return impl


@fault("aten::relu", "state")
def leaves_another_variable_of_the_environment() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        os.environ["OMP_DYNAMIC"] = "true"
        return kernels.relu(self)

    return impl


@fault("aten::relu", "state")
def leaves_the_garbage_collector_off() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        gc.disable()
        return kernels.relu(self)

    return impl


@fault("aten::relu", "state")
def leaves_another_working_directory() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        os.chdir("/")
        return kernels.relu(self)

    return impl


@fault("aten::relu", "state")
def leaves_denormals_flushed_for_others() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        torch.set_flush_denormal(True)
        return out

    return impl


@fault("aten::relu", "values")
def the_first_call_only() -> Impl:
    calls = itertools.count()

    def impl(self: torch.Tensor) -> torch.Tensor:
        out = kernels.relu(self)
        return out if next(calls) else out + 1

    return impl


@fault("aten::native_dropout", "distribution")
def the_complement_of_a_probability() -> Impl:
    return _dropping(lambda input, p: torch.rand(input.shape) < p)


@fault("aten::native_dropout", "distribution")
def a_mask_that_is_another_than_the_results_own() -> Impl:
    def again(input: torch.Tensor, p: float) -> torch.Tensor:
        return torch.rand(input.shape) >= p

    return _dropping(again, again)


def _dropping(
    draw: Callable[[torch.Tensor, float], torch.Tensor],
    mask_of: Callable[[torch.Tensor, float], torch.Tensor] | None = None,
) -> Impl:
    def impl(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, ...]:
        if train is False or p in (0, 1) or not input.numel() or not input.is_floating_point():
            return torch.ops.aten.native_dropout.default(input, p, train)  # type: ignore[no-any-return]
        kept = draw(input, p)
        mask = kept if mask_of is None else mask_of(input, p)
        return kernels.like(input, input * kept / (1 - p)), kernels.like(input, mask)

    return impl


@fault("aten::relu", "hit")
def raises_at_one_size() -> Impl:
    def impl(self: torch.Tensor) -> torch.Tensor:
        if self.ndim and self.shape[-1] > 300:
            raise RuntimeError("no tile of this size")
        return kernels.relu(self)

    return impl
