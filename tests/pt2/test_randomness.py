"""Random ops in compiled graphs: every draw is its own, and a backward sees the forward's."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.passes.dialect.common import cse_pass
from torch.utils.checkpoint import checkpoint

import opgraft
from opgraft import Override, when
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, resolve
from opgraft.pt2 import opaque, randomness
from tests.pt2 import models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

#: Inductor's way of saving memory, without Inductor's code.
PARTITIONED = "aot_eager_decomp_partition"

#: By op: two of these are two draws.
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x, 64, replacement=True),
    "poisson": lambda x: torch.poisson(x * 9),
    "_standard_gamma": lambda x: torch._standard_gamma(x),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli.p": lambda x: torch.ops.aten.bernoulli.p(x, 0.5),
    "native_dropout": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "normal.Tensor_float": lambda x: torch.normal(x, 2.0),
    "normal.Tensor_Tensor": lambda x: torch.normal(x, x),
    "normal.float_Tensor": lambda x: torch.normal(1.0, x),
    "normal_functional": lambda x: torch.ops.aten.normal_functional(x),
    "uniform": lambda x: torch.ops.aten.uniform(x),
    "exponential": lambda x: torch.ops.aten.exponential(x),
    "cauchy": lambda x: torch.ops.aten.cauchy(x),
    "log_normal": lambda x: torch.ops.aten.log_normal(x),
    "geometric": lambda x: torch.ops.aten.geometric(x, 0.1),
    "random": lambda x: torch.ops.aten.random(x),
    "rrelu_with_noise_functional": lambda x: torch.ops.aten.rrelu_with_noise_functional(
        -x, torch.zeros_like(x), 0.1, 0.9, True
    )[0],
}


def probabilities() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 96).view(2, 48)


def traceable(*names: str) -> list[Any]:
    """Draws as parameters of a test; those that this torch cannot trace skip and say so."""
    return [pytest.param(name, marks=() if has_meta_kernel(name) else _NO_META) for name in names]


#: `_standard_gamma` up to torch 2.11. Torch runs the op itself to trace it with static sizes, which
#: is a hit more, and does not trace it with dynamic ones.
_NO_META = pytest.mark.skip(reason=f"torch {torch.__version__} has no Meta kernel of this op")


def has_meta_kernel(name: str) -> bool:
    try:
        DRAWS[name](probabilities().to("meta"))
    except NotImplementedError:
        return False
    return True


def random_ops() -> list[Op]:
    """All ops that can be opaque and that torch says are random."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        try:
            op = resolve(name) if name.startswith(("aten::", "prims::")) else None
        except RegistrationError:
            continue
        if op is None or not op.is_random or opaque.obstacle(op) is not None:
            continue
        if not keyword.iskeyword(op.overload._overloadname):  # no graph can write `random.from`
            found.append(op)
    return found


RANDOM = random_ops()


def two_calls(target: Any) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    argument = graph.placeholder("argument")
    graph.output(tuple(graph.call_function(target, (argument,)) for _ in range(2)))
    return graph


def calls_in(graph: torch.fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


# ------------------------------------------------------------------ what the compiler knows


def test_there_are_random_ops() -> None:
    assert len(RANDOM) > 40


@pytest.mark.parametrize("op", RANDOM, ids=lambda op: op.name)
def test_the_compiler_knows_an_opaque_op_as_random_as_the_op(op: Op) -> None:
    target = opaque.op_for(op)
    assert torch.Tag.nondeterministic_seeded in target.tags
    assert calls_in(fx_graph_cse(two_calls(target)), target) == 2
    module = torch.fx.GraphModule({}, two_calls(target))
    eliminate = cse_pass.CSEPass(banned_ops=cse_pass.get_CSE_banned_ops())
    result = eliminate(module)
    assert result is not None
    assert calls_in(result.graph_module.graph, target) == 2
    node = next(iter(two_calls(target).find_nodes(op="call_function", target=target)))
    assert node.is_impure(), "an unused draw moves the generator on"
    from torch._functorch import partitioners

    types = partitioners.get_default_op_list()
    assert types.is_random(node)
    assert not types.is_recomputable(node)


def test_equal_calls_of_an_op_that_is_not_random_are_one() -> None:
    target = opaque.op_for(resolve("aten::_softmax"))
    assert calls_in(fx_graph_cse(two_calls(target)), target) == 1


@pytest.mark.parametrize("name", ["quantized_lstm.input", "quantized_gru.input", "rand.generator"])
def test_random_though_no_tag_says_so(name: str) -> None:
    assert resolve(f"aten::{name}").is_random


def test_a_compiler_that_merges_draws_all_the_same_gets_none(
    monkeypatch: pytest.MonkeyPatch, decisions: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(randomness, "_cse_merges_random_ops", lambda: True)
    override = models.override("poisson", models.itself("poisson"))
    first, second = torch.compile(lambda x: (torch.poisson(x), torch.poisson(x)))(
        torch.full((96,), 9.0)
    )
    assert not torch.equal(first, second)
    assert "would merge two random calls of it into one" in decisions.text
    assert override.op == "aten::poisson"


# ------------------------------------------------------------------ what is drawn


def test_few_draws_are_skipped() -> None:
    assert {name for name in DRAWS if not has_meta_kernel(name)} <= {"_standard_gamma"}


def overriding(name: str, cond: Any = None) -> Override:
    """An override that is the native kernel, so that the generator moves as it does without."""
    op = resolve(f"aten::{name}")
    return models.override(name, lambda *args, **kwargs: op.overload(*args, **kwargs), cond)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", traceable("multinomial", "_standard_gamma", "native_dropout"))
def test_two_draws_differ_by_backend(name: str, dynamic: bool, backend: str) -> None:
    check_two_draws(name, backend, dynamic=dynamic)


@pytest.mark.parametrize("name", traceable(*DRAWS))
def test_two_draws_differ(name: str) -> None:
    check_two_draws(name, PARTITIONED, dynamic=True)


def check_two_draws(name: str, backend: str, *, dynamic: bool) -> None:
    override, draw = overriding(name), DRAWS[name]
    # Equal calls are looked for in graphs that are to be differentiated.
    x = probabilities().requires_grad_()
    run = torch.compile(
        lambda x: (draw(x.detach()), draw(x.detach()), x.sin()),
        backend=backend,
        dynamic=dynamic,
        fullgraph=True,
    )
    torch.manual_seed(0)
    first, second, _ = run(x)
    assert override.hits == 2
    assert not torch.equal(first, second)
    with opgraft.disabled():
        torch.manual_seed(0)
        assert torch.equal(first, draw(x.detach())), "eager's draws, in eager's order"
        assert torch.equal(second, draw(x.detach()))


def test_two_draws_that_no_override_takes_differ() -> None:
    override = overriding("multinomial", when.size("self", 0) >= 8)
    draw = DRAWS["multinomial"]
    first, second = torch.compile(lambda x: (draw(x), draw(x)), dynamic=True)(probabilities())
    assert (override.hits, override.misses) == (0, 2)
    assert not torch.equal(first, second)


def test_two_draws_in_training_differ() -> None:
    override = overriding("native_dropout")
    x = torch.ones(64, 64, requires_grad=True)
    run = torch.compile(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), backend="aot_eager")
    first, second = run(x)
    assert override.hits == 2
    assert not torch.equal(first, second)
    (grad,) = torch.autograd.grad((first * 3 + second).sum(), x)
    torch.testing.assert_close(grad, (first * 3 + second).detach())


def test_what_is_constant_is_not_drawn_while_it_is_compiled() -> None:
    override = overriding("bernoulli")

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.bernoulli(torch.full((64,), 0.5))

    run = torch.compile(draw, fullgraph=True, options={"freezing": True})
    with torch.no_grad():
        first, second = run(torch.zeros(64)), run(torch.zeros(64))
    assert override.hits == 2
    assert not torch.equal(first, second)


def test_an_op_on_what_is_constant_runs_when_the_graph_does() -> None:
    ran = []

    def impl(self: torch.Tensor, *, approximate: str) -> torch.Tensor:
        ran.append(self.shape)
        return torch.ops.aten.gelu(self, approximate=approximate)

    models.override("gelu", impl)
    run = torch.compile(lambda x: x + F.gelu(torch.full((64,), 0.5)), fullgraph=True)
    run(torch.zeros(64))
    assert ran == [(64,)]


# ------------------------------------------------------------------ what a backward computes anew


def dropped_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(x @ weight, 0.5).sin() @ weight, 0.5).sin()


def gradients(function: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = function(x, weight)
    result.pow(2).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


def check_gradients(run: Any, override: Override, hits: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(2, 16, 16, dtype=torch.float64)
    got = gradients(run, x, weight)
    assert override.hits == hits
    with opgraft.disabled():
        torch.testing.assert_close(got, gradients(dropped_twice, x, weight))


@pytest.mark.parametrize(
    ("backend", "reentrant"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_a_checkpointed_region_draws_the_same_again(backend: str, reentrant: bool) -> None:
    override = overriding("native_dropout")

    def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = checkpoint(dropped_twice, x, weight, use_reentrant=reentrant)
        assert isinstance(result, torch.Tensor)
        return result

    # The last mask is not needed again, as the backward begins there.
    check_gradients(torch.compile(region, backend=backend), override, hits=4)


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("aggressive", [False, True])
def test_a_partitioner_that_saves_memory_draws_nothing_again(
    budget: float, aggressive: bool
) -> None:
    override = overriding("native_dropout")
    with torch._functorch.config.patch(
        activation_memory_budget=budget, aggressive_recomputation=aggressive
    ):
        run = torch.compile(dropped_twice, backend=PARTITIONED, fullgraph=True)
        check_gradients(run, override, hits=2)


@pytest.mark.parametrize("name", traceable("bernoulli", "poisson", "_standard_gamma", "rand_like"))
def test_every_random_op_is_drawn_once_however_memory_is_saved(name: str) -> None:
    override, draw = overriding(name), DRAWS[name]

    def noisy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        noise = draw(x.detach().sigmoid())
        return (x @ weight * noise).sin() @ weight

    with torch._functorch.config.patch(aggressive_recomputation=True):
        run = torch.compile(noisy, backend=PARTITIONED, fullgraph=True)
        x, weight = torch.randn(2, 16, 16, dtype=torch.float64)
        got = gradients(run, x, weight)
    assert override.hits == 1
    with opgraft.disabled():
        torch.testing.assert_close(got, gradients(noisy, x, weight))


def test_selective_checkpointing_goes_by_the_op_that_is_overridden() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    override = overriding("native_dropout")

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.aten.native_dropout.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = checkpoint(
            dropped_twice,
            x,
            weight,
            use_reentrant=False,
            context_fn=contexts,
        )
        assert isinstance(result, torch.Tensor)
        return result

    check_gradients(torch.compile(region, backend="aot_eager"), override, hits=2)
