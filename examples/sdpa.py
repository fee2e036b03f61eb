"""Faster attention by an install alone:

    pip install opgraft opgraft-kernels

`attend` below is what any model does; it does not use opgraft. The rest of this script shows where
its call goes. On a GPU it prints the call's time with and without overrides; without a GPU, what
would happen on one.

    python examples/sdpa.py
"""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ------------------------------------------------------------------------- only to see what happens

import opgraft  # noqa: E402

SHAPE = (4, 16, 4096, 128)  # batch, heads, length, head size


def milliseconds(q, k, v) -> float:
    for _ in range(3):
        attend(q, k, v)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        attend(q, k, v)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 20


def on_a_gpu() -> None:
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    print(opgraft.explain(attend, q, k, v))
    mine = milliseconds(q, k, v)
    with opgraft.disabled():
        native = milliseconds(q, k, v)
    print(f"\n{mine:.3f} ms a call; {native:.3f} ms without opgraft")
    with opgraft.trace() as t:
        attend(q, k, v)
    print(t)


def without_a_gpu() -> None:
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    print("On this CPU:")
    print(opgraft.explain(attend, q, k, v))
    print("\nOn a GPU, torch calls one of these; of each, the overrides and what they would say:")
    with FakeTensorMode():  # tensors that are on a GPU that is not there
        q, k, v = (torch.empty(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = {
        "aten::_scaled_dot_product_cudnn_attention": (q, k, v, None, False, 0.0, True),
        "aten::_scaled_dot_product_flash_attention": (q, k, v, 0.0, True),
    }
    for op, arguments in calls.items():
        print(opgraft.explain(op, *arguments))


if __name__ == "__main__":
    if not opgraft.overrides():
        print("No override is registered: is a pack installed and active? `opgraft doctor` tells.")
    on_a_gpu() if torch.cuda.is_available() else without_a_gpu()
