"""Impls that worker processes import: what each does depends on whether it runs without memory."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_dry(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def negated(self: torch.Tensor) -> torch.Tensor:
    return 0 - self


def times_minus_one(self: torch.Tensor) -> torch.Tensor:
    """Its op gets the number as a tensor."""
    return self * -1.0


def negated_by_product(self: torch.Tensor) -> torch.Tensor:
    """Calls an op that autocast would cast for, were it on for impls."""
    row = self.reshape(1, 1, -1)
    minus_one = torch.full((1, row.shape[-1], row.shape[-1]), 0.0).diagonal_scatter(
        torch.full((1, row.shape[-1]), -1.0), dim1=1, dim2=2
    )
    return torch.bmm(row, minus_one).reshape(self.shape)


def tells_when_dry(self: torch.Tensor) -> torch.Tensor:
    """Writes down which process ran it dry."""
    if is_dry(self):
        with open(os.environ["OPGRAFT_TEST_NOTES"], "a", encoding="utf-8") as notes:
            notes.write(f"{os.getpid()} {tuple(self.shape)} {self.stride()} {self.dtype}\n")
    return 0 - self


def must_be_alone_when_dry(self: torch.Tensor) -> torch.Tensor:
    """Fails where another process is at it, too."""
    if is_dry(self):
        inside = f"{os.environ['OPGRAFT_TEST_NOTES']}.inside"
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        time.sleep(1)
        os.unlink(inside)
    return tells_when_dry(self)


def crashes_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        os.kill(os.getpid(), signal.SIGSEGV)
    return 0 - self


def is_killed_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0 - self


def exits_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        os._exit(3)
    return 0 - self


def hangs_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        time.sleep(10_000)
    return 0 - self


def needs_memory(self: torch.Tensor) -> torch.Tensor:
    """Cannot be run dry: it reads a value."""
    return self * (0 * float(self.sum().item()) - 1)


def never_works(self: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no compiler found")


def prints_when_dry(self: torch.Tensor) -> torch.Tensor:
    """What is printed must not be taken for an answer."""
    if is_dry(self):
        print('{"compiled": ["nonsense"]}', flush=True)
        os.write(1, b"{\n")
    return 0 - self


def reads_its_input(self: torch.Tensor) -> torch.Tensor:
    """A program that asks for input, as a debugger does, must not eat requests."""
    if is_dry(self):
        with contextlib.suppress(EOFError):
            input()
    return 0 - self


def looks_around(self: torch.Tensor) -> torch.Tensor:
    """Fails unless a worker is as it should be."""
    import sys

    if is_dry(self):
        main = sys.modules["__main__"]
        assert main.__spec__ is not None and main.__spec__.name == "opgraft.ready.worker"
        assert not torch.cuda.is_initialized()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert not torch.is_grad_enabled()
    return 0 - self


def negated_inside(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def wrapper(self: torch.Tensor) -> torch.Tensor:
        return function(self)

    return wrapper


def negated_pairs(self: list[torch.Tensor]) -> list[torch.Tensor]:
    return [0 - each for each in self]


def negated_by_native(keys: torch.DispatchKeySet, self: torch.Tensor) -> torch.Tensor:
    return torch.neg(self)


def negated_in_place(self: torch.Tensor) -> torch.Tensor:
    return self.mul_(-1)


def negated_out(self: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(0 - self)


def crashes_once_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        notes = os.environ["OPGRAFT_TEST_NOTES"]
        was_here = os.path.exists(notes)
        with open(notes, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        if not was_here:
            os.kill(os.getpid(), signal.SIGKILL)
    return 0 - self


def prints_much_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        os.write(2, b"much\n" * 10_000)
    return 0 - self


def starts_a_process_when_dry(self: torch.Tensor) -> torch.Tensor:
    """As a compiler is one, and may hang."""
    if is_dry(self):
        _start_a_process().wait()
    return 0 - self


def starts_a_process_and_is_killed_when_dry(self: torch.Tensor) -> torch.Tensor:
    if is_dry(self):
        _start_a_process()
    return is_killed_when_dry(self)


def _start_a_process() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "10000"])
    with open(os.environ["OPGRAFT_TEST_NOTES"], "a", encoding="utf-8") as notes:
        notes.write(f"{process.pid}\n")
    return process


def doubled(self: torch.Tensor) -> torch.Tensor:
    """Not what `neg` is."""
    return self + self


def negated_by_where_it_begins(self: torch.Tensor) -> torch.Tensor:
    """Would be wrong in a plan: what it multiplies by is none of a plan's key."""
    return self * (-1 - self.storage_offset()) + self * self.storage_offset()


def negated_by_its_memory(self: torch.Tensor) -> torch.Tensor:
    extra = self.untyped_storage().nbytes() // 4 - self.numel()
    return self * (-1 - extra) + self * extra


def dropped_otherwise(
    input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws other numbers than native dropout."""
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.rand_like(input).flip(0) >= p
    return input * mask / (1 - p), mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    logsumexp = scores.logsumexp(-1).mT.contiguous().mT  # with native's strides
    return scores.softmax(-1) @ value, logsumexp
