"""Products on slices of experts: the fastest that PyTorch has for a device and a dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.ops.precision import wide

ONEDNN_WORTH = 2**20
"""Multiplications from which oneDNN's speed outweighs what it takes to call it."""

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CONVERTS_FP16 = _ONEDNN and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
_MM_KEEPS_FP32 = "dtype" in torch.ops.aten.mm.overloads()


def exposes_accumulator(value: Tensor) -> bool:
    """Whether a product of half precision matrices can be had before it is rounded."""
    if value.device.type == "cpu":
        return value.dtype == torch.float16 and _CONVERTS_FP16
    return value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16) and _MM_KEEPS_FP32


def matmul_nt(a: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = a @ w.T + bias`` for any strides, rounded once; bias is (N,) or (M, N).

    ``out`` has the operands' dtype, or where :func:`exposes_accumulator` says so fp32.
    """
    on_cpu = a.device.type == "cpu"
    if on_cpu and a.dtype == torch.float16 and _CONVERTS_FP16:
        # Without fp16 arithmetic in the CPU, torch.mm multiplies number by number.
        a, w = a.float(), w.float()
    if on_cpu and a.dtype == torch.float32 and _ONEDNN and a.numel() * w.shape[0] >= ONEDNN_WORTH:
        # torch.mm would take MKL, which runs at half of oneDNN's speed on the CPUs of other vendors.
        value = torch.ops.mkldnn._linear_pointwise.default(a, w, None, "none", [], "")
    elif out.dtype == a.dtype:
        if bias is None:
            torch.mm(a, w.T, out=out)
        else:
            torch.addmm(bias.to(a.dtype), a, w.T, out=out)
        return
    else:
        value = torch.mm(a, w.T) if on_cpu else torch.mm(a, w.T, out_dtype=out.dtype)
    if bias is None:
        out.copy_(value)
    else:
        torch.add(value, bias, out=out)


def whole_rows(value: Tensor) -> Tensor:
    """The matrix with each row in one piece: gathering scattered elements costs more than this one copy."""
    return value if value.stride(-1) == 1 else value.contiguous()


def gather(value: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """``out = value[index]``, by rows."""
    return torch.index_select(whole_rows(value), 0, index, out=out)


def batches(value: Tensor) -> bool:
    """Whether one product of many equally tall matrices is worth the rows that fill up the shorter ones.

    oneDNN deals a batch out to threads matrix by matrix, so that each weight is brought into its order just once.
    fp32 batches go to MKL (see :func:`matmul_nt`), and fp16 without arithmetic of its own nowhere fast.
    """
    return value.device.type == "cpu" and value.dtype == torch.bfloat16 and _ONEDNN


@dataclass(frozen=True)
class Block:
    """Some consecutive experts' places in a walk: ``start:stop``, and (expert, i, j), i:j counted from start."""

    start: int
    stop: int
    experts: list[tuple[int, int, int]]

    @property
    def places(self) -> slice:
        """``start:stop``."""
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        """How many places."""
        return self.stop - self.start

    @property
    def sizes(self) -> list[int]:
        """Places of each expert."""
        return [j - i for _, i, j in self.experts]

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """The experts' matrices in an (E, ...) tensor. Cutting all at once costs a fraction of one by one."""
        first, found = self.experts[0][0], self.of_experts(weight).unbind(0)
        return [found[e - first] for e, _, _ in self.experts]

    def of_experts(self, value: Tensor) -> Tensor:
        """The part of an (E, ...) tensor from the first expert to the last."""
        return value[self.experts[0][0] : self.experts[-1][0] + 1]

    def multiply(self, a: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Each expert's rows of ``a`` times its matrix of ``weight`` (E, N, K_dim), plus its row of ``bias``."""
        biases = [None] * len(self.experts) if bias is None else self.matrices(bias)
        rows, results = a.split(self.sizes), out.split(self.sizes)
        for mine, matrix, result, b in zip(rows, self.matrices(weight), results, biases, strict=True):
            matmul_nt(mine, matrix, result, b)

    def multiply_wide(
        self, a: Tensor, weight: Tensor, rounded: Tensor, exact: Tensor, bias: Tensor | None = None
    ) -> None:
        """:meth:`multiply` into ``rounded`` and, unrounded where that is to be had, into the fp32 ``exact``.

        Both are one tensor where the operands' dtype is the accumulator's.
        """
        first, second = (exact, rounded) if exposes_accumulator(a) else (rounded, exact)
        self.multiply(a, weight, first, bias)
        if first is not second:
            second.copy_(first)

    def weight_gradient(self, grad: Tensor, x: Tensor, d_weight: Tensor, transposed: bool) -> None:
        """Each expert's ``grad.T @ x`` into its matrix of ``d_weight``, or if that is transposed ``x.T @ grad``."""
        left, right = (x.T, grad.T) if transposed else (grad.T, x.T)
        lefts, rights = left.split(self.sizes, 1), right.split(self.sizes, 1)
        for a, b, result in zip(lefts, rights, self.matrices(d_weight), strict=True):
            matmul_nt(a, b, result)

    def bias_gradient(self, grad: Tensor, d_bias: Tensor) -> None:
        """The sum of each expert's rows of ``grad`` into its row of ``d_bias``."""
        for e, i, j in self.experts:
            d_bias[e] = grad[i:j].sum(0, dtype=wide(grad.dtype))


@dataclass(frozen=True)
class EvenBlock(Block):
    """A block of experts that follow on each other and have equally many places, some of them fillers.

    Attributes:
        rows: the rows that the other places hold.
    """

    rows: slice

    def multiply(self, a: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """As for any block, in one product."""
        if bias is not None:
            super().multiply(a, weight, out, bias)
        else:
            torch.bmm(self._batch(a), self.of_experts(weight).mT, out=self._batch(out))

    def weight_gradient(self, grad: Tensor, x: Tensor, d_weight: Tensor, transposed: bool) -> None:
        """As for any block, in one product."""
        left, right = (x, grad) if transposed else (grad, x)
        torch.bmm(self._batch(left).mT, self._batch(right), out=self.of_experts(d_weight))

    def _batch(self, value: Tensor) -> Tensor:
        return value.view(len(self.experts), -1, value.shape[1])
