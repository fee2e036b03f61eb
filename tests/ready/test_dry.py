"""What a worker compiles without a device: the pack's own impls, and what requests can say."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import opgraft
from opgraft.ops.schema import Call, resolve
from opgraft.ready import request, triton_kernels
from opgraft.ready.request import CannotAsk
from tests.ready import impls

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
NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
#: Prints what a worker is asked for calls of the pack's overrides that a GPU would run.
REQUESTS = """
import json, torch, opgraft
from opgraft.ready import request, triton_kernels

def tensor(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype)

query = tensor(1, 4, 1024, 64)
norm = (tensor(4096, 4096), [4096])
calls = {
    "rms_norm.forward": (*norm, tensor(4096), 1e-6),
    "layer_norm.forward": (*norm, tensor(4096), tensor(4096), 1e-5),
    "rms_norm.backward": (
        tensor(4096, 4096), *norm, tensor(4096, 1, dtype=torch.float32), tensor(4096), [True, True]
    ),
    "attention.triton.scaled_dot_product_flash_attention": (query, query, query, 0.0, True, False),
}
# Of a sum: the impl makes it contiguous first.
gradient = tensor(1).expand(4096, 4096)
backward = calls["rms_norm.backward"]
for name, values in [*calls.items(), ("rms_norm.backward", (gradient, *backward[1:]))]:
    (override,) = opgraft.overrides(name="opgraft_kernels." + name, dispatch_key="CUDA")
    keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    print(json.dumps(request.request(override, override.operator.bind(values, {}), keyset)))
"""


#: Loads what workers described, with no GPU to load it onto, and then makes the calls dry.
LOADING = """
import json, sys
import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from opgraft.ready import dry, triton_kernels

lines = [json.loads(line) for line in sys.stdin]
described = [each for line in lines for each in line.get("triton", ())]
triton.runtime.driver.set_active(dry._driver({"device": {"properties": {"major": 9, "minor": 0}}}))
loaded, compiled = set(), []
CompiledKernel.run = property(lambda self: loaded.add(self) or (lambda *_: None))
for each in described:
    triton_kernels._load(each)
do_compile = JITFunction._do_compile
JITFunction._do_compile = lambda self, *a: compiled.append(self) or do_compile(self, *a)
for asked in lines[len(lines) // 2 :]:
    dry.run(asked)
print(len(loaded), "loaded,", len(compiled), "compiled")
"""


def on_a_gpu(asked: str) -> str:
    """A request of a call on the CPU as if it had been made on a GPU."""
    text = json.dumps(json.loads(asked) | {"device": H200})
    return text.replace('"device": "cpu"', '"device": "cuda"')


def test_the_packs_kernels_are_compiled_by_a_process_without_a_gpu(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    packs = environment | {"OPGRAFT_PACKS": "opgraft-kernels"}
    requests = subprocess.check_output([sys.executable, "-c", REQUESTS], env=packs, text=True)
    lines = list(map(on_a_gpu, requests.splitlines()))
    done = subprocess.run(
        [sys.executable, "-m", "opgraft.ready.worker", str(os.getpid())],
        input="\n".join(lines) + "\n",
        env=environment | {"OPGRAFT_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert len(answers) == 5, done.stderr
    assert all(answer.get("compiled") for answer in answers), answers
    # Where the process with the GPU finds them; two calls may share a kernel.
    kernels = {each["hash"] for answer in answers for each in answer["triton"]}
    assert len(list(tmp_path.rglob("*.cubin"))) == len(kernels) >= 4
    described = [len(answer["triton"]) for answer in answers]
    assert described == [len(answer["compiled"]) for answer in answers]
    loaded = subprocess.run(
        [sys.executable, "-c", LOADING],
        input="\n".join(done.stdout.splitlines()[1:] + lines),
        env=environment | {"OPGRAFT_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert loaded.stdout == f"{len(kernels)} loaded, 0 compiled\n", loaded.stderr


class Rows(NamedTuple):
    ptr: str
    stride: Any


DESCRIBED = [1, 0.5, True, None, "fp32", (1, ("a", None)), [("tt.divisibility", 16)]]


@pytest.mark.parametrize("value", [*DESCRIBED, {(0,): [], "b": 1}, Rows("*fp32", (1,))], ids=repr)
def test_what_describes_a_kernel_comes_back_as_it_was(value: Any) -> None:
    came = triton_kernels._decoded(json.loads(json.dumps(triton_kernels._encoded(value))))
    assert came == value and type(came) is type(value)


def test_constants_of_a_kernel_come_back_as_they_were() -> None:
    tl = pytest.importorskip("triton.language")
    for value in (tl.float32, tl.constexpr("fp32"), tl.constexpr(3)):
        came = triton_kernels._decoded(json.loads(json.dumps(triton_kernels._encoded(value))))
        assert came == value and type(came) is type(value)
    with pytest.raises(triton_kernels.CannotSay, match="object"):
        triton_kernels._encoded({"a": object()})


def test_a_named_tuple_that_only_this_process_knows_is_not_described() -> None:
    class Local(NamedTuple):
        ptr: str

    with pytest.raises(triton_kernels.CannotSay, match="no other process can import"):
        triton_kernels._encoded([Local("*fp32")])


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 2**70, 1.5, float("inf"), float("-inf"), 1e-30, 2.5j, "mean", [1, 2], []),
        *([None, 3], torch.float16, torch.strided, torch.channels_last, [True, False]),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    came = request.decode(json.loads(json.dumps(request.encode(value))))
    assert came == value and type(came) is type(value)


def test_nan_comes_back() -> None:
    came = request.decode(json.loads(json.dumps(request.encode(float("nan")))))
    assert came != came


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.ones(3, 4),
        lambda: torch.ones(3, 4).t(),
        lambda: torch.ones(8, 8)[1:, 1::2],
        lambda: torch.ones(3, 1).expand(3, 5),
        lambda: torch.ones(()),
        lambda: torch.ones(0, 4),
        lambda: torch.ones(16, dtype=torch.int8)[3:],
    ],
)
def test_a_tensors_metadata_comes_back(made: Any) -> None:
    tensor = made()
    came = request.decode(json.loads(json.dumps(request.encode(tensor))))
    assert (came.shape, came.stride(), came.dtype) == (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
    if tensor.numel():
        address = came.storage_offset() * came.element_size()
        assert (address - tensor.data_ptr()) % request.ALIGNMENT == 0


@pytest.mark.parametrize(
    "value, why",
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.Generator(), "Generator"),
        (object(), "object"),
    ],
)
def test_what_cannot_be_told_is_said(value: Any, why: str) -> None:
    with pytest.raises(CannotAsk, match=why):
        request.encode(value)


def test_a_request_is_the_same_in_every_process() -> None:
    call = Call(resolve("aten::neg"), (torch.ones(4),))
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", impls.negated, unconditional_override=True, launch_plan=True
    )
    try:
        asked = request.request(override, call, NO_KEYS)
    finally:
        override.remove()
    assert asked == json.loads(json.dumps(asked))
    assert request.digest(asked) == request.digest(json.loads(json.dumps(asked)))
    assert asked["impl"] == "tests.ready.impls:negated"


@pytest.mark.parametrize(
    "impl, why",
    [
        (lambda self: self, "inside a function|no function|<"),
        (functools.partial(torch.neg), "no function of a module"),
        (impls.negated_inside(impls.negated), "another function"),
    ],
)
def test_an_impl_without_a_name_is_said(impl: Any, why: str) -> None:
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", impl, unconditional_override=True, launch_plan=True
    )
    with pytest.raises(CannotAsk, match=why):
        request.name_of(override)


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_an_impl_of_the_program_itself_is_looked_for_by_no_worker(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker it would be found in the worker's own program, if that has one of this name."""

    def main(self: torch.Tensor) -> torch.Tensor:
        return -self

    main.__module__, main.__qualname__ = module, "main"
    monkeypatch.setattr(sys.modules["__main__"], "main", main, raising=False)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", main, unconditional_override=True, launch_plan=True
    )
    try:
        with pytest.raises(CannotAsk, match=f"defined in {module}"):
            request.name_of(override)
    finally:
        override.remove()


def test_an_impl_that_is_not_there_is_said() -> None:
    for name in ("no_such_module:f", "tests.ready.impls:no_such_function"):
        with pytest.raises(CannotAsk, match="cannot be imported"):
            request.load(name)


def test_fake_tensors_have_addresses_aligned_as_the_calls() -> None:
    from opgraft.ready import dry

    seen: list[int] = []

    def note(tensor: torch.Tensor) -> None:
        seen.append(tensor.data_ptr())

    impls.noting = note  # type: ignore[attr-defined]
    try:
        for offset in (0, 1, 3):
            values = [request.encode(torch.ones(64)[offset:])]
            dry.run(
                {
                    **{"impl": "tests.ready.impls:noting", "op": "aten::neg", "keyset": None},
                    "dsl": None,
                    **{"arguments": values, "device": None, "autograd": None, "needs": []},
                    "default_dtype": request.encode(torch.float32),
                }
            )
    finally:
        del impls.noting  # type: ignore[attr-defined]
    assert [address % 16 for address in seen] == [0, 4, 12]


#: A module that looks for the GPU while it is imported, as kernels' modules do.
LOOKS_FOR_A_GPU = """
import torch

CAPABILITY = torch.cuda.get_device_capability()
PROCESSORS = torch.cuda.get_device_properties("cuda").multi_processor_count

def negated(self):
    assert torch.cuda.is_available() and (CAPABILITY, PROCESSORS) == ((9, 0), 132)
    assert torch.empty(1).dtype == torch.bfloat16
    return 0 - self
"""


def test_an_impl_finds_the_device_and_the_default_dtype_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "looks_for_a_gpu.py").write_text(LOOKS_FOR_A_GPU)
    call = Call(resolve("aten::neg"), (torch.ones(4),))
    override = opgraft.register_op_override(
        "aten", "neg", "CPU", impls.negated, unconditional_override=True, launch_plan=True
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        asked = request.request(override, call, NO_KEYS)
    finally:
        torch.set_default_dtype(before)
        override.remove()
    line = on_a_gpu(json.dumps(asked | {"impl": "looks_for_a_gpu:negated"}))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "opgraft.ready.worker", str(os.getpid())],
        input=f"{line}\n",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OPGRAFT_DISABLE": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == {"compiled": [], "triton": [], "no_plan": "no plan was asked for"}, answer
