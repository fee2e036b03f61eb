"""The `opgraft` command: what it prints, its JSON, its exit status."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import opgraft
from opgraft import cli, packs, when
from opgraft.cli import arguments, doctor, explain, facts, new
from opgraft.cli.arguments import ArgumentError, Options
from opgraft.core import loader, store
from opgraft.explanation import Kernel, Neighbours
from opgraft.ops.schema import resolve
from tests import forked_programs, ops

Capture = pytest.CaptureFixture[str]
COMMANDS = list(cli.opgraft.commands)
TAKING_A_SCRIPT = ("run", "profile", "warmup")


def register(**keywords: Any) -> opgraft.Override:
    keywords.setdefault("unconditional_override", "cond" not in keywords)
    key = keywords.pop("dispatch_key", "CPU")
    impl = keywords.pop("impl", ops.softmax)
    return opgraft.register_op_override("aten", "_softmax", key, impl, **keywords)


def run_json(capsys: Capture, *words: str, status: int = 0) -> Any:
    assert cli.main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------------- the command line


def test_help_names_every_command(capsys: Capture) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str, capsys: Capture) -> None:
    assert cli.main([command, "-h"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["no-such-command"], ["list", "--no-such-option"], ["explain"], ["new"]]
)
def test_a_wrong_command_line_is_2_and_on_stderr(words: list[str], capsys: Capture) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Error: " in captured.err


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "opgraft", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("opgraft, version ")


# ---------------------------------------------------------------------------------------- list


def test_list_shows_packs_and_overrides_with_their_states(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    packs.load("opgraft-kernels")
    register(name="mine", dsl="mine", priority=3)
    opgraft.disable(dsl="mine")
    listed = run_json(capsys, "list")
    (pack,) = [row for row in listed["packs"] if row["name"] == "opgraft-kernels"]
    own = [row for row in listed["overrides"] if row["pack"] == "opgraft-kernels"]
    assert (pack["state"], pack["overrides"]) == ("active", len(own)) and own
    (mine,) = [row for row in listed["overrides"] if row["name"] == "mine"]
    assert (mine["priority"], mine["enabled"]) == (3, False)
    assert mine["reason"] == "disabled by opgraft.disable(dsl='mine')"
    assert listed["versions"]["torch"] == torch.__version__

    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "disabled by" in printed
    assert "opgraft_kernels.rms_norm.forward" in printed
    assert "\x1b" not in printed  # no colours where nobody sees them


def test_list_says_why_a_pack_is_not_active(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraft.packs.loading._statuses", {})
    monkeypatch.setenv("OPGRAFT_DISABLE", "1")
    (row,) = [r for r in run_json(capsys, "list")["packs"] if r["name"] == "opgraft-kernels"]
    assert (row["state"], row["reason"]) == ("inactive", "OPGRAFT_DISABLE=1")


# ------------------------------------------------------------------------- what a machine can do


def test_an_override_whose_device_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert facts.why_unreachable(register(dispatch_key="CUDA")) == "there is no CUDA device here"
    assert facts.why_unreachable(register()) is None


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (when.device_capability("self") >= (9, 0), "when.device_capability('self') >= (9, 0) "),
        (when.device_capability("self") == (9, 0), "when.device_capability('self') == (9, 0) "),
        (when.device_capability("self") >= (8, 0), None),
        ((when.device_capability("self") >= (9, 0)) | (when.ndim("self") == 2), None),
        (when.ndim("self") == 2, None),
    ],
)
def test_an_override_for_another_compute_capability(
    monkeypatch: pytest.MonkeyPatch, wanted: when.Condition, reason: str | None
) -> None:
    monkeypatch.setattr(facts, "has_device", lambda key: True)
    monkeypatch.setattr(facts, "capabilities", lambda: [(7, 5), (8, 6)])
    override = register(dispatch_key="CUDA", cond=(when.numel("self") > 0) & wanted)
    found = facts.why_unreachable(override)
    if reason is None:
        assert found is None
    else:
        assert found == f"{reason}cannot hold here: the GPUs are (7, 5), (8, 6)"


# -------------------------------------------------------------------------------------- doctor


def checks(topic: str) -> list[doctor.Check]:
    return [check for check in doctor.examine() if check.topic == topic]


def levels(topic: str) -> set[str]:
    return {check.level for check in checks(topic)}


def test_doctor_is_right_about_this_machine(capsys: Capture) -> None:
    status = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    by_topic = {check["topic"]: check for check in found["checks"]}
    assert torch.__version__ in by_topic["torch"]["text"]
    gpu = by_topic["GPU"]
    if torch.cuda.is_available():
        assert gpu["level"] == "ok"
        assert torch.cuda.get_device_name(0) in gpu["text"]
    elif torch.version.cuda is None:
        assert "a build without CUDA" in gpu["text"]
    assert status == (0 if found["healthy"] else 1)
    assert found["healthy"] == all(check["level"] != "problem" for check in found["checks"])


def test_an_override_that_misses_its_dsl_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    register(dsl="cutedsl", name="a.b")
    (check,) = [check for check in doctor._overrides() if check.level == "problem"]
    assert check.text.startswith("a.b (aten::_softmax): cutedsl is missing")


def test_a_packs_override_whose_dsl_is_an_extra_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: False)
    with opgraft.packs.loading.owning("a-pack"):
        register(dsl="cutedsl", name="a.b")
    (check,) = doctor._overrides()
    assert check.level == "note"
    assert "cutedsl is missing" in check.text
    assert check.mend == "pip install 'opgraft[cutedsl]'"


def test_a_disabled_override_is_no_problem() -> None:
    register(name="a.b")
    opgraft.disable(name="a.b")
    (check,) = doctor._overrides()
    assert check.level == "note"
    assert check.text == "a.b (aten::_softmax): disabled by opgraft.disable(name='a.b')"


def raises(*args: Any) -> Any:
    raise RuntimeError("no such tile")


@pytest.mark.filterwarnings("ignore::opgraft.OverrideWarning")
def test_what_failed_or_differed_in_this_process_is_a_problem() -> None:
    failing = register(name="failing", impl=raises, on_error="fallback")
    torch.softmax(torch.ones(2, 2), -1)
    texts = [check.text for check in doctor._overrides() if check.level == "problem"]
    reason = "RuntimeError: no such tile"
    assert texts == [
        f"failing (aten::_softmax): kept from 1 kinds of calls; the last failed with {reason}"
    ]
    for rank in (1, 3):
        torch.softmax(torch.ones([2] * rank), -1)
    (check,) = [check for check in doctor._overrides() if check.level == "problem"]
    assert check.text.startswith("failing (aten::_softmax): given up: it failed for 3 kinds")
    failing.remove()
    register(name="wrong", impl=lambda self, *rest: self * 0)
    with opgraft.shadow(rate=1.0):
        torch.softmax(torch.ones(2, 2), -1)
    (check,) = [check for check in doctor._overrides() if check.level == "problem"]
    assert check.text == "wrong (aten::_softmax): 1 of 1 hits differ from native's result"


@pytest.mark.parametrize(
    ("missing", "text"), [("compiler", "no C compiler"), ("headers", "no Python.h in /nowhere")]
)
@pytest.mark.parametrize("needed", [True, False])
def test_what_triton_needs_to_launch(
    missing: str, text: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: needed)
    monkeypatch.setattr("opgraft.cli.doctor.shutil.which", lambda name: "/usr/bin/gcc")
    monkeypatch.delenv("CC", raising=False)
    register(dsl="triton")
    if missing == "compiler":
        monkeypatch.setattr("opgraft.cli.doctor.shutil.which", lambda name: None)
    else:
        monkeypatch.setattr("opgraft.cli.doctor.sysconfig.get_path", lambda name: "/nowhere")
    (check,) = doctor._host_compiler()
    assert check.text.startswith(text)
    assert check.level == ("problem" if needed else "note")
    assert check.mend


def test_a_dsl_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_TRIALS", {"triton": "import no_such_part_of_triton", "cutedsl": ""}
    )
    monkeypatch.setattr("opgraft.dsl._is_importable", lambda module: module == "triton")
    doctor._trial.cache_clear()
    try:
        assert [check.level for check in doctor._dsls()] == ["note", "note"]
        register(dsl="triton")
        (check, _) = doctor._dsls()
        assert check.level == "problem"
        assert "cannot be imported: ModuleNotFoundError: No module named 'no_such" in check.text
    finally:
        doctor._trial.cache_clear()


def test_a_kernel_on_top_of_the_overrides_is_a_problem_while_it_is_there() -> None:
    register()
    assert [check.level for check in doctor._neighbours()] == ["ok"]
    with torch.library._scoped_library("aten", "IMPL") as library:
        below = torch.library.get_kernel("aten::_softmax", "CPU")
        library.impl(
            "_softmax",
            lambda keys, *args: below.call_boxed(keys, *args),
            "CPU",
            with_keyset=True,
            allow_override=True,
        )
        (check,) = doctor._neighbours()
        assert check.level == "problem"
        assert check.text.startswith(
            "aten::_softmax at CPU: shadowed by a kernel that was registered on"
        )


def test_torch_natives_own_override_of_the_op_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    kernel = Kernel("registered at /somewhere/torch/_native/registry.py:302")
    known = Neighbours("aten::_softmax", "CPU", above=(kernel,), below=(), torch_native=("triton",))
    monkeypatch.setattr(doctor, "neighbours", lambda: [known])
    (check,) = doctor._neighbours()
    assert check.level == "note"
    assert "aten::_softmax at CPU: shadowed by a kernel" in check.text
    assert "torch._native" in check.text
    assert "TORCH_DISABLE_NATIVE_JIT=1" in check.mend


FLASH_ATTENTION_4 = Kernel("registered at /somewhere/torch/nn/attention/_fa4.py:68")


def test_flash_attention_4_on_top_is_a_problem_with_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    known = Neighbours("aten::_softmax", "CPU", above=(FLASH_ATTENTION_4,), below=())
    monkeypatch.setattr(doctor, "neighbours", lambda: [known])
    (check,) = doctor._neighbours()
    assert check.level == "problem"
    assert "it takes every call" in check.text
    assert check.mend.startswith(
        "torch.nn.attention.restore_flash_attention_impl(), or activate it"
    )


def test_a_kernel_that_is_kept_though_it_was_deregistered_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register()
    known = Neighbours("aten::_softmax", "CPU", above=(), below=(), kept=FLASH_ATTENTION_4)
    monkeypatch.setattr(doctor, "neighbours", lambda: [known])
    (check,) = doctor._neighbours()
    assert (check.level, check.mend) == ("note", "start a process that never registers it")
    assert "and is registered no more" in check.text


def test_a_cache_that_others_can_write_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("OPGRAFT_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(doctor, "_trial", lambda dsl: ({}, ""))
    assert [check.level for check in doctor._caches()] == ["note", "note"]
    cache.mkdir()
    assert doctor._default_inductor_cache() is not None
    assert [check.level for check in doctor._caches()] == ["note", "ok"]
    cache.chmod(0o777)
    (_, check) = doctor._caches()
    assert check.level == "problem"
    assert f"others may write to {cache}" in check.text


def test_a_core_cache_that_others_can_write_to_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find", lambda version: (None, "the core x is not loaded: others"))
    assert "problem" in levels("caches")


@pytest.mark.parametrize(
    ("variables", "level", "text"),
    [
        ({"OPGRAFT_PACKS": "no-such-pack"}, "problem", "not installed: no-such-pack"),
        ({"OPGRAFT_PACKS": "none"}, "note", "by OPGRAFT_PACKS: none"),
        ({"OPGRAFT_DISABLE": "1"}, "note", "nothing is installed at all"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "note", "AUTOLOAD switches it off"),
    ],
)
def test_what_switches_activation_off_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], level: str, text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (check,) = [check for check in doctor._activation() if text in check.text]
    assert check.level == level
    (environment,) = doctor._environment()
    assert all(f"{name}={value}" in environment.text for name, value in variables.items())


# ----------------------------------------------------------------------- explain: its arguments


def built(op: str, **options: Any) -> dict[str, tuple[str, str]]:
    given = arguments.arguments(resolve(op), Options(**options))
    return {name: (arguments.format_value(each.value), each.origin) for name, each in given.items()}


def test_arguments_that_are_not_given_are_assumed_and_said_to_be() -> None:
    assert built("aten::_fused_rms_norm", shapes=["8192x4096"], dtype="bf16") == {
        "input": ("bfloat16[8192, 4096] on cpu", "given"),
        "normalized_shape": ("[4096]", "assumed"),
        "weight": ("None", "assumed"),
        "eps": ("None", "assumed"),
    }


def test_shapes_go_to_the_tensors_in_order_with_dtypes_of_their_own() -> None:
    assert built("aten::_fused_rms_norm", shapes=["2x8:f16", "8"], named=["eps=1e-6"]) == {
        "input": ("float16[2, 8] on cpu", "given"),
        "normalized_shape": ("[8]", "assumed"),
        "weight": ("float32[8] on cpu", "given"),
        "eps": ("1e-06", "given"),
    }


def test_tensors_that_are_missing_are_like_the_first() -> None:
    found = built("aten::_scaled_dot_product_flash_attention", shapes=["1x2x8x64"], dtype="fp16")
    for name in ("query", "key", "value"):
        assert found[name][0] == "float16[1, 2, 8, 64] on cpu"
    assert found["is_causal"] == ("False", "default")
    assert built("aten::_softmax", shapes=["2x3"])["dim"] == ("-1", "assumed")


def test_lists_numbers_dtypes_devices_and_none() -> None:
    assert built("aten::cat", named=["tensors=2x3,4x3:f64", "dim=0"])["tensors"][0] == (
        "[float32[2, 3] on cpu, float64[4, 3] on cpu]"
    )
    shaped = built("aten::sum.dim_IntList", shapes=["2x3"], named=["dim=[0, 1]", "dtype=f64"])
    assert (shaped["dim"], shaped["dtype"]) == (("[0, 1]", "given"), ("float64", "given"))
    assert built("aten::clamp", shapes=["2"], named=["min=none", "max=2.5"])["max"][0] == "2.5"
    made = built("aten::ones", named=["size=2x3", "device=meta", "pin_memory=true"])
    assert [made[name][0] for name in ("size", "device", "pin_memory")] == [
        "[2, 3]",
        "meta",
        "True",
    ]


def test_training_needs_floating_point() -> None:
    found = built("aten::embedding", shapes=["8x4", "3:int64"], requires_grad=True)
    assert found["weight"][0].endswith("requires grad")
    assert found["indices"][0] == "int64[3] on cpu"


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("aten::_softmax", {}, "needs self .Tensor.: give --shape"),
        (
            "aten::_softmax",
            {"shapes": ["2x3", "4"]},
            "--shape is given 2 times, and aten::_softmax has only 1",
        ),
        (
            "aten::_softmax",
            {"shapes": ["2xn"]},
            "self=2xn: '2xn' is no shape: give sizes joined by x",
        ),
        ("aten::_softmax", {"shapes": ["2"], "dtype": "float"}, None),
        ("aten::_softmax", {"shapes": ["2"], "dtype": "f33"}, "'f33' is no dtype"),
        (
            "aten::_softmax",
            {"shapes": ["2"], "named": ["axis=1"]},
            "NAME=VALUE, for one of self, dim, half",
        ),
        (
            "aten::_softmax",
            {"shapes": ["2"], "named": ["half_to_flat=true"]},
            "did you mean half_to_float",
        ),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim"]}, "--arg dim: give NAME=VALUE"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim=x y"]}, "dim=x y: 'x y' is no number"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim=2x3"]}, "'2x3' is no number"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim="]}, "dim=: '' is no number"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim=1.5"]}, "'1.5' is no int"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim=true"]}, "'true' is no int"),
        ("aten::_softmax", {"shapes": ["2"], "named": ["half_to_float=3"]}, "'3' is no bool"),
        ("aten::native_dropout", {"shapes": ["2"], "named": ["p=[1]"]}, "is no float"),
        ("aten::native_dropout", {"shapes": ["2"], "named": ["p=1"]}, None),
        ("aten::_softmax", {"shapes": ["2"], "named": ["dim=x"]}, "dim=x: .x. is no number"),
        ("aten::reshape", {"shapes": ["2"]}, "needs shape .List.int..: give --arg shape="),
    ],
)
def test_what_does_not_make_a_call_is_named(
    op: str, options: dict[str, Any], message: str | None
) -> None:
    if message is None:
        assert built(op, **options)
        return
    with pytest.raises(ArgumentError, match=message):
        built(op, **options)


def test_fake_tensors_take_no_memory_and_real_ones_do() -> None:
    huge = arguments.arguments(resolve("aten::_softmax"), Options(["1000000x1000000"]))
    assert huge["self"].value.numel() == 10**12
    real = arguments.arguments(resolve("aten::_softmax"), Options(["2x3"], real=True))
    assert type(real["self"].value) is torch.Tensor


# ----------------------------------------------------------------------------- explain: the rest

EXPLAIN = ("explain", "aten::_softmax", "--device", "cpu", "--shape")


def test_explain_names_the_part_that_failed_with_what_it_saw(capsys: Capture) -> None:
    register(name="narrow", cond=(when.ndim("self") == 2) & (when.size("self", -1) <= 4))
    register(name="wide", cond=when.size("self", -1) > 4, priority=-1)
    found = run_json(capsys, *EXPLAIN, "2x8")
    assert (found["op"], found["dispatch_key"], found["runs"]) == ("aten::_softmax", "CPU", "wide")
    narrow, wide = found["overrides"]
    assert (narrow["part"], narrow["saw"]) == (
        "when.size('self', -1) <= 4",
        "when.size('self', -1) is 8",
    )
    assert (wide["name"], wide["status"]) == ("wide", "takes")
    assert found["call"]["dim"] == {"value": "-1", "origin": "assumed"}

    assert cli.main([*EXPLAIN, "2x8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "self = float32[2, 8] on cpu" in printed
    assert "declines: when.size('self', -1) <= 4 (when.size('self', -1) is 8)" in printed
    assert "Runs: wide" in printed


def test_explain_names_no_kernel_where_a_condition_raises(capsys: Capture) -> None:
    def cond(self: torch.Tensor, dim: int, half_to_float: bool) -> bool:
        raise ValueError("no such shape")

    register(name="raising", cond=cond)
    assert run_json(capsys, *EXPLAIN, "2x8")["runs"] is None
    assert cli.main([*EXPLAIN, "2x8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the condition of override raising raises" in printed.partition("Runs: ")[2]


def test_explain_without_overrides_names_the_native_kernel(capsys: Capture) -> None:
    found = run_json(capsys, *EXPLAIN, "2x8")
    assert (found["runs"], found["overrides"]) == ("native", [])
    assert "RegisterCPU" in found["native"]


@pytest.mark.parametrize(
    ("built", "note"),
    [
        (True, "there is no CUDA device here: this is what would happen with one"),
        (False, "this torch is built without CUDA: conditions are evaluated"),
    ],
)
def test_explain_for_a_device_that_is_not_there_says_so(
    built: bool, note: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "has_device", lambda key: False)
    monkeypatch.setattr(explain, "is_built_for", lambda key: built)
    found = run_json(capsys, "explain", "aten::_softmax", "--shape", "2x8", "--device", "cuda")
    assert found["dispatch_key"] == "CUDA"
    assert any(each.startswith(note) for each in found["notes"])


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["aten::_sofmax"], 2, "did you mean aten::_softmax"),
        (["softmax"], 2, "does not name an op"),
        (["aten::_softmax"], 2, "give --shape"),
        (["aten::_softmax", "--shape", "2", "--device", "tpu"], 2, "tpu"),
    ],
)
def test_explain_of_what_is_no_call(
    words: list[str], status: int, message: str, capsys: Capture
) -> None:
    assert cli.main(["explain", *words]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


# ----------------------------------------------------------------------------------------- run


def run_script(
    tmp_path: Path, text: str, *words: str, command: str = "run"
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "beside.py").write_text("value = 'found'\n")
    return forked_programs.run_module("opgraft", command, *words, cwd=tmp_path)


REGISTERS = """
import sys, torch, opgraft
from opgraft import when
opgraft.register_op_override(
    "aten", "_softmax", "CPU", lambda self, dim, half: self.exp() / self.exp().sum(dim, True),
    cond=when.size("self", -1) >= 4, name="mine")
torch.softmax(torch.zeros(2, 4), -1), torch.softmax(torch.zeros(2, 3), -1)
"""


def test_run_prints_where_calls_went_and_leaves_stdout_to_the_script(tmp_path: Path) -> None:
    text = (
        REGISTERS
        + """
import beside
print(__name__, sys.argv, beside.value)
"""
    )
    done = run_script(tmp_path, text, "script.py", "--shape", "-x", "y")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['script.py', '--shape', '-x', 'y'] found\n"
    assert "aten::_softmax" in done.stderr
    assert "when.size('self', -1) >= 4" in done.stderr


def test_run_writes_json_to_a_file(tmp_path: Path) -> None:
    done = run_script(tmp_path, REGISTERS, "--json", "-o", "trace.json", "script.py")
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads((tmp_path / "trace.json").read_text())["ops"]
    assert (row["op"], row["calls"], row["hits"]) == ("aten::_softmax", 2, 1)


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('so long')", 1, "so long"),
        ("raise KeyError('gone')", 1, "KeyError: 'gone'"),
        ("def (", 1, "SyntaxError"),
    ],
)
def test_run_ends_as_the_script_ends_and_prints_the_table_all_the_same(
    tmp_path: Path, end: str, status: int, message: str
) -> None:
    done = run_script(tmp_path, f"{REGISTERS}\n{end}\n", "script.py")
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "opgraft trace" in done.stderr
    assert "opgraft/cli" not in done.stderr  # the script's own frames only
    assert "runpy" not in done.stderr


def test_run_of_a_module(tmp_path: Path) -> None:
    done = run_script(tmp_path, "import sys; print(sys.argv[1:])", "-m", "script", "-q")
    assert (done.returncode, done.stdout) == (0, "['-q']\n")


@pytest.mark.parametrize("command", ["run", "warmup"])
def test_run_of_what_is_not_there(command: str, capsys: Capture) -> None:
    assert cli.main([command, "no-such-script.py"]) == 2
    assert "there is no file 'no-such-script.py'" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- warmup

PLANNED = f"""
import sys, torch, opgraft
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests import probes
def impl(self, dim, half_to_float):
    out = torch.empty_like(self)
    probes.scale(self, out, 2.0)
    return out
opgraft.register_op_override(
    "aten", "_softmax", "CPU", impl, unconditional_override=True, launch_plan=True, name="mine")
for _ in range(int(sys.argv[1])):
    torch.softmax(torch.zeros(2, 4), -1)
"""


@pytest.mark.skipif(loader.in_use() is None, reason="launch plans need the compiled core")
def test_warmup_prints_what_ran_and_what_was_recorded(tmp_path: Path) -> None:
    done = run_script(tmp_path, PLANNED, "script.py", "5", command="warmup")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("mine\t")]
    assert row.split("\t")[1] == "5" and "1 plan, 2 replays" in row


@pytest.mark.skipif(loader.in_use() is None, reason="launch plans need the compiled core")
def test_warmup_writes_json_to_a_file_and_ends_as_the_script_does(tmp_path: Path) -> None:
    text = f"{PLANNED}\nsys.exit(3)\n"
    done = run_script(
        tmp_path, text, "--json", "-o", "plans.json", "script.py", "4", command="warmup"
    )
    assert (done.returncode, done.stderr) == (3, "")
    (found,) = json.loads((tmp_path / "plans.json").read_text())["overrides"]
    assert (found["name"], found["op"], found["hits"]) == ("mine", "aten::_softmax", 4)
    (plan,) = found["plans"]["plans"]
    assert plan["key"] == "self float32[2, 4], dim -1, half_to_float False"
    assert plan["hits"] == 1
    assert (found["plans"]["refusals"], found["plans"]["stopped"]) == ({}, False)


# ----------------------------------------------------------------------------------------- new


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch", "would be the module torch, and a module of that name is installed"),
        ("Json", "would be the module json, which is Python's own"),
        ("class", "would be the module class, which is Python's own"),
        ("-x", "is no name for a pack"),
        ("a b", "is no name for a pack"),
        ("a--b", "is no name for a pack"),
        ("../a", "is no name for a pack"),
        ("", "is no name for a pack"),
    ],
)
def test_names_that_a_pack_cannot_have(name: str, problem: str) -> None:
    assert new.refuse(name).startswith(problem)


def test_new_writes_a_pack_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_json(capsys, "new", "Fast-Norms")
    folder = Path(made["folder"])
    assert (folder / "src" / "fast_norms" / "overrides.py").exists()
    assert (folder / ".gitignore").exists()
    written = "".join(Path(file).read_text() for file in made["files"])
    assert "my-pack" not in written and "my_pack" not in written
    assert 'Fast-Norms = "fast_norms:register"' in written
    assert cli.main(["new", "Fast-Norms"]) == 1
    assert "Fast-Norms is there already" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["list"], ["verify"]], ids=str)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dsl", "tritn"], "did you mean triton?"),
        (["--op", "aten::nosuch"], "there is no op aten::nosuch"),
        (["--op", "aten::_sofmax"], "did you mean aten::_softmax?"),
        (["--op", "_softmax"], "did you mean aten::_softmax?"),
    ],
    ids=str,
)
def test_a_word_that_nothing_has_is_told_with_the_nearest(
    command: list[str], words: list[str], message: str, capsys: Capture
) -> None:
    assert cli.main([*command, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("op", ["aten::mul", "aten::relu", "other::op"])
def test_an_op_without_overrides_is_no_mistake(op: str, capsys: Capture) -> None:
    assert cli.main(["list", "--op", op]) == 0
    assert "No registered override matches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "about"),
    [(None, "No module named 'to_import'"), ("raise ValueError('bad')", "ValueError: bad")],
)
def test_a_module_that_cannot_be_imported_is_told(
    text: str | None,
    about: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if text is not None:
        (tmp_path / "to_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["verify", "--import", "to_import"]) == 1
    assert f"--import to_import: {'ModuleNotFoundError: ' if text is None else ''}{about}" in (
        capsys.readouterr().err
    )


def test_make_test_of_a_new_pack_says_what_it_needs(tmp_path: Path, capsys: Capture) -> None:
    """With a Python that has no pytest; what the command itself prints says so as well."""
    assert cli.main(["new", "a-pack-of-mine", "--into", str(tmp_path)]) == 0
    mend = "pip install -e '.[test]'"
    assert mend in capsys.readouterr().out
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: no site-packages
    without.chmod(0o755)
    done = subprocess.run(
        ["make", "test", f"PYTHON={without}"],
        cwd=tmp_path / "a-pack-of-mine",
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"the tests need pytest: {without} -m {mend}" in done.stdout


def test_new_says_how_its_table_is_measured(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["new", "Fast-Norms", "--into", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "opgraft tune Fast-Norms --output src/fast_norms/tables" in printed
    assert (tmp_path / "Fast-Norms" / "src" / "fast_norms" / "tables").is_dir()


def test_new_into_another_folder(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["new", "norms", "--into", str(tmp_path / "packs")]) == 0
    assert (tmp_path / "packs" / "norms" / "pyproject.toml").exists()
    assert f"cd {tmp_path / 'packs' / 'norms'}" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- build


def test_build_with_json_says_where_the_core_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("opgraft.core.loader.status", lambda: loader.CoreStatus(True, "m"))
    monkeypatch.setattr("opgraft.core.loader.load", lambda: os)
    assert run_json(capsys, "build") == {"torch": str(torch.__version__), "core": os.__file__}


# ------------------------------------------------------------------ what needs no torch


NEED_NO_TORCH = {
    "--version": "opgraft, version ",
    "--help": "Kernels written in Triton or CuteDSL under PyTorch's own operators.",
    "new fast-softmax": "fast-softmax: a kernel pack, ",
    **{f"{name} --help": f"Usage: opgraft {name} [OPTIONS]" for name in COMMANDS},
    "nosuch": "Error: No such command 'nosuch'",
    "explain": "Error: Missing argument 'OP'.",
    "tune --budget 5x": "Error: Invalid value for '--budget': '5x' is no duration: write 90s, ",
    **{
        f"{name} --nosuch": "Error: No such option"
        for name in COMMANDS
        if name not in TAKING_A_SCRIPT  # which would be the script
    },
}


@pytest.mark.parametrize("command", NEED_NO_TORCH)
def test_commands_that_need_no_torch_do_not_import_it(command: str, tmp_path: Path) -> None:
    program = (
        "import sys; from opgraft_command import main\n"
        "status = main(sys.argv[1:]); sys.exit(status if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    is_wrong = NEED_NO_TORCH[command].startswith("Error: ")
    assert done.returncode == (2 if is_wrong else 0), done.stderr
    assert NEED_NO_TORCH[command] in (done.stderr if is_wrong else done.stdout)


@pytest.mark.parametrize("options", [["-m", "opgraft"], ["-mopgraft"], ["-Bm", "opgraft"]], ids=str)
def test_running_the_module_imports_no_torch_for_its_version(options: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *options, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "opgraft, version " in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "opgraft.cli" in imported
    assert "torch" not in imported


def test_running_another_module_imports_torch_with_the_package(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("import opgraft, sys; print('torch' in sys.modules)")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/__init__.py").write_text("import opgraft")
    (tmp_path / "inside/__main__.py").write_text("import sys; print('torch' in sys.modules)")
    for options in (["-m", "other"], ["-m", "inside"], ["-minside"], ["-Bm", "inside"]):
        command = [sys.executable, *options, "-m", "opgraft"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "True", options


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_what_its_command_line_gives(name: str) -> None:
    module = importlib.import_module(f"opgraft.cli.{'listing' if name == 'list' else name}")
    given = [each.name for each in cli.opgraft.commands[name].params]
    assert sorted(inspect.signature(module.command).parameters) == sorted(given)


FORKING = """
import os, sys
from opgraft.cli import scripts

def script():
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        END

print("the script ended with", scripts.run(script))
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "-o", "absent/table", "SCRIPT"], "there is no folder"),
        (["warmup", "-o", "absent/table", "SCRIPT"], "there is no folder"),
        (["profile", "--html", "absent/page", "SCRIPT"], "there is no folder"),
        (["verify", "--junit", "absent/report.xml"], "there is no folder"),
        (["verify", "--max-samples", "0"], "0 is not in the range"),
        (["verify", "--k", "-1"], "-1.0 is not in the range"),
        (["verify", "--import", "./mine.py"], "--import takes a module's name"),
        (["tune", "--import", "mine.py"], "--import takes a module's name"),
    ],
)
def test_what_cannot_be_done_is_told_before_a_script_runs(
    words: list[str], message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('it ran')")
    given = [str(script) if word == "SCRIPT" else word for word in words]
    done = forked_programs.run_module("opgraft", *given, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "it ran" not in done.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("raise KeyboardInterrupt", 130)],
)
def test_what_a_script_forks_ends_with_the_script(end: str, status: int) -> None:
    """A command goes on when the script has ended, in its own process alone."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING.replace("END", end)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [str(status), "the script ended with 0"]
