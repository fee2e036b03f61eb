"""`register_op_override`: what a library calls to put its kernel under an op of PyTorch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch

from opgraft import dsl as dsls
from opgraft import packs, router
from opgraft.base import env, events
from opgraft.core import loader
from opgraft.crossover import Crossover
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, check_accepts, check_dispatch_key, resolve_symbol
from opgraft.pt2 import hooks
from opgraft.registry import (
    Autograd,
    Chain,
    CompilePolicy,
    Declaration,
    Definition,
    OnError,
    Override,
    WhenNotReady,
    registry,
)
from opgraft.router import composite
from opgraft.when import Condition, Expression
from opgraft.when.nodes import ExpressionError

log = logging.getLogger(__name__)

hooks.attach()


def register_op_override(
    lib_symbol: str,
    op_symbol: str,
    dispatch_key: str,
    impl: Callable[..., Any],
    *,
    cond: Condition | Callable[..., Any] | None = None,
    unconditional_override: bool = False,
    dsl: str | None = None,
    name: str | None = None,
    priority: int = 0,
    on_error: OnError | None = None,
    compile: CompilePolicy | Condition = "auto",
    autograd: Autograd | None = None,
    launch_plan: bool = False,
    unplanned: Condition | None = None,
    when_not_ready: WhenNotReady | None = None,
    samples: Callable[[torch.device], Iterable[Any]] | None = None,
    crossover: Crossover | None = None,
) -> Override:
    """Register an implementation for one op at one dispatch key.

    Three forms:

    - `cond` given: `impl` has the op's signature and runs when `cond` holds.
    - no `cond`, `unconditional_override=True`: `impl` has the op's signature and runs on every
      call.
    - no `cond`, `unconditional_override=False`: `impl` gets the `torch.DispatchKeySet` first, runs
      on every call and decides for itself. The same op inside it is the native kernel.

    `impl` and `cond` get arguments by position and keyword-only arguments by name. Schema defaults
    are filled in. A Python number in a Tensor slot is the 0-dim tensor that the dispatcher makes
    of it.

    Args:
        lib_symbol: the op's namespace, such as `"aten"`.
        op_symbol: the op's name, with the overload if it is not `default`: `"add.Tensor"`.
        dispatch_key: the backend: `"CPU"`, `"CUDA"`, `"XPU"`, ...
        impl: the implementation. It imports its DSL itself when it first runs, or it is
            :func:`opgraft.lazy`, which names a function to be imported then.
        cond: a :mod:`opgraft.when` expression, or any callable with the op's signature. It reads
            metadata only: reading values would make every call wait for the device.
        unconditional_override: see above.
        dsl: the kernel language, `"triton"` or `"cutedsl"`. Where it is not installed, the override
            is registered as unavailable, as `explain` says, and never runs. Any other string is a
            label to select by.
        name: the name in messages and in `disable`. If the same owner registers again under an
            explicit name at the same op and key, the new override replaces the old one. Default:
            the impl's module and name. Without an explicit name, an override replaces, with a
            warning, those that an earlier run of the same code registered: a module that was
            reloaded, or a notebook's cell that is run again as it was; or the one whose impl is a
            function that was defined again. Whatever one run registers stays, in a loop or from a
            factory function. A lambda, a `functools.partial` or an `opgraft.lazy` in a cell that
            was edited cannot be recognised: give it a name.
        priority: overrides with a higher priority are asked first. The user's own come before those
            of packs, whatever the priority.
        on_error: `"raise"` (default) or `"fallback"` (default for packs). With `"fallback"`, after
            an exception from `impl` the native kernel runs, a warning says so once, and the
            override is quarantined for calls of that kind.
        compile: the policy under `torch.compile`: `"auto"`, `"opaque"`, `"inductor"` or
            `"traceable"`; or a :mod:`opgraft.when` expression, evaluated when a graph is traced.
            Where it holds for all dynamic sizes the op is opaque, else it is left to Inductor.
        autograd: `(setup_context, backward)` for a derivative of its own, as for
            `torch.library.register_autograd`: `setup_context(ctx, inputs, output)` with all of the
            op's arguments, `backward(ctx, *grads)` with a gradient or None for each of them.
            Without it the op keeps its derivative, and its backward op can be overridden as well.
            So it does in compiled graphs that leave the op to the compiler.
            Or `"impl"`, for a composite op (`scaled_dot_product_attention`): `impl` runs at the
            autograd key, and autograd differentiates the ops that it calls. All of them must have
            derivatives; :func:`opgraft.register_backward` gives one to an op of your own.
        launch_plan: the author declares `impl` a pure function of its arguments' metadata. What it
            does for one kind of call may then be recorded, and replayed without Python; see
            docs/plans.md.
        unplanned: with `launch_plan`, a :mod:`opgraft.when` expression. Calls for which it holds
            run `impl` in Python while they have no plan. The others run the native kernel until
            they have a plan. Default: all calls that `cond` takes run `impl`.
        when_not_ready: with `launch_plan` or `autograd`, what happens to a call whose kernels are
            not compiled yet. `"wait"` (default): the call waits until they are. `"native"` (default
            of packs, with `launch_plan`): the native kernel runs, at the cost of a miss, and the
            kernels are compiled in the background; see docs/ready.md. With `autograd` native serves
            the forward and the backward until the kernels of both are compiled. Without
            `launch_plan` it declares that the three functions run on tensors without memory.
        samples: calls on which `opgraft.verify` tests it, besides those of PyTorch's own tests: a
            function of a device that yields the op's arguments, each time as a tuple, or as a dict
            by name. A backward op, an `out=` or an in-place variant is also tested on the samples
            of the op that it belongs to, if the same pack overrides that op in the same DSL.
        crossover: a :class:`opgraft.Crossover`: on what it depends whether `impl` is faster than
            the native kernel. Tables that were measured say for which calls it is: by a launch
            plan, from Python (`unplanned`, where that is not given), and in compiled graphs
            (`compile="auto"`). Without a table for the device it declines; see docs/tuning.md.

    Returns:
        The override: its counters, and `.remove()`.

    Raises:
        RegistrationError: the op does not exist; the dispatch key is not a backend's; `impl` or
            `cond` cannot take the op's arguments; `cond`, `unplanned`, `compile` or `crossover`
            names an argument that does not exist; the op cannot have such an `autograd`; the
            derivative of a composite op could not be kept; or the op is about autograd's own state.
            The message says what to do.

    >>> import torch, opgraft
    >>> from opgraft import when
    >>> def softmax(self, dim, half_to_float):
    ...     weights = (self - self.amax(dim, keepdim=True)).exp()
    ...     return (weights / weights.sum(dim, keepdim=True)).contiguous()
    >>> override = opgraft.register_op_override(
    ...     "aten", "_softmax", "CPU", softmax, cond=when.size("self", -1) >= 8, name="doc"
    ... )
    >>> _ = torch.softmax(torch.ones(2, 8), -1), torch.softmax(torch.ones(2, 4), -1)
    >>> override.hits, override.misses
    (1, 1)
    >>> override.remove()
    """
    router.withdraw_outdated()
    op = resolve_symbol(lib_symbol, op_symbol)
    check_dispatch_key(dispatch_key)
    _check_labels(op, name=name, dsl=dsl, priority=priority)
    takes_keyset = cond is None and not unconditional_override
    check_accepts(impl, op, what="impl", leading=["DispatchKeySet"] if takes_keyset else [])
    _check_condition(cond, op, unconditional_override)
    _check_unplanned(unplanned, op, launch_plan)
    owner = packs.owner()
    pack = owner.name if owner else None
    if when_not_ready is None:
        when_not_ready = "native" if pack and launch_plan else "wait"
    _check_when_not_ready(when_not_ready, op, launch_plan or isinstance(autograd, tuple))
    on_error = on_error or ("fallback" if pack else "raise")
    _check_choice("on_error", on_error, OnError)
    _check_compile(compile, op)
    _check_crossover(crossover, op)
    if samples is not None and not callable(samples):
        raise RegistrationError(
            f"samples= for {op.name} must be a function of a device that yields the op's "
            f"arguments, not {samples!r}"
        )
    if autograd is not None:
        from opgraft.router import derivative

        derivative.check(autograd, op, launch_plan=launch_plan)
    declaration = Declaration(
        name=name or _default_name(impl),
        operator=op,
        dispatch_key=dispatch_key,
        impl=impl,
        cond=cond,
        takes_keyset=takes_keyset,
        dsl=dsl,
        pack=pack,
        priority=priority,
        on_error=on_error,
        compile=compile,
        autograd=autograd,
        launch_plan=launch_plan,
        unplanned=unplanned,
        when_not_ready=when_not_ready,
        samples=samples,
        crossover=crossover,
        unavailable=_unavailable(dsl, owner)
        or _why_not_in_bundles(launch_plan and autograd is None),
    )
    definition = Definition(declaration.name, impl) if name is None else None
    override = Override(declaration, registry, definition)
    if launch_plan or when_not_ready == "native":
        from opgraft.plan.plans import for_override

        override.state.plans = for_override(override)
    _install(override)
    return override


def _install(override: Override) -> None:
    chain = registry.chain(override.operator, override.dispatch_key)
    what = f"{override.name!r} for {override.op} at {override.dispatch_key}"
    installed = None
    if override.unavailable is not None:
        log.info("override %s is not active: %s", what, override.unavailable)
    elif env.installs_nothing():
        log.info("override %s is not active: OPGRAFT_DISABLE=1", what)
    else:
        # The router comes first: if it refuses, nothing is registered.
        installed = router.install(chain)
        _warn_without_core()
        if override.derivative is not None:
            from opgraft.router import derivative

            derivative.install(installed)
        elif override.is_differentiated:
            from opgraft.router import derivative

            derivative.check_composite(installed)
            if derivative.is_traced_in_training(override):
                derivative.install(installed)
        elif installed.is_composite:
            log.info("override %s: the op is %s", what, composite.NOTE)
    _add(chain, override)
    found = registry.find(override.operator, override.dispatch_key)
    if installed is not None and (installed.is_outdated or found is not chain):
        override.remove()
        raise RegistrationError(
            f"override {what}: another thread destroyed the op or defined it anew meanwhile; "
            "register it again"
        )


def _warn_without_core() -> None:
    """Warn once that calls are routed in Python; packs are not activated in that case."""
    if loader.in_use() is None and not env.wants_python_router():
        env.warn_once(
            f"no compiled core, so calls of overridden ops are routed in Python, at some ten times "
            f"the cost of a call ({loader.status().reason}); OPGRAFT_ROUTER=python silences this"
        )


def _add(chain: Chain, override: Override) -> None:
    replaced = registry.add(override)
    if replaced and override.definition is not None:
        log.warning(
            "override %r for %s at %s was defined again, and replaces the earlier one; give "
            "name= to keep both",
            *(override.name, override.op, override.dispatch_key),
        )
    log.debug("registered %r; the chain is %s", override, [o.name for o in chain.members])
    events.emit(
        "opgraft_override",
        lambda: {
            **override.identity,
            "cond": str(override.cond),
            "chain": [o.name for o in chain.members],
            "off": override.why_off(),
        },
    )


def _check_labels(op: Op, *, name: object, dsl: object, priority: object) -> None:
    """Before anything is registered: the core takes text and numbers, and nothing else."""
    for parameter, value in (("name", name), ("dsl", dsl)):
        if value is None:
            continue
        if not isinstance(value, str):
            raise RegistrationError(f"{parameter}= for {op.name} must be a str, not {value!r}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RegistrationError(
                f"{parameter}= for {op.name} has a character that is no text: {value!r}"
            ) from None
    if not isinstance(priority, int):
        raise RegistrationError(f"priority= for {op.name} must be an int, not {priority!r}")


def _check_condition(cond: object, op: Op, unconditional_override: bool) -> None:
    if cond is None:
        return
    if inspect.iscoroutinefunction(cond) or inspect.isgeneratorfunction(cond):
        raise RegistrationError(
            f"cond= for {op.name} must return a bool: {cond!r} returns a coroutine or a generator, "
            "which is always true"
        )
    if unconditional_override:
        raise RegistrationError(
            f"cond= and unconditional_override=True for {op.name} contradict each other: give one"
        )
    if isinstance(cond, Expression):
        _check_expression("cond", cond, op)
    else:
        check_accepts(cond, op, what="cond")  # type: ignore[arg-type]


def _check_expression(parameter: str, expression: Expression, op: Op) -> Condition:
    if not isinstance(expression, Condition):
        raise RegistrationError(
            f"{parameter}= for {op.name} is {expression!r}, a number: compare it with one"
        )
    try:
        expression.check(op.kinds)
    except ExpressionError as error:
        raise RegistrationError(f"{parameter}= for {op.name}: {error}") from None
    return expression


def _check_unplanned(unplanned: object, op: Op, launch_plan: bool) -> None:
    if unplanned is None:
        return
    if not launch_plan:
        raise RegistrationError(
            f"unplanned= for {op.name} is about launch plans: it needs launch_plan=True; without "
            "launch plans, make it a part of cond"
        )
    if not isinstance(unplanned, Expression):
        raise RegistrationError(
            f"unplanned= for {op.name} is {unplanned!r}: give an expression of opgraft.when"
        )
    from opgraft.when.compilation import compile_condition

    if compile_condition(_check_expression("unplanned", unplanned, op), op) is None:
        raise RegistrationError(
            f"unplanned= for {op.name}: only Python can evaluate {unplanned!r}; compare with "
            "constants of 64 bits"
        )


def _check_when_not_ready(when_not_ready: WhenNotReady, op: Op, runs_dry: bool) -> None:
    _check_choice("when_not_ready", when_not_ready, WhenNotReady)
    if when_not_ready == "native" and not runs_dry:
        raise RegistrationError(
            f"when_not_ready='native' for {op.name} compiles from a call's metadata alone: it "
            "wants launch_plan=True, which declares the impl a function of them, or autograd="
        )


def _check_compile(compile: CompilePolicy | Condition, op: Op) -> None:
    if isinstance(compile, Expression):
        _check_expression("compile", compile, op)
    else:
        or_else = ", or give an expression of opgraft.when"
        _check_choice("compile", compile, CompilePolicy, or_else)


def _check_crossover(crossover: Crossover | None, op: Op) -> None:
    if crossover is None:
        return
    if not isinstance(crossover, Crossover):
        raise RegistrationError(
            f"crossover= for {op.name} is {crossover!r}: give an opgraft.Crossover"
        )
    from opgraft.crossover.decisions import Decisions
    from opgraft.when.compilation import compile_condition

    lookup = Decisions("", "", crossover).by_plan
    _check_expression("crossover", lookup, op)
    if compile_condition(lookup, op) is None:
        raise RegistrationError(
            f"crossover= for {op.name}: only Python can evaluate {crossover!r}; use constants of "
            "64 bits"
        )


def _check_choice(parameter: str, value: str, choices: Any, or_else: str = "") -> None:
    if value not in get_args(choices):
        raise RegistrationError(
            f"{parameter}={value!r}: choose one of {get_args(choices)}{or_else}"
        )


def _default_name(impl: Callable[..., Any]) -> str:
    module = getattr(impl, "__module__", None) or type(impl).__module__
    return f"{module}.{getattr(impl, '__qualname__', type(impl).__qualname__)}"


def _why_not_in_bundles(has_plans: bool) -> str | None:
    """Why no call may be routed to an override, where that is for what a bundle holds alone."""
    if not env.needs_bundle():
        return None
    if not has_plans:
        return "it has no launch plans, which is all that a bundle holds (OPGRAFT_READY=bundle)"
    if loader.in_use() is None:
        return "launch plans need the compiled core (OPGRAFT_READY=bundle): opgraft build"
    return None


def _unavailable(dsl: str | None, owner: packs.Owner | None) -> str | None:
    """Why overrides of a DSL cannot run here: it is missing, or not the version the pack needs."""
    if dsl is None:
        return None
    known = dsls.find(dsl)
    if known is None:
        from opgraft import spelling  # few need it

        if hint := spelling.hint(dsl, [each.name for each in dsls.KNOWN]):
            log.warning("dsl=%r is a label that opgraft knows nothing about%s", dsl, hint)
    missing = known.missing() if known else None
    return missing or (owner.missing(dsl) if owner else None)
