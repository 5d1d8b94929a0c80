"""Prepared launches: that they launch what Triton would, and that those who remember them may.

A fake kernel stands for Triton's in the first tests. In the last, every op is called with tensors of many shapes,
strides, addresses and dtypes on a GPU that is not there, and Triton is asked what it would compile.
"""

import importlib.util
import itertools
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from anabranch import (
    ExpertLayout,
    dispatch,
    grouped_gemm,
    moe_mlp,
    multi_gemm,
    permute,
    rope,
    topk_router,
    unpermute,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton, and its compiler, for which the interpreter stands in",
)
CPU = torch.device("cpu")


class Kernel:
    """Takes (a, b, n, BLOCK, FLAG); notes what is launched, by Triton or by what it compiled."""

    arg_names = ("a", "b", "n", "BLOCK", "FLAG")

    def __init__(self, backend="cuda"):
        self.pre_run_hooks = []
        self.asked, self.run, self.backend = [], [], backend

    def __getitem__(self, grid):
        def ask(*tensors, **constants):
            self.asked.append((grid, tensors, constants))
            return None if self.backend is None else self.compile()

        return ask

    def compile(self):
        from triton.compiler import CompiledKernel

        class Compiled(CompiledKernel):
            function, packed_metadata, run = "function", "packed", None

            def __init__(self, backend, run):
                self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))
                self.run = run

        return Compiled(self.backend, lambda *arguments: self.run.append(arguments))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Streams of GPUs that are not there."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))


def prepared(kernel):
    from anabranch._backends.triton.prepared import Launch

    return Launch(CPU, kernel, (5,), 7, FLAG=True, BLOCK=16, num_warps=4)


def test_triton_is_asked_once():
    kernel = Kernel()
    launch = prepared(kernel)
    for i in range(3):
        launch(f"a{i}", None)
    assert kernel.asked == [
        ((5, 1, 1), ("a0", None, 7), dict(FLAG=True, BLOCK=16, num_warps=4, enable_fp_fusion=True))
    ]
    assert kernel.run == [
        (5, 1, 1, "stream", "function", "packed", None, None, None, f"a{i}", None, 7, 16, True)
        for i in (1, 2)
    ]


@pytest.mark.parametrize("backend", [None, "hip"], ids=["interpreter", "amd"])
def test_where_nothing_may_be_remembered_triton_is_always_asked(backend):
    kernel = Kernel(backend)
    launch = prepared(kernel)
    for _ in range(3):
        launch("a", "b")
    assert len(kernel.asked) == 3
    assert not kernel.run


@pytest.mark.parametrize("whose", ["kernel", "before", "after"])
def test_hooks_run(whose):
    from triton import knobs

    kernel = Kernel()
    launch = prepared(kernel)
    launch("a", "b")
    hook = mock.Mock()
    hooks = {
        "kernel": kernel.pre_run_hooks,
        "before": knobs.runtime.launch_enter_hook.calls,
        "after": knobs.runtime.launch_exit_hook.calls,
    }[whose]
    hooks.append(hook)
    launch("a", "b")
    hooks.remove(hook)
    launch("a", "b")
    assert len(kernel.asked) == 2  # Triton calls them
    assert len(kernel.run) == 1


def test_what_a_launch_is_remembered_by():
    from anabranch._backends.triton.prepared import launch

    kernel = Kernel()
    x = torch.zeros(64)
    for first, number, flag in (
        (x, 1, True), (x, 1.0, True), (x, True, True), (x, 2, True), (x, 1, 1), (x[1:], 1, True), (x.half(), 1, True),
        (None, 1, True),
    ):  # fmt: skip
        for _ in range(2):
            launch(CPU, kernel, (3,), (first, x), number, FLAG=flag, BLOCK=16)
    launch(CPU, kernel, (4,), (x, x), 1, FLAG=True, BLOCK=16)
    assert len(kernel.asked) == 9
    assert len(kernel.run) == 8


@pytest.fixture
def forms(monkeypatch):
    """What Triton would compile at each launch, by the launch that was prepared."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from anabranch._backends.triton import device
    from anabranch._backends.triton.prepared import Launch

    backend = make_backend(GPUTarget("cuda", 90, 32))
    found, current = {}, []
    original = Launch.unprepared

    def unprepared(self, *tensors):
        current.append(self)
        original(self, *tensors)

    def run(self, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binder(*args, **kwargs)
        found.setdefault(current[-1], set()).add(str((self.fn.__name__, grid, specialization, options)))

    monkeypatch.setattr(Launch, "unprepared", unprepared)
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(device, "capability", lambda _: (9, 0))
    monkeypatch.setattr(dispatch, "probe", lambda backend, _: "not here" if backend == "hopper" else None)
    yield found
    assert len(found) > 10


def views(*shape, dtype=torch.float16):
    """The same sizes at addresses and with strides of all kinds."""
    *first, last = shape
    wide = torch.zeros(*first, last + 16, dtype=dtype)
    yield wide[..., :last].contiguous()
    yield wide[..., :last]
    yield wide[..., 1 : 1 + last]
    yield wide[..., 8 : 8 + last]
    if len(shape) > 1:
        yield torch.zeros(*first[:-1], last, first[-1], dtype=dtype).mT
        yield torch.zeros(*first[:-1], 1, last, dtype=dtype).expand(shape)


def each_in_turn(**operands):
    """The operands with the first view of each, but for one at a time."""
    plain = {name: next(iter(views(*shape, dtype=dtype))) for name, (shape, dtype) in operands.items()}
    for name, (shape, dtype) in operands.items():
        for view in views(*shape, dtype=dtype):
            yield {**plain, name: view}


def layouts(tokens, top_k=2, experts=4):
    plain = ExpertLayout.from_topk(torch.zeros(tokens, top_k, dtype=torch.int64), experts)
    yield plain
    for move in range(4):
        fields = [plain.counts, plain.offsets, plain.row_to_slot, plain.slot_to_row]
        shifted = torch.zeros(fields[move].numel() + 1, dtype=torch.int32)[1:]
        fields[move] = shifted.view(fields[move].shape)
        yield ExpertLayout(*fields)


def run_grouped_gemm(dtype):
    ways = ({}, {"activation": "swiglu", "gather": True}, {"scatter": True, "activation": "gelu"})
    for tokens, flags in itertools.product((8, 9), ways):
        sizes = dict(
            x=((tokens if flags.get("gather") else 2 * tokens, 32), dtype),
            weight=((4, 64, 32), dtype),
            bias=((4, 64), dtype),
            scale=((tokens, 2), dtype),
        )
        plain, *odd = layouts(tokens)
        calls = [(plain, given) for given in each_in_turn(**sizes)]
        calls += [(layout, calls[0][1]) for layout in odd]
        for layout, given in calls:
            leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
            out = grouped_gemm(layout=layout, backend="triton", **leaves, **flags)
            for grad in views(*out.shape, dtype=dtype):
                torch.autograd.grad(out, list(leaves.values()), grad, retain_graph=True)


def run_moe_mlp(dtype):
    for tokens, ids, options in itertools.product(
        (8, 9),
        (torch.int32, torch.int64),
        ({}, {"weight_on": "input"}, {"gate_layout": "interleaved", "activation": "gpt_oss"}),
    ):
        for given in each_in_turn(
            x=((tokens, 32), dtype), gate_up=((4, 64, 32), dtype), down=((4, 32, 32), dtype),
            expert_weights=((tokens, 2), torch.float32), gate_up_bias=((4, 64), dtype), down_bias=((4, 32), dtype),
        ):  # fmt: skip
            leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
            out = moe_mlp(expert_ids=torch.zeros(tokens, 2, dtype=ids), backend="triton", **leaves, **options)
            torch.autograd.grad(out, list(leaves.values()), torch.zeros_like(out))


def run_the_others(dtype):
    for rows in (7, 8):
        for a in each_in_turn(x=((rows, 32), dtype), w=((64, 32), dtype)):
            for b in each_in_turn(x=((16, 32), dtype), w=((30, 32), dtype)):
                multi_gemm([a["x"], b["x"]], [a["w"], b["w"]], backend="triton")
        for x in views(rows, 32, dtype=dtype):
            topk_router(x, 4, backend="triton")
            topk_router(x, 4, scaling=1, backend="triton")
            for layout in layouts(rows):
                permute(x, layout, backend="triton")
                for y, w in itertools.product(
                    views(2 * rows, 32, dtype=dtype), views(rows, 2, dtype=torch.float32)
                ):
                    unpermute(y, layout, w, backend="triton")
        for given in each_in_turn(
            q=((1, 4, rows, 32), dtype),
            k=((1, 2, rows, 32), dtype),
            cos=((1, rows, 32), dtype),
            sin=((1, rows, 32), dtype),
        ):
            rope(**given, backend="triton")


@pytest.mark.no_poison
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "calls", [run_grouped_gemm, run_moe_mlp, run_the_others], ids=lambda f: f.__name__[4:]
)
def test_each_prepared_launch_is_one_to_triton(forms, calls, dtype):
    calls(dtype)
    for seen in forms.values():
        assert len(seen) == 1, "\n".join(sorted(seen))


def test_a_promise_that_is_broken_is_found(forms):
    """The test above can fail: without addresses among what is known, it does."""
    from anabranch._backends.triton import operand

    def blind(value):
        return operand.Operand(value.shape, value.stride(), value.dtype, 0)

    with mock.patch.object(operand, "of", blind):
        run_moe_mlp(torch.float16)
    assert any(len(seen) > 1 for seen in forms.values())
