"""Packs that declare their ops wait for a call: what keeps their place, and what activates them."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from opgraft.core import loader
from tests import probes
from tests.forked_programs import EnvironmentWithTorch

pytestmark = pytest.mark.skipif(
    loader.load() is None, reason="without a compiled core packs are not activated"
)

# Ordinary torch ops at the CPU key, so that what is hit can be told without a GPU.
PACK = """
import opgraft
def softmax(self, dim, half_to_float):
    weights = (self - self.amax(dim, keepdim=True)).exp()
    return weights / weights.sum(dim, keepdim=True)
def softmax_backward(grad_output, output, dim, input_dtype):
    return output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
def rms_norm(input, normalized_shape, weight=None, eps=None):
    r = (input.square().mean(-1, keepdim=True) + (eps or 1e-6)).rsqrt()
    return input * r, r
def put(symbol, impl, **keywords):
    opgraft.register_op_override("aten", symbol, "CPU", impl, name=impl.__name__,
        **({"unconditional_override": True} | keywords))
def register():
    put("_softmax", softmax)
"""
SOFTMAX = 'softmax = "aten:_softmax"'
# What a program begins with, and what it says at its end.
HEAD = """
import json, sys, torch
x = torch.randn(4, 8)
def is_active(): return "the_pack" in sys.modules
assert not is_active()
"""
TAIL = """
import opgraft
print(json.dumps({
    "hits": {o.name: o.hits for o in opgraft.overrides()},
    "misses": {o.name: o.misses for o in opgraft.overrides()},
    "packs": {s.pack.name: [s.state, s.reason] for s in opgraft.packs.statuses()},
}))
"""


@pytest.fixture
def environment(environment_with_torch: EnvironmentWithTorch) -> EnvironmentWithTorch:
    return environment_with_torch


@pytest.fixture
def put_pack(tmp_path: Path) -> Any:
    """Puts a pack where programs find it; returns the environment variables of these."""

    def put(
        code: str = "",
        *declared: str,
        name: str = "the-pack",
        key: str = "CPU",
        needs: str = "",
        body: str = PACK,
    ) -> dict[str, str]:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(body + textwrap.dedent(code))
        info = tmp_path / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n{needs}")
        entries = f"[opgraft.packs]\n{name} = {module}:register\n"
        for each in key.split() if declared else ():
            lines = "\n".join(line.replace('"', "") for line in declared)
            entries += f"\n[opgraft.ops.{each}]\n{lines}\n"
        (info / "entry_points.txt").write_text(entries)
        return {"PYTHONPATH": str(tmp_path), "OPGRAFT_PACKS": "the-pack,other-pack"}

    return put


def run(
    environment: EnvironmentWithTorch, program: str, variables: dict[str, str], head: str = HEAD
) -> tuple[dict[str, Any], str]:
    """What a program says at its end, and what it wrote to stderr."""
    runs = environment.after_torch if head == HEAD else environment.program
    done = runs(head + textwrap.dedent(program) + TAIL, **variables)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kept = [line for line in done.stderr.splitlines() if "none that is installed" not in line]
    return result, "\n".join(line for line in kept if "names what is not installed" not in line)


ACTIVE = {"the-pack": ["active", ""]}


def active(found: dict[str, Any]) -> bool:
    return bool(found["packs"]["the-pack"] == ["active", ""])


# ------------------------------------------------------------------ the call that activates


def test_the_first_call_activates_and_is_a_hit(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        ours = ("opgraft.registration", "opgraft.registry", "opgraft.when", "opgraft.router")
        assert not [name for name in sys.modules if name in ours]
        torch.relu(x)
        assert not is_active()
        y = torch.softmax(x, -1)
        assert is_active()
        torch.testing.assert_close(y.sum(-1), torch.ones(4))
        opgraft_before = sys.modules["opgraft.registry"].registry
        (override,) = [o for c in opgraft_before._chains.values() for o in c.members]
        assert (override.hits, override.misses) == (1, 0)
        torch.softmax(x, -1)
    """
    found, err = run(environment, program, put_pack("", SOFTMAX))
    assert found["hits"] == {"softmax": 2}
    assert active(found)
    assert err == ""


def test_a_call_that_the_condition_declines_is_one_miss(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def register():
            from opgraft import when
            put("_softmax", softmax, unconditional_override=False,
                cond=when.size("self", -1) > 100)
    """
    found, _ = run(environment, "y = torch.softmax(x, -1)", put_pack(code, SOFTMAX))
    assert (found["hits"], found["misses"]) == ({"softmax": 0}, {"softmax": 1})


def test_impls_that_decide_for_themselves_and_plans_are_reached(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def decides(keyset, self, dim, half_to_float):
            import torch
            return torch.ops.aten._softmax.default(self, dim, half_to_float)
        def register():
            put("_softmax", decides, unconditional_override=False)
    """
    program = """
        torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))
        import opgraft
        assert [o.fallbacks for o in opgraft.overrides()] == [1]
    """
    found, _ = run(environment, program, put_pack(code, SOFTMAX))
    assert found["hits"] == {"decides": 1}


def test_backward_in_the_engines_thread_activates(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = "\ndef register(): put('_softmax_backward_data', softmax_backward)"
    program = """
        x.requires_grad_()
        y = torch.softmax(x, -1)
        assert not is_active()
        (y * torch.arange(8.)).sum().backward()
        y.detach_()
        g = torch.arange(8.)
        torch.testing.assert_close(x.grad, y * (g - (g * y).sum(-1, keepdim=True)))
    """
    variables = put_pack(code, 'b = "aten:_softmax_backward_data"')
    assert run(environment, program, variables)[0]["hits"] == {"softmax_backward": 1}


def test_a_call_of_a_thread_that_python_never_saw(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    probes.load()
    program = f"""
        from importlib.util import module_from_spec, spec_from_file_location
        spec = spec_from_file_location("opgraft_probes", {str(probes.extension())!r})
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.call_on_a_thread("aten::_softmax", "", [x], (-1, False), 1)
        assert is_active()
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"softmax": 1}


@pytest.mark.parametrize(
    "how",
    [
        "torch.inference_mode()",
        "torch.no_grad()",
        "torch.device('meta')",
        "torch.autocast('cpu')",
        "FakeTensorMode()",
    ],
)
def test_a_pack_sees_nothing_of_the_call_that_activates_it(
    environment: EnvironmentWithTorch, put_pack: Any, how: str
) -> None:
    code = """
        import torch
        scale = torch.nn.Parameter(torch.ones(2, 2))
        product = scale @ scale
        assert type(product) is torch.Tensor and product.requires_grad
        assert not scale.is_inference() and scale.device.type == "cpu"
        assert product.dtype is torch.float32
        def register():
            put("_softmax", softmax)
    """
    program = f"""
        from torch._subclasses.fake_tensor import FakeTensorMode
        with {how}:
            y = torch.softmax(x if "Fake" not in {how!r} else torch.empty(2, 2), -1)
        assert is_active()
        torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))
    """
    found, err = run(environment, program, put_pack(code, SOFTMAX))
    assert (found["hits"]["softmax"], err) == (1 if "Fake" in how else 2, "")


def test_a_composite_op_keeps_its_derivative_and_activates(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = "\ndef register(): put('_fused_rms_norm', rms_norm)"
    program = """
        import torch.nn.functional as F
        x.requires_grad_()
        F.rms_norm(x, (8,)).sum().backward()
        assert x.grad is not None and is_active()
        with torch.no_grad():
            F.rms_norm(x, (8,))
        x.grad = None
        F.rms_norm(x, (8,)).sum().backward()
        assert x.grad is not None
    """
    found, _ = run(environment, program, put_pack(code, 'r = "aten:_fused_rms_norm"'))
    assert found["hits"] == {"rms_norm": 1}


CROSS_ENTROPY = """
def cross_entropy(self, target, weight, reduction, ignore_index, label_smoothing):
    return -self.log_softmax(1).gather(1, target[:, None]).mean()
def setup(ctx, inputs, output): ctx.save_for_backward(*inputs[:2])
def backward(ctx, grad):
    global differentiated
    differentiated = True
    x, target = ctx.saved_tensors
    one = torch.nn.functional.one_hot(target, x.shape[1])
    return (grad * (x.softmax(1) - one) / len(x), *[None] * 5)
def register():
    put("cross_entropy_loss", cross_entropy, autograd=(setup, backward), compile="inductor")
import torch
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_call_in_training_is_a_hit_with_a_derivative_of_its_own(
    environment: EnvironmentWithTorch, put_pack: Any, threads: int
) -> None:
    """For a composite op, whose router is at the autograd key before its pack is imported."""
    program = f"""
        import threading
        import torch.nn.functional as F
        target, barrier, grads = torch.tensor([1, 0, 7, 3]), threading.Barrier({threads}), []
        F.nll_loss(x, target)
        import opgraft
        with opgraft.disabled():
            F.cross_entropy(x.clone().requires_grad_(), target)
        assert not is_active()
        def train():
            y = x.clone().requires_grad_()
            barrier.wait()
            F.cross_entropy(y, target).backward()
            grads.append(y.grad)
        all_threads = [threading.Thread(target=train) for _ in range({threads})]
        for thread in all_threads: thread.start()
        for thread in all_threads: thread.join()
        assert is_active() and sys.modules["the_pack"].differentiated
        right = (x.softmax(1) - F.one_hot(target, 8)) / 4
        for grad in grads: torch.testing.assert_close(grad, right)
        assert len(grads) == {threads}
    """
    declared = 'c = "aten:cross_entropy_loss"'
    found, err = run(environment, program, put_pack(CROSS_ENTROPY, declared))
    assert (found["hits"], err) == ({"cross_entropy": threads}, "")
    assert active(found)


def test_a_call_in_training_that_native_takes_while_a_pack_is_imported(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    """A pack whose import trains: it cannot be registered then, and is by the next call."""
    code = CROSS_ENTROPY + (
        "y = torch.ones(2, 3, requires_grad=True)\n"
        "torch.nn.functional.cross_entropy(y, torch.tensor([0, 1])).backward()\n"
        "assert y.grad is not None\n"
    )
    program = """
        import the_pack, torch.nn.functional as F
        y = x.clone().requires_grad_()
        F.cross_entropy(y, torch.tensor([1, 0, 7, 3])).backward()
        assert the_pack.differentiated
    """
    found, _ = run(environment, program, put_pack(code, 'c = "aten:cross_entropy_loss"'))
    assert found["hits"] == {"cross_entropy": 1}


def test_calls_that_no_override_may_take_activate_nothing(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        torch.softmax(torch.empty(4, 8, device="meta"), -1)
        assert not is_active()
        import opgraft
        with opgraft.disabled():
            torch.softmax(x, -1)
        opgraft.native("aten::_softmax")(x, -1, False)
        assert not is_active()
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"softmax": 0}


@pytest.mark.gpu
def test_the_first_call_while_a_cuda_graph_is_captured(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def register():
            opgraft.register_op_override("aten", "_softmax", "CUDA", softmax,
                unconditional_override=True, name="softmax")
    """
    program = """
        x = x.cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.softmax(x, -1)
        assert is_active()
        graph.replay()
        torch.testing.assert_close(y, torch.softmax(x, -1))
    """
    variables = put_pack(code, SOFTMAX, key="CUDA")
    # Nothing that has not run before runs in a capture.
    assert run(environment, program, variables)[0]["hits"] == {"softmax": 1}


# ------------------------------------------------------------------ the first call of each op

TWO_OPS = """
def register():
    put("_softmax", softmax)
    put("_softmax_backward_data", softmax_backward)
"""
BOTH = (SOFTMAX, 'backward = "aten:_softmax_backward_data"')


def test_what_an_op_needs_is_compiled_by_its_first_call(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        from opgraft import router
        def compiled():
            return [op for (op, _), each in router._routers.items() if each._core_overrides]
        torch.softmax(x, -1)
        assert compiled() == ["aten::_softmax"]
        torch.softmax(x.requires_grad_(), -1).sum().backward()
        assert len(compiled()) == 2
    """
    found, _ = run(environment, program, put_pack(TWO_OPS, *BOTH))
    assert found["hits"] == {"softmax": 2, "softmax_backward": 1}


@pytest.mark.parametrize("before", ["", "import opgraft; opgraft.overrides()"])
def test_threads_that_make_the_first_calls_of_two_ops_are_hits(
    environment: EnvironmentWithTorch, put_pack: Any, before: str
) -> None:
    program = """
        import threading
        calls = [
            lambda: torch.softmax(x, -1),
            lambda: torch._softmax_backward_data(x, x, -1, torch.float32),
        ] * 4
        start = threading.Barrier(len(calls))
        def call(function):
            start.wait()
            for _ in range(3):
                function()
        threads = [threading.Thread(target=call, args=(each,)) for each in calls]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    variables = put_pack(TWO_OPS, *BOTH)
    found, err = run(environment, f"{before}\n{textwrap.dedent(program)}", variables)
    assert (found["hits"], err) == ({"softmax": 12, "softmax_backward": 12}, "")


def test_what_is_off_at_the_first_call_is_native_and_a_hit_later(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import opgraft
        (override,) = opgraft.overrides()
        with opgraft.disabled():
            torch.softmax(x, -1)
        with opgraft.disabled(name="softmax"):
            torch.softmax(x, -1)
        opgraft.disable(name="softmax")
        torch.softmax(x, -1)
        assert (override.hits, override.misses) == (0, 0)
        opgraft.enable(name="softmax")
        torch.softmax(x, -1)
    """
    found, _ = run(environment, program, put_pack("", SOFTMAX))
    assert (found["hits"], found["misses"]) == ({"softmax": 1}, {"softmax": 0})


def test_what_is_registered_before_the_first_call_goes_before_the_packs(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import opgraft
        assert [o.name for o in opgraft.overrides()] == ["softmax"]
        opgraft.register_op_override("aten", "_softmax", "CPU",
            lambda self, dim, half: torch.zeros_like(self).fill_(1 / 8),
            cond=lambda self, dim, half: self.shape[0] == 1, name="own")
        torch.softmax(x[:1], -1)
        torch.softmax(x, -1)
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"own": 1, "softmax": 1}


def test_what_cannot_be_compiled_is_native_and_one_line_says_so(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        from opgraft.router import compiled
        import opgraft; opgraft.overrides()
        def fail(*_): raise MemoryError("no room")
        compiled.CompiledRouter._compile = fail
        for _ in range(2):
            torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))
    """
    found, err = run(environment, program, put_pack("", SOFTMAX))
    assert found["hits"] == {"softmax": 0}
    assert err.count("\n") == 0 and "no override of aten::_softmax at CPU is used" in err


# ------------------------------------------------------------------ threads, forks, the end


def test_threads_that_come_at_once_are_all_hits_and_activate_once(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        import time
        times = 0
        def register():
            global times
            times += 1
            put("_softmax", softmax)
            time.sleep(0.3)
    """
    program = """
        import threading
        start = threading.Barrier(8)
        def call():
            start.wait()
            for _ in range(3):
                torch.softmax(x, -1)
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert sys.modules["the_pack"].times == 1
    """
    assert run(environment, program, put_pack(code, SOFTMAX))[0]["hits"] == {"softmax": 24}


def test_threads_that_wait_for_each_other_go_on(
    environment: EnvironmentWithTorch, put_pack: Any, tmp_path: Path
) -> None:
    """One imports a module that calls an op; the other activates a pack that imports the module.

    A call does not wait then, which would take as long as a thread waits at the most.
    """
    (tmp_path / "shared.py").write_text(
        "import time, torch\ntime.sleep(1)\ntorch.softmax(torch.ones(2, 2), -1)\n"
    )
    code = """
        def register():
            import time
            time.sleep(1)
            import shared
            put("_softmax", softmax)
    """
    program = """
        import threading, time
        from opgraft.packs import waiting
        waiting._MAX_WAIT_SECONDS = 600.0
        thread = threading.Thread(target=__import__, args=("shared",))
        thread.start()
        time.sleep(0.5)
        torch.softmax(x, -1)
        thread.join()
        assert "shared" in sys.modules
    """
    assert run(environment, program, put_pack(code, SOFTMAX))[0]["hits"] == {"softmax": 1}


def test_a_pack_that_calls_its_op_while_it_registers(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def register():
            import threading, torch
            torch.softmax(torch.ones(2, 2), -1)
            put("_softmax", softmax)
            torch.softmax(torch.ones(2, 2), -1)
    """
    found, err = run(environment, "torch.softmax(x, -1)", put_pack(code, SOFTMAX))
    assert (found["hits"], err) == ({"softmax": 2}, "")


def test_a_child_that_is_forked_before_the_first_call(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import os
        def forked():
            child = os.fork()
            if child == 0:
                torch.softmax(x, -1)
                import opgraft
                os._exit([o.hits for o in opgraft.overrides()] != [1])
            return os.waitpid(child, 0)[1]
        assert forked() == 0
        assert not is_active()
        torch.softmax(x, -1)
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"softmax": 1}


@pytest.mark.parametrize(("seconds", "hits"), [(0.5, [1]), (30, [])])
def test_a_child_that_is_forked_while_another_thread_activates(
    environment: EnvironmentWithTorch, put_pack: Any, seconds: float, hits: list[int]
) -> None:
    code = f"""
        import time
        def register():
            put("_softmax", softmax)
            time.sleep({seconds})
            put("_softmax", softmax)
    """
    program = """
        import os, threading, time
        thread = threading.Thread(target=torch.softmax, args=(x, -1), daemon=True)
        thread.start()
        while not is_active() or not hasattr(sys.modules["the_pack"], "register"):
            time.sleep(0.01)
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            y = torch.softmax(x, -1)
            torch.testing.assert_close(y.sum(-1), torch.ones(4))
            os._exit(7)
        assert os.waitpid(child, 0)[1] >> 8 == 7
        os._exit(0)
    """
    done = environment.after_torch(HEAD + textwrap.dedent(program), **put_pack(code, SOFTMAX))
    assert done.returncode == 0, done.stderr
    assert ("forked while another thread" in done.stderr) == (not hits)


def test_ctrl_c_while_it_activates_ends_the_call_alone(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def register():
            put("_softmax", softmax)
            raise KeyboardInterrupt
    """
    program = """
        try:
            torch.softmax(x, -1)
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("no")
        torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))
    """
    found, _ = run(environment, program, put_pack(code, SOFTMAX))
    assert found["packs"]["the-pack"][0] == "failed"
    assert found["hits"] == {}


@pytest.mark.parametrize(
    "end",
    [
        "",
        "import atexit; atexit.register(lambda: torch.softmax(x, -1))",
        "class Late:\n    def __del__(self): torch.softmax(x, -1)\nlate = Late(); sys.late = late",
    ],
)
def test_a_program_that_ends_before_any_call(
    environment: EnvironmentWithTorch, put_pack: Any, end: str
) -> None:
    done = environment.after_torch(HEAD + end, **put_pack("", SOFTMAX))
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


# ------------------------------------------------------------------ the thread beside CUDA's start

# What `torch.cuda` calls while it initialises itself, without a GPU.
START_CUDA = """
import threading
def start_cuda():
    for call, _ in torch.cuda._queued_calls[2:]:
        call()
def wait():
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
"""


BesideCuda: TypeAlias = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def beside_cuda(environment: EnvironmentWithTorch, put_pack: Any) -> BesideCuda:
    """Runs a program that can start CUDA, with a pack whose code is given."""

    def run_it(program: str, code: str = "", key: str = "CPU CUDA") -> tuple[dict[str, Any], str]:
        variables = put_pack(code, SOFTMAX, key=key)
        return run(environment, START_CUDA + textwrap.dedent(program), variables)

    return run_it


def test_packs_are_activated_while_cuda_starts(beside_cuda: BesideCuda) -> None:
    program = """
        start_cuda()
        wait()
        assert is_active()
        routed = sys.modules["opgraft.router"]._routers["aten::_softmax", "CPU"]
        assert not routed._awaits_first_call  # what its overrides need is compiled
        torch.softmax(x, -1)
    """
    found, err = beside_cuda(program)
    assert (found["hits"], err) == ({"softmax": 1}, "")
    assert active(found)


def test_a_module_of_the_pack_that_calls_its_op_does_not_wait_for_the_thread(
    beside_cuda: BesideCuda, tmp_path: Path
) -> None:
    (tmp_path / "part_of_it.py").write_text("import torch\ntorch.softmax(torch.ones(2, 2), -1)\n")
    code = """
        def register():
            import builtins, time
            builtins.IS_REGISTERING.set()
            time.sleep(0.3)
            import part_of_it
            put("_softmax", softmax)
    """
    program = """
        import builtins
        from opgraft.packs import waiting
        waiting._MAX_WAIT_SECONDS = 600.0
        builtins.IS_REGISTERING = threading.Event()
        start_cuda()
        builtins.IS_REGISTERING.wait(60)
        import part_of_it
        wait()
        torch.softmax(x, -1)
    """
    found, err = beside_cuda(program, code)
    assert (found["hits"], err) == ({"softmax": 1}, "")


def test_packs_for_the_cpu_alone_do_not_care_whether_cuda_starts(beside_cuda: BesideCuda) -> None:
    program = "start_cuda(); wait(); assert not is_active(); torch.softmax(x, -1)"
    found, _ = beside_cuda(program, key="CPU")
    assert found["hits"] == {"softmax": 1}


def test_calls_while_the_thread_activates_wait_for_it_and_are_hits(beside_cuda: BesideCuda) -> None:
    code = """
        times = 0
        def register():
            import time
            global times
            times += 1
            time.sleep(0.3)
            put("_softmax", softmax)
    """
    program = """
        start_cuda()
        torch.softmax(x, -1)
        assert sys.modules["the_pack"].times == 1
    """
    found, err = beside_cuda(program, code)
    assert (found["hits"], err) == ({"softmax": 1}, "")


def test_a_pack_that_starts_cuda_while_it_is_imported_is_activated_when_it_is_whole(
    beside_cuda: BesideCuda,
) -> None:
    code = """
        import time, torch
        torch.cuda._queued_calls[-1][0]()
        time.sleep(0.3)
        is_whole = True
        def register():
            assert is_whole
            put("_softmax", softmax)
    """
    program = "import the_pack; wait(); assert [o.hits for o in __import__('opgraft').overrides()]"
    found, err = beside_cuda(program, code)
    assert (found["hits"], err) == ({"softmax": 0}, "")


def test_where_no_thread_can_be_started_the_first_call_activates(beside_cuda: BesideCuda) -> None:
    program = """
        def start(self): raise RuntimeError("can't start new thread")
        threading.Thread.start = start
        start_cuda()
        assert not is_active()
        torch.softmax(x, -1)
    """
    found, err = beside_cuda(program)
    assert (found["hits"], err) == ({"softmax": 1}, "")


def test_a_pack_that_fails_on_the_thread_is_left_out_with_one_line(beside_cuda: BesideCuda) -> None:
    code = """
        def register():
            raise ValueError("no")
    """
    program = "start_cuda(); wait(); torch.softmax(x, -1)"
    found, err = beside_cuda(program, code)
    assert found["packs"]["the-pack"] == ["failed", "ValueError: no"]
    assert err.count("\n") == 0 and "is left out" in err


def test_a_child_that_is_forked_while_the_thread_prepares_has_all(beside_cuda: BesideCuda) -> None:
    code = """
        def prepare():
            import time
            time.sleep(0.3)
            import wave  # which nothing else imports
        def register():
            import time
            from opgraft.core import deferred
            put("_softmax", softmax)
            deferred.add_preparation(prepare)
    """
    program = """
        import os
        start_cuda()
        while not hasattr(sys.modules.get("the_pack"), "register"): pass
        child = os.fork()
        if child == 0:
            import wave
            torch.softmax(x, -1)
            import opgraft
            os._exit([o.hits for o in opgraft.overrides()] != [1])
        assert os.waitpid(child, 0)[1] == 0
        torch.softmax(x, -1)
    """
    found, err = beside_cuda(program, code)
    assert (found["hits"], err) == ({"softmax": 1}, "")


def test_a_fork_does_not_wait_for_a_thread_that_waits_for_an_import(
    beside_cuda: BesideCuda,
) -> None:
    code = """
        import os, time, torch
        from opgraft.packs import waiting
        waiting._MAX_WAIT_SECONDS = 60.0
        torch.cuda._queued_calls[-1][0]()
        time.sleep(0.1)
        waiting._MAX_WAIT_SECONDS = 1.0
        if (child := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not waiting._preparing_thread.is_alive()
        def register():
            put("_softmax", softmax)
    """
    program = "import the_pack; torch.softmax(x, -1)"
    found, err = beside_cuda(program, code)
    assert (found["hits"], err) == ({"softmax": 1}, "")


def test_a_pack_that_fails_because_the_program_ends_is_not_told_of(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    """It may register functions for the interpreter's end, which are refused then."""
    code = """
        def register():
            import threading
            threading.main_thread().join()
            threading._register_atexit(print)
    """
    program = HEAD + START_CUDA + "start_cuda()"
    done = environment.after_torch(program, **put_pack(code, SOFTMAX, key="CPU CUDA"))
    assert (done.returncode, "left out" in done.stderr) == (0, False), done.stderr


def test_a_program_that_switches_the_garbage_collector_off_meanwhile_finds_it_off(
    beside_cuda: BesideCuda,
) -> None:
    code = """
        import threading
        begun, may_end = threading.Event(), threading.Event()
        def register():
            begun.set()
            may_end.wait()
            put("_softmax", softmax)
    """
    program = """
        import gc
        start_cuda()
        while not hasattr(sys.modules.get("the_pack"), "register"): pass
        pack = sys.modules["the_pack"]
        pack.begun.wait()
        gc.disable()
        pack.may_end.set()
        wait()
        assert is_active() and not gc.isenabled()
    """
    _, err = beside_cuda(program, code)
    assert err == ""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "torch.softmax(x, -1)"])
def test_a_program_that_ends_as_soon_as_cuda_has_started(
    environment: EnvironmentWithTorch, put_pack: Any, end: str
) -> None:
    program = HEAD + START_CUDA + "start_cuda()\n" + end
    done = environment.after_torch(program, **put_pack("", SOFTMAX, key="CPU CUDA"))
    assert (done.returncode, done.stderr.count("Error")) == (0, 0), done.stderr


@pytest.mark.gpu
def test_packs_are_activated_when_cuda_starts(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = START_CUDA + "torch.zeros(1, device='cuda'); wait(); assert is_active()"
    found, err = run(environment, program, put_pack("", SOFTMAX, key="CPU CUDA"))
    assert (found["hits"], err) == ({"softmax": 0}, "")


# ------------------------------------------------------------------ who looks at what is registered


@pytest.mark.parametrize(
    "look",
    [
        "import opgraft; assert [o.name for o in opgraft.overrides()] == ['softmax']",
        "from opgraft import packs; assert packs.statuses()[-1].state == 'active'",
        "from opgraft import packs; packs.activate()",
        "from opgraft import packs; packs.load('the-pack')",
        "import opgraft; opgraft.enable(dsl='triton')",
        "import opgraft; opgraft.explain('aten::_softmax', x, -1, False)",
        "import opgraft.registration\n"
        "opgraft.registration.register_op_override('aten', 'relu', 'CPU', torch.clone)",
        "from opgraft.registry import registry; list(registry.chains())",
        "import opgraft\nwith opgraft.shadow(0.5): pass",
        "import opgraft\nwith opgraft.trace(): pass",
        "import torch._dynamo",
        "import torch._inductor.codecache",
        "torch.compile(lambda x: x + 1, backend='eager')(x)",
        "import torch.export._trace",
    ],
)
def test_whoever_looks_or_changes_something_finds_them(
    environment: EnvironmentWithTorch, put_pack: Any, look: str
) -> None:
    done = environment.after_torch(f"{HEAD}{look}\nassert is_active()", **put_pack("", SOFTMAX))
    assert done.returncode == 0, done.stderr


def test_the_users_own_come_first_and_rules_hold(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import opgraft
        opgraft.register_op_override("aten", "_softmax", "CPU",
            lambda self, dim, half: torch.zeros_like(self).fill_(1 / 8),
            cond=lambda self, dim, half: self.shape[0] == 1, name="own")
        opgraft.disable(pack="the-pack")
        torch.softmax(x, -1)
        opgraft.enable()
        torch.softmax(x, -1)
        assert [o.name for o in opgraft.overrides()] == ["own", "softmax"]
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"own": 0, "softmax": 1}


def test_compiled_graphs_hold_them(environment: EnvironmentWithTorch, put_pack: Any) -> None:
    code = "\ndef register(): put('_softmax', softmax, compile='opaque')"
    program = """
        graphs = []
        def keep(graph, _):
            graphs.append(graph.code)
            return graph.forward
        from torch._dynamo.backends.common import aot_autograd
        f = torch.compile(lambda x: torch.softmax(x, -1), backend=aot_autograd(fw_compiler=keep))
        f(x)
        assert "opgraft.aten___softmax" in graphs[0], graphs
    """
    assert run(environment, program, put_pack(code, SOFTMAX))[0]["hits"] == {"softmax": 1}


def test_the_keys_of_the_compilers_caches_hold_them(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import torch._inductor.codecache
        from opgraft.pt2 import caches
        assert caches.are_salted() and caches.registry_state()
    """
    assert active(run(environment, program, put_pack("", SOFTMAX))[0])


@pytest.mark.parametrize(
    "early",
    [
        "torch.softmax(torch.ones(2, 2), -1)",
        "import torch._dynamo",
        "import opgraft; early = opgraft.overrides()",
        "import opgraft; opgraft.register_op_override('aten', '_softmax', 'CPU',"
        " lambda self, dim, half: self, cond=lambda self, dim, half: False, name='own')",
    ],
)
def test_a_pack_that_a_program_is_importing_waits_until_it_is_whole(
    environment: EnvironmentWithTorch, put_pack: Any, early: str
) -> None:
    variables = put_pack("", SOFTMAX, body=f"import torch\n{early}\n{PACK}")
    program = """
        import the_pack
        torch.softmax(x, -1)
    """
    found, err = run(environment, program, variables)
    assert found["hits"]["softmax"] == 1
    assert active(found)
    assert err == ""


# ------------------------------------------------------------------ when packs do not wait


@pytest.mark.parametrize(
    "variables",
    [{"TRITON_INTERPRET": "1"}, {"OPGRAFT_ROUTER": "python"}],
    ids=lambda variables: next(iter(variables)),
)
def test_where_packs_are_active_at_once(
    environment: EnvironmentWithTorch, put_pack: Any, variables: dict[str, str]
) -> None:
    head = HEAD.replace("assert not", "assert")
    variables = put_pack("", SOFTMAX) | variables
    found, _ = run(environment, "torch.softmax(x, -1)", variables, head)
    assert found["hits"] == {"softmax": 1}


@pytest.mark.parametrize("variables", [{"OPGRAFT_DISABLE": "1"}, {"OPGRAFT_PACKS": "none"}])
def test_every_switch_makes_it_stock(
    environment: EnvironmentWithTorch, put_pack: Any, variables: dict[str, str]
) -> None:
    variables = put_pack("", SOFTMAX) | variables
    program = """
        torch.softmax(x, -1)
        assert not [name for name in sys.modules if name.startswith("opgraft._C_")]
    """
    found, _ = run(environment, program, variables)
    assert found["hits"] == {}
    assert found["packs"]["the-pack"][0] == "inactive"


def test_a_disabled_pack_is_activated_and_not_hit(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    variables = put_pack("", SOFTMAX) | {"OPGRAFT_DISABLE": "pack:the-pack"}
    found, _ = run(environment, "torch.softmax(x, -1)", variables)
    assert (found["hits"], active(found)) == ({"softmax": 0}, True)


def test_without_a_core_one_line_says_so(
    environment: EnvironmentWithTorch, put_pack: Any, tmp_path: Path
) -> None:
    without = shutil.ignore_patterns("_C_torch*")
    shutil.copytree(environment.packages / "opgraft", tmp_path / "opgraft", ignore=without)
    variables = put_pack("", SOFTMAX) | {"OPGRAFT_CACHE": str(tmp_path / "cache")}
    found, err = run(environment, "torch.softmax(x, -1)", variables)
    assert found["hits"] == {}
    assert err.startswith("opgraft: packs are installed and not active (the-pack): no compiled")
    assert len(err.splitlines()) == 1


def test_one_pack_that_declares_nothing_activates_all_at_once(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    put_pack("", name="other-pack", body="def register(): pass")
    head = HEAD.replace("assert not", "assert")
    found, _ = run(environment, "torch.softmax(x, -1)", put_pack("", SOFTMAX), head)
    assert found["hits"] == {"softmax": 1}


@pytest.mark.parametrize(
    ("declared", "key", "said"),
    [
        ('x = "aten"', "CPU", "declares no op"),
        (SOFTMAX, "AutogradCPU", "declares no op"),
        (SOFTMAX, "Nowhere", "declares no op"),
        ('x = "no_such_library:op"', "CPU", "overrides aten::_softmax and does not declare it"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_reported_and_activates_at_once(
    environment: EnvironmentWithTorch, put_pack: Any, declared: str, key: str, said: str
) -> None:
    head = HEAD.replace("assert not", "assert")
    found, err = run(environment, "torch.softmax(x, -1)", put_pack("", declared, key=key), head)
    assert found["hits"] == {"softmax": 1}
    assert said in err


@pytest.mark.parametrize(
    ("op", "said"), [("_soft", ""), ("soft", "overrides the_pack::soft and does not declare it")]
)
def test_an_op_for_the_pack_alone_needs_no_declaration(
    environment: EnvironmentWithTorch, put_pack: Any, op: str, said: str
) -> None:
    """Nothing calls it before the pack is active. Another may be called as soon as it is defined,
    which the import of its package may do.
    """
    code = """
        def register():
            import torch
            global library
            library = torch.library.Library("the_pack", "FRAGMENT")
            library.define("soft(Tensor self, int dim, bool half_to_float) -> Tensor")
            library.impl("soft", torch.ops.aten._softmax.default, "CompositeExplicitAutograd")
            put("_softmax", softmax)
            opgraft.register_op_override(
                "the_pack", "soft", "CPU", softmax, name="own", unconditional_override=True
            )
    """
    program = """
        torch.softmax(x, -1)
        torch.ops.the_pack.soft(x, -1, False)
    """
    code, program = (
        each.replace('"soft', f'"{op}').replace("the_pack.soft", f"the_pack.{op}")
        for each in (code, program)
    )
    found, err = run(environment, program, put_pack(code, SOFTMAX))
    assert found["hits"] == {"softmax": 1, "own": 1}
    assert said in err if said else err == ""


def test_torch_looking_for_backends_again_changes_nothing(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        torch._import_device_backends()
        torch.softmax(x, -1)
        torch._import_device_backends()
        torch.softmax(x, -1)
    """
    assert run(environment, program, put_pack("", SOFTMAX))[0]["hits"] == {"softmax": 2}


def test_where_a_program_has_registered_before(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    program = """
        import opgraft
        opgraft.register_op_override("aten", "_softmax", "CPU",
            lambda self, dim, half: self, cond=lambda self, dim, half: False, name="own")
        torch._import_device_backends()
        assert is_active()
        torch.softmax(x, -1)
    """
    variables = put_pack("", SOFTMAX) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found, _ = run(environment, program, variables)
    assert (found["hits"], found["misses"]["own"]) == ({"own": 0, "softmax": 1}, 1)


# ------------------------------------------------------------------ declarations that are not true


def test_ops_that_this_torch_does_not_have_are_nothing_to_wait_for(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    variables = put_pack("", SOFTMAX, 'n = "aten:no_such_op"', 'm = "aten:mul.NoSuch"')
    found, err = run(environment, "torch.softmax(x, -1)", variables)
    assert (found["hits"], err) == ({"softmax": 1}, "")
    done = environment.run("opgraft", "doctor", "--json", **variables)
    notes = [c["text"] for c in json.loads(done.stdout)["checks"] if c["level"] == "note"]
    missing = "aten::mul.NoSuch at CPU, aten::no_such_op at CPU"
    assert f"the-pack 1: it declares, and does not override here: {missing}" in notes


def test_an_op_that_is_declared_and_not_registered_runs_native(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    variables = put_pack("", SOFTMAX, 'r = "aten:relu"', 'm = "aten:mul.Tensor"')
    program = """
        torch.testing.assert_close(torch.relu(x), x.clamp(min=0))
        assert is_active()
        torch.mul(x, x)
        torch.softmax(x, -1)
        import opgraft
        override = opgraft.register_op_override("aten", "relu", "CPU", torch.clone,
            unconditional_override=True, name="own")
        assert torch.relu(x) is not x and override.hits == 1
        override.remove()
        assert "native" in str(opgraft.explain("aten::relu", x))
    """
    assert run(environment, program, variables)[0]["hits"] == {"softmax": 1}


def test_what_is_registered_and_not_declared_works_once_active_and_is_reported(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def relu(self): return self.clamp(min=0)
        def register():
            put("_softmax", softmax)
            put("relu", relu)
    """
    program = """
        torch.relu(x)
        assert not is_active()
        torch.softmax(x, -1)
        torch.relu(x)
    """
    variables = put_pack(code, SOFTMAX)
    found, err = run(environment, program, variables)
    assert found["hits"] == {"softmax": 1, "relu": 1}
    (line,) = err.splitlines()
    assert "pack 'the-pack' (the-pack 1) overrides aten::relu and does not declare it" in line
    assert 'in the entry-point group "opgraft.ops.CPU" as "aten:relu"' in line
    done = environment.run("opgraft", "doctor", "--json", **variables)
    problems = [c["text"] for c in json.loads(done.stdout)["checks"] if c["level"] == "problem"]
    assert any("overrides aten::relu and does not declare it" in text for text in problems)


def test_an_override_with_a_derivative_of_its_own_cannot_wait(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    code = """
        def setup(ctx, inputs, output): ctx.save_for_backward(output)
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return y * (grad - (grad * y).sum(-1, keepdim=True)), None, None
        def register():
            put("_softmax", softmax, autograd=(setup, backward))
    """
    program = """
        torch.softmax(x.requires_grad_(), -1).sum().backward()
        torch.testing.assert_close(x.grad, torch.zeros_like(x))
    """
    found, err = run(environment, program, put_pack(code, SOFTMAX))
    assert found["hits"] == {"softmax": 1}
    assert "whose override has autograd=" in err


def test_a_pack_for_another_torch_is_left_out(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    variables = put_pack("", SOFTMAX, needs="Requires-Dist: torch>=99\n")
    program = """
        torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))
        assert not is_active()
        torch.softmax(x, -1)
    """
    found, err = run(environment, program, variables)
    assert (found["hits"], found["packs"]["the-pack"][0]) == ({}, "unmet")
    (line,) = err.splitlines()
    assert "is left out: needs torch>=99" in line


def test_a_pack_that_fails_is_left_out_and_the_other_one_takes_the_call(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    put_pack("\ndef register(): put('_softmax', softmax)", SOFTMAX, name="other-pack")
    variables = put_pack("def register(): 1 / 0", SOFTMAX, body="")
    program = "torch.softmax(x, -1); torch.softmax(x, -1)"
    found, err = run(environment, program, variables)
    assert found["hits"] == {"softmax": 2}
    (line,) = err.splitlines()
    assert "pack 'the-pack' (the-pack 1) is left out: ZeroDivisionError" in line


def test_a_dsl_that_is_missing_runs_native(
    environment: EnvironmentWithTorch, put_pack: Any
) -> None:
    needs = 'Requires-Dist: no-such-dsl; extra == "mine"\n'
    code = "\ndef register(): put('_softmax', softmax, dsl='mine')"
    program = "torch.testing.assert_close(torch.softmax(x, -1).sum(-1), torch.ones(4))"
    found, err = run(environment, program, put_pack(code, SOFTMAX, needs=needs))
    assert (found["hits"], active(found), err) == ({"softmax": 0}, True, "")
