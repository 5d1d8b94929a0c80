"""A grouped_gemm with its inputs, and two independent answers: an fp64 oracle and a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch import ExpertLayout, grouped_gemm
from anabranch.testing.budget import assert_component_wise, assert_within_budget
from anabranch.testing.inputs import randn

__all__ = ["FORMULAS", "INPUTS", "Flags", "Problem", "majorant"]

INPUTS = ("x", "weight", "bias", "scale")
"""The differentiable inputs, in the order of the operator."""


def _sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def _gelu(z: Tensor) -> Tensor:
    return z / 2 * (1 + torch.erf(z / math.sqrt(2)))


def _gelu_tanh(z: Tensor) -> Tensor:
    return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _positive(z: Tensor) -> Tensor:
    return torch.where(z > 0, z, 0)


def _most(z: Tensor, limit: float) -> Tensor:
    return torch.where(z > limit, limit, z)


def _between(z: Tensor, limit: float) -> Tensor:
    return -_most(-_most(z, limit), limit)


FORMULAS: dict[str | None, Callable[..., Tensor]] = {
    None: lambda z: z,
    "identity": lambda z: z,
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _positive,
    "relu_squared": lambda z: _positive(z) ** 2,
    "swiglu": lambda g, u: g * _sigmoid(g) * u,
    "geglu": lambda g, u: _gelu(g) * u,
    "geglu_tanh": lambda g, u: _gelu_tanh(g) * u,
    "reglu": lambda g, u: _positive(g) * u,
    "gpt_oss": lambda g, u: (_between(u, 7.0) + 1) * _most(g, 7.0) * _sigmoid(1.702 * _most(g, 7.0)),
    "clamped_swiglu": lambda g, u: _most(g, 7.0) * _sigmoid(_most(g, 7.0)) * _between(u, 7.0),
}
"""Every epilogue by its textbook formula. The gated ones take gate, then up."""


def _gated(activation: str | None) -> bool:
    return FORMULAS[activation].__code__.co_argcount == 2


def majorant(activation: str | None) -> Callable[..., Tensor]:
    """What bounds an epilogue, and its slopes too, at absolute operands: errors are relative to it."""
    if activation == "relu_squared":
        return torch.square
    if activation == "gpt_oss":
        return lambda g, u: g * (u + 1)
    return torch.mul if _gated(activation) else FORMULAS[None]


@dataclass(frozen=True)
class Flags:
    """How grouped_gemm is asked; bias and scale say whether there is one."""

    gather: bool = False
    scatter: bool = False
    bias: bool = False
    scale: bool = False
    activation: str | None = None
    transpose_weight: bool = False

    def __str__(self) -> str:
        names = [n for n in ("gather", "scatter", "bias", "scale", "transpose_weight") if getattr(self, n)]
        return "+".join([*names, *([self.activation] if self.activation else [])]) or "plain"


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs of grouped_gemm and the output's gradient. ``ids`` (T, K) alone says what the oracle does.

    What nobody may read holds NaN: rows and slots of dropped choices, in the inputs and in the gradient.
    """

    ids: Tensor
    layout: ExpertLayout
    flags: Flags
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    grad: Tensor
    _cache: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        ids: Tensor,
        num_experts: int,
        N: int,
        K_dim: int,
        dtype: torch.dtype,
        flags: Flags = Flags(),
        *,
        size: float = 1.0,
        counts: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
    ) -> Problem:
        """Random inputs for (T, K) ``ids``; with ``counts``, the layout is made of these instead.

        ``size`` is the standard deviation of x and of the gradient.
        """
        num_tokens, top_k = ids.shape
        device, rows = ids.device, ids.numel()

        def draw(*shape: int, size: float = 1.0) -> Tensor:
            return randn(*shape, dtype=dtype, scale=size, device=device, generator=generator)

        if counts is None:
            layout = ExpertLayout.from_topk(ids, num_experts)
        else:
            layout = ExpertLayout.from_counts(torch.tensor(counts, device=device), rows)
        weight = draw(num_experts, N, K_dim, size=K_dim**-0.5 if K_dim else 1)
        problem = cls(
            ids,
            layout,
            flags,
            draw(num_tokens if flags.gather else rows, K_dim, size=size),
            weight.mT.contiguous() if flags.transpose_weight else weight,
            draw(num_experts, N) if flags.bias else None,
            torch.rand(num_tokens, top_k, generator=generator).add(0.1).to(device) if flags.scale else None,
            draw(rows, N // (2 if _gated(flags.activation) else 1), size=size),
        )
        problem._forbid()
        return problem

    def _forbid(self) -> None:
        slots = {slot for _, slot, _ in self.rows()}
        rows = range(len(slots))
        everything, top_k = range(self.ids.numel()), self.ids.shape[1]
        read = {slot // top_k for slot in slots} if self.flags.gather else rows
        self.x[[i for i in range(self.x.shape[0]) if i not in read]] = math.nan
        self.grad[[i for i in everything if i not in (slots if self.flags.scatter else rows)]] = math.nan
        if self.scale is not None:
            self.scale.view(-1)[[i for i in everything if i not in slots]] = math.nan

    def rows(self) -> list[tuple[int, int, int]]:
        """(row, slot, expert) of every row there is: by expert, then by slot."""
        experts = self.weight.shape[0]
        ids = enumerate(self.ids.reshape(-1).tolist())
        ordered = sorted((expert, slot) for slot, expert in ids if 0 <= expert < experts)
        return [(row, slot, expert) for row, (expert, slot) in enumerate(ordered)]

    def inputs(self) -> dict[str, Tensor]:
        """The differentiable inputs there are, by name."""
        named = {name: getattr(self, name) for name in INPUTS}
        return {name: value for name, value in named.items() if value is not None}

    def with_inputs(self, **changed: Any) -> Problem:
        """The same problem with other tensors."""
        return replace(self, _cache={}, **changed)

    def call(self, backend: str | None, out: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """grouped_gemm of these inputs, or of those given instead."""
        tensors = {**self.inputs(), **inputs}
        flags = self.flags
        return grouped_gemm(
            tensors["x"],
            tensors["weight"],
            self.layout,
            gather=flags.gather,
            scatter=flags.scatter,
            bias=tensors.get("bias"),
            scale=tensors.get("scale"),
            activation=flags.activation,
            transpose_weight=flags.transpose_weight,
            out=out,
            backend=backend,
        )

    def run(self, backend: str | None, needs: Sequence[str] = INPUTS) -> dict[str, Tensor | None]:
        """The output and the gradients of the inputs named in ``needs``; None for the others."""
        leaves = {n: v.detach().requires_grad_(n in needs) for n, v in self.inputs().items()}
        out = self.call(backend, **leaves)
        if out.requires_grad:
            out.backward(self.grad)
        return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}

    def _differentiate(self, out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        given = list(leaves.values())
        if out.requires_grad:
            grad = self.grad.to(out.device, out.dtype)
            grads = torch.autograd.grad(out, given, grad, materialize_grads=True)
        else:
            grads = tuple(torch.zeros_like(v) for v in given)
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    def oracle(self) -> dict[str, Tensor]:
        """Output and gradients in fp64, one row at a time."""
        if "oracle" not in self._cache:
            self._cache["oracle"] = self._one_row_at_a_time(FORMULAS[self.flags.activation])
        return self._cache["oracle"]

    def _one_row_at_a_time(self, formula: Callable[..., Tensor]) -> dict[str, Tensor]:
        # So many small steps are the CPU's to take.
        leaves = {n: v.detach().cpu().double().requires_grad_() for n, v in self.inputs().items()}
        top_k, flags = self.ids.shape[1], self.flags
        out = [torch.zeros(self.grad.shape[1], dtype=torch.float64)] * self.grad.shape[0]
        for row, slot, expert in self.rows():
            x = leaves["x"][slot // top_k if flags.gather else row]
            w = leaves["weight"][expert]
            z = x @ w if flags.transpose_weight else w @ x
            if flags.bias:
                z = z + leaves["bias"][expert]
            half = z.shape[0] // 2
            y = formula(*((z[:half], z[half:]) if _gated(flags.activation) else (z,)))
            if flags.scale:
                y = y * leaves["scale"].reshape(-1)[slot]
            out[slot if flags.scatter else row] = y
        stacked = torch.stack(out) if out else self.grad.cpu().double()
        found = self._differentiate(stacked, leaves)
        return {name: value.to(self.x.device) for name, value in found.items()}

    def magnitude(self) -> dict[str, Tensor]:
        """The oracle of absolute values: what roundings are relative to, in each element of each result."""
        if "magnitude" not in self._cache:
            absolute = {name: value.abs() for name, value in self.inputs().items()}
            problem = self.with_inputs(grad=self.grad.abs(), **absolute)
            self._cache["magnitude"] = problem._one_row_at_a_time(majorant(self.flags.activation))
        return self._cache["magnitude"]

    def baseline(self) -> dict[str, Tensor]:
        """Output and gradients as plain PyTorch gives them in the tested dtype, one F.linear an expert."""
        leaves = {n: v.detach().clone().requires_grad_() for n, v in self.inputs().items()}
        top_k, flags, rows = self.ids.shape[1], self.flags, self.rows()
        out = torch.zeros_like(self.grad)
        for expert in sorted({expert for _, _, expert in rows}):
            mine = [(row, slot) for row, slot, e in rows if e == expert]
            read = torch.tensor([slot // top_k if flags.gather else row for row, slot in mine])
            write = torch.tensor([slot if flags.scatter else row for row, slot in mine])
            w = leaves["weight"][expert]
            bias = leaves["bias"][expert] if flags.bias else None
            z = F.linear(leaves["x"][read.to(self.x.device)], w.T if flags.transpose_weight else w, bias)
            y = FORMULAS[flags.activation](*z.chunk(2 if _gated(flags.activation) else 1, dim=-1))
            if flags.scale:
                slots = torch.tensor([slot for _, slot in mine], device=self.x.device)
                y = y.to(torch.promote_types(y.dtype, torch.float32)) * leaves["scale"].reshape(-1, 1)[slots]
            out = out.index_put((write.to(self.x.device),), y.to(out.dtype))
        return self._differentiate(out, leaves)

    def check(self, results: dict[str, Tensor | None], name: str = "", *, one_rounding: bool = True) -> None:
        """Demands that results are right, by bounds that follow from the contract.

        The output, and in fp32 and fp64 the gradients, by the error bound of sums; gradients in half
        precision, whose pre-activation is rounded, by the baseline's error.

        Args:
            results: what :meth:`run` returned, or a part of it.
            name: what to call them in messages.
            one_rounding: whether the output is rounded once, after bias, activation and scale.
        """
        for key, actual in results.items():
            assert actual is not None, f"{name}{key}: no gradient"
            label, reference, magnitude = f"{name}{key}", self.oracle()[key], self.magnitude()[key]
            expected = self.inputs()[key].dtype if key in INPUTS else self.grad.dtype
            assert actual.dtype == expected, f"{label}: dtype {actual.dtype}, expected {expected}"
            plain = key == "out" and (one_rounding or self.flags.activation is None)
            if plain or self.grad.dtype in (torch.float32, torch.float64):
                terms = sum(self.weight.shape[1:]) + (self.ids.numel() if key in ("weight", "bias") else 0)
                bounds = {"constant": 4, "roundings": 1 if one_rounding else 2}
                assert_component_wise(actual, reference, magnitude, terms, name=label, **bounds)
            else:
                # The baseline may be lucky in a small result; a rounded intermediate is no fault in any, and moves
                # a result by its share of the magnitude, however small the result is (as near silu's minimum).
                luck = torch.finfo(self.grad.dtype).eps / 2 * reference.abs()
                baseline = self.baseline()[key].to(reference)
                baseline = torch.where((baseline - reference).abs() < luck, reference + luck, baseline)
                assert_within_budget(actual, reference, baseline, name=label, scale=magnitude)
