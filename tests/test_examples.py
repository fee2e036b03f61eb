"""Every example runs, and does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forked_programs

EXAMPLES = Path(__file__).parents[1] / "examples"


def variables() -> dict[str, str]:
    """Without a GPU an example's kernels run in Triton's interpreter."""
    return os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})


def run(example: str) -> str:
    """What an example prints, in a process that has just imported torch."""
    done = forked_programs.run_file(EXAMPLES / example, env=variables())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_library_that_registers_when_it_is_imported() -> None:
    printed = run("library_init/main.py")
    assert "4 calls of ops with overrides, 1 taken" in printed
    assert "1 x declined: when.size('self', -1) >= 1024 (when.size('self', -1) is 10)" in printed


def test_an_override_that_decides_for_itself() -> None:
    printed = run("smart_rms_norm.py")
    assert "1 x ended in the native kernel" in printed
    assert printed.endswith("hits 2, of these to the native kernel 1\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it would do, without a GPU")
def test_attention_says_what_it_would_do() -> None:
    printed = run("sdpa.py")
    assert "_scaled_dot_product_flash_attention_for_cpu" in printed
    assert "aten::_scaled_dot_product_cudnn_attention at CUDA ->" in printed


@pytest.mark.gpu
def test_attention_runs_with_overrides_and_without() -> None:
    printed = run("sdpa.py")
    assert "ms without opgraft" in printed


@pytest.mark.slow
def test_the_quickstart_checks_itself() -> None:
    """Started as a reader starts it."""
    quickstart = [sys.executable, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(quickstart, env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Large calls ran Triton, small ones the native kernel" in done.stdout
