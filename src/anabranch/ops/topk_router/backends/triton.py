"""topk_router in Triton: a program scores and chooses for a few tokens, all in registers.

What is chosen by is packed into one int64: the number as an integer of the same order, NaN first and -0
as 0, above the expert's number, counted down. The largest is then the one a stable sort puts first, and no
two are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anabranch._backends.triton.combine import power_of_2
from anabranch._backends.triton.prepared import launch
from anabranch.ops.topk_router.call import EPSILON, TopkRouterCall

MAX_EXPERTS = 4096
"""Places of a token, a power of two; a program holds them in registers."""
MAX_ROUNDS = 16
"""Up to here the largest is taken K times, beyond all are sorted."""
ELEMENTS = 1024
"""Places of a program; few tokens are spread over more programs."""

_NOTHING = tl.constexpr(-(2**63))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_REST = tl.constexpr(1.4426950408889634 - 1.44269502162933349609375)
_LN_2 = tl.constexpr(0.6931471805599453)


def supports(call: TopkRouterCall) -> str | None:
    """fp16, bf16 and fp32 logits of up to 4096 experts, those that pad the groups included."""
    if call.dtype == torch.float64:
        return "it computes in fp32, too coarse for float64"
    groups, size = _padded(call)
    if groups * size > MAX_EXPERTS:
        return f"it holds {MAX_EXPERTS} experts of a token, not {groups} groups of {size} (powers of two)"
    return None


def _padded(call: TopkRouterCall) -> tuple[int, int]:
    """Groups and experts of a group, each padded to a power of two; one group where all groups are kept."""
    groups = 1 if call.top_groups == call.num_groups else call.num_groups
    return power_of_2(groups), power_of_2(call.logits.shape[1] // groups)


@triton.jit
def _exp(x):
    """e**x to the last bits: the product with log2(e) keeps what its rounding loses."""
    t = x * _LOG2_E
    rest = tl.fma(x, _LOG2_E, -t) + x * _LOG2_E_REST
    y = tl.exp2(t)
    return tl.where((y == 0) | (y == float("inf")), y, y + y * (rest * _LN_2))


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x))


@triton.jit
def _softmax(x, inside):
    """Over the last dimension, where ``inside``; 0 elsewhere."""
    x = tl.where(inside, x, float("-inf"))
    e = tl.where(inside, _exp(x - tl.max(x, 1)[:, None]), 0.0)
    return tl.div_rn(e, tl.broadcast_to(tl.sum(e, 1)[:, None], e.shape))


@triton.jit
def _pack(value, index, inside, SIZE: tl.constexpr):
    """int64 in the order of a stable descending sort; what is not inside comes last."""
    value = tl.where(value == 0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value == value, key, 0x7FFFFFFF)
    packed = (key.to(tl.int64) << 32) | (SIZE - 1 - index).to(tl.int64)
    return tl.where(inside, packed, _NOTHING)


@triton.jit
def _value(packed):
    """The number that was packed; -0 has become 0."""
    key = (packed >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _index(packed, SIZE: tl.constexpr):
    return SIZE - 1 - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _keep_groups(
    limits, inside, GROUPS: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr,
):  # fmt: skip
    """Which places are of the groups with the largest sums of two best."""
    o_s = tl.arange(0, GROUPS_2 * SIZE_2)[None, :] % SIZE_2 + tl.zeros(limits.shape, tl.int32)
    packed = tl.reshape(_pack(limits, o_s, inside, SIZE_2), [TOKENS, GROUPS_2, SIZE_2])
    best = tl.max(packed, 2)
    total = _value(best)
    if SIZE > 1:
        total += _value(tl.max(tl.where(packed == best[:, :, None], _NOTHING, packed), 2))
    o_g = tl.arange(0, GROUPS_2)[None, :] + tl.zeros([TOKENS, GROUPS_2], tl.int32)
    left = _pack(total, o_g, o_g < GROUPS, GROUPS_2)
    for _ in range(TOP):
        left = tl.where(left == tl.max(left, 1)[:, None], _NOTHING, left)
    kept = ((left == _NOTHING) & (o_g < GROUPS)).to(tl.int32)
    kept = tl.broadcast_to(kept[:, :, None], [TOKENS, GROUPS_2, SIZE_2])
    return inside & (tl.reshape(kept, [TOKENS, GROUPS_2 * SIZE_2]) != 0)


@triton.jit(do_not_specialize=["num_tokens", "scaling"])
def _forward_kernel(
    logits, bias, weights, ids, num_tokens, scaling, stride_t, stride_e, stride_b, EPSILON: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr, SOFTMAX: tl.constexpr, LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SORT: tl.constexpr, TOKENS: tl.constexpr, GROUPS_2: tl.constexpr, SIZE_2: tl.constexpr,
):  # fmt: skip
    """Weights and ids of TOKENS tokens. A token's places are its experts, every group padded to SIZE_2."""
    EXPERTS: tl.constexpr = GROUPS_2 * SIZE_2
    SIZE: tl.constexpr = E // GROUPS
    o_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, EXPERTS)
    o_e = (place // SIZE_2) * SIZE + place % SIZE_2
    m_t = o_t < num_tokens
    m_e = (place % SIZE_2 < SIZE) & (place // SIZE_2 < GROUPS)
    inside = m_t[:, None] & m_e[None, :]
    p = logits + o_t[:, None].to(tl.int64) * stride_t + o_e[None, :].to(tl.int64) * stride_e
    x = tl.load(p, mask=inside, other=0.0).to(tl.float32)
    inside = inside | (m_e[None, :] & ~m_t[:, None])  # tokens past the last: zeros, not NaN
    scores = x
    if not LATE:
        scores = _softmax(x, inside) if SOFTMAX else _sigmoid(x)
    # Both scores grow with the logit, so without a bias the logits say the same with fewer ties.
    key = x
    limits = scores
    if BIASED:
        key = (
            scores + tl.load(bias + o_e.to(tl.int64) * stride_b, mask=m_e, other=0.0).to(tl.float32)[None, :]
        )
        limits = key
    candidates = inside
    if GROUPS > 1:
        candidates = _keep_groups(limits, inside, GROUPS, TOP_GROUPS, SIZE, TOKENS, GROUPS_2, SIZE_2)
    number = o_e[None, :] + tl.zeros([TOKENS, EXPERTS], tl.int32)
    packed = _pack(key, number, candidates, E)

    if SORT:
        packed = tl.sort(packed, 1, descending=True)
        o_k = place
        found = tl.where((o_k < K)[None, :], _index(packed, E), 0)
        # Of the number chosen to the place that has it.
        at = (found // SIZE) * SIZE_2 + found % SIZE
        chosen = tl.gather(scores, at, 1)
    else:
        o_k = tl.arange(0, K_2)
        found = tl.zeros([TOKENS, K_2], tl.int32)
        chosen = tl.zeros([TOKENS, K_2], tl.float32)
        for k in range(K):
            best = tl.max(packed, 1)[:, None]
            hit = packed == best
            here = (o_k == k)[None, :]
            found = tl.where(here, _index(best, E), found)
            chosen = tl.where(here, tl.sum(tl.where(hit, scores, 0.0), 1)[:, None], chosen)
            packed = tl.where(hit, _NOTHING, packed)
    m_k = (o_k < K)[None, :] & (found >= 0)
    if LATE:
        chosen = _softmax(chosen, m_k) if SOFTMAX else _sigmoid(chosen)
    chosen = tl.where(m_k, chosen, 0.0)
    if RENORMALIZE:
        chosen = tl.div_rn(chosen, tl.broadcast_to(tl.sum(chosen, 1)[:, None] + EPSILON, chosen.shape))
    o = o_t[:, None].to(tl.int64) * K + o_k[None, :]
    m = m_t[:, None] & m_k
    tl.store(weights + o, chosen * scaling, mask=m)
    tl.store(ids + o, found.to(tl.int64), mask=m)


@triton.jit
def _score_chosen(x, m_k, high, total, OVER_ALL: tl.constexpr, SOFTMAX: tl.constexpr):
    """Scores of chosen logits (TOKENS, n); high and total are those of the softmax, (TOKENS, 1)."""
    if SOFTMAX:
        y = tl.div_rn(_exp(x - high), tl.broadcast_to(total, x.shape))
    else:
        y = _sigmoid(x)
    return tl.where(m_k, y, 0.0)


@triton.jit(do_not_specialize=["num_tokens", "scaling"])
def _backward_kernel(
    grad, logits, ids, out, num_tokens, scaling, stride_gt, stride_gk, stride_t, stride_e, stride_it, stride_ik,
    EPSILON: tl.constexpr, E: tl.constexpr, K: tl.constexpr, K_2: tl.constexpr, SOFTMAX: tl.constexpr,
    LATE: tl.constexpr, RENORMALIZE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The gradient of TOKENS rows of logits. What is needed of the chosen is loaded again, one by one."""
    OVER_ALL: tl.constexpr = SOFTMAX and not LATE
    o_t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    o_e = tl.arange(0, EXPERTS)[None, :]
    o_k = tl.arange(0, K_2)[None, :]
    m_t = o_t < num_tokens
    m_e = m_t & (o_e < E)
    m_k = m_t & (o_k < K)
    p_x = logits + o_t * stride_t
    p_g = grad + o_t * stride_gt
    p_i = ids + o_t * stride_it
    at = tl.load(p_i + o_k.to(tl.int64) * stride_ik, mask=m_k, other=0)
    x = tl.load(p_x + at * stride_e, mask=m_k, other=0.0).to(tl.float32)
    d = tl.load(p_g + o_k.to(tl.int64) * stride_gk, mask=m_k, other=0.0).to(tl.float32) * scaling
    high = tl.zeros([TOKENS, 1], tl.float32)
    total = high + 1.0
    exps = tl.zeros([TOKENS, EXPERTS], tl.float32)
    if OVER_ALL:
        everything = tl.load(p_x + o_e.to(tl.int64) * stride_e, mask=m_e, other=0.0).to(tl.float32)
        everything = tl.where(o_e < E, everything, float("-inf"))
        high = tl.max(everything, 1)[:, None]
        exps = tl.where(o_e < E, _exp(everything - high), 0.0)
        total = tl.sum(exps, 1)[:, None]
    elif SOFTMAX:
        x = tl.where(o_k < K, x, float("-inf"))
        high = tl.max(x, 1)[:, None]
        total = tl.sum(tl.where(o_k < K, _exp(x - high), 0.0), 1)[:, None]
    chosen = _score_chosen(x, m_k, high, total, OVER_ALL, SOFTMAX)
    inner = tl.zeros([TOKENS, 1], tl.float32)
    norm = inner + 1.0
    if RENORMALIZE:
        norm = tl.sum(chosen, 1)[:, None] + EPSILON
        inner = tl.div_rn(tl.sum(d * chosen, 1)[:, None], norm)
        d = tl.div_rn(d - inner, tl.broadcast_to(norm, d.shape))
    dot = tl.sum(tl.where(m_k, d * chosen, 0.0), 1)[:, None]

    result = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for k in range(K):
        at_k = tl.load(p_i + k * stride_ik, mask=m_t, other=0)
        x_k = tl.load(p_x + at_k * stride_e, mask=m_t, other=0.0).to(tl.float32)
        d_k = tl.load(p_g + k * stride_gk, mask=m_t, other=0.0).to(tl.float32) * scaling
        if RENORMALIZE:
            d_k = tl.div_rn(d_k - inner, norm)
        if not OVER_ALL:
            y_k = _score_chosen(x_k, m_t, high, total, OVER_ALL, SOFTMAX)
            if SOFTMAX:
                d_k = y_k * (d_k - dot)
            else:
                d_k = d_k * y_k * (1.0 - y_k)
        result = tl.where(o_e == at_k, d_k, result)
    if OVER_ALL:
        result = tl.div_rn(exps, tl.broadcast_to(total, exps.shape)) * (result - dot)
    tl.store(out + o_t * E + o_e, result.to(out.dtype.element_ty), mask=m_e)


def _tokens(num_tokens: int, experts: int) -> int:
    """Tokens of a program: few where there are few, and then more programs; two choices, so two kernels."""
    most = max(1, ELEMENTS // experts)
    return most if num_tokens >= 128 * most else max(1, min(most, 256 // experts))


def forward(call: TopkRouterCall) -> tuple[Tensor, Tensor]:
    """(weights, ids)."""
    num_tokens, experts = call.logits.shape
    weights = call.logits.new_empty((num_tokens, call.k), dtype=torch.float32)
    ids = call.logits.new_empty((num_tokens, call.k), dtype=torch.int64)
    if num_tokens == 0:
        return weights, ids
    groups, size = _padded(call)
    tokens = _tokens(num_tokens, groups * size)
    all_groups = groups == 1
    launch(
        call.device, _forward_kernel, (-(-num_tokens // tokens),), (call.logits, call.bias, weights, ids),
        num_tokens, call.scaling, *call.logits.stride(),
        0 if call.bias is None else call.bias.stride(0), EPSILON=EPSILON, E=experts, K=call.k,
        K_2=power_of_2(call.k), SOFTMAX=call.score == "softmax", LATE=not call.scores_all,
        RENORMALIZE=call.renormalize, BIASED=call.bias is not None,
        GROUPS=1 if all_groups else call.num_groups, TOP_GROUPS=1 if all_groups else call.top_groups,
        SORT=call.k > MAX_ROUNDS, TOKENS=tokens, GROUPS_2=groups, SIZE_2=size,
        num_warps=_warps(tokens * groups * size),
    )  # fmt: skip
    return weights, ids


def _warps(elements: int) -> int:
    return 1 if elements <= 512 else 4 if elements <= 2048 else 8


def backward(call: TopkRouterCall, ids: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits from that of the weights, and the ids chosen."""
    num_tokens, experts = call.logits.shape
    out = call.logits.new_empty((num_tokens, experts))
    if num_tokens == 0:
        return out
    padded = power_of_2(experts)
    tokens = _tokens(num_tokens, padded)
    launch(
        call.device, _backward_kernel, (-(-num_tokens // tokens),), (grad, call.logits, ids, out),
        num_tokens, call.scaling, *grad.stride(), *call.logits.stride(),
        *ids.stride(), EPSILON=EPSILON, E=experts, K=call.k, K_2=power_of_2(call.k),
        SOFTMAX=call.score == "softmax", LATE=not call.scores_all, RENORMALIZE=call.renormalize,
        TOKENS=tokens, EXPERTS=padded, num_warps=_warps(tokens * padded),
    )  # fmt: skip
    return out
