"""`register_backward`: the derivative of an op of one's own, by another op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from opgraft.core import loader
from opgraft.errors import RegistrationError
from opgraft.ops.schema import Op, current, resolve
from opgraft.router import composite

#: What the name of a gradient begins with: the rest names the output or the argument.
PREFIX = "grad_"
#: Hold what is registered in Python, as long as the process lives.
_libraries: list[torch.library.Library] = []


def register_backward(op: str, backward: str) -> None:
    """Differentiate an op of your own by another op.

    The schema of `backward` says how, by names. Its argument `grad_NAME` is the gradient of the
    op's output `NAME`, of that output's shape: where there is none it gets zeros, or if all such
    arguments are `Tensor?` None. Any other argument is the op's argument or output of that name,
    which is saved until then. Its result `grad_NAME` is the gradient of the op's argument `NAME`,
    and an undefined tensor says that there is none. An output whose gradient it does not want, and
    an argument whose gradient it does not return, have no derivative. Types are those of the op, or
    the same with `?`.

    No Python runs for it where the compiled core is in use, unlike for
    `torch.library.register_autograd`. Both ops can be overridden as any op can, with launch plans.
    To differentiate what `backward` returns is an error, unless that op has a derivative of its
    own. So is forward-mode differentiation.

    Args:
        op: the op's name, `"namespace::name"` or with an overload. It returns tensors, and neither
            writes to an argument nor returns a view of one. Its kernels are for backends, or for
            `CompositeExplicitAutograd`.
        backward: likewise the name of its backward op.

    Raises:
        RegistrationError: there is no such op, or the names do not say what is what, or two types
            differ.

    >>> import torch, opgraft
    >>> library = torch.library.Library("doc_of_backward", "FRAGMENT")
    >>> _ = library.define("scaled_sin(Tensor x, float scale) -> Tensor y")
    >>> _ = library.define("scaled_cos(Tensor grad_y, Tensor x, float scale) -> Tensor grad_x")
    >>> library.impl("scaled_sin", lambda x, scale: scale * x.sin(), "CPU")
    >>> library.impl("scaled_cos", lambda grad_y, x, scale: grad_y * scale * x.cos(), "CPU")
    >>> opgraft.register_backward("doc_of_backward::scaled_sin", "doc_of_backward::scaled_cos")
    >>> x = torch.zeros(2, requires_grad=True)
    >>> torch.ops.doc_of_backward.scaled_sin(x, 3.0).sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    pairing = _Pairing(_resolved(op), _resolved(backward))
    pairing.check()
    core = loader.in_use()
    if core is None:
        _Function(pairing).register()
        return
    forward_schema, backward_schema = (o.overload._schema for o in (pairing.op, pairing.backward))
    core.register_backward(
        *(forward_schema.name, forward_schema.overload_name),
        *(backward_schema.name, backward_schema.overload_name),
    )


def _resolved(name: object) -> Op:
    if not isinstance(name, str) or "::" not in name:
        raise RegistrationError(
            f"register_backward: {name!r} is no name of an op; give it as 'namespace::name'"
        )
    return resolve(name)


class _Pairing(NamedTuple):
    """An op and its backward op."""

    op: Op
    backward: Op

    @property
    def arguments(self) -> list[str]:
        """The names of the op's arguments."""
        return [argument.name for argument in self.op.arguments]

    @property
    def outputs(self) -> list[str]:
        """The names of the op's outputs."""
        return [returned.name for returned in self.op.returns]

    @property
    def is_differentiable(self) -> bool:
        """Whether what the backward op returns can be differentiated."""
        has_own = torch._C._dispatch_has_kernel_for_dispatch_key(self.backward.name, "Autograd")
        wanted = {argument.name for argument in self.backward.arguments}
        lost = (o for o in self.outputs if PREFIX + o not in wanted)
        return has_own and not wanted.intersection(lost)

    def check(self) -> None:
        """Refuse ops whose names do not say what is what.

        Raises:
            RegistrationError: the message names the ops, the argument and the mend.
        """
        for problem in self._problems():
            raise RegistrationError(
                f"register_backward({self.op.name!r}, {self.backward.name!r}): {problem}"
            )

    def _problems(self) -> Iterator[str]:
        for op in self:
            if op.name.startswith("aten::"):
                yield f"{op.name} has a derivative of PyTorch's own"
            if op.mutates or any(returned.alias_info is not None for returned in op.returns):
                yield f"{op.name} writes to an argument, or returns a view of one"
            if any(str(returned.type) != "Tensor" for returned in op.returns) or not op.returns:
                yield f"{op.name} returns something else than tensors"
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            self.op.name, "CompositeImplicitAutograd"
        ):
            yield (
                f"{self.op.name} has a kernel for CompositeImplicitAutograd, whose pieces autograd "
                "differentiates instead: register it for CompositeExplicitAutograd"
            )
        names = [*self.arguments, *self.outputs]
        if double := sorted({name for name in names if name and names.count(name) > 1}):
            yield f"{', '.join(double)} names an argument and an output: rename one of them"
        wanted = [argument.name for argument in self.backward.arguments]
        for name in wanted:
            if self.gradient_of(name) is None and name not in names:
                yield (
                    f"its argument {name!r} is no gradient of an output "
                    f"({', '.join(PREFIX + each for each in self.outputs if each)}), no argument "
                    f"({', '.join(self.arguments)}) and no output: name it after what it gets. An "
                    "output has a name if the schema gives it one: '-> Tensor out'"
                )
        for each in self.backward.arguments:
            if "List" in each.kind and "Tensor" in each.kind:
                yield f"its argument {each.name!r} is a list of tensors, which are not saved"
            source, kind = self._source_of(each.name)
            if each.kind not in (kind, f"Optional[{kind}]"):
                yield (
                    f"its argument {each.name!r} is of type {_spelled(each.kind)}, and gets "
                    f"{source}, which is of type {_spelled(kind)}: declare it as "
                    f"'{_spelled(kind)} {each.name}'"
                )
        if not any(self.gradient_of(name) for name in wanted):
            yield f"no argument is the gradient of an output: name one '{PREFIX}OUTPUT'"
        results = [returned.name for returned in self.backward.returns]
        if double := sorted({name for name in results if results.count(name) > 1}):
            yield f"it returns {', '.join(double)} twice"
        for returned in self.backward.returns:
            target = returned.name.removeprefix(PREFIX)
            argument = next((a for a in self.op.arguments if a.name == target), None)
            if not returned.name.startswith(PREFIX) or argument is None:
                yield (
                    f"it returns {returned.name or 'a tensor without a name'!r}: name each result "
                    f"'{PREFIX}ARGUMENT', after an argument ({', '.join(self.arguments)})"
                )
            elif argument.kind not in ("Tensor", "Optional[Tensor]"):
                yield f"it returns {returned.name!r}, and {target} is no tensor"

    def _source_of(self, name: str) -> tuple[str, str]:
        """What an argument of the backward op gets, in words, and its type."""
        output = self.gradient_of(name)
        if output is not None:
            return f"the gradient of {self.op.name}'s output {output!r}", "Tensor"
        if name in self.outputs:
            return f"{self.op.name}'s output {name!r}", "Tensor"
        return f"{self.op.name}'s argument {name!r}", self.op.kinds[name]

    def gradient_of(self, name: str) -> str | None:
        """The output whose gradient an argument of the backward op is."""
        target = name.removeprefix(PREFIX)
        return target if name.startswith(PREFIX) and target in self.outputs else None


def _spelled(kind: str) -> str:
    """A type as a schema spells it.

    >>> _spelled("Optional[List[int]]"), _spelled("number")
    ('int[]?', 'Scalar')
    """
    for outer, sign in (("Optional", "?"), ("List", "[]")):
        if kind.startswith(f"{outer}["):
            return _spelled(kind[len(outer) + 1 : -1]) + sign
    return "Scalar" if kind == "number" else kind


class _ReverseModeLibrary(torch.library.Library):
    """Has the kernel that `register_autograd` makes for an op refuse calls with tangents.

    That kernel looks for tensors that require grad alone. In other calls a tangent would be lost in
    silence.
    """

    def __init__(self, op: Op) -> None:
        super().__init__(op.name.partition("::")[0], "FRAGMENT")
        self._op = op

    def impl(self, op_name: Any, fn: Callable[..., Any], *terms: Any, **named: Any) -> Any:
        def refusing(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            op = current(self._op)
            if composite.has_tangents(op.bind(args, kwargs)):
                raise NotImplementedError(
                    f"{op.name} has no forward-mode derivative: opgraft.register_backward declared "
                    "its backward alone"
                )
            return fn(keyset, *args, **kwargs)

        return super().impl(op_name, refusing, *terms, **named)


class _Function:
    """The autograd function of a pairing, for a process without the core."""

    def __init__(self, pairing: _Pairing) -> None:
        op, backward = pairing
        self._pairing = pairing
        self._wanted = [argument.name for argument in backward.arguments]
        self._positional = [argument.name for argument in op.positional]
        self._targets = [returned.name.removeprefix(PREFIX) for returned in backward.returns]
        gradients = [a for a in backward.arguments if pairing.gradient_of(a.name)]
        #: Whether a gradient that is missing is a tensor of zeros.
        self._materializes = not all(a.kind.startswith("Optional") for a in gradients)

    def register(self) -> None:
        op = self._pairing.op
        setup = self._setup_with_keywords if op.keyword_only else self._setup
        library = _ReverseModeLibrary(op)
        _libraries.append(library)
        torch.library.register_autograd(op.name, self._backward, setup_context=setup, lib=library)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        self._save(ctx, dict(zip(self._positional, inputs, strict=True)), output)

    def _setup_with_keywords(
        self, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        named = dict(zip(self._positional, inputs, strict=True))
        self._save(ctx, named | keyword_only_inputs, output)

    def _save(self, ctx: Any, values: dict[str, Any], output: Any) -> None:
        pairing = self._pairing
        outputs = output if isinstance(output, tuple) else (output,)
        values |= dict(zip(pairing.outputs, outputs, strict=True))
        lost = [name for name in pairing.outputs if PREFIX + name not in self._wanted]
        ctx.mark_non_differentiable(*(values[name] for name in lost))
        ctx.set_materialize_grads(self._materializes)
        ctx.given = {name for name in self._targets if values[name] is not None}
        kept = [values[name] for name in self._wanted if not pairing.gradient_of(name)]
        ctx.others = [None if isinstance(v, torch.Tensor) else (v,) for v in kept]
        # Whatever the op's gradients are made of, they depend on these.
        inputs = [values[name] for name in self._targets if name in ctx.given]
        tensors = [v for v in kept if isinstance(v, torch.Tensor)]
        ctx.inputs_from = len(tensors)
        ctx.save_for_backward(*tensors, *inputs)

    def _backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        of_output = dict(zip(self._pairing.outputs, gradients, strict=True))
        saved = ctx.saved_tensors
        tensors, others = iter(saved[: ctx.inputs_from]), iter(ctx.others)

        def value(name: str) -> Any:
            if output := self._pairing.gradient_of(name):
                return of_output[output]
            other = next(others)
            return next(tensors) if other is None else other[0]

        given = {name: value(name) for name in self._wanted}
        self._refuse_tangents(given.values())
        # Autograd would find derivatives in what the op's kernel calls.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._pairing.is_differentiable):
            results = self._pairing.backward.overload(**given)
        results = results if isinstance(results, tuple) else (results,)
        if torch.is_grad_enabled() and not self._pairing.is_differentiable:
            sources = (*gradients, *saved[ctx.inputs_from :])
            results = _once_differentiable(self._pairing.backward, results, sources)
        found = dict(zip(self._targets, results, strict=True))
        return tuple(found[n] if n in ctx.given else None for n in self._positional)

    def _refuse_tangents(self, values: Iterable[Any]) -> None:
        """Where autograd does not know the derivative of the backward op, a tangent would be lost
        in it: that of the upstream gradient, though the op's own arguments had none."""
        tensors = (each for each in values if isinstance(each, torch.Tensor))
        if not self._pairing.is_differentiable and any(map(composite.has_tangent, tensors)):
            raise NotImplementedError(
                f"{self._pairing.backward.name} has no forward-mode derivative: {_ONCE}"
            )


_ONCE = (
    "opgraft.register_backward declares how to differentiate once; if an override calls it, "
    "opgraft.disabled() leaves the call to the native kernel"
)


def _once_differentiable(
    backward: Op, gradients: tuple[Any, ...], sources: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The same gradients, of which it is an error to differentiate one.

    Args:
        backward: what made them.
        gradients: tensors.
        sources: what they depend on, though their own graph may not say so.
    """
    message = f"derivative for {backward.name} is not implemented: {_ONCE}"
    everything = (*gradients, *sources)
    refuse = torch._C._functions.DelayedError(message.encode(), len(everything))
    made: tuple[Any, ...] = refuse(*everything)
    return made[: len(gradients)]
