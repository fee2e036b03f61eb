"""DSLs: found without importing them; both positional forms of registration; packs."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

import opgraft
from opgraft import RegistrationError, cutedsl_utils, packs, triton_utils, when
from opgraft import dsl as dsls
from tests import ops

UTILS = {"triton": triton_utils, "cutedsl": cutedsl_utils}
ADDRESS = ("aten", "_softmax", "CPU")


@pytest.fixture(autouse=True)
def every_dsl_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: True)


@pytest.fixture(params=sorted(UTILS))
def utils(request: pytest.FixtureRequest) -> Any:
    return UTILS[request.param]


def is_small(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
    return self.numel() < 10


@pytest.mark.parametrize(
    ("positional", "keywords"),
    [
        ((ops.softmax_by_itself,), {"unconditional_override": False}),
        ((ops.softmax,), {"cond": is_small}),
        ((is_small, ops.softmax), {}),
        ((is_small,), {"impl": ops.softmax}),
        ((), {"impl": ops.softmax, "cond": when.numel("self") < 10}),
        ((None, ops.softmax), {"unconditional_override": True}),
        ((is_small, ops.softmax), {"allow_multiple_override": True}),
    ],
)
def test_both_positional_forms(utils: Any, positional: Any, keywords: Any) -> None:
    override = utils.register_op_override(*ADDRESS, *positional, **keywords)
    torch.softmax(torch.randn(2, 3), -1)
    assert override.hits == 1
    assert override.dsl in UTILS


@pytest.mark.parametrize(
    ("positional", "keywords", "message"),
    [
        ((), {}, "impl is missing"),
        ((is_small, ops.softmax, 1), {}, "got 3 more positional arguments"),
        ((is_small, ops.softmax), {"impl": ops.softmax}, "impl is given twice"),
        ((ops.softmax,), {"dsl": "mine"}, "dsl= is fixed to"),
    ],
)
def test_misuse(utils: Any, positional: Any, keywords: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        utils.register_op_override(*ADDRESS, *positional, **keywords)


def test_where_the_dsl_is_missing_registering_is_a_no_op(
    utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    override = utils.register_op_override(*ADDRESS, is_small, ops.softmax)
    torch.softmax(torch.randn(2, 3), -1)
    assert (override.hits, override.enabled) == (0, False)
    assert "is missing" in override.unavailable
    assert not utils.runtime_available()
    assert utils.runtime_version() is None


def test_arguments_are_validated_even_where_the_dsl_is_missing(
    utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    with pytest.raises(RegistrationError, match="no op"):
        utils.register_op_override("aten", "_sofmax", "CPU", ops.softmax)


def test_deregistering_removes_what_the_dsl_has_and_nothing_else(utils: Any) -> None:
    gone = utils.register_op_override(*ADDRESS, is_small, ops.softmax)
    kept = opgraft.register_op_override(*ADDRESS, ops.softmax, unconditional_override=True)
    utils.deregister_op_overrides()
    assert opgraft.overrides() == [kept]
    assert not gone.enabled


def test_version_is_read_from_metadata() -> None:
    assert dsls.TRITON.version() == metadata.version("triton")


def test_an_unknown_dsl_is_a_label() -> None:
    override = opgraft.register_op_override(
        *ADDRESS, ops.softmax, unconditional_override=True, dsl="helion"
    )
    torch.softmax(torch.randn(2, 3), -1)
    assert override.hits == 1
    assert opgraft.overrides(dsl="helion") == [override]


def test_a_pack_is_loaded_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "opgraft-kernels" in packs.installed()
    for _ in range(2):  # loading again replaces
        packs.load("opgraft-kernels")
    loaded = opgraft.overrides(pack="opgraft-kernels")
    assert {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"} <= {
        override.op for override in loaded
    }
    assert len(loaded) == len({override.name for override in loaded})
    assert {override.on_error for override in loaded} == {"fallback"}


def test_importing_and_registering_import_no_dsl() -> None:
    program = """
import sys
import opgraft
heavy = {"triton", "cutlass", "tvm_ffi", "torch._inductor", "torch._dynamo"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
opgraft.packs.load("opgraft-kernels")
import opgraft_kernels
overrides = opgraft_kernels.register()
assert overrides and not heavy & set(sys.modules), heavy & set(sys.modules)
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
