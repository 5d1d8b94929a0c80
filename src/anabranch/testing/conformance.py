"""What every backend of grouped_gemm must pass: one function a property, each fails with AssertionError.

:data:`CHECKS` has them by name. The named shapes are checked one by one with :func:`check_case`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anabranch.epilogues import resolve
from anabranch.ops.grouped_gemm.cases import Case
from anabranch.testing.budget import assert_same
from anabranch.testing.inputs import STRIDES, empty_patterns, routing, strided
from anabranch.testing.memory import guard_band, poison
from anabranch.testing.problems import Flags, Problem

__all__ = ["CHECKS", "FULL", "VARIANTS", "check_case", "make", "rounds_once", "solve"]

Device = torch.device | str
FULL = Flags(gather=True, scatter=True, bias=True, scale=True, activation="swiglu", transpose_weight=True)
"""Everything at once."""

VARIANTS = (
    Flags(),
    Flags(gather=True),
    Flags(scatter=True, bias=True),
    Flags(bias=True, activation="gelu"),
    Flags(scale=True, transpose_weight=True),
    Flags(gather=True, bias=True, activation="swiglu"),
    Flags(scatter=True, scale=True, activation="silu"),
    Flags(gather=True, scatter=True, bias=True, scale=True, activation="gpt_oss"),
    Flags(gather=True, scale=True, activation="relu_squared", transpose_weight=True),
    Flags(scatter=True, bias=True, activation="geglu_tanh", transpose_weight=True),
    Flags(gather=True, scatter=True, activation="reglu"),
    Flags(bias=True, scale=True),
)
"""Combinations of flags in which every pair of them occurs, with and without."""

UNITS = {"hopper": 8}
"""Backends of sizes in such units alone, which have no scale either."""

CHECKS: dict[str, Callable[[str, torch.dtype, Device], None]] = {}


def _check(function: Callable[[str, torch.dtype, Device], None]) -> Callable[..., None]:
    CHECKS[function.__name__] = function
    return function


def rounds_once(backend: str, dtype: torch.dtype, flags: Flags, device: Device) -> bool:
    """Whether the output is rounded once only.

    PyTorch has no half precision product on the CPU that returns its accumulator, so eager has a rounded one.
    """
    plain = flags.activation is None and not flags.scale
    return backend != "eager" or plain or dtype not in (torch.float16, torch.bfloat16)


def make(
    dtype: torch.dtype, device: Device, ids: Tensor | None = None, E: int = 4, N: int = 12, K_dim: int = 17,
    flags: Flags = FULL, *, backend: str | None = None, **options: Any,
) -> Problem:  # fmt: skip
    """A problem from a seed of its own; some dropped slots unless ``ids`` are given.

    For a backend of :data:`UNITS` sizes are rounded up, and flags that it does not have left out.
    """
    generator = torch.Generator().manual_seed(7)
    if ids is None:
        ids = routing(11, E, 2, "duplicates", dropped=0.2, generator=generator)
    if backend in UNITS:
        flags = replace(flags, scale=False)
        unit = UNITS[backend]
        wide = unit * resolve("conformance", flags.activation).columns
        N, K_dim = -(-N // wide) * wide, -(-K_dim // unit) * unit
    return Problem.make(ids.to(device), E, N, K_dim, dtype, flags, generator=generator, **options)


def solve(backend: str, problem: Problem, name: str = "") -> dict[str, Tensor | None]:
    """Runs a problem in dirty memory and demands the right results, which it returns."""
    poison(problem.x.device, problem.grad, *problem.inputs().values())
    results = problem.run(backend)
    once = rounds_once(backend, problem.grad.dtype, problem.flags, problem.x.device)
    problem.check(results, f"{name or problem.flags}: ", one_rounding=once)
    return results


def check_case(backend: str, dtype: torch.dtype, device: Device, case: Case, flags: Flags) -> None:
    """A named shape, forward and backward."""
    generator = torch.Generator().manual_seed(7)
    ids = routing(case.T, case.E, case.K, case.routing, dropped=case.dropped, generator=generator)
    problem = make(dtype, device, ids, case.E, case.N, case.K_dim, flags, backend=backend)
    solve(backend, problem, f"{case}, {flags}")


def _sorted_ids(counts: Sequence[int], num_rows: int) -> Tensor:
    ids = [expert for expert, count in enumerate(counts) for _ in range(count)][:num_rows]
    return torch.tensor(ids + [-1] * (num_rows - len(ids))).reshape(num_rows, 1)


@_check
def every_variant(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Each combination of flags."""
    for flags in VARIANTS:
        solve(backend, make(dtype, device, flags=flags, backend=backend))


@_check
def every_pattern_of_empty_experts(backend: str, dtype: torch.dtype, device: Device) -> None:
    """dW and d_bias of an empty expert are zero, not garbage; those of the others are right."""
    for index, counts in enumerate(empty_patterns(4, rows=1)):
        if backend in UNITS and not any(counts):
            continue  # no row at all is none of its business
        flags = Flags(bias=True, activation=(None, "silu")[index % 2], transpose_weight=index % 3 == 0)
        problem = make(
            dtype, device, _sorted_ids(counts, sum(counts)), flags=flags, counts=counts, backend=backend
        )
        solve(backend, problem, f"counts {counts}")


@_check
def rows_past_the_last_expert(backend: str, dtype: torch.dtype, device: Device) -> None:
    """They are zero in the output and in d_x although x and the gradient hold NaN there, in every round."""
    for counts, rows in (([8, 0, 12, 4], 40), ([0, 0, 0, 0], 5), ([5, 0, 70, 13], 89), ([4, 0, -7, 2], 9)):
        ids = _sorted_ids([max(0, c) for c in counts], rows)
        for flags in (Flags(), Flags(bias=True, scale=True, activation="swiglu")):
            problem = make(dtype, device, ids, K_dim=64, flags=flags, counts=counts, backend=backend)
            for round_number in range(2):
                solve(backend, problem, f"counts {counts}, round {round_number}, {flags}")


@_check
def counts_that_claim_too_much(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Counts of more rows than there are stop at the last row."""
    for counts in ([5, 100, 3, 1], [2**30, 2**30, 2**30, 2**30], [0, 9, 1, 0]):
        problem = make(
            dtype,
            device,
            _sorted_ids([min(c, 9) for c in counts], 9),
            flags=Flags(),
            counts=counts,
            backend=backend,
        )
        solve(backend, problem, f"counts {counts}")


@_check
def dropped_and_repeated_choices(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Ids out of range have no row; an expert named twice adds up, and both scales get a gradient."""
    dropped = torch.tensor([[0, -1], [-1, -1], [2, 1], [-1, 2], [1, 0], [3, -1]])
    repeated = torch.tensor([[3, 1, 1, 2], [1, 1, 1, 1], [0, 1, 2, 3], [0, 0, 7, -5]])
    for ids, flags in itertools.product((dropped, repeated), (FULL, Flags(gather=True), Flags(scatter=True))):
        problem = make(dtype, device, ids, flags=flags, backend=backend)
        results = solve(backend, problem, f"ids {ids.tolist()}, {flags}")
        if problem.flags.scale:
            assert results["scale"] is not None
            inside = (ids >= 0) & (ids < 4)
            assert torch.equal(results["scale"].cpu() != 0, inside), (
                f"d_scale is zero for some of {ids.tolist()}"
            )


@_check
def tile_tails(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Row counts round powers of two."""
    for T in (1, 2, 15, 16, 17, 31, 32, 33, 45, 63, 65, 129):
        ids = routing(T, 3, 1 if T > 50 else 2, generator=torch.Generator().manual_seed(T))
        solve(
            backend,
            make(dtype, device, ids, 3, 6, 8, Flags(gather=True, scatter=T % 2 == 0), backend=backend),
            f"T = {T}",
        )


@_check
def experts_that_share_a_tile(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Each row uses its own expert's weight. All numbers are small integers, so the result is exact."""
    for sizes in ([128, 130, 65], [1, 127, 128, 1], [63, 65, 64]):
        ids = _sorted_ids(sizes, sum(sizes))
        problem = make(dtype, device, ids, len(sizes), 8, 16, Flags(), counts=sizes, backend=backend)
        experts = torch.arange(1, len(sizes) + 1, device=device, dtype=dtype)
        weight = experts[:, None, None].expand(-1, 8, 16).contiguous()
        out = problem.call(backend, x=torch.ones_like(problem.x), weight=weight)
        assert_same(out, 16 * (ids.to(device, dtype) + 1).expand(-1, 8), name=f"sizes {sizes}")


@_check
def square_and_half_square_weights(backend: str, dtype: torch.dtype, device: Device) -> None:
    """The weight's layout is what the flag says, never what its shape suggests."""
    for N, K_dim, transposed in itertools.product((32, 16), (32, 16), (False, True)):
        problem = make(
            dtype, device, N=N, K_dim=K_dim, flags=Flags(transpose_weight=transposed), backend=backend
        )
        size = problem.weight.shape[-2:]
        i, j = torch.arange(size[0])[:, None], torch.arange(size[1])[None, :]
        weight = ((i - 2 * j) / 32).expand(4, *size).to(device, dtype).contiguous()
        solve(backend, problem.with_inputs(weight=weight), f"N = {N}, K_dim = {K_dim}, {transposed}")


@_check
def sizes_that_no_tile_divides(backend: str, dtype: torch.dtype, device: Device) -> None:
    """N and K_dim of real models and odd ones."""
    for N, K_dim in (
        (64, 72),
        (72, 192),
        (320, 64),
        (1408, 64),
        (64, 1856),
        (1025, 8),
        (8, 1025),
        (2, 1),
        (256, 16),
    ):
        flags = Flags(bias=True, transpose_weight=K_dim == 1025)
        problem = make(dtype, device, _sorted_ids([2, 0, 3], 5), 3, N, K_dim, flags, backend=backend)
        solve(backend, problem, f"N = {N}, K_dim = {K_dim}")


@_check
def any_scale_of_numbers(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Small numbers are held to small errors."""
    for size, flags in itertools.product(
        (1e-3, 1.0, 30.0), (Flags(scatter=True, scale=True), Flags(bias=False))
    ):
        solve(backend, make(dtype, device, flags=flags, size=size, backend=backend), f"size {size}, {flags}")


def memory_layout(layout: str, backend: str, dtype: torch.dtype, device: Device) -> None:
    """Inputs and incoming gradients of any strides and offsets, a stride of 0 among them."""
    for flags in (FULL, Flags(bias=True)):
        problem = make(dtype, device, routing(9, 4, 2, "even"), flags=flags, backend=backend)
        for name in (*problem.inputs(), "grad"):
            changed = problem.with_inputs(**{name: strided(getattr(problem, name), layout)})
            solve(backend, changed, f"{name} {layout}, {flags}")


CHECKS.update({f"memory_layout_{layout}": partial(memory_layout, layout) for layout in STRIDES})


@_check
def no_tokens(backend: str, dtype: torch.dtype, device: Device) -> None:
    """T = 0: empty output, zero gradients."""
    for flags in VARIANTS:
        results = solve(
            backend, make(dtype, device, torch.zeros(0, 2, dtype=torch.long), flags=flags, backend=backend)
        )
        assert results["weight"] is not None
        assert not bool(results["weight"].any())


@_check
def full_precision(backend: str, dtype: torch.dtype, device: Device) -> None:
    """fp32 is not TF32, and sums are not rounded on the way."""
    if dtype not in (torch.float32, torch.float64):
        ones, expected = torch.full((1, 512), 1.0), 512.0  # a running sum in bf16 stops at 256
    else:
        ones, expected = torch.full((1, 64), 1 + 2.0**-12), 64.015625
    problem = make(dtype, device, torch.tensor([[0]]), 1, 1, ones.shape[1], Flags(), backend=backend)
    out = problem.call(backend, x=ones.to(device, dtype), weight=torch.ones_like(problem.weight))
    assert bool((out == expected).all()), f"{out.tolist()} instead of {expected}"


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from itertools.combinations(names, size)


@_check
def frozen_inputs(backend: str, dtype: torch.dtype, device: Device) -> None:
    """Every combination of needed gradients gives those, bit by bit, and None for the others."""
    for flags in (FULL, replace(FULL, activation=None, gather=False)):
        problem = make(dtype, device, flags=flags, backend=backend)
        full = solve(backend, problem)
        for needs in _subsets(tuple(problem.inputs())):
            results = problem.run(backend, needs)
            for name in problem.inputs():
                actual, expected = results[name], full[name]
                if name not in needs:
                    assert actual is None, f"{name} got a gradient although only {needs} need one"
                else:
                    assert actual is not None, f"{name} got no gradient when {needs} need one"
                    assert expected is not None
                    assert_same(actual, expected, name=f"{name} when {needs} need a gradient")


@_check
def backward_twice(backend: str, dtype: torch.dtype, device: Device) -> None:
    """A second backward through a kept graph is the first again, and nobody's tensor has changed."""
    for flags in (FULL, Flags(activation="gelu", bias=True)):
        problem = make(dtype, device, flags=flags, backend=backend)
        before = {name: value.clone() for name, value in {**problem.inputs(), "grad": problem.grad}.items()}
        leaves = {n: v.detach().requires_grad_() for n, v in problem.inputs().items()}
        out = problem.call(backend, **leaves)
        rounds = [
            torch.autograd.grad(out, list(leaves.values()), problem.grad, retain_graph=True) for _ in "12"
        ]
        for name, first, second in zip(leaves, *rounds, strict=True):
            assert_same(second, first, name=f"{name}'s gradient, the second time, {flags}")
        for name, value in before.items():
            assert_same(getattr(problem, name), value, name=f"{name} after the call, {flags}")


@_check
def same_bits_every_time(backend: str, dtype: torch.dtype, device: Device) -> None:
    """40 repeats, forward and backward."""
    problem = make(dtype, device, backend=backend)
    first = problem.run(backend)
    for _ in range(40):
        for name, value in problem.run(backend).items():
            expected = first[name]
            assert value is not None
            assert expected is not None
            assert_same(value, expected, name=name)


@_check
def writes_only_its_output(backend: str, dtype: torch.dtype, device: Device) -> None:
    """``out`` gets exactly what is returned without it, and nothing around it is touched."""
    for flags, columns in itertools.product(VARIANTS, (0, 5)):
        problem = make(dtype, device, flags=flags, backend=backend)
        out, untouched = guard_band(tuple(problem.grad.shape), dtype, device, columns=columns)
        with torch.no_grad():
            returned, expected = problem.call(backend, out=out), problem.call(backend)
        assert returned is out, "out was not returned"
        untouched()
        assert_same(out, expected, name=f"out, {flags}")
