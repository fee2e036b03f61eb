"""Attention as models call it beyond long causal sequences: masks, biases, other heads, float32.

`attention.py --everywhere` measures it. Every row is a call of F.scaled_dot_product_attention, or
its backward, with the overrides and without: torch's own choice of a backend both times. Beside the
overrides as tables decide, each DSL's take all that they are right for.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _gpu import Call, gpu_times, natively

import opgraft
from opgraft import cutedsl_utils, triton_utils
from opgraft_kernels.attention import boolean, overrides

BFLOAT16 = torch.bfloat16


class Row(NamedTuple):
    """A call that a model makes."""

    who: str
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    # "causal and padding", "causal", "padding", "bias", or none. Those "of -inf" are additive, as
    # newer torch makes of a boolean mask (pytorch 177868); torch 2.11 makes -65504 for cuDNN.
    mask: str = ""
    dtype: torch.dtype = BFLOAT16


ROWS = (
    Row("padded batch of a language model", 8, 16, 2048, 2048, 128, "causal and padding"),
    Row("the same of -inf", 8, 16, 2048, 2048, 128, "causal and padding of -inf"),
    Row("the same without padding", 8, 16, 2048, 2048, 128, "causal"),
    Row("BERT", 32, 16, 512, 512, 64, "padding"),
    Row("BERT of -inf", 32, 16, 512, 512, 64, "padding of -inf"),
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
    if row.mask in ("", "causal"):
        return None
    if row.mask == "bias":
        shape = (1, row.heads, row.queries, row.keys)
        return torch.randn(shape, dtype=row.dtype, device=device)
    # From half of the length on, evenly.
    lengths = torch.linspace(row.keys / 2, row.keys, row.batch, device=device)
    is_there = (torch.arange(row.keys, device=device) < lengths[:, None])[:, None, None]
    if row.mask.startswith("causal"):
        seen = torch.ones(row.queries, row.keys, dtype=torch.bool, device=device).tril()
        is_there = is_there & seen
    if row.mask.endswith("of -inf"):
        return torch.where(is_there, 0.0, -torch.inf).to(row.dtype)
    return is_there


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
        is_causal = row.mask == "causal"
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    def forward() -> object:
        with torch.no_grad():
            return attend()

    return forward, lambda: torch.autograd.grad(attend(), (q, k, v), grad)


_FORCED = {"Triton": ("triton_kernels", 10), "FlashAttention-4": ("cutedsl_kernels", 11)}


def _register_all() -> None:
    """The pack's overrides, and before them, by contestant, those of one DSL that take every call
    that they are right for, whatever tables say."""
    overrides.register("CUDA")
    kinds = [(op, kind) for kind in overrides.available_kinds() for op in kind.ops]
    for contestant, (kernels, priority) in _FORCED.items():
        utils = triton_utils if kernels == "triton_kernels" else cutedsl_utils
        for op, kind in kinds:
            if kind.kernels == kernels:
                utils.register_op_override(
                    "aten",
                    op.name,
                    "CUDA",
                    overrides._impl(op, kernels),
                    cond=overrides._condition(op, kind),
                    name=f"{contestant}, {op.name}, {kind.name}",
                    priority=priority,
                    launch_plan=True,
                )
    if not any(kind.kernels == "cutedsl_kernels" for _, kind in kinds):
        return
    _, priority = _FORCED["FlashAttention-4"]
    cutedsl_utils.register_op_override(
        "aten",
        "scaled_dot_product_attention",
        "CUDA",
        boolean.attention,
        cond=overrides.boolean_condition(),
        name="FlashAttention-4, boolean masks",
        priority=priority,
    )


def _without(call: Call, *contestants: str) -> Call:
    """The call without what is registered for some contestants."""
    names = [each.name for each in opgraft.overrides() if each.name.startswith(contestants)]

    def run() -> object:
        with ExitStack() as scopes:
            for name in names:
                scopes.enter_context(opgraft.disabled(name=name))
            return call()

    return run


# After some calls of its kind a call is replayed: before, a table may leave it to native. Kernels
# that are compiled meanwhile take more of them.
CALLS_TO_A_PLAN = 4
MOST_CALLS_TO_A_PLAN = 16


def _hits(call: Call) -> set[str]:
    """The names of the overrides that a call hits, once it has a plan."""
    hits: set[str] = set()
    for n in range(MOST_CALLS_TO_A_PLAN):
        before = {each.name: each.hits for each in opgraft.overrides()}
        call()
        torch.cuda.synchronize()
        hits = {each.name for each in opgraft.overrides() if each.hits > before[each.name]}
        if hits and n + 1 >= CALLS_TO_A_PLAN:
            break
    return hits


def measure(rounds: int, only: str = "") -> list[dict[str, Any]]:
    """A record of each row and direction: medians of rounds in which all take turns.

    Args:
        rounds: how many.
        only: masks and dtypes of the rows to measure, with commas between; all by default.
    """
    _register_all()
    records = []
    for row in ROWS:
        kinds = {row.mask, str(row.dtype).removeprefix("torch.")}
        if only and not kinds & set(only.split(",")):
            continue
        for direction, call in zip(("forward", "both"), calls(row, "cuda"), strict=True):
            ways = {
                "opgraft": _without(call, *_FORCED),
                "Triton": _without(call, "FlashAttention-4"),
                "FlashAttention-4": _without(call, "Triton"),
            }
            hits = {name: sorted(_hits(way)) for name, way in ways.items()}
            contenders = {name: [way] for name, way in ways.items() if hits[name]}
            for name in _FORCED:  # where the pack's own answer in its place, it is not in the race
                if not any(each.startswith(name) for each in hits[name]):
                    contenders.pop(name, None)
            native = [natively(call)]
            times = gpu_times({"native": native, "native again": native, **contenders}, rounds)
            records.append(
                {
                    **row._asdict(),
                    "dtype": str(row.dtype).removeprefix("torch."),
                    "direction": direction,
                    "hits": hits["opgraft"],
                    "microseconds": {name: time * 1e3 for name, time in times.items()},
                    "speedups": {name: times["native"] / time for name, time in times.items()},
                }
            )
            print(_line(records[-1]), flush=True)
            torch.cuda.empty_cache()
    return records


def _line(record: dict[str, Any]) -> str:
    speedups = dict(record["speedups"])
    del speedups["native"]
    control = speedups.pop("native again")
    if not record["hits"]:
        speedups["opgraft"] = "declines"
    return (
        f"{record['who']:34} {record['direction']:8} "
        f"native {record['microseconds']['native']:7.0f} us | "
        + " | ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in speedups.items()
        )
        + f" (control {control:.2f})"
    )
