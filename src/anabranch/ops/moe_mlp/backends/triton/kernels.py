"""The kernels of moe_mlp's backward that no grouped GEMM is: routing weights' gradients that need a dot over H."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots"])
def row_dot_kernel(
    rows_of, x, row_to_slot, offsets, d_weights, num_slots, top_k, H, num_experts, stride_xm, stride_xh,
    BY_EXPERT: tl.constexpr, ADD: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``d_weights[slot] (+)= <rows_of[row], x[index]>``, where index is the row's expert (a bias) or its token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_to_slot + row)
    if (slot >= 0) & (slot < num_slots):
        if BY_EXPERT:
            o_e = tl.arange(0, EXPERTS)
            stops = tl.load(offsets + 1 + o_e, mask=o_e < num_experts, other=2147483647)
            index = tl.sum((stops <= row).to(tl.int32), 0).to(tl.int64)  # how many experts end before the row
            index = tl.minimum(index, num_experts - 1)  # offsets put together by hand may end before it all
        else:
            index = (slot // top_k).to(tl.int64)
        acc = tl.zeros([BLOCK_H], tl.float32)
        for h in range(0, H, BLOCK_H):
            o_h = h + tl.arange(0, BLOCK_H)
            a = tl.load(rows_of + row * H + o_h, mask=o_h < H, other=0.0).to(tl.float32)
            acc += a * tl.load(x + index * stride_xm + o_h.to(tl.int64) * stride_xh, mask=o_h < H, other=0.0)
        dot = tl.sum(acc, 0)
        if ADD:
            dot += tl.load(d_weights + slot)
        tl.store(d_weights + slot, dot)
