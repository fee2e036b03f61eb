"""Events for `TORCH_TRACE`, the structured log that `tlparse` reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch._logging


def emit(name: str, payload: Callable[[], dict[str, Any]], *, of_compilation: bool = False) -> None:
    """Write an event, if `TORCH_TRACE` is set and this torch supports it.

    Args:
        name: the artifact's name in `tlparse`.
        payload: makes the JSON to write. It is called only if an event is written.
        of_compilation: whether it belongs to the compilation in progress.
    """
    write = getattr(torch._logging, "trace_structured", None)
    if write is None or not os.environ.get("TORCH_TRACE"):
        return
    write(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=of_compilation,
    )
