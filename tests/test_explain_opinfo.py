"""What `explain` follows is what happens, on PyTorch's own samples of its ops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from opgraft.explanation.stand_ins import Recorder

pytest.importorskip("expecttest")  # torch.testing's OpInfo imports it
from torch.testing._internal.common_methods_invocations import op_db

OPS = [op for op in op_db if torch.float32 in op.dtypes and "jiterator" not in op.name][::20]
# A profile leaves out autograd's own detach; attention's math does not write into its scores where
# they are of a subclass of Tensor.
APART = {"aten::detach": "aten::detach", "aten::add": "aten::add_"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.formatted_name)
def test_every_op_that_is_named_is_called_when_it_runs(op: Any) -> None:
    # Not `op.sample_inputs`: it searches the stack for a test's name, which takes longer.
    samples = op.sample_inputs_func(op, "cpu", torch.float32, op.supports_autograd)
    for sample in list(itertools.islice(samples, 3)):
        named: set[str] = set()
        recorder = Recorder(lambda call: named.add(call.op.name.split(".")[0]), lambda *_: False)  # noqa: B023
        before = torch.random.get_rng_state()
        imagined = recorder.run(op.op, (sample.input, *sample.args), sample.kwargs)
        assert torch.equal(torch.random.get_rng_state(), before)
        with torch.profiler.profile() as profile:
            real = op.op(sample.input, *sample.args, **sample.kwargs)
        called = {event.name for event in profile.events()} | {"aten::detach"}
        assert {name for name in named if not {name, APART.get(name)} & called} == set()
        if recorder.stopped is None:
            pairs = zip(pytree.tree_leaves(imagined), pytree.tree_leaves(real), strict=True)
            for mine, its in pairs:
                if isinstance(its, torch.Tensor):
                    assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
                    assert mine.requires_grad == its.requires_grad
