"""What `register_op_override` was given for an override, and nothing that changes later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from opgraft.ops.schema import Op
from opgraft.registry.rules import Selector
from opgraft.when import Condition

if TYPE_CHECKING:
    from opgraft.crossover import Crossover

OnError = Literal["raise", "fallback"]
WhenNotReady = Literal["native", "wait"]
CompilePolicy = Literal["auto", "opaque", "inductor", "traceable"]
#: `(setup_context, backward)`; or that autograd differentiates the ops that `impl` calls.
Autograd = tuple[Callable[..., Any], Callable[..., Any]] | Literal["impl"]


class Declaration:
    """An implementation for one op at one dispatch key, as its author declares it. Immutable."""

    #: The name in messages and for selectors.
    name: str
    operator: Op
    dispatch_key: str
    impl: Callable[..., Any]
    #: The condition that calls must meet; None: all do.
    cond: Condition | Callable[..., Any] | None
    #: Whether `impl` gets the `DispatchKeySet` first.
    takes_keyset: bool
    #: The kernel language, or a label.
    dsl: str | None
    #: The pack that registers it; None: the user.
    pack: str | None
    priority: int
    on_error: OnError
    compile: CompilePolicy | Condition
    #: Its own derivative; None: the op's.
    autograd: Autograd | None
    launch_plan: bool
    #: What to do with a call whose kernels are not compiled yet.
    when_not_ready: WhenNotReady
    #: Returns calls to verify it on, for a device: arguments as tuples, or as dicts by name.
    samples: Callable[..., Iterable[Any]] | None
    #: For which calls without a launch plan `impl` is worth running in Python, if `cond` holds;
    #: None: for all of them.
    unplanned: Condition | None
    #: On what it depends whether it is faster than native, which tables decide; None: it always is.
    crossover: Crossover | None
    #: Why it can never run here (its DSL is missing); None if it can.
    unavailable: str | None

    def __init__(
        self,
        *,
        name: str,
        operator: Op,
        dispatch_key: str,
        impl: Callable[..., Any],
        cond: Condition | Callable[..., Any] | None = None,
        takes_keyset: bool = False,
        dsl: str | None = None,
        pack: str | None = None,
        priority: int = 0,
        on_error: OnError = "raise",
        compile: CompilePolicy | Condition = "auto",
        autograd: Autograd | None = None,
        launch_plan: bool = False,
        when_not_ready: WhenNotReady = "wait",
        samples: Callable[..., Iterable[Any]] | None = None,
        unplanned: Condition | None = None,
        crossover: Crossover | None = None,
        unavailable: str | None = None,
    ) -> None:
        given = locals()
        vars(self).update({field: given[field] for field in type(self).__annotations__})

    def __setattr__(self, field: str, value: object) -> None:
        raise AttributeError(
            f"{field} of override {self.name!r} cannot be changed: it was declared by "
            "register_op_override; register it again under the same name="
        )

    def replaced(self, **changes: Any) -> Declaration:
        """The same declaration with some fields changed."""
        return Declaration(**vars(self) | changes)

    @property
    def op(self) -> str:
        """The op's name as torch prints it, such as `"aten::mul.Tensor"`."""
        return self.operator.name

    @property
    def identity(self) -> dict[str, str | None]:
        """What selectors compare."""
        return {key: getattr(self, key) for key in Selector.KEYS}
