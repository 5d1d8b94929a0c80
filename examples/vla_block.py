"""A vision-language-action block of two experts, written with wall-x's names, and the same in plain PyTorch.

Text and image tokens belong to a wide expert, action tokens to a narrow one; they share one attention. The frozen
vision layer rotates by row and column in windows, the block by three positions a token.

    python examples/vla_block.py [device]

checks values and gradients against the plain version in fp64, then trains the action expert alone for a few steps.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.interop.wallx import backend, ops

TEXT, IMAGE, VIDEO, START, ACTION = 10, 3, 4, 2, 5
WIDE, NARROW, HEADS, KV_HEADS, D = 32, 16, 4, 2, 16  # D channels a head
SECTIONS = [2, 3, 3]  # of the D / 2 pairs: temporal, height, width
PATCH, MERGE, WINDOW = 14, 2, 56  # pixels, patches, pixels
MOTORS = 7

Params = dict[str, Tensor]


@dataclass
class Batch:
    """Prompts of text, one image each and actions; patches of all images, and the actions to predict."""

    ids: Tensor
    grids: Tensor
    patches: Tensor
    noisy: Tensor
    target: Tensor

    @property
    def is_action(self) -> Tensor:
        """(T,), the expert of each token: 0 or 1."""
        return (self.ids.reshape(-1) == ACTION).int()


def make_batch(dtype: torch.dtype, device: str) -> Batch:
    """Two prompts of as many tokens, with images of different shapes."""
    grids = [(1, 8, 4), (1, 4, 8)]
    rows = [
        [TEXT] * before + [START] + [IMAGE] * 8 + [TEXT] * (6 - before) + [ACTION] * 5 for before in (2, 4)
    ]
    ids = torch.tensor(rows, device=device)
    patches = torch.randn(sum(t * h * w for t, h, w in grids), WIDE, dtype=dtype, device=device)
    actions = torch.randn(2, 10, MOTORS, dtype=dtype, device=device)
    return Batch(ids, torch.tensor(grids, device=device), patches, actions[0], actions[0].roll(1, 1) / 2)


def make_params(dtype: torch.dtype, device: str) -> Params:
    """Weights as wall-x stores them, (k, n)."""

    def weight(*size: int) -> Tensor:
        return (torch.randn(*size, dtype=dtype, device=device) / size[-2] ** 0.5).requires_grad_()

    params = {
        "embedding": weight(16, WIDE),
        "action_in": weight(MOTORS, NARROW),
        "action_out": weight(NARROW, MOTORS),
    }
    for i, (hidden, inner) in enumerate(((WIDE, 48), (NARROW, 24))):
        params |= {
            f"qkv{i}": weight(hidden, (HEADS + 2 * KV_HEADS) * D),
            f"out{i}": weight(HEADS * D, hidden),
            f"gate_up{i}": weight(hidden, 2 * inner),
            f"down{i}": weight(inner, hidden),
        }
    params["vision_qkv"] = weight(WIDE, 3 * WIDE).requires_grad_(False)
    params["vision_out"] = weight(MERGE**2 * WIDE, WIDE).requires_grad_(False)
    return params


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def inverse_frequencies(count: int, like: Tensor) -> Tensor:
    return 100.0 ** -(torch.arange(count, device=like.device).to(like.dtype) / count)


# With the drop-in names.


@torch.no_grad()
def see(p: Params, batch: Batch) -> Tensor:
    """(image tokens, WIDE): one layer of window attention over the patches, then groups of MERGE**2 in one."""
    unit = MERGE**2
    order, bounds = ops.get_window_index(batch.grids, WINDOW, MERGE, PATCH, unit)
    angles = ops.rot_pos_emb(inverse_frequencies(D // 4, batch.patches), batch.grids, MERGE)
    x, angles = (value.unflatten(0, (-1, unit))[order].flatten(0, 1) for value in (batch.patches, angles))
    q, k, v = (norm(x) @ p["vision_qkv"]).view(1, -1, 3, WIDE // D, D).permute(2, 0, 3, 1, 4)
    angles = torch.cat((angles, angles), -1)[None]
    backend.rope(q, k, angles.cos(), angles.sin(), q, k, None)
    window = torch.bucketize(torch.arange(x.shape[0], device=x.device), bounds, right=True)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=window[:, None] == window)
    x = x + mixed[0].transpose(0, 1).flatten(1)
    return (x.reshape(-1, unit * WIDE) @ p["vision_out"])[order.argsort()]


def act(p: Params, batch: Batch) -> Tensor:
    """(actions, MOTORS): one block over all tokens."""
    b, s = batch.ids.shape
    is_action = batch.is_action
    rows, row_id_map = ops.permute(embed(p, batch, see(p, batch)), is_action)
    actions = batch.noisy.shape[0]
    x0, x1 = rows[:-actions], batch.noisy @ p["action_in"]

    joined = torch.cat(ops.asym_dual_gmm(norm(x0), norm(x1), p["qkv0"], p["qkv1"]))
    heads = ops.unpermute(joined, row_id_map).view(b, s, -1, D).transpose(1, 2)
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    positions, _ = ops.get_rope_index(batch.ids, MERGE, IMAGE, VIDEO, START, 1.0, batch.grids)
    angles = positions.to(x0.dtype)[..., None] * inverse_frequencies(D // 2, x0)
    angles = torch.cat((angles, angles), -1)
    q, k = ops.multimodal_rope(q, k, angles.cos(), angles.sin(), SECTIONS)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mixed, _ = ops.permute(mixed.transpose(1, 2).reshape(b * s, -1), is_action)

    y0, y1 = ops.asym_dual_gmm(mixed[:-actions], mixed[-actions:], p["out0"], p["out1"])
    x0, x1 = x0 + y0, x1 + y1
    h0, h1 = ops.asym_dual_gmm(norm(x0), norm(x1), p["gate_up0"], p["gate_up1"])
    y0, y1 = ops.asym_dual_gmm(swiglu(h0), swiglu(h1), p["down0"], p["down1"])
    # The mean stands for what the next block would read of the wide expert.
    return (x1 + y1) @ p["action_out"] + (x0 + y0).mean()


def embed(p: Params, batch: Batch, images: Tensor) -> Tensor:
    """(T, WIDE) in token order."""
    ids = batch.ids.reshape(-1)
    return p["embedding"][ids].index_put((ids == IMAGE,), images)


# The same in plain PyTorch: masks instead of permutations, loops instead of builders.


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@torch.no_grad()
def see_plain(p: Params, batch: Batch) -> Tensor:
    side = WINDOW // PATCH  # patches
    places, windows = [], []
    for image, (_, height, width) in enumerate(batch.grids.tolist()):
        for block_row in range(0, height, MERGE):
            for block_column in range(0, width, MERGE):
                for patch in range(MERGE**2):
                    row, column = block_row + patch // MERGE, block_column + patch % MERGE
                    places.append((row, column))
                    windows.append((image, row // side, column // side))
    x = batch.patches
    same = torch.tensor([[a == b for a in windows] for b in windows], device=x.device)
    place = torch.tensor(places, device=x.device).to(x.dtype)
    angles = (place[:, :, None] * inverse_frequencies(D // 4, x)).flatten(1).repeat(1, 2)
    q, k, v = (norm(x) @ p["vision_qkv"]).view(-1, 3, WIDE // D, D).permute(1, 2, 0, 3)
    q, k = (rotate_plain(value, angles.cos(), angles.sin()) for value in (q, k))
    scores = (q @ k.mT / D**0.5).masked_fill(~same, -torch.inf)
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return x.reshape(-1, MERGE**2 * WIDE) @ p["vision_out"]


def positions_plain(batch: Batch) -> Tensor:
    """(3, B, S)."""
    rows = []
    for row, (_, height, width) in zip(batch.ids.tolist(), batch.grids.tolist(), strict=True):
        found: list[tuple[int, int, int]] = []
        start, seen = 0, 0
        for token in row:
            if token == IMAGE:
                found.append((start, start + seen // (width // MERGE), start + seen % (width // MERGE)))
                seen += 1
                continue
            if seen:
                start, seen = start + max(height, width) // MERGE, 0
            found.append((start, start, start))
            start += 1
        rows.append(found)
    return torch.tensor(rows, device=batch.ids.device).permute(2, 0, 1)


def act_plain(p: Params, batch: Batch) -> Tensor:
    b, s = batch.ids.shape
    is_action = batch.is_action.bool()
    masks = (~is_action, is_action)
    xs = [embed(p, batch, see_plain(p, batch))[masks[0]], batch.noisy @ p["action_in"]]

    def join(name: str, parts: list[Tensor]) -> Tensor:
        whole = parts[0].new_zeros(b * s, p[f"{name}0"].shape[1])
        for i, mask in enumerate(masks):
            whole = whole.index_put((mask,), parts[i] @ p[f"{name}{i}"])
        return whole

    heads = join("qkv", [norm(x) for x in xs]).view(b, s, -1, D).transpose(1, 2)
    q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
    angles = positions_plain(batch).to(q.dtype)[..., None] * inverse_frequencies(D // 2, q)
    row = [i for i in range(3) for _ in range(2 * SECTIONS[i])]  # of each channel
    turn = torch.stack([angles[row[d], :, :, d % (D // 2)] for d in range(D)], -1)[:, None]
    q, k = (rotate_plain(value, turn.cos(), turn.sin()) for value in (q, k))
    k, v = (value.repeat_interleave(HEADS // KV_HEADS, 1) for value in (k, v))
    later = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / D**0.5).masked_fill(later, -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b * s, -1)
    for i, mask in enumerate(masks):
        xs[i] = xs[i] + mixed[mask] @ p[f"out{i}"]
        xs[i] = xs[i] + swiglu(norm(xs[i]) @ p[f"gate_up{i}"]) @ p[f"down{i}"]
    return xs[1] @ p["action_out"] + xs[0].mean()


def compare(device: str = "cpu") -> float:
    """The largest difference of values and gradients between the two, in fp64, relative to the largest value."""
    torch.manual_seed(0)
    batch, params = make_batch(torch.float64, device), make_params(torch.float64, device)
    leaves = [value for value in params.values() if value.requires_grad]
    results = []
    for forward in (act, act_plain):
        out = forward(params, batch)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    return max(
        float((mine - plain).abs().max() / plain.abs().max()) for mine, plain in zip(*results, strict=True)
    )


def train(device: str = "cpu", steps: int = 30) -> list[float]:
    """Trains the action expert; the other's weights are frozen, and no product is spent on them."""
    torch.manual_seed(0)
    batch, params = make_batch(torch.float32, device), make_params(torch.float32, device)
    trained = [value for name, value in params.items() if name.startswith("action") or name.endswith("1")]
    for value in params.values():
        value.requires_grad_(False)
    optimizer = torch.optim.AdamW([value.requires_grad_() for value in trained], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(act(params, batch), batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"largest relative difference from plain PyTorch, values and gradients, fp64: {compare(place):.1e}")
    history = train(place)
    print(f"loss of the action expert: {history[0]:.3f} -> {history[-1]:.3f} in {len(history)} steps")
