"""moe_mlp in plain PyTorch: block by block of experts, so that rows stay in cache from gather to product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch._backends.eager.cuts import price
from anabranch._backends.eager.epilogue import activate
from anabranch._backends.eager.product import Block, batches, gather, matmul_nt
from anabranch._backends.eager.walk import Scratch, Walk
from anabranch.ops.moe_mlp.call import MoeMlpCall
from anabranch.ops.precision import wide
from anabranch.ops.route.call import Fields, Routing

Gradients = tuple[Tensor | None, ...]


def supports(call: MoeMlpCall) -> str | None:
    """Everything."""
    return None


def forward(call: MoeMlpCall, out: Tensor, h: Tensor | None, routing: Routing) -> Fields:
    """Routes, and writes the output, and the pre-activation if ``h`` is given. Returns the fields of the layout."""
    assert call.expert_ids is not None
    fields = routing(call.expert_ids, call.down.shape[0])
    work = _Work(call.routed(fields))
    walk, early = work.walk, work.on_output and work.half
    if h is not None:
        walk.zero_rest(h)
    y = walk.new_places(call.x, call.x.shape[1])
    for block in walk.blocks:
        w = work.weights[block.places]
        if h is not None and walk.rows is None:
            rounded = h[block.places]
        else:
            rounded = work.scratch("z", block, call.gate_up_nk.shape[1])
        z = work.pre_activation(block, rounded)
        if h is not None:
            walk.put_back(rounded, h, block)
        a = activate(call.epilogue, *call.columns(z))
        if early:
            # The weight joins the rounding that half precision needs here anyway. In place: a is new, or z's memory.
            a.mul_(w)
        a = work.scratch.rounded("a", block, a)
        y_block = y[block.places]
        if early and call.down_bias is not None:
            for e, i, j in block.experts:
                matmul_nt(a[i:j], call.down_nk[e], y_block[i:j], w[i:j] * call.down_bias[e])
        else:
            block.multiply(a, call.down_nk, y_block, call.down_bias)
    out.copy_(walk.combine(y, call.expert_weights if work.on_output and not early else None))
    return fields


def backward(call: MoeMlpCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]) -> Gradients:
    """The gradients of x, gate_up, down, expert_weights and the biases; None for those not needed.

    Without h each block makes its own part again.
    """
    work = _Backward(call, needs)
    for block in work.walk.blocks:
        work.through(block, grad, h)
    return work.result()


class _Work:
    """A call's walk with the routing weight of each place."""

    def __init__(self, call: MoeMlpCall) -> None:
        assert call.layout is not None
        acc = wide(call.dtype)
        self.call = call
        self.on_output = call.weight_on == "output"
        # On the input a filler's weight of 0 would leave the bias and f(0).
        self.walk = Walk.of(call.layout, call.gate_up_nk.shape[1], self._price())
        self.scratch = Scratch(self.walk, call.x)
        weights = call.expert_weights.reshape(-1).index_select(0, self.walk.slots).to(acc)
        self.weights = weights[:, None]
        self.half = call.dtype != acc

    def _price(self) -> int | None:
        """What :meth:`Walk.of` asks for."""
        call = self.call
        if not (self.on_output and batches(call.x)):
            return None
        return price((call.gate_up.numel() + call.down.numel()) // call.down.shape[0])

    def rows_of(self, value: Tensor, block: Block, name: str) -> Tensor:
        """``value``'s row of each place's token."""
        return gather(value, self.walk.tokens[block.places], self.scratch(name, block, value.shape[1]))

    def inputs(self, block: Block) -> Tensor:
        """The up-projection's operand."""
        x = self.rows_of(self.call.x, block, "x")
        return x if self.on_output else x.copy_(x.to(self.weights.dtype) * self.weights[block.places])

    def pre_activation(self, block: Block, rounded: Tensor) -> Tensor:
        """The up-projection into ``rounded``; returned as the accumulator has it, where that is to be had."""
        z = self.scratch.wide("wide z", block, rounded)
        block.multiply_wide(self.inputs(block), self.call.gate_up_nk, rounded, z, self.call.gate_up_bias)
        return z


class _Backward(_Work):
    """The gradients as far as the blocks seen have made them; None for those not needed."""

    def __init__(self, call: MoeMlpCall, needs: Sequence[bool]) -> None:
        super().__init__(call)
        if (fillers := self.walk.fillers) is not None:
            self.weights.masked_fill_(fillers[:, None], 0)  # so no gradient comes of them
        self.need_x, need_gate_up, need_down, need_weights, need_gate_up_bias, need_down_bias = needs
        need_rows = self.need_x or (need_weights and not self.on_output)
        self.need_d_h = need_rows or need_gate_up or need_gate_up_bias
        self.need_dot = need_weights and self.on_output
        self.need_a = need_down or self.need_dot
        self.d_rows = self.walk.new_places(call.x, call.x.shape[1]) if need_rows else None
        self.d_gate_up = self.walk.new_gradient(call.gate_up, need_gate_up)
        self.d_down = self.walk.new_gradient(call.down, need_down)
        self.d_weights = self.walk.new_places(self.weights, 1) if need_weights else None
        self.d_gate_up_bias = self.walk.new_gradient(call.gate_up_bias, need_gate_up_bias)
        self.d_down_bias = self.walk.new_gradient(call.down_bias, need_down_bias)

    def through(self, block: Block, grad: Tensor, h: Tensor | None) -> None:
        """Adds a block."""
        call = self.call
        d_out = self.rows_of(grad, block, "d_out")
        if self.need_d_h or self.need_a:
            if h is None:
                z = self.scratch("z", block, call.gate_up_nk.shape[1])
                self.pre_activation(block, z)
            else:
                z = self.walk.of_rows(h, block)
            wide_z = self.scratch.wide("wide z", block, z)
            d_z = self._down(block, d_out, call.columns(z if wide_z is z else wide_z.copy_(z)))
            if self.need_d_h:
                d_h = self.scratch("d_h", block, z.shape[1])
                for column, value in zip(call.columns(d_h), d_z, strict=True):
                    column.copy_(value)
                self._up(block, d_h)
        if self.d_down_bias is not None:
            weighted = d_out * self.weights[block.places] if self.on_output else d_out
            block.bias_gradient(weighted, self.d_down_bias)

    def _weighted(self, value: Tensor, block: Block, name: str) -> Tensor:
        """Rows times the routing weight of their place."""
        memory = self.scratch(name, block, value.shape[1], value.dtype)
        return torch.mul(value, self.weights[block.places], out=memory)

    def _down(self, block: Block, d_out: Tensor, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """From the output's gradient to the pre-activation's, if that is needed."""
        call = self.call
        d_z: tuple[Tensor, ...] = ()
        if self.need_d_h or self.need_dot:
            rounded = self.scratch("d_a", block, call.down_nk.shape[2])
            d_a = self.scratch.wide("wide d_a", block, rounded)
            block.multiply_wide(d_out, call.down_nk.mT, rounded, d_a)
        if self.need_d_h:
            d_f = self._weighted(d_a, block, "d_f") if self.on_output else d_a
            d_z = call.epilogue.backward(d_f, *z)
        if self.need_a:
            a = activate(call.epilogue, *z)
        if self.d_weights is not None and self.on_output:
            dots = d_a.mul_(a).sum(-1, keepdim=True)
            if call.down_bias is not None:
                for e, i, j in block.experts:
                    dots[i:j] += (d_out[i:j].to(dots.dtype) * call.down_bias[e]).sum(-1, keepdim=True)
            self.d_weights[block.places] = dots
        if self.d_down is not None:
            a = self.scratch.rounded("a", block, self._weighted(a, block, "aw") if self.on_output else a)
            block.weight_gradient(d_out, a, self.d_down, call.transpose_weight)
        return d_z

    def _up(self, block: Block, d_h: Tensor) -> None:
        """From the pre-activation's gradient to those of the up-projection's operands."""
        call = self.call
        if self.d_rows is not None:
            rows = self.d_rows[block.places]
            if self.on_output:
                block.multiply(d_h, call.gate_up_nk.mT, rows)
            else:
                d_x = self.scratch.wide("wide d_x", block, rows)
                block.multiply_wide(d_h, call.gate_up_nk.mT, rows, d_x)
                if self.d_weights is not None:
                    x = self.rows_of(call.x, block, "x")
                    self.d_weights[block.places] = (d_x * x).sum(-1, keepdim=True)
                if self.need_x:
                    rows.copy_(d_x * self.weights[block.places])
        if self.d_gate_up is not None:
            block.weight_gradient(d_h, self.inputs(block), self.d_gate_up, call.transpose_weight)
        if self.d_gate_up_bias is not None:
            block.bias_gradient(d_h, self.d_gate_up_bias)

    def result(self) -> Gradients:
        """All of them, when every block is through."""
        d_weights = None if self.d_weights is None else self.walk.to_slots(self.d_weights)
        return (
            self.walk.combine(self.d_rows) if self.need_x and self.d_rows is not None else None,
            self.d_gate_up,
            self.d_down,
            None if d_weights is None else d_weights.to(self.call.expert_weights.dtype),
            self.d_gate_up_bias,
            self.d_down_bias,
        )
