"""Every operation, forward and backward, as one table: for what has to hold of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from anabranch import ExpertLayout, grouped_gemm, moe_mlp, multi_gemm, permute, unpermute
from anabranch.ops.rope.api import mrope, rope
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing.conformance import VARIANTS
from anabranch.testing.inputs import randn, routing
from anabranch.testing.problems import FORMULAS

__all__ = ["STEPS", "Step", "results"]

Inputs = dict[str, Tensor]
T, E, K, H, WIDTH = 60, 5, 2, 48, 40
"""Sizes; the hidden one and the width of an expert are multiples of 8, as the fast paths demand, and of no tile."""


@dataclass(frozen=True)
class Step:
    """One operation with its options.

    ``make(dtype, device, generator)`` returns its tensors, ``call`` takes them by name and returns its results.
    Gradients flow to the tensors named in ``leaves``.
    """

    make: Callable[[torch.dtype, torch.device | str, torch.Generator], Inputs]
    call: Callable[..., Any]
    leaves: Sequence[str]

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Inputs:
        """Its tensors, from a seed of their own."""
        return self.make(dtype, device, torch.Generator().manual_seed(seed))


STEPS: dict[str, Step] = {}
"""By name: the operation's first, then what it is asked."""


def results(step: Step, inputs: Inputs) -> list[Tensor]:
    """What a step returns, then the gradients of its leaves; nothing here waits for the device."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in step.leaves}
    outs = _tensors(step.call(**{**inputs, **leaves}))
    graded = [y for y in outs if y.requires_grad]
    if not graded:
        return outs
    # A gradient of many values, and none of them from the host.
    grads = [torch.arange(y.numel(), device=y.device).view(y.shape).sin().to(y.dtype) for y in graded]
    return [*(y.detach() for y in outs), *torch.autograd.grad(graded, list(leaves.values()), grads)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, ExpertLayout):
        value = [getattr(value, field.name) for field in fields(value)]
    values = [value] if isinstance(value, Tensor) else value
    return [v for v in values if v is not None]


def _ids(device: torch.device | str, generator: torch.Generator) -> Tensor:
    return routing(T, E, K, "zipf", dropped=0.2, device=device, generator=generator)


def _moe(gate: int, bias: bool, transposed: bool) -> Callable[..., Inputs]:
    def make(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
        def draw(*shape: int) -> Tensor:
            return randn(*shape, dtype=dtype, device=device, generator=generator)

        up, down = draw(E, gate * WIDTH, H), draw(E, H, WIDTH)
        made = {
            "x": draw(T, H),
            "gate_up": up.mT.contiguous() if transposed else up,
            "down": down.mT.contiguous() if transposed else down,
            "expert_weights": torch.rand(T, K, generator=generator).to(device),
            "expert_ids": _ids(device, generator),
        }
        return {**made, **({"gate_up_bias": draw(E, gate * WIDTH), "down_bias": draw(E, H)} if bias else {})}

    return make


def _add_moe(
    name: str, *, transposed: bool = False, bias: bool = False, gate: int = 2, **options: Any
) -> None:
    leaves = ["x", "gate_up", "down", "expert_weights", *(["gate_up_bias", "down_bias"] if bias else [])]

    def call(**inputs: Any) -> Tensor:
        return moe_mlp(**inputs, transpose_weight=transposed, **options)

    STEPS[f"moe_mlp {name}"] = Step(_moe(gate, bias, transposed), call, leaves)


_add_moe("swiglu")
_add_moe("gpt_oss", bias=True, transposed=True, activation="gpt_oss", gate_layout="interleaved")
_add_moe("on input", gate=1, activation="relu_squared", weight_on="input")
_add_moe("of inputs", bias=True, save="inputs")


def _add_grouped(flags: Any) -> None:
    gate = FORMULAS[flags.activation].__code__.co_argcount

    def make(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
        def draw(*shape: int) -> Tensor:
            return randn(*shape, dtype=dtype, device=device, generator=generator)

        weight = draw(E, gate * WIDTH, H)
        made = {
            "ids": _ids(device, generator),
            "x": draw(T if flags.gather else T * K, H),
            "weight": weight.mT.contiguous() if flags.transpose_weight else weight,
        }
        if flags.bias:
            made["bias"] = draw(E, gate * WIDTH)
        if flags.scale:
            made["scale"] = torch.rand(T, K, generator=generator).to(device)
        return made

    def call(ids: Tensor, **inputs: Any) -> Tensor:
        asked = {n: getattr(flags, n) for n in ("gather", "scatter", "activation", "transpose_weight")}
        return grouped_gemm(layout=ExpertLayout.from_topk(ids, E), **inputs, **asked)

    optional = [name for name in ("bias", "scale") if getattr(flags, name)]
    STEPS[f"grouped_gemm {flags}"] = Step(make, call, ["x", "weight", *optional])


for _flags in VARIANTS:
    _add_grouped(_flags)


def _rows(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
    return {
        "ids": _ids(device, generator),
        "x": randn(T, H, dtype=dtype, device=device, generator=generator),
        "y": randn(T * K, H, dtype=dtype, device=device, generator=generator),
        "weights": torch.rand(T, K, generator=generator).to(device),
    }


def _permute(ids: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return permute(x, ExpertLayout.from_topk(ids, E))


def _unpermute(ids: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
    layout = ExpertLayout.from_topk(ids, E)
    return [unpermute(y, layout, weights), unpermute(y, layout)]


STEPS["permute"] = Step(_rows, _permute, ["x"])
STEPS["unpermute"] = Step(_rows, _unpermute, ["y", "weights"])


def _add_multi(transpose_x: bool, transpose_weight: bool) -> None:
    def make(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
        made: Inputs = {}
        for i, (m, n, k) in enumerate(((37, 40, 48), (0, 8, 16), (20, 33, 17))):
            x, w = (randn(*s, dtype=dtype, device=device, generator=generator) for s in ((m, k), (n, k)))
            made[f"x{i}"] = x.T.contiguous() if transpose_x else x
            made[f"w{i}"] = w.T.contiguous() if transpose_weight else w
        return made

    def call(**inputs: Tensor) -> list[Tensor]:
        xs, weights = ([inputs[f"{letter}{i}"] for i in range(3)] for letter in "xw")
        return multi_gemm(xs, weights, transpose_x=transpose_x, transpose_weight=transpose_weight)

    name = "multi_gemm" + " transpose_x" * transpose_x + " transpose_weight" * transpose_weight
    STEPS[name] = Step(make, call, [f"{letter}{i}" for letter in "xw" for i in range(3)])


_add_multi(False, False)
_add_multi(True, True)


def _logits(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
    return {
        "logits": randn(T, 24, dtype=dtype, scale=2, device=device, generator=generator),
        "bias": randn(24, scale=0.1, device=device, generator=generator),
    }


def _router(logits: Tensor, bias: Tensor) -> list[Tensor]:
    options: dict[str, Any] = {"score": "sigmoid", "renormalize": True, "num_groups": 4, "top_groups": 2}
    return [*topk_router(logits, 4), *topk_router(logits, 4, bias=bias, scaling=2.5, **options)]


STEPS["topk_router"] = Step(_logits, _router, ["logits"])


def _heads(*table: int) -> Callable[..., Inputs]:
    def make(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
        q, k = (randn(2, h, 9, 24, dtype=dtype, device=device, generator=generator) for h in (3, 1))
        cos, sin = (randn(*table, device=device, generator=generator) for _ in range(2))
        positions = torch.randint(-1, 10, (2, 9), generator=generator).to(device)
        return {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}

    return make


def _rope(positions: Tensor, **inputs: Any) -> Any:
    return rope(**inputs, pairing="adjacent", rotary_dim=16)


def _rope_positions(**inputs: Any) -> Any:
    return rope(**inputs)


def _rope_inplace(positions: Tensor, q: Tensor, k: Tensor, **inputs: Any) -> Any:
    return rope(q.clone(), k.clone(), **inputs, inplace=True)


def _mrope(positions: Tensor, **inputs: Any) -> Any:
    return [
        *mrope(**inputs, sections=[4, 5, 3]),
        *mrope(**inputs, sections=[4, 4, 4], order="interleaved"),
    ]


STEPS["rope"] = Step(_heads(2, 9, 16), _rope, ["q", "k"])
STEPS["rope positions"] = Step(_heads(9, 12), _rope_positions, ["q", "k"])
STEPS["rope inplace"] = Step(_heads(2, 9, 24), _rope_inplace, [])
STEPS["mrope"] = Step(_heads(3, 2, 9, 24), _mrope, ["q", "k"])


def _maps(dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> Inputs:
    ids = _ids(device, generator)
    counts = torch.randint(-2, 30, (E,), generator=generator).to(device)
    return {"ids": ids, "counts": counts, "rows": torch.randperm(T * K, generator=generator).to(device)}


def _layouts(ids: Tensor, counts: Tensor, rows: Tensor) -> list[Tensor]:
    made = (
        ExpertLayout.from_topk(ids, E),
        ExpertLayout.from_counts(counts, 77),
        ExpertLayout.from_sorted(counts, rows, K),
        ExpertLayout.from_slot_to_row(rows.view(T, K), 100),
    )
    return [tensor for layout in made for tensor in _tensors(layout)]


STEPS["route"] = Step(_maps, _layouts, [])
