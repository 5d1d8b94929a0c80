"""grouped_gemm in plain PyTorch: one product per expert, all else by blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from anabranch._backends.eager.epilogue import activate
from anabranch._backends.eager.product import Block, gather
from anabranch._backends.eager.walk import Scratch, Walk
from anabranch.epilogues import Identity
from anabranch.ops.grouped_gemm.call import NO_TILES, GroupedGemmCall
from anabranch.ops.precision import wide

Gradients = tuple[Tensor | None, ...]


def supports(call: GroupedGemmCall) -> str | None:
    """Everything but a configuration of tiles."""
    configs = (call.config, call.d_x_config, call.d_weight_config)
    return None if configs == (None, None, None) else NO_TILES


def forward(call: GroupedGemmCall, out: Tensor, h: Tensor | None) -> None:
    """Writes the output, and the rounded pre-activation if ``h`` is given."""
    work = _Work(call)
    walk, columns = work.walk, call.weight_nk.shape[1]
    if not call.scatter:
        walk.zero_rest(out)
    elif walk.drops:
        out.zero_()
    if h is not None:
        walk.zero_rest(h)
    plain = isinstance(call.epilogue, Identity) and call.scale is None
    for block in walk.blocks:
        x = work.inputs(block)
        if plain and h is None and not call.scatter:
            y = walk.of_rows(out, block)
            block.multiply(x, call.weight_nk, y, call.bias)
            walk.put_back(y, out, block)
            continue
        z = work.scratch("z", block, columns) if h is None else walk.of_rows(h, block)
        y = work.scratch.wide("wide z", block, z)
        block.multiply_wide(x, call.weight_nk, z, y, call.bias)
        if h is not None:
            walk.put_back(z, h, block)
        if plain:
            y = z
        else:
            y = activate(call.epilogue, *y.chunk(call.epilogue.columns, dim=-1))
            y = y if work.scale is None else y * work.scale[block.places]
        out[walk.slots[block.places] if call.scatter else walk.index(block)] = y.to(out.dtype)


def backward(call: GroupedGemmCall, grad: Tensor, h: Tensor | None, needs: Sequence[bool]) -> Gradients:
    """The gradients of x, weight, bias and scale; None for those not needed."""
    work = _Backward(call, needs)
    for block in work.walk.blocks:
        work.through(block, grad, h)
    return work.result()


class _Work:
    """A call's walk with the scale of each place."""

    def __init__(self, call: GroupedGemmCall) -> None:
        self.call = call
        self.walk = Walk.of(call.layout, call.weight_nk.shape[1])
        self.scratch = Scratch(self.walk, call.x)
        self.scale = None
        if call.scale is not None:
            self.scale = call.scale.reshape(-1, 1).index_select(0, self.walk.slots).to(wide(call.dtype))

    def inputs(self, block: Block) -> Tensor:
        """The rows of x."""
        if not self.call.gather:
            return self.walk.of_rows(self.call.x, block)
        memory = self.scratch("x", block, self.call.x.shape[1])
        return gather(self.call.x, self.walk.tokens[block.places], memory)


class _Backward(_Work):
    """The gradients as far as the blocks seen have made them; None for those not needed."""

    def __init__(self, call: GroupedGemmCall, needs: Sequence[bool]) -> None:
        super().__init__(call)
        need_x, need_weight, need_bias, need_scale = needs
        walk, x = self.walk, call.x
        self.d_x = self.d_scale = None
        if need_x:
            self.d_x = walk.new_places(x, x.shape[1]) if call.gather else x.new_empty(x.shape)
            if not call.gather:
                walk.zero_rest(self.d_x)
        self.d_weight = walk.new_gradient(call.weight, need_weight)
        self.d_bias = walk.new_gradient(call.bias, need_bias)
        if need_scale and self.scale is not None:
            self.d_scale = walk.new_places(self.scale, 1)

    def through(self, block: Block, grad: Tensor, h: Tensor | None) -> None:
        """Adds a block."""
        call, walk = self.call, self.walk
        if call.scatter:
            d_y = gather(grad, walk.slots[block.places], self.scratch("d_y", block, grad.shape[1]))
        else:
            d_y = walk.of_rows(grad, block)
        x = (
            self.inputs(block)
            if self.d_weight is not None or (self.d_scale is not None and h is None)
            else None
        )
        d_z = self._down(block, d_y, h, x)
        if self.d_x is not None:
            d_x = self.d_x[block.places] if call.gather else walk.of_rows(self.d_x, block)
            block.multiply(d_z, call.weight_nk.mT, d_x)
            if not call.gather:
                walk.put_back(d_x, self.d_x, block)
        if self.d_weight is not None and x is not None:
            block.weight_gradient(d_z, x, self.d_weight, call.transpose_weight)
        if self.d_bias is not None:
            block.bias_gradient(d_z, self.d_bias)

    def _down(self, block: Block, d_y: Tensor, h: Tensor | None, x: Tensor | None) -> Tensor:
        """From the output's gradient to the accumulator's, rounded."""
        call, walk = self.call, self.walk
        if self.scale is None and h is None:
            return d_y
        d_a = d_y.to(wide(call.dtype))
        d_f = d_a if self.scale is None else d_a * self.scale[block.places]
        d_z: tuple[Tensor, ...] = (d_f,)
        if h is None:
            if self.d_scale is not None and x is not None:
                rounded = self.scratch("a", block, d_y.shape[1])
                a = self.scratch.wide("wide a", block, rounded)
                block.multiply_wide(x, call.weight_nk, rounded, a, call.bias)
        else:
            z = walk.of_rows(h, block).to(d_a.dtype).chunk(call.epilogue.columns, dim=-1)
            d_z = call.epilogue.backward(d_f, *z)
            if self.d_scale is not None:
                a = activate(call.epilogue, *z)
        if self.d_scale is not None:
            self.d_scale[block.places] = (d_a * a).sum(-1, keepdim=True)
        return self._rounded(block, d_z)

    def _rounded(self, block: Block, d_z: tuple[Tensor, ...]) -> Tensor:
        out = self.scratch("d_z", block, sum(value.shape[1] for value in d_z))
        for column, value in zip(out.chunk(len(d_z), dim=-1), d_z, strict=True):
            column.copy_(value)
        return out

    def result(self) -> Gradients:
        """All of them, when every block is through."""
        d_x, d_scale = self.d_x, self.d_scale
        if d_x is not None and self.call.gather:
            d_x = self.walk.combine(d_x)
        if d_scale is not None and self.call.scale is not None:
            d_scale = self.walk.to_slots(d_scale).to(self.call.scale.dtype)
        return d_x, self.d_weight, self.d_bias, d_scale
