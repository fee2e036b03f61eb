"""What a prompt and a notebook show of what the public API returns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import opgraft
from tests import ops


def explanation() -> object:
    return opgraft.explain("aten::_softmax", torch.ones(2, 3), -1, False)


def trace() -> object:
    with opgraft.trace() as found:
        torch.softmax(torch.ones(2, 3), -1)
    return found


def warm_up() -> object:
    return opgraft.warmup(torch.softmax, torch.ones(2, 3), -1)


@pytest.mark.parametrize("make", [explanation, trace, warm_up], ids=lambda make: make.__name__)
def test_it_is_shown_as_it_prints(make: Callable[[], object]) -> None:
    override = opgraft.register_op_override(
        *("aten", "_softmax", "CPU", ops.softmax), unconditional_override=True, name="a<b>&c"
    )
    shown = make()
    assert override.name in str(shown)
    assert repr(shown) == str(shown)
    html = shown._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<pre>") and html.endswith("</pre>")
    assert "a&lt;b&gt;&amp;c" in html and "<b>" not in html
