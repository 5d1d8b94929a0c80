"""Defines the package's operators: what torch.library.custom_op does, at a fraction of its price per call.

custom_op looks for aliased results in every call, and its gradients read the schema in every forward that needs
one: together that takes longer than the kernels of a small layer. Operators defined here leave that out and are
alike in all else: torch.compile, torch.export, torch.func.vmap and opcheck see no difference. Neither kind has the
derivatives of torch.func, such as torch.func.grad.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.autograd import profiler
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from anabranch.errors import UnsupportedError
from anabranch.tuning.environment import variable

NAMESPACE = "anabranch"

# Not public, but what PyTorch makes the gradients of a custom_op from.
_C: Any = torch._C
_profiler_enabled = _C._autograd._profiler_enabled
_KEY, _KEYS = _C.DispatchKey, _C.DispatchKeySet
_KERNEL_ALONE = {_KEYS(key).raw_repr() for key in (_KEY.CPU, _KEY.CUDA)}
"""What is left to dispatch of plain tensors on one device, without modes, below autograd."""


def _united(*keys: Any) -> int:
    found = _KEYS(keys[0])
    for key in keys[1:]:
        found |= _KEYS(key)
    return int(found.raw_repr())


_PLAIN_KEYS = {
    _united(_KEY.CPU, _KEY.ADInplaceOrView, _KEY.AutogradCPU, _KEY.AutocastCPU),
    _united(_KEY.CUDA, _KEY.ADInplaceOrView, _KEY.AutogradCUDA, _KEY.AutocastCUDA),
}
"""What plain tensors are dispatched by: no lazy negation, no mode's wrapper, made outside of inference mode."""
_PLAIN_TYPES = {Tensor, torch.nn.Parameter}
_INCLUDED = _united(_KEY.BackendSelect, _KEY.ADInplaceOrView)
"""What a thread adds to that without modes, transforms and traces."""
_NEEDED = _united(_KEY.CPU, _KEY.CUDA, _KEY.ADInplaceOrView, _KEY.AutogradCPU, _KEY.AutogradCUDA)
"""What it may not take from that."""
_direct: dict[Any, Callable[..., Any]] = {}


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    differentiate: Callable[..., Sequence[Tensor | None]] | None = None,
    by: Callable[..., Any] | None = None,
) -> Any:
    """Defines ``torch.ops.anabranch.<name>`` and returns it. A module imported anew replaces its operators.

    Args:
        name: the operator's.
        schema: its arguments, all positional and without defaults, and its results, which alias nothing.
        kernel: computes the results, on any device. torch.compile does not look inside. On a GPU, where all that it
            did for a call were launches, these alone are made for calls like that one; so unless it reads them,
            nothing may depend on what its tensors hold, nor on where they are but for the distance from a multiple of
            16 bytes; and launches take its tensors from their start, for an address alone does not tell a view that
            starts inside one from another tensor there. Mutating ones are called every time.
        fake: allocates the results alone.
        save: ``save(ctx, args, results)`` keeps what the gradient needs.
        differentiate: ``differentiate(ctx, *grads)`` takes a gradient or None for every tensor among the results
            and returns one for every tensor among the arguments, of which Nones at the end may be left out. An
            optional tensor counts always and a list's members count one by one; ``ctx.needs_input_grad`` is in
            the same order. None if the operator has no gradient.
        by: hashable, what the kernel decides by that is neither among its arguments nor the same in the whole process.
    """
    library = get_library_allowing_overwrite(NAMESPACE, name)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    mutable = operator._schema.is_mutable
    kernel = _skipped(_counting_versions(operator, kernel) if mutable else _remembering(operator, kernel, by))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    graph: Callable[..., Any] | None = None
    if differentiate is not None:
        run, graph = _differentiable(operator, kernel, save, differentiate)
        library.impl(name, run, "Autograd", with_keyset=True)
    if not mutable:
        _direct[operator] = _directly(operator, kernel, graph)
    return operator


def direct(operator: Any) -> Callable[..., Any]:
    """What calls an operator that mutates nothing, past the dispatcher where that would only come to its kernel.

    The dispatcher turns all arguments and results around, which takes longer than looking for whatever else it might
    do: for a mode, a transform, a trace, a profiler, a tensor that is more than its memory. It does not find who
    observes all operators without a profiler, as torch.profiler.ExecutionTraceObserver does on its own.
    """
    return _direct[operator]


def _directly(operator: Any, kernel: Any, graph: Callable[..., Any] | None) -> Callable[..., Any]:
    tensors_of = _tensors(operator)

    def eagerly(*args: Any) -> Any:
        tensors = tensors_of(args)
        if not _plain(tensors):
            return operator(*args)
        if graph is None:
            return kernel(*args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return graph(tensors, None, args)
        with _C._AutoDispatchBelowAutograd():
            return kernel(*args)

    eagerly = _skipped(eagerly)

    def call(*args: Any) -> Any:
        return operator(*args) if is_dynamo_compiling() else eagerly(*args)

    return call


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody but autograd and a kernel sees a call of such tensors here and now."""
    if (
        _C._dispatch_tls_local_include_set().raw_repr() != _INCLUDED
        or _C._dispatch_tls_local_exclude_set().raw_repr() & _NEEDED
        or _C._is_torch_function_mode_enabled()
        or profiler._is_profiler_enabled  # of whichever threads; below, this one's, however it was started
        or _profiler_enabled()
    ):
        return False
    for value in tensors:
        if value is not None and (
            type(value) not in _PLAIN_TYPES or _C._dispatch_keys(value).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


def _skipped(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, left alone by torch.compile, which tries every frame below one that it gave up on."""
    skip = getattr(eval_frame, "_FrameAction", None)
    if skip is None or not hasattr(eval_frame, "set_code_exec_strategy") or not inspect.isfunction(kernel):
        return _disable_dynamo(kernel)  # the same at a price per call
    # Neither this frame nor those below it.
    strategy = eval_frame._FrameExecStrategy(skip.SKIP, skip.SKIP)
    eval_frame.set_code_exec_strategy(kernel.__code__, strategy)
    return kernel


def _remembering(
    operator: Any, kernel: Callable[..., Any], by: Callable[..., Any] | None
) -> Callable[..., Any]:
    """The kernel, or the launches that it made for a call like this one."""
    types = _types(operator)
    places = [i for i, kind in enumerate(types) if "Tensor" in kind]
    lists = [i for i, kind in enumerate(types) if "List" in kind]
    tensors_of = _tensors(operator)
    scalars_of = _members([i for i in range(len(types)) if i not in places and i not in lists], types)

    def run(*args: Any) -> Any:
        tensors = tensors_of(args)
        first = tensors[0] if tensors else None
        if first is None or not (first.is_cuda or _launches(first.device.type)):
            return kernel(*args)
        known = _triton()
        if known is None:
            return kernel(*args)
        decides = scalars_of(args)
        if lists:
            decides = (*decides, *[len(args[i]) if i in places else (*args[i],) for i in lists])
        return known.results(kernel, args, tensors, decides if by is None else (*decides, by(*args)))

    return run


def _launches(device: str) -> bool:
    """Whether kernels of Triton run there."""
    return device == "cuda" or (device == "cpu" and variable("TRITON_INTERPRET") == "1")


@cache
def _triton() -> ModuleType | None:
    """What remembers the calls that Triton's kernels serve, or None without Triton."""
    found = importlib.util.find_spec("triton")
    return importlib.import_module("anabranch._backends.triton.remembered") if found else None


def _counting_versions(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which then tells autograd of the tensors that it wrote to."""
    arguments = operator._schema.arguments
    written = [i for i, argument in enumerate(arguments) if argument.alias_info is not None]
    tensors_of = _members(written, _types(operator))

    def count(*args: Any) -> None:
        kernel(*args)
        increment_version([tensor for tensor in tensors_of(args) if tensor is not None])

    return count


def _differentiable(
    operator: Any, kernel: Any, save: Any, differentiate: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operator's kernel for autograd, a node where a gradient is needed and else what lies below; and the node.

    The node takes the tensors among the arguments, the dispatcher's keys or None for the kernel alone, and the
    arguments.
    """
    tensors_of = _tensors(operator)
    returns_list = str(operator._schema.returns[0].type) == "List[Tensor]"

    def below(keyset: Any, args: tuple[Any, ...]) -> Any:
        with _C._AutoDispatchBelowAutograd():
            if keyset is None:
                return kernel(*args)
            left = keyset & _C._after_autograd_keyset
            # Where nothing but the kernel is left, the dispatcher would only turn all arguments around twice.
            return kernel(*args) if left.raw_repr() in _KERNEL_ALONE else operator.redispatch(left, *args)

    def forward(ctx: Any, *inputs: Any) -> Any:
        keyset, args = inputs[-2:]
        results = below(keyset, args)
        ctx.set_materialize_grads(False)
        if save is not None:
            save(ctx, args, results)
        return tuple(results) if returns_list else results

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found = differentiate(ctx, *grads)
        return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    node: Any = type(operator._opname, (torch.autograd.Function,), methods)
    # What Function.apply comes to without torch.func's transforms, having looked at every argument for traces of them.
    apply = super(torch.autograd.Function, node).apply

    def run(keyset: Any, *args: Any) -> Any:
        if not (torch.is_grad_enabled() and _C._any_requires_grad(*args)):
            return below(keyset, args)
        if _C._are_functorch_transforms_active():
            raise UnsupportedError(
                operator._opname,
                "torch.func",
                expected='torch.autograd.grad (backend="reference" has the transforms of torch.func)',
                got="torch.func.grad or another derivative of that kind",
            )
        return graph(tensors_of(args), keyset, args)

    def graph(tensors: Sequence[Tensor | None], keyset: Any, args: tuple[Any, ...]) -> Any:
        results = apply(*tensors, keyset, args)
        return list(results) if returns_list else results

    return _skipped(run), graph


def _types(operator: Any) -> list[str]:
    """Those of its arguments."""
    return [str(argument.type) for argument in operator._schema.arguments]


def _tensors(operator: Any) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """What picks the tensors among its arguments."""
    types = _types(operator)
    return _members([i for i, kind in enumerate(types) if "Tensor" in kind], types)


def _members(places: Sequence[int], types: Sequence[str]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """What picks the arguments at some places, each list among them member by member."""
    lists = {i for i in places if "List" in types[i]}
    if not lists and len(places) > 1:
        return itemgetter(*places)

    def pick(args: tuple[Any, ...]) -> Sequence[Any]:
        found: list[Any] = []
        for i in places:
            if i in lists:
                found += args[i]
            else:
                found.append(args[i])
        return found

    return pick
