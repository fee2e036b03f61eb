"""Random programs: what users write, at random, and what is left when it has run.

A program is a list of steps on registers that hold tensors: leaves of every layout, ops, views,
writes through views, derivatives of first and second order, transforms, checkpoints, in modes and
scopes. It is made while stock PyTorch runs it, since what fits next depends on the shapes so far,
and what a step raises belongs to the program: an error must be the same error later.

An *exact* program holds any op; overrides for it compute what native does, bit for bit. A *smooth*
one holds differentiable ops that keep values in bounds, so that overrides that round elsewhere can
be compared by their error.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Kind = Literal["exact", "smooth"]
Value = Tensor | None
#: A step's drawing: the parameters for these tensors, or None where the function does not fit them.
Draw = Callable[[random.Random, Sequence[Tensor]], tuple[Any, ...] | None]

MAX_NUMEL = 512
SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 13, 16)


class Function(NamedTuple):
    """What a step does.

    Attributes:
        run: takes the tensors, then the parameters.
        draw: chooses parameters.
        takes: how many tensors.
        smooth: whether it is fit for smooth programs.
        unary: whether transforms take it: one tensor in, one out, nothing written.
        weight: how often it is chosen.
    """

    run: Callable[..., Any]
    draw: Draw
    takes: int = 1
    smooth: bool = False
    unary: bool = False
    weight: int = 2


@dataclass(frozen=True)
class Step:
    """One line of a program; `line()` prints it."""

    name: str
    inputs: tuple[int, ...]
    params: tuple[Any, ...]
    output: int
    modes: tuple[str, ...] = ()
    off: str | None = None  # an op whose overrides are off meanwhile

    def line(self) -> str:
        arguments = ", ".join([*(f"r{i}" for i in self.inputs), *map(repr, self.params)])
        around = "".join(f"with {mode}: " for mode in self.modes)
        if self.off is not None:
            around += f"with opgraft.disabled(op={self.off!r}): "
        return f"{around}r{self.output} = {self.name}({arguments})"


@dataclass(frozen=True)
class Program:
    """What `make` made: its steps say all of it."""

    seed: int
    kind: Kind
    device: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(step.line() for step in self.steps)

    @property
    def may_share_threads(self) -> bool:
        """Whether others may run meanwhile: torch has one stack of forward-mode levels."""
        return not any(step.name.startswith("jvp of") for step in self.steps)

    def without(self, index: int) -> Program:
        return replace(self, steps=self.steps[:index] + self.steps[index + 1 :])


@dataclass
class Registers:
    """The tensors of a program that runs."""

    values: list[Value] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def set(self, index: int, value: Value) -> None:
        self.values.extend([None] * (index + 1 - len(self.values)))
        self.values[index] = value


class Left(NamedTuple):
    """What is left of a register: all that a program could tell."""

    value: Tensor
    grad: Tensor | None
    facts: tuple[Any, ...]


class Outcome(NamedTuple):
    """What is left of a program."""

    registers: tuple[Left | None, ...]
    aliases: tuple[int, ...]  # for each register, the first one in the same storage
    errors: tuple[str, ...]


# ------------------------------------------------------------------ drawing


def _nothing(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return ()


def _floats(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    return () if all(t.is_floating_point() for t in tensors) else None


def _dim(t: Tensor, rng: random.Random) -> int:
    return rng.randrange(-t.ndim, t.ndim) if t.ndim else 0


def _along(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (_dim(t, rng),) if t.ndim and t.is_floating_point() else None


def _reduction(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (_dim(t, rng), rng.random() < 0.5) if t.ndim and t.is_floating_point() else None


def _last(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (t.shape[-1],) if t.ndim and t.is_floating_point() and t.numel() else None


def _top(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (rng.randint(1, t.shape[-1]),) if t.ndim and t.shape[-1] else None


def _broadcast(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    try:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    except RuntimeError:
        # Now and then, what does not fit: native's error must be the error.
        return () if rng.random() < 0.03 else None
    return () if shape.numel() <= MAX_NUMEL else None


def _alpha(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    return None if _broadcast(rng, tensors) is None else (rng.choice((1, 1, 2, -1)),)


def _number(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return (rng.choice((2, -1, 0.5, 3)),)


def _fraction(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    return (rng.choice((-1, 0.5, 0.25)),) if tensors[0].is_floating_point() else None


def _matrices(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    a, b = tensors
    good = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype
    return () if good and a.is_floating_point() and a.shape[0] * b.shape[1] <= MAX_NUMEL else None


def _gram(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    good = t.ndim == 2 and t.is_floating_point() and t.shape[0] ** 2 <= MAX_NUMEL
    return () if good else None


def _batches(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    good = t.ndim == 3 and t.is_floating_point() and t.shape[0] * t.shape[1] ** 2 <= MAX_NUMEL
    return () if good else None


def _joined(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    a, b = tensors
    if not a.ndim or a.ndim != b.ndim or a.numel() + b.numel() > MAX_NUMEL:
        return None
    dim = _dim(a, rng)
    rest = [list(t.shape[: dim % a.ndim]) + list(t.shape[dim % a.ndim + 1 :]) for t in (a, b)]
    return (dim,) if rest[0] == rest[1] else None


def _two_dims(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (_dim(t, rng), _dim(t, rng)) if t.ndim >= 2 else None


def _cut(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    if not t.ndim:
        return None
    dim = _dim(t, rng)
    start = rng.randint(0, t.shape[dim])
    return dim, start, rng.randint(0, t.shape[dim] - start)


def _item(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    if not t.ndim:
        return None
    dim = _dim(t, rng)
    return (dim, rng.randrange(t.shape[dim])) if t.shape[dim] else None


def _new_dim(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    return (rng.randint(0, t.ndim),) if t.ndim < 4 else None


def _repeats(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    count = rng.choice((1, 2, 3))
    return (count,) if t.ndim < 4 and t.numel() * count <= MAX_NUMEL else None


def _dtype(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    if not tensors[0].is_floating_point():
        return None
    return (rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16)),)


def _indices(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    if not t.ndim:
        return None
    dim = _dim(t, rng)
    size = t.shape[dim]
    if not size:
        return None
    return dim, tuple(rng.randrange(size) for _ in range(rng.randint(1, 4)))


# ------------------------------------------------------------------ what steps do


def _index_select(t: Tensor, dim: int, index: tuple[int, ...]) -> Tensor:
    return torch.index_select(t, dim, torch.tensor(index, device=t.device))


def _norm(t: Tensor, size: int) -> Tensor:
    return F.layer_norm(t, (size,))


def _affine_norm(t: Tensor, size: int) -> Tensor:
    weight = torch.linspace(0.5, 1.5, size, dtype=t.dtype, device=t.device)
    return F.layer_norm(t, (size,), weight, weight)


def _rms_norm(t: Tensor, size: int) -> Tensor:
    return F.rms_norm(t, (size,), None, 1e-5)


def _copy_(t: Tensor, other: Tensor) -> Tensor:
    return t.copy_(other)


def _grad(y: Tensor, x: Tensor, create_graph: bool) -> Value:
    (grad,) = torch.autograd.grad(
        y.float().sum(), [x], create_graph=create_graph, allow_unused=True
    )
    # The engine adds up in place what nobody else holds, which shows in the version; the contract
    # check of a first hit holds it.
    return grad if grad is None or create_graph else grad.clone()


def _backward(y: Tensor) -> None:
    y.float().pow(2).sum().backward(retain_graph=True)


def _hook(t: Tensor) -> Tensor:
    # On a view of no_grad whose base was written to this raises, where `register_hook` crashes.
    t.grad_fn  # noqa: B018
    t.register_hook(lambda grad: grad * 2)
    return t


def _channels(rng: random.Random, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    (t,) = tensors
    good = t.ndim in (2, 3) and t.is_floating_point() and t.numel() > t.shape[1] > 0
    return (t.shape[1], rng.random() < 0.7) if good else None


def _batch_norm(t: Tensor, channels: int, training: bool) -> Tensor:
    mean, variance = (torch.full((channels,), v, dtype=t.dtype, device=t.device) for v in (0.5, 2))
    out = F.batch_norm(t, mean, variance, training=training, momentum=0.25)
    # With what the op has left in the statistics, of which its schema says nothing.
    return out + (mean + variance).view(channels, *[1] * (t.ndim - 2))


def _foreach(t: Tensor, factor: float) -> Tensor:
    return torch._foreach_mul([t, t[:0], t], factor)[2] if t.ndim else t


def _mask(t: Tensor) -> Tensor:
    return torch.where(t > 0, t, t * 2)


FUNCTIONS: dict[str, Function] = {
    # ops
    "relu": Function(torch.relu, _floats, unary=True),
    "tanh": Function(torch.tanh, _floats, smooth=True, unary=True),
    "sigmoid": Function(torch.sigmoid, _floats, smooth=True, unary=True),
    "gelu": Function(F.gelu, _floats, smooth=True, unary=True),
    "softmax": Function(torch.softmax, _along, smooth=True, unary=True, weight=6),
    "log_softmax": Function(torch.log_softmax, _along, unary=True, weight=3),
    "layer_norm": Function(_norm, _last, unary=True, weight=3),
    "affine_norm": Function(_affine_norm, _last, unary=True),
    "rms_norm": Function(_rms_norm, _last, unary=True, weight=3),
    "sum": Function(torch.sum, _reduction, unary=True),
    "mean": Function(torch.mean, _reduction, smooth=True, unary=True),
    "cumsum": Function(torch.cumsum, _along, unary=True),
    "amax": Function(torch.amax, _last, unary=True, weight=0),
    "topk": Function(lambda t, k: torch.topk(t, k)[0], _top, unary=True),
    "sort": Function(lambda t, k: torch.sort(t)[0], _top, unary=True),
    "add": Function(lambda a, b, alpha: torch.add(a, b, alpha=alpha), _alpha, 2, weight=4),
    "sub": Function(torch.sub, _broadcast, 2),
    "mul": Function(torch.mul, _broadcast, 2, smooth=True, weight=4),
    "times": Function(torch.mul, _number, unary=True),
    "part": Function(torch.mul, _fraction, smooth=True, unary=True),
    "maximum": Function(torch.maximum, _broadcast, 2),
    "where": Function(_mask, _floats, unary=True),
    "mm": Function(torch.mm, _matrices, 2, weight=6),
    "gram": Function(lambda t: t @ t.t() / 16, _gram, smooth=True, weight=3),
    "bmm": Function(lambda t: torch.bmm(t, t.mT) / 16, _batches, smooth=True, weight=3),
    "cat": Function(lambda a, b, dim: torch.cat([a, b], dim), _joined, 2, smooth=True, weight=3),
    "index_select": Function(_index_select, _indices, smooth=True, unary=True),
    "clone": Function(torch.clone, _nothing, smooth=True, unary=True),
    "contiguous": Function(Tensor.contiguous, _nothing, smooth=True),
    "to": Function(Tensor.to, _dtype),
    "batch_norm": Function(_batch_norm, _channels, weight=4),
    "foreach": Function(_foreach, _fraction),
    # views
    "transpose": Function(torch.transpose, _two_dims, smooth=True, unary=True, weight=3),
    "narrow": Function(torch.narrow, _cut, smooth=True, unary=True, weight=3),
    "select": Function(torch.select, _item, smooth=True, unary=True),
    "unsqueeze": Function(torch.unsqueeze, _new_dim, smooth=True, unary=True),
    "expand": Function(lambda t, n: t.expand(n, *t.shape), _repeats, smooth=True, unary=True),
    "every_other": Function(lambda t, k: t[::2], _top, smooth=True),
    "flatten": Function(torch.flatten, _nothing, smooth=True, unary=True),
    "chunk": Function(lambda t, k: torch.chunk(t, 2)[0], _top),
    "unbind": Function(lambda t, k: torch.unbind(t, -1)[-1], _top),
    "split": Function(lambda t, k: torch.split(t, k, -1)[-1], _top),
    "diagonal": Function(torch.diagonal, _two_dims, weight=1),
    "detach": Function(Tensor.detach, _nothing, weight=1),
    # writes
    "relu_": Function(torch.relu_, _floats),
    "tanh_": Function(torch.tanh_, _floats, weight=1),
    "add_": Function(lambda a, b, alpha: a.add_(b, alpha=alpha), _alpha, 2, weight=3),
    "mul_": Function(lambda a, b: a.mul_(b), _broadcast, 2, weight=3),
    "copy_": Function(_copy_, _broadcast, 2),
    "zero_": Function(Tensor.zero_, _nothing, weight=1),
    # derivatives
    "grad": Function(_grad, lambda rng, t: (rng.random() < 0.5,), 2, smooth=True, weight=5),
    "backward": Function(_backward, _nothing, smooth=True, weight=3),
    "hook": Function(_hook, _nothing, weight=1),
}


def _jvp(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    result: Tensor = torch.func.jvp(function, (t,), (torch.full_like(t, 0.5),))[1]
    return result


def _func_grad(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    return torch.func.grad(lambda x: function(x).float().sum())(t)


def _vmap(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    return torch.vmap(function)(t)


def _checkpointed(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, t, use_reentrant=False)
    return result


#: What is done with a unary function in place of calling it.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "jvp": _jvp,
    "func.grad": _func_grad,
    "vmap": _vmap,
    "checkpoint": _checkpointed,
}

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast cuda": lambda: torch.autocast("cuda", torch.bfloat16),
}

# ------------------------------------------------------------------ leaves

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT if t.ndim >= 2 else t,
    "strided": lambda t: t[..., ::2] if t.ndim else t,
    "offset": lambda t: t[1:] if t.ndim else t,
    "expanded": lambda t: t[:1].expand(t.shape) if t.ndim and t.shape[0] else t,
}


def _leaf(
    device: str,
    wide: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    requires_grad: bool,
    seed: int,
) -> Tensor:
    """The same values in every dtype, rounded to it; in float64 where `wide`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point:
        values = values.to(dtype)
    else:
        values = (values * 4).to(dtype)
    tensor = values.double() if wide and dtype.is_floating_point else values
    tensor = tensor.to(device)
    if requires_grad:
        tensor.requires_grad_()
    # A view of a leaf that requires grad may not be written to; a copy of one may.
    return LAYOUTS[layout](tensor * 1 if requires_grad and layout != "contiguous" else tensor)


def _draw_leaf(rng: random.Random, kind: Kind, differentiable: bool) -> tuple[Any, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3))))
        if torch.Size(shape).numel() <= MAX_NUMEL:
            break
    dtype = torch.float32
    if kind == "exact":
        rare = (torch.float64, torch.bfloat16, torch.float16, torch.int64)
        dtype = rng.choice((*[torch.float32] * 5, *rare))
    layout = rng.choice(("contiguous", "contiguous", *LAYOUTS))
    requires_grad = dtype.is_floating_point and rng.random() < 0.5 and differentiable
    return shape, dtype, layout, requires_grad, rng.randrange(2**31)


# ------------------------------------------------------------------ making and running


def make(seed: int, kind: Kind, overridden: Sequence[str], device: str = "cpu") -> Program:
    """A program.

    Args:
        seed: of every choice.
        kind: what for.
        overridden: names of ops, for scopes in which their overrides are off.
        device: where its tensors live.
    """
    rng = random.Random(seed)
    names = [name for name, f in FUNCTIONS.items() if kind == "exact" or f.smooth]
    weights = [FUNCTIONS[name].weight for name in names]
    registers = Registers()
    steps: list[Step] = []
    modes: tuple[str, ...] = ()
    off: str | None = None
    for output in range(rng.randint(6, 18)):
        if rng.random() < 0.15:
            modes = _draw_modes(rng, kind, device)
            off = rng.choice(overridden) if rng.random() < 0.3 else None
        step = None
        if output >= 2 and rng.random() < 0.85:
            step = _draw_step(rng, rng.choices(names, weights)[0], registers, output)
        if step is None:
            # Where a tensor of inference mode requires grad, autograd records what a kernel is made
            # of outside of that mode: nothing of native's, and all of an impl's.
            differentiable = "inference_mode" not in modes
            step = Step("leaf", (), _draw_leaf(rng, kind, differentiable), output)
        step = replace(step, modes=modes, off=off)
        steps.append(step)
        execute(step, registers, device)
    return Program(seed, kind, device, tuple(steps))


def _draw_modes(rng: random.Random, kind: Kind, device: str) -> tuple[str, ...]:
    if kind == "smooth" or rng.random() < 0.5:
        return ()
    autocast = "autocast" if device == "cpu" else "autocast cuda"
    return (rng.choice(("no_grad", "inference_mode", autocast)),)


def _draw_step(rng: random.Random, name: str, registers: Registers, output: int) -> Step | None:
    function = FUNCTIONS[name]
    filled = [i for i, value in enumerate(registers.values) if value is not None]
    for _ in range(4):
        if not filled:
            return None
        inputs = tuple(rng.choice(filled) for _ in range(function.takes))
        tensors = [value for i in inputs if (value := registers.values[i]) is not None]
        params = function.draw(rng, tensors)
        if params is not None:
            break
    else:
        return None
    (first, *_) = tensors
    if function.unary and rng.random() < 0.12 and first.is_floating_point():
        return Step(f"{rng.choice(list(TRANSFORMS))} of {name}", inputs, params, output)
    return Step(name, inputs, params, output)


def execute(
    step: Step, registers: Registers, device: str, *, wide: bool = False, scopes: bool = False
) -> None:
    """Run a step; what it raises is written down."""
    tensors = [registers.values[i] if i < len(registers.values) else None for i in step.inputs]
    result: Any = None
    if all(tensor is not None for tensor in tensors):
        try:
            with ExitStack() as stack:
                for mode in step.modes:
                    stack.enter_context(MODES[mode]())
                if scopes and step.off is not None:
                    stack.enter_context(_disabled(step.off))
                result = _call(step, tensors, device, wide)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            registers.errors.append(f"r{step.output}: {type(error).__name__}: {_first_line(error)}")
    registers.set(step.output, result if isinstance(result, Tensor) else None)


def _call(step: Step, tensors: Sequence[Value], device: str, wide: bool) -> Any:
    if step.name == "leaf":
        return _leaf(device, wide, *step.params)
    transform, _, name = step.name.rpartition(" of ")
    function = FUNCTIONS[name]
    if not transform:
        return function.run(*tensors, *step.params)
    return TRANSFORMS[transform](lambda x: function.run(x, *step.params), tensors[0])  # type: ignore[arg-type]


@contextlib.contextmanager
def _disabled(op: str) -> Iterator[None]:
    import opgraft

    with opgraft.disabled(op=op):
        yield


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def run(
    program: Program,
    *,
    wide: bool = False,
    scopes: bool = False,
    between: Callable[[], object] = lambda: None,
) -> Outcome:
    """Run a program.

    Args:
        wide: in float64.
        scopes: with the scopes that switch overrides off.
        between: called before each step.
    """
    registers = Registers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            between()
            execute(step, registers, program.device, wide=wide, scopes=scopes)
    return outcome(registers)


def outcome(registers: Registers) -> Outcome:
    """What a program could tell of its registers, the storages they share included."""
    storages: dict[int, int] = {}
    aliases: list[int] = []
    left: list[Left | None] = []
    for index, value in enumerate(registers.values):
        if value is None:
            left.append(None)
            aliases.append(index)
            continue
        aliases.append(storages.setdefault(value.untyped_storage()._cdata, index))
        # What is empty lies nowhere.
        place = (value.stride(), value.storage_offset()) if value.numel() else None
        facts = (value.dtype, tuple(value.shape), place, *_graph(value))
        leaf = facts[-3] is True
        grad = value.grad if leaf else None
        copied = value.detach().clone()
        left.append(Left(copied, None if grad is None else grad.detach().clone(), facts))
    return Outcome(tuple(left), tuple(aliases), tuple(registers.errors))


def _graph(value: Tensor) -> tuple[Any, ...]:
    """Where it stands in autograd's graph: is it a leaf, who made it, how often it was written."""
    if value.is_inference():
        return False, "inference", 0
    try:
        made_by = None if value.grad_fn is None else value.grad_fn.name()
        return value.is_leaf, (value.requires_grad, made_by), value._version
    except RuntimeError as error:  # a view of no_grad whose base was written to
        return False, _first_line(error), value._version
