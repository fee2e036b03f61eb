"""What is traced into a graph counts in the caches' keys with all that it has read."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opgraft.pt2 import caches, fingerprint
from tests.pt2 import models

HELPER = "opgraft_tests_helper"
HELPER_SOURCE = """
FACTOR = 1
def scale(): return FACTOR
def __getattr__(name):
    if name == "anything":
        return FACTOR
    raise AttributeError(name)
"""
SOURCE = """
import enum, functools, math, os, torch
import {helper}
from {helper} import scale, FACTOR

number, listed, mapped, nested = 1, [1], {{"k": 1}}, {{"a": [{{"b": 1}}]}}

class Class:
    attribute = 1

class Parent:
    inherited = 1

class Child(Parent):
    pass

class Instance:
    def __init__(self): self.value = 1
    def read(self, _=None): return self.value

instance = Instance()

class List(list):
    pass

class Mapping(dict):
    __getattr__ = dict.get

class Number(int):
    pass

class Meta(type):
    held = 1

class WithMeta(metaclass=Meta):
    pass

class Kind(enum.Enum):
    A = [1]

listed_more, mapped_more, numbered = List([1]), Mapping(k=1), Number(1)
numbered.value = 1
member = Kind.A
member.more = 1
in_instance = Instance()
in_instance.module = {helper}

@functools.wraps(torch.nn.functional.softmax)
def wrapped(_=None): return listed[0]
without_gradients = torch.no_grad()(lambda: listed[0])
def scale_of(module): return module.FACTOR
def lazily_passed():
    import {helper} as module
    return scale_of(module)
def default_module(_=None, module={helper}): return module.FACTOR
def with_scale(_=None): return {helper}.inner.scale(), {helper}.inner.__name__
def with_factor(_=None): return {helper}.inner.FACTOR + 0 * len(with_scale())

def default(_, value=[1]): return value[0]
def keyword(_, *, value={{"v": 1}}): return value["v"]
def helper_here(): return number
def lazily():
    from {helper} import scale
    return scale()
@functools.lru_cache
def cached(): return listed[0]
def with_attribute(_): return with_attribute.value
with_attribute.value = 1
"""


@pytest.fixture
def user() -> Iterator[types.ModuleType]:
    """A user's module, with a helper in another."""
    helper = types.ModuleType(HELPER)
    sys.modules[HELPER] = helper
    exec(HELPER_SOURCE, vars(helper))
    helper.__dict__["inner"] = types.ModuleType(f"{HELPER}.inner")
    exec(HELPER_SOURCE, vars(helper.__dict__["inner"]))
    module = types.ModuleType("opgraft_tests_user")
    module.__dict__["__name__"] = "opgraft_tests_user"
    exec(SOURCE.format(helper=HELPER), vars(module))
    os.environ["OPGRAFT_TESTS_FACTOR"] = "1"
    yield module
    del os.environ["OPGRAFT_TESTS_FACTOR"]
    del sys.modules[HELPER]


def code(user: types.ModuleType, expression: str) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(f"lambda _=None: {expression}", vars(user))
    return function


def closure(user: types.ModuleType) -> Callable[..., Any]:
    return _holding(user.listed)


def _holding(value: list[int]) -> Callable[..., Any]:
    return types.FunctionType(
        _inner(value).__code__, {"__name__": "opgraft_tests_user"}, "f", None, _cells(value)
    )


def _inner(value: list[int]) -> Any:
    return lambda _=None: value[0]


def _cells(value: list[int]) -> Any:
    return _inner(value).__closure__


def setting(path: str, value: object = 2) -> Callable[[types.ModuleType], None]:
    *parents, name = path.split(".")
    return lambda user: setattr(functools.reduce(getattr, parents, user), name, value)


def helpers(user: types.ModuleType) -> None:
    vars(sys.modules[HELPER])["FACTOR"] = 2


def inner_helpers(user: types.ModuleType) -> None:
    sys.modules[HELPER].inner.FACTOR = 2


def environment(_: types.ModuleType) -> None:
    os.environ["OPGRAFT_TESTS_FACTOR"] = "2"


def first(user: types.ModuleType) -> None:
    user.listed[0] = 2


#: Ways to hold a number, 1: what reads it, and what makes it 2.
HELD: dict[str, tuple[Callable[[types.ModuleType], Any], Callable[[types.ModuleType], None]]] = {
    "a global number": (lambda u: code(u, "number"), setting("number")),
    "a global list": (lambda u: code(u, "listed[0]"), first),
    "a global dict": (lambda u: code(u, "mapped['k']"), lambda u: u.mapped.update(k=2)),
    "a nested one": (
        lambda u: code(u, "nested['a'][0]['b']"),
        lambda u: u.nested["a"][0].update(b=2),
    ),
    "a class attribute": (lambda u: code(u, "Class.attribute"), setting("Class.attribute")),
    "an inherited one": (lambda u: code(u, "Child.inherited"), setting("Parent.inherited")),
    "an instance": (lambda u: code(u, "instance.value"), setting("instance.value")),
    "a bound method": (lambda u: u.instance.read, setting("instance.value")),
    "a method": (lambda u: code(u, "instance.read()"), setting("instance.value")),
    "a helper here": (lambda u: code(u, "helper_here()"), setting("number")),
    "a helper elsewhere": (lambda u: code(u, "scale()"), helpers),
    "a helper's module": (lambda u: code(u, f"{HELPER}.scale()"), helpers),
    "a module's number": (lambda u: code(u, f"{HELPER}.FACTOR"), helpers),
    "a late import": (lambda u: code(u, "lazily()"), helpers),
    "an imported constant": (lambda u: code(u, "FACTOR"), setting("FACTOR")),
    "os.environ": (lambda u: code(u, "int(os.environ['OPGRAFT_TESTS_FACTOR'])"), environment),
    "os.getenv": (lambda u: code(u, "int(os.getenv('OPGRAFT_TESTS_FACTOR'))"), environment),
    "a closure": (closure, first),
    "a default": (
        lambda u: u.default,
        lambda u: u.default.__defaults__[0].__setitem__(0, 2),
    ),
    "a keyword's default": (
        lambda u: u.keyword,
        lambda u: u.keyword.__kwdefaults__["value"].update(v=2),
    ),
    "a partial": (
        lambda u: functools.partial(u.default, value=u.listed),
        first,
    ),
    "an lru_cache": (lambda u: code(u, "cached()"), first),
    "a function's attribute": (lambda u: u.with_attribute, setting("with_attribute.value")),
    "getattr": (lambda u: code(u, "getattr(Class, 'attr' + 'ibute')"), setting("Class.attribute")),
    "globals": (lambda u: code(u, "globals()['num' + 'ber']"), setting("number")),
    "a lambda inside": (lambda u: code(u, "(lambda: listed[0])()"), first),
    "a comprehension": (lambda u: code(u, "[v for v in listed][0]"), first),
    "a list's subclass": (
        lambda u: code(u, "listed_more[0]"),
        lambda u: u.listed_more.__setitem__(0, 2),
    ),
    "a dict's subclass": (lambda u: code(u, "mapped_more.k"), lambda u: u.mapped_more.update(k=2)),
    "a number's attribute": (lambda u: code(u, "numbered.value"), setting("numbered.value")),
    "a metaclass": (lambda u: code(u, "WithMeta.held"), setting("Meta.held")),
    "an enum's value": (
        lambda u: code(u, "member.value[0]"),
        lambda u: u.member.value.__setitem__(0, 2),
    ),
    "an enum's attribute": (lambda u: code(u, "member.more"), setting("member.more")),
    "a function that wraps torch's": (lambda u: code(u, "wrapped()"), first),
    "a function that torch wraps": (lambda u: code(u, "without_gradients()"), first),
    "a module in an instance": (lambda u: code(u, "in_instance.module.FACTOR"), helpers),
    "a module as a default": (lambda u: u.default_module, helpers),
    "a module in a partial": (
        lambda u: functools.partial(u.default_module, module=sys.modules[HELPER]),
        helpers,
    ),
    "a module that is passed on": (lambda u: code(u, f"scale_of({HELPER})"), helpers),
    "a late import that is passed on": (lambda u: code(u, "lazily_passed()"), helpers),
    "a module's __dict__": (lambda u: code(u, f"{HELPER}.__dict__['FACTOR']"), helpers),
    "a module's __getattr__": (lambda u: code(u, f"{HELPER}.anything"), helpers),
    "a module that another function reads, too": (lambda u: u.with_factor, inner_helpers),
    "a function's __globals__": (
        lambda u: code(u, "helper_here.__globals__['number']"),
        setting("number"),
    ),
}
#: Those of which nothing can be told.
UNTOLD = {
    *("an lru_cache", "getattr", "globals", "os.environ", "os.getenv"),
    *("a list's subclass", "a dict's subclass", "a number's attribute"),
    *("a function that torch wraps", "a function's __globals__"),
    *("a module in an instance", "a module as a default", "a module in a partial"),
    *("a module that is passed on", "a late import that is passed on"),
    *("a module's __dict__", "a module's __getattr__"),
}


@pytest.mark.parametrize("how", HELD)
def test_what_is_held_counts_or_cannot_be_told(how: str, user: types.ModuleType) -> None:
    make, change = HELD[how]
    before = fingerprint.digest_reachable(make(user))
    assert before == fingerprint.digest_reachable(make(user)), (
        "it is the same until something changes"
    )
    change(user)
    after = fingerprint.digest_reachable(make(user))
    if how in UNTOLD:
        assert before is None
        assert after is None
    else:
        assert before is not None, "ways like this one go on using the cache"
        assert after != before


class Table(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.ones(2).as_subclass(Table),
        torch.Generator(),
        iter([1]),
        sys.stdin,
        types.SimpleNamespace,
    ],
)
def test_what_c_code_keeps_cannot_be_told(value: Any) -> None:
    assert fingerprint.digest_reachable(functools.partial(max, value)) is None


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler's caches, which the environment of these tests forbids."""
    for module, name in (
        (torch._inductor.config, "fx_graph_cache"),
        (torch._functorch.config, "enable_autograd_cache"),
    ):
        monkeypatch.setattr(module._config[name], "env_value_force", True)  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("caching")
@pytest.mark.parametrize("how", HELD)
def test_a_graph_is_never_stale_after_a_reset(how: str, user: types.ModuleType) -> None:
    make, change = HELD[how]
    read = make(user)

    def impl(self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return torch.full_like(self, read(None))

    impl.__module__ = "opgraft_tests_user"
    override = models.override("_softmax", impl, compile="traceable")
    run = torch.compile(lambda x: torch.softmax(x, -1), fullgraph=True)
    counters = torch._dynamo.utils.counters["aot_autograd"]
    assert run(torch.ones(2, 3))[0, 0] == 1
    told = counters["autograd_cache_bypass"] == 0
    assert counters["autograd_cache_miss"] == told
    change(user)
    if how == "an lru_cache":
        user.cached.cache_clear()
    torch._dynamo.reset()
    assert run(torch.ones(2, 3))[0, 0] == 2
    assert told == (how not in UNTOLD)
    assert override.hits == 0, "it was traced"


def test_an_own_derivative_that_reads_what_cannot_be_told_bypasses_the_cache() -> None:
    table = torch.ones(2)
    models.override("exp", torch.exp, autograd=(lambda *_: None, lambda ctx, grad: grad * table[0]))
    assert caches.override_with_unknown_state() is not None
    assert caches.registry_state()
