"""Workers compile what overrides in CuteDSL launch, and other processes load it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: What a worker is told of a GPU that this machine does not have.
H200 = {
    "type": "cuda",
    "properties": {
        **{"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132},
        **{"total_memory": 150 * 2**30, "warp_size": 32, "L2_cache_size": 60 * 2**20},
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
    },
}
#: Prints what a worker is asked for one call of each override.
REQUESTS = """
import json, torch, opgraft
from opgraft.ready import request
from test_attention import OPS, Tensors

def tensor(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype)

def norm(name, hidden):
    x, weight, rstd = tensor(4, hidden), tensor(hidden), tensor(4, 1, dtype=torch.float32)
    if name == "_fused_rms_norm":
        return (x, [hidden], weight, 1e-6), (x, x, [hidden], rstd, weight, [True, True])
    backward = (x, x, [hidden], rstd, rstd, weight, weight, [True, True, True])
    return (x, [hidden], weight, weight, 1e-5), backward

calls = {}
for name in ("_fused_rms_norm", "native_layer_norm"):
    calls[name], calls[name + "_backward"] = norm(name, 65536)
for each in OPS.values():
    x = each.view(tensor(1, 2, 1024, 128))
    seeds = [torch.empty((), dtype=torch.int64)] * 2
    results = (x, tensor(1, 2, 1024, dtype=torch.float32), *seeds, None, None, *seeds)
    t = Tensors(*[tensor(1, 2, 1024, 128)] * 4)
    calls[each.forward.__name__] = each.forward_arguments(t, True)
    calls[each.backward.__name__] = each.backward_arguments(t, True, results)

for override in opgraft.overrides(dsl="cutedsl", dispatch_key="CUDA"):
    if "boolean" in override.name:
        continue
    call = override.operator.bind(calls[override.op.partition("::")[2].partition(".")[0]], {})
    keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    asked = request.request(override, call, keyset)
    print(json.dumps([override.name, asked | {"plan": {"of": override.name}}]))
"""
#: Prints what a worker is asked for the forward and the backward of cross-entropy.
CROSS_ENTROPY_REQUESTS = """
import json, torch, opgraft
from opgraft.ready import request
from opgraft_kernels.cross_entropy.overrides import register

def calls(reduction, smoothing, weight):
    x, target = torch.empty(64, 1024, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    weight = torch.empty(1024, dtype=torch.bfloat16) if weight else None
    loss = torch.empty(64 if reduction == 0 else (), dtype=torch.bfloat16)
    statistics, mass = torch.empty(2, 64), torch.empty(() if reduction == 1 else 0)
    rest = reduction, -100, smoothing
    yield (x, target, weight, *rest), {"dtype": torch.bfloat16}
    yield (loss, x, target, weight, statistics, mass, *rest), {}

for kind in ((0, 0.0, False), (1, 0.0, False), (1, 0.1, True), (2, 0.0, True)):
    loss, *parts = register("CUDA")
    loss.remove()
    for override, (args, kwargs) in zip(parts, calls(*kind)):
        call = override.operator.bind(args, kwargs)
        keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        asked = request.request(override, call, keyset)
        name = f"{override.name} {kind}"
        print(json.dumps([name, asked | {"plan": {"of": name}}]))
        override.remove()
"""
#: Prints what a worker is asked for calls of the two ops of attention with a boolean mask: of keys,
#: and of queries and keys, of lengths that fill tiles and that fill none.
BOOLEAN_REQUESTS = """
import json, torch, opgraft
from opgraft.ready import request

(forward,), (backward,) = (
    opgraft.overrides(name=f"opgraft_kernels.attention.boolean_mask{each}")
    for each in ("", "_backward")
)
for queries, keys, of_queries in ((512, 512, 1), (512, 512, 512), (300, 333, 300)):
    q, k = (torch.empty(2, n, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (queries, keys))
    mask = torch.ones(2, 1, of_queries, keys, dtype=torch.bool)
    numbers = (0.125, -65536.0)
    for kind, override, args in (
        ("output", forward, (q, k, k, mask, *numbers, False)),
        ("output and logsumexp", forward, (q, k, k, mask, *numbers, True)),
        ("gradients", backward, (q, q, k, k, q, torch.empty(2, 4, queries), mask, *numbers)),
    ):
        call = override.operator.bind(args, {})
        keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        asked = request.request(override, call, keyset)
        name = f"{kind} {queries} {of_queries}"
        print(json.dumps([name, asked | {"plan": {"of": name}}]))
"""
#: Prints what a worker is asked for one small call of each override in Triton, but for
#: cross-entropy's. What a crossover is measured with is a call of it.
TRITON_REQUESTS = """
import itertools, json, torch, opgraft
from opgraft.ready import request
from test_attention import OPS, Tensors

def calls(override):
    crossover = override.declaration.crossover
    if crossover.calls is None:
        yield by_name[override.op.partition("::")[2].partition(".")[0]]
        return
    for features in itertools.product(*crossover.ranges.values()):
        features = dict(zip(crossover.ranges, features))
        yield from crossover.calls(torch.device("cpu"), **features)

by_name = {}
for each in OPS.values():
    t = Tensors(*[torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)] * 4)
    seeds = [torch.empty((), dtype=torch.int64)] * 2
    results = each.view(t.q), torch.empty(1, 2, 64), *seeds, None, None, *seeds
    by_name[each.forward.__name__] = each.forward_arguments(t, True)
    by_name[each.backward.__name__] = each.backward_arguments(t, True, results)

for override in opgraft.overrides(dsl="triton", dispatch_key="CUDA"):
    if "cross_entropy" in override.name:
        continue
    values = next(calls(override))
    args, kwargs = ((), values) if isinstance(values, dict) else (values, {})
    keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    asked = request.request(override, override.operator.bind(args, kwargs), keyset)
    print(json.dumps([override.name, asked | {"plan": {"of": override.name}}]))
"""
#: Loads each function that is in the cache, and says whether CuteDSL was imported for that.
LOAD = """
import json, sys
from opgraft.cache import cutedsl, entries, loaded, origins

for path in sorted(entries.folder().glob("*.json")):
    key = json.loads(path.read_text().splitlines()[0])["key"]
    entry = entries.read(key)
    if cutedsl.LIBRARY not in entry.files:  # a plan
        continue
    needs = map(origins.absolute, entry.facts["libraries"])
    function = loaded.load(entry.open(cutedsl.LIBRARY), list(needs))
    try:
        function()
    except TypeError as error:
        print(error)
print([name for name in ("cutlass", "flash_attn", "quack") if name in sys.modules])
"""


@pytest.fixture
def environment(cutedsl: list[str], tmp_path: Path) -> dict[str, str]:
    """Of processes that find CuteDSL, and keep what is compiled in a folder of the test's."""
    return _environment(cutedsl, tmp_path)


def _environment(found_in: list[str], tmp_path: Path) -> dict[str, str]:
    path = [str(tmp_path), str(Path(__file__).parent), *filter(None, found_in)]
    return os.environ | {
        "TRITON_INTERPRET": "0",
        "OPGRAFT_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(path),
    }


Run = Callable[..., list[str]]


@pytest.fixture
def output(environment: dict[str, str]) -> Run:
    return functools.partial(_output, environment)


def _output(environment: dict[str, str], script: str, **more: str) -> list[str]:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_a_worker_compiles_for_every_override_in_cutedsl(
    environment: dict[str, str], output: Run
) -> None:
    asked = dict(json.loads(line) for line in output(REQUESTS, OPGRAFT_PACKS="opgraft-kernels"))
    assert {name.partition(".")[2].partition(".")[0] for name in asked} == {
        *("attention", "layer_norm", "rms_norm")
    }
    _expect_plans(asked, environment)
    *called, imported = output(LOAD, OPGRAFT_PACKS="none")
    assert called and all("parameters when calling" in line for line in called)
    assert imported == "[]"


def test_a_worker_compiles_for_every_override_in_triton(tmp_path: Path) -> None:
    environment = _environment(sys.path, tmp_path)
    lines = _output(environment, TRITON_REQUESTS, OPGRAFT_PACKS="opgraft-kernels")
    asked = dict(json.loads(line) for line in lines)
    assert len(asked) == len(lines) >= 26
    _expect_plans(asked, environment)


def test_a_worker_records_the_plans_of_cross_entropy(
    environment: dict[str, str], output: Run
) -> None:
    asked = dict(json.loads(line) for line in output(CROSS_ENTROPY_REQUESTS, OPGRAFT_PACKS="none"))
    assert len(asked) == 8
    _expect_plans(asked, environment)


def test_a_worker_records_the_plans_of_boolean_masks(
    environment: dict[str, str], output: Run
) -> None:
    lines = output(BOOLEAN_REQUESTS, OPGRAFT_PACKS="opgraft-kernels")
    asked = dict(json.loads(line) for line in lines)
    assert len(asked) == 9
    _expect_plans(asked, environment)


def _expect_plans(asked: dict[str, Any], environment: dict[str, str]) -> None:
    """A worker compiles for each request, and keeps its launch plan."""
    answers = _answers([_on_a_gpu(each) for each in asked.values()], environment)
    for name, answer in zip(asked, answers, strict=True):
        assert answer.get("compiled"), (name, answer)
        assert len(answer["compiled"]) == len({*answer["compiled"]})
        assert answer["no_plan"] == "", name


def _on_a_gpu(asked: Any) -> str:
    """A request of a call on the CPU as if it had been made on a GPU."""
    text = json.dumps(asked | {"device": H200})
    return text.replace('"device": "cpu"', '"device": "cuda"')


def _answers(requests: list[str], environment: dict[str, str]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "opgraft.ready.worker", str(os.getpid())],
        input="\n".join(requests) + "\n",
        env=environment | {"OPGRAFT_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


# ------------------------------------------------------------- a function that runs on the CPU

#: Compiled by CuteDSL for the host: it launches nothing.
COMPILE = """
import cutlass.cute as cute
from cutlass import Float32

class Scale:
    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, value: Float32):
        for i in range(cute.size(x)):
            y[i] = x[i] * value

def compile_kind(kind):
    memory = dict(stride=(1,), assumed_align=4, memspace=cute.AddressSpace.generic)
    x, y = (
        cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), **memory) for _ in range(2)
    )
    return cute.compile(Scale(), x, y, Float32(1.0), options="--enable-tvm-ffi"), kind.fact
"""
CALLS = """
from typing import NamedTuple
import torch
from opgraft import cutedsl_utils, lazy

functions = cutedsl_utils.Functions(lazy("my_compile:compile_kind"))

class Kind(NamedTuple):
    fact: str

def negated(self):
    out = torch.empty_like(self)
    functions(Kind("a fact"), self.device)(self, out, -1.0)
    return out

def with_a_module_that_makes_a_tensor(self):
    import my_numbers
    return negated(self)

def compiled_by_hand(self):
    import my_compile
    out = torch.empty_like(self)
    my_compile.compile_kind(Kind("a fact"))[0](self, out, -1.0)
    return out
"""
#: Registers one of the impls and prints what three calls return, and what became of it.
MAIN = """
import sys, torch, opgraft, my_calls

override = opgraft.cutedsl_utils.register_op_override(
    "aten", "neg", "CPU", my_calls.{impl}, name="mine", unconditional_override=True,
    launch_plan=True, when_not_ready="native", on_error="raise",
)
print(torch.neg(torch.ones(4)).tolist())
assert opgraft.wait_until_ready(200)
print(*[torch.neg(torch.full((4,), value)).tolist() for value in (1.0, 2.0, 3.0, 4.0)])
print(override.hits, override.misses, "cutlass" in sys.modules)
plans = override.plans.as_dict()
(state,) = plans["readiness"]
print(state["status"], state["by"].split()[0], state["reason"])
print(len(plans["plans"]), plans["refusals"])
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "my_compile.py").write_text(COMPILE)
    (tmp_path / "my_calls.py").write_text(CALLS)
    (tmp_path / "my_numbers.py").write_text("import torch\nNUMBER = torch.tensor([1.0, 2.0])\n")
    return tmp_path


NATIVE = "[-1.0, -1.0, -1.0, -1.0]"
RESULTS = " ".join(str([-value] * 4) for value in (1.0, 2.0, 3.0, 4.0))


@pytest.mark.usefixtures("modules")
def test_what_a_worker_compiled_runs_here_without_cutedsl(output: Run) -> None:
    """Two calls are native's, with which the worker's launch plan is compared; then it is hit."""
    native, ours, counts, state, plans = output(MAIN.replace("{impl}", "negated"))
    assert (native, ours) == (NATIVE, RESULTS)
    assert counts == "2 3 False"
    assert state.strip() == "ready worker"
    assert plans == "1 {}"


@pytest.mark.usefixtures("modules")
def test_what_a_module_does_as_it_is_imported_is_no_part_of_a_plan(output: Run) -> None:
    script = MAIN.replace("{impl}", "with_a_module_that_makes_a_tensor")
    native, ours, counts, state, plans = output(script)
    assert (native, ours, counts) == (NATIVE, RESULTS, "2 3 False")
    assert state.strip() == "ready worker"
    assert plans == "1 {}"


@pytest.mark.usefixtures("modules")
def test_what_cutedsl_compiles_in_another_way_is_compiled_here(output: Run) -> None:
    native, ours, counts, state, _ = output(MAIN.replace("{impl}", "compiled_by_hand"))
    assert (native, ours) == (NATIVE, RESULTS)
    assert counts == "4 1 True"
    assert state.startswith("ready this") and "opgraft.cutedsl_utils.Functions" in state
