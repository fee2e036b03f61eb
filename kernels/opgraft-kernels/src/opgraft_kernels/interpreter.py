"""What Triton's interpreter needs before it runs the pack's kernels on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton

from opgraft import triton_utils

__all__ = ["prepare"]


def prepare() -> None:
    """Mend and hasten the interpreter, where kernels run in it. The second call does nothing."""
    if not triton_utils.interpreted():
        return
    from triton.runtime import interpreter

    if interpreter._patch_lang.__module__ == __name__:
        return
    _launch_one_at_a_time(interpreter)
    _patch_once_a_launch(interpreter)
    _compute_no_overflow(interpreter)
    _look_up_dtypes(interpreter)
    _describe_tensors_once()
    _leave_alike_operands(interpreter)
    _reduce_whole_blocks(interpreter)
    _call_functions_of_the_language(interpreter)
    if triton.__version__.startswith("3.6."):
        _let_tensors_bound_loops(interpreter)


def _launch_one_at_a_time(interpreter: Any) -> None:
    """Let threads wait for each other's launches, others' kernels included.

    What the interpreter puts in `triton.language` for a launch, and which program runs, is there
    once for all threads: of two launches at a time one failed, or computed wrong numbers.
    """
    executor: Any = getattr(interpreter, "GridExecutor", None)
    if executor is None:  # another version
        return
    launch, lock = executor.__call__, threading.RLock()

    @functools.wraps(launch)
    def launch_alone(self: Any, *arguments: Any, **named: Any) -> Any:
        with lock:
            return launch(self, *arguments, **named)

    executor.__call__ = launch_alone


def _patch_once_a_launch(interpreter: Any) -> None:
    """Leave `triton.language` as it is where a kernel calls a function of its own.

    The interpreter puts its own functions there when it starts a kernel, and goes through all of
    the module again at each call of a function with `triton.jit`, though nothing is left to be put
    there. That took more than half of the time of the pack's kernels.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # another version, which may work otherwise
        return
    import triton.language as tl

    patch = interpreter._patch_lang
    used: dict[Any, list[Any]] = {}

    def patch_if_needed(fn: Any) -> Any:
        modules = used.get(fn)
        if modules is None:
            seen = {id(each) for each in fn.__globals__.values()}
            modules = used[fn] = [each for each in (tl, tl.core) if id(each) in seen]
        if not modules or any(tl.core.is_builtin(each.load) for each in modules):
            return patch(fn)
        return interpreter._LangPatchScope()  # nothing to be put back

    interpreter._patch_lang = patch_if_needed


def _compute_no_overflow(interpreter: Any) -> None:
    """Leave out what nothing looks at: whether sums and products of integers overflow.

    The interpreter computes each of them again in int64, for an assertion that it then leaves out,
    `debug` being off.
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if getattr(options, "debug", True) or not hasattr(options, "sanitize_overflow"):
        return
    builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_up_dtypes(interpreter: Any) -> None:
    """Keep numpy's dtype for each of Triton's, of which the interpreter makes a table each time."""
    numpy_dtype = getattr(interpreter, "_get_np_dtype", None)
    if numpy_dtype is None:
        return
    of_name: dict[str, Any] = {}

    def known_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        found = of_name.get(name)
        if found is None:
            found = of_name[name] = numpy_dtype(dtype)
        return found

    interpreter._get_np_dtype = known_dtype


def _describe_tensors_once() -> None:
    """Keep what blocks and tensors of one dtype and shape say of themselves.

    Each value in a kernel is a new tensor, most of a new type, and each of these puts together its
    name, shape and number of elements, which took a third of the time of the pack's kernels.
    """
    import triton.language as tl

    _keep_fields(tl.core.block_type, lambda element_ty, shape: (element_ty.name, *shape))
    _keep_fields(tl.core.tensor, lambda handle, type: type.name, own="handle")


def _keep_fields(kind: Any, key: Callable[..., Any], own: str | None = None) -> None:
    """Let objects have the fields of the first whose arguments had the same key, but for `own`."""
    make: Any = kind.__init__
    known: dict[Any, dict[str, Any]] = {}

    def make_with_known(self: Any, *arguments: Any, **named: Any) -> None:
        if named:
            make(self, *arguments, **named)
            return
        of = key(*arguments)
        fields = known.get(of)
        if fields is None:
            make(self, *arguments)
            known[of] = {name: each for name, each in self.__dict__.items() if name != own}
            return
        self.__dict__.update(fields)
        if own is not None:
            setattr(self, own, arguments[0])

    kind.__init__ = make_with_known


def _leave_alike_operands(interpreter: Any) -> None:
    """Return at once operands that have one shape, and tensors that have the dtype wanted.

    Most have. The interpreter finds that out element by element of their shapes, and by comparing
    dtypes' names, which took a good part of the time of the pack's kernels.
    """
    semantic: Any = type(getattr(interpreter, "interpreter_semantic", None))
    broadcast, cast = (getattr(semantic, each, None) for each in ("broadcast_impl_value", "cast"))
    if broadcast is None or cast is None:
        return

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and _sizes(one) == _sizes(other):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def cast_if_needed(self: Any, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, *rounding, **named)

    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.cast = cast_if_needed


def _sizes(block_type: Any) -> Sequence[int]:
    """Of a block. Triton's own tuple compares by way of new tuples, so this is what it holds."""
    shape = block_type.shape
    return getattr(shape, "values", shape)


def _reduce_whole_blocks(interpreter: Any) -> None:
    """Reduce by the pack's own functions in as many steps as a block's size has bits.

    But for sums and the like, the interpreter calls the function for each element of a block, which
    took a good part of the time of the norms' kernels. Here each call combines every other element
    along the axis with the one that follows it, as blocks: the order of elements stays, and they
    are grouped as on a GPU. Others' functions may do what blocks can't, such as branch.
    """
    kind: Any = getattr(interpreter, "ReduceOps", None)
    if not hasattr(kind, "generic_reduce") or not hasattr(kind, "to_tensor"):
        return
    one_by_one = kind.generic_reduce
    own = f"{__package__}."

    def reduced(self: Any, input: tuple[Any, ...]) -> list[Any]:
        axis, combine = self.axis, self.combine_fn.fn
        if axis is None or not combine.__module__.startswith(own):
            return one_by_one(self, input)
        before = (slice(None),) * (axis % len(input[0].shape))
        dtypes = [each.dtype for each in input]

        def parts(blocks: Sequence[Any], index: Any) -> list[Any]:
            place = (*before, index)
            found = [each.handle.data[place] for each in blocks]
            return [self.to_tensor(*each) for each in zip(found, dtypes, strict=True)]

        blocks: Sequence[Any] = input
        while blocks[0].handle.data.shape[len(before)] > 1:
            both = *parts(blocks, slice(0, None, 2)), *parts(blocks, slice(1, None, 2))
            combined = combine(*both)
            blocks = combined if isinstance(combined, tuple) else (combined,)
        return parts(blocks, slice(None) if self.keep_dims else 0)

    kind.generic_reduce = reduced


def _call_functions_of_the_language(interpreter: Any) -> None:
    """Call what the language's functions do, without asking each time whether that may be.

    There are two functions between a kernel and them: one adds an argument, and the other makes
    sure that it is there. They took a good part of the time of the pack's kernels.
    """
    put = getattr(interpreter, "_patch_attr", None)
    expected = ["obj", "name", "member", "builder", "scope"]
    if put is None or list(inspect.signature(put).parameters) != expected:
        return
    semantic = interpreter.interpreter_semantic

    def put_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        does = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return does(*arguments, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = put_directly


def _let_tensors_bound_loops(interpreter: Any) -> None:
    """Let the interpreter of Triton 3.6 run loops between tensors with numpy 2.4 and newer.

    It makes an index of a scalar by `int` of an array with one dimension, which numpy has refused
    since 2.4. Triton 3.7 squeezes the array first, as this does.
    """
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_with_index
