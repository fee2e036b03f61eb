"""Attention as models call it beyond long causal sequences: masks, biases, other heads, float32.

`attention.py --everywhere` measures it. Every row is a call of F.scaled_dot_product_attention, or
its backward, with the overrides and without: torch's own choice of a backend both times. The
overrides take all that they are right for, whatever tables say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _gpu import Call, gpu_times, natively

import opgraft
from opgraft import triton_utils
from opgraft_kernels.attention import overrides

BFLOAT16 = torch.bfloat16


class Row(NamedTuple):
    """A call that a model makes."""

    who: str
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    # "causal and padding", "padding", "bias", or none.
    mask: str = ""
    dtype: torch.dtype = BFLOAT16


ROWS = (
    Row("padded batch of a language model", 8, 16, 2048, 2048, 128, "causal and padding"),
    Row("BERT", 32, 16, 512, 512, 64, "padding"),
    Row("T5, ALiBi", 8, 16, 1024, 1024, 64, "bias"),
    Row("ViT", 64, 16, 197, 197, 64),
    Row("Stable Diffusion, 4096", 16, 8, 4096, 4096, 40),
    Row("Stable Diffusion, 1024", 16, 8, 1024, 1024, 80),
    Row("Stable Diffusion, cross", 16, 8, 4096, 77, 40),
    Row("DiT, PixArt", 8, 16, 1024, 1024, 72),
    Row("Swin", 4096, 4, 49, 49, 32, "bias"),
    Row("without autocast", 8, 16, 1024, 1024, 64, dtype=torch.float32),
)


def _mask(row: Row, device: str) -> torch.Tensor | None:
    if not row.mask:
        return None
    if row.mask == "bias":
        shape = (1, row.heads, row.queries, row.keys)
        return torch.randn(shape, dtype=row.dtype, device=device)
    # From half of the length on, evenly.
    lengths = torch.linspace(row.keys / 2, row.keys, row.batch, device=device)
    is_there = (torch.arange(row.keys, device=device) < lengths[:, None])[:, None, None]
    if row.mask == "padding":
        return is_there
    return is_there & torch.ones(row.queries, row.keys, dtype=torch.bool, device=device).tril()


def calls(row: Row, device: str) -> tuple[Call, Call]:
    """The forward, and forward with backward, each of inputs in the layout of a projection."""
    lengths = (row.queries, row.keys, row.keys)
    q, k, v = (
        torch.randn(row.batch, length, row.heads, row.dim, dtype=row.dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for length in lengths
    )
    grad, mask = torch.randn_like(q), _mask(row, device)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward() -> object:
        with torch.no_grad():
            return attend()

    return forward, lambda: torch.autograd.grad(attend(), (q, k, v), grad)


def register() -> list[opgraft.Override]:
    """Triton's overrides of masks, other heads and float32, without their crossovers."""
    wanted = [(op, True) for op in overrides._MASKED_OPS]
    wanted += [(op, False) for op in overrides._UNMASKED_OPS]
    return [
        triton_utils.register_op_override(
            "aten",
            op.name,
            "CUDA",
            overrides._impl(op, "triton_kernels"),
            cond=overrides._condition_by_table(op, is_masked=is_masked),
            name=f"{op.name}, {'masked' if is_masked else 'unmasked'}",
            launch_plan=True,
        )
        for op, is_masked in wanted
    ]


def measure(rounds: int) -> list[dict[str, Any]]:
    """A record of each row and direction: medians of rounds in which all take turns."""
    registered, records = register(), []
    for row in ROWS:
        for direction, call in zip(("forward", "both"), calls(row, "cuda"), strict=True):
            native = [natively(call)]
            before = sum(each.hits for each in registered)
            times = gpu_times({"native": native, "native again": native, "opgraft": [call]}, rounds)
            hits = sum(each.hits for each in registered) - before
            records.append(
                {
                    **row._asdict(),
                    "dtype": str(row.dtype).removeprefix("torch."),
                    "direction": direction,
                    "hits": hits,
                    "microseconds": {name: time * 1e3 for name, time in times.items()},
                    "native / opgraft": times["native"] / times["opgraft"],
                    "native / native": times["native"] / times["native again"],
                }
            )
            print(_line(records[-1]), flush=True)
            torch.cuda.empty_cache()
    return records


def _line(record: dict[str, Any]) -> str:
    times = record["microseconds"]
    return (
        f"{record['who']:34} {record['direction']:8} native {times['native']:7.0f} us | "
        f"opgraft {times['opgraft']:7.0f} us | {record['native / opgraft']:.2f} "
        f"(control {record['native / native']:.2f}){'' if record['hits'] else ' not taken'}"
    )
