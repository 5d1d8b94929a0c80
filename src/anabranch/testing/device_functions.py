"""An epilogue's functions for Triton kernels, alone: run on operands that are made to be hard, and held to its maths.

Imports Triton, which interprets with TRITON_INTERPRET=1, and runs on a GPU otherwise.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch.epilogues import Epilogue
from anabranch.testing.budget import assert_component_wise
from anabranch.testing.inputs import randn
from anabranch.testing.problems import majorant

__all__ = ["check", "operands", "results", "variants"]

BLOCK = 256


@triton.jit
def _forward_kernel(
    p_z, p_out, size, EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, B: tl.constexpr
):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < size
    z = tl.load(p_z + o, m, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(p_z + size + o, m, other=0.0).to(tl.float32)
        tl.store(p_out + o, EPILOGUE(z, up, P), m)
    else:
        tl.store(p_out + o, EPILOGUE(z, P), m)


@triton.jit
def _backward_kernel(
    p_grad, p_z, p_out, size, EPILOGUE: tl.constexpr, P: tl.constexpr, GATED: tl.constexpr, B: tl.constexpr
):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < size
    grad = tl.load(p_grad + o, m, other=0.0).to(tl.float32)
    z = tl.load(p_z + o, m, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(p_z + size + o, m, other=0.0).to(tl.float32)
        d_gate, d_up, out = EPILOGUE(grad, z, up, P)
        tl.store(p_out + o, d_gate, m)
        tl.store(p_out + size + o, d_up, m)
        tl.store(p_out + 2 * size + o, out, m)
    else:
        d_z, out = EPILOGUE(grad, z, P)
        tl.store(p_out + o, d_z, m)
        tl.store(p_out + size + o, out, m)


def variants(cls: type[Epilogue]) -> list[Epilogue]:
    """An epilogue with its default parameters and, if it has any, with others: all differ, none is above 1."""
    default = cls()
    others = {name: 0.5 + i / 8 for i, name in enumerate(default.__dict__)}
    return [default, cls(**others)] if others else [default]


def operands(epilogue: Epilogue, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """(gradient (size,), pre-activation (columns, size)): random ones, and every combination of hard values.

    Those are zeros, what exponentials under- and overflow at, and each parameter (where a clamp may be) with its
    neighbourhood; each with both signs.
    """
    parameters = [p * (1 + e / 64) for p in epilogue.__dict__.values() for e in (-1, 0, 1)]
    values = [0.0, 2.0**-10, 1.0, 20.0, 90.0, 100.0 if dtype == torch.float16 else 1e4, *parameters]
    hard = torch.tensor([*values, *(-v for v in values)], dtype=torch.float64)
    columns = [hard] if epilogue.columns == 1 else list(torch.cartesian_prod(hard, hard).T)
    drawn = [
        torch.cat([randn(100, dtype=torch.float64, device="cpu", scale=s) for s in (0.01, 2, 20)])
        for _ in columns
    ]
    z = torch.stack([torch.cat(pair) for pair in zip(columns, drawn, strict=True)])
    grad = randn(z.shape[1], dtype=torch.float64, device="cpu")
    grad[::7] = 0
    return grad.to(device, dtype), z.to(device, dtype)


def results(
    code: ModuleType | SimpleNamespace, epilogue: Epilogue, grad: Tensor, z: Tensor
) -> dict[str, Tensor]:
    """What the ``forward`` and ``backward`` of some device code give, by name, in the operands' dtype."""
    size, P = grad.numel(), tuple(epilogue.__dict__.values())
    out, back = torch.full_like(grad, math.nan), grad.new_full((len(z) + 1, size), math.nan)
    grid, options = (triton.cdiv(size, BLOCK),), {"P": P, "GATED": epilogue.columns == 2, "B": BLOCK}
    _forward_kernel[grid](z, out, size, EPILOGUE=code.forward, **options)
    _backward_kernel[grid](grad, z, back, size, EPILOGUE=code.backward, **options)
    names = ("d_z",) if len(z) == 1 else ("d_gate", "d_up")
    return dict(zip(("forward", *names, "backward's output"), (out, *back), strict=True))


def check(found: dict[str, Tensor], epilogue: Epilogue, grad: Tensor, z: Tensor) -> None:
    """Demands that results are the epilogue's maths in fp64, but for the errors of fp32 and one rounding.

    What the dtype cannot hold is not looked at.
    """
    # A kernel has the parameters in fp32.
    exact = type(epilogue)(**{n: float(torch.tensor(v)) for n, v in epilogue.__dict__.items()})
    wide, wide_grad = z.double(), grad.double()
    out = exact.forward(*wide)
    expected = [out, *exact.backward(wide_grad, *wide), out]
    # Beyond a limit an operand counts as the limit does.
    leaves = [v.abs().clamp(max=getattr(exact, "limit", math.inf)).requires_grad_() for v in wide]
    bound = majorant(epilogue.name)(*leaves)
    bounds = [bound.detach(), *torch.autograd.grad(bound, leaves, wide_grad.abs()), bound.detach()]
    for (key, actual), value, scale in zip(found.items(), expected, bounds, strict=True):
        held = value.abs() < torch.finfo(actual.dtype).max / 2
        assert held.double().mean() > 0.5, f"{epilogue.spec} {key}: hardly a result is finite"
        # An exponential is as many units off as its argument, which is below 90 where the result is not 0 or 1;
        # the slope of a tanh's argument multiplies that.
        assert_component_wise(
            actual[held], value[held], scale[held], length=1, constant=256, name=f"{epilogue.spec} {key}"
        )
