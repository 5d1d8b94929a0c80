"""One step of ours, kernel by kernel, each beside its own limit where it is known what the kernel does."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from anabranch.cli.bench.limits import COPY, Sizes, ceilings, dense
from anabranch.cli.bench.problem import Problem
from anabranch.cli.bench.report import Explained, Line
from anabranch.cli.bench.timing import interleaved, medians
from anabranch.cli.bench.variants import Variant

STEPS = 5
PRODUCTS = ("forward_kernel", "product_kernel")
ROUTING = ("_compare_kernel", "_count_kernel", "_scan_kernel", "_place_kernel")

WEIGHT_GRADIENT = "weight_gradient_kernel"
OTHERS = {
    "gate_gradient_kernel": "d_h",
    "pre_activation_gradient_kernel": "gate gradient",
    "_gather_kernel": "gather",
    "_combine_kernel": "combine",
}
NAMED = {"_schedule_kernel": "tiles listed", "_clear_kernel": "unused rows cleared"}
"""Known, but too small for a limit to mean something."""


class Kernel(NamedTuple):
    """One launch: its name and how long it ran."""

    name: str
    seconds: float


class Work(NamedTuple):
    """What a kernel does: the least bytes that it moves, and the dense product that it is as much work as."""

    what: str
    bytes: int
    product: str | None = None


def explain(problem: Problem, variant: Variant, shape: str) -> list[Explained]:
    """Profiles the phases of a step: forward for inference, forward that keeps h, backward."""
    view, device = problem.view(variant), problem.x.device
    sizes = Sizes.of(problem)
    runs = dense(problem)
    copy, copied = ceilings(problem)
    found, _ = interleaved({**runs, COPY: copy[COPY]}, 7, device)
    times = medians(found)
    bandwidth = 2 * copied / times.pop(COPY)

    out = view.run()
    phases: dict[str, Callable[[], object]] = {
        "forward": view.forward,
        "forward, training": view.run,
        "backward": lambda: torch.autograd.grad(out, view.leaves, problem.gradient, retain_graph=True),
    }
    whole, _ = interleaved(phases, 7, device)
    result = []
    for phase, run in phases.items():
        lines = attribute(phase, profile(run, device), sizes, times, bandwidth)
        result.append(Explained(shape, phase, medians(whole)[phase], lines))
    return result


def profile(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """The kernels of one run in the order of their starts, each its median over five runs."""
    from torch.profiler import ProfilerActivity

    run()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize(device)
    events = [
        event
        for event in profiler.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    events.sort(key=lambda event: event.time_range.start)
    return fold([Kernel(event.name, event.time_range.elapsed_us() / 1e6) for event in events], STEPS)


def fold(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The kernels of one step from those of several; by name alone where the steps are not alike."""
    size, rest = divmod(len(kernels), steps)
    rounds = [kernels[step * size : (step + 1) * size] for step in range(steps)]
    alike = not rest and all([k.name for k in one] == [k.name for k in rounds[0]] for one in rounds)
    if alike:
        return [
            Kernel(same[0].name, statistics.median(kernel.seconds for kernel in same))
            for same in zip(*rounds, strict=True)
        ]
    total: dict[str, float] = {}
    for kernel in kernels:
        total[kernel.name] = total.get(kernel.name, 0.0) + kernel.seconds / steps
    return [Kernel(f"{name} (all of a step)", seconds) for name, seconds in total.items()]


def attribute(
    phase: str,
    kernels: Sequence[Kernel],
    sizes: Sizes,
    dense_seconds: dict[str, float],
    bandwidth: float,
) -> list[Line]:
    """Lines in the order of the step; kernels of the routing in one line, unknown ones as they are."""
    lines = []
    known = roles(phase, kernels, sizes)
    routing = [kernel for kernel in kernels if kernel.name in ROUTING]
    if routing:
        seconds = sum(kernel.seconds for kernel in routing)
        ids_and_maps = sizes.R * (8 + 4 + 4)
        names = [kernel.name for kernel in routing]
        lines.append(Line("routing", names, seconds, ids_and_maps / bandwidth, "bytes"))
    for kernel, work in zip(kernels, known, strict=True):
        if kernel.name in ROUTING:
            continue
        if work is None:
            lines.append(Line(NAMED.get(kernel.name), [kernel.name], kernel.seconds, None, None))
            continue
        moved = work.bytes / bandwidth
        computed = dense_seconds[work.product] if work.product else 0.0
        bound = "products" if computed > moved else "bytes"
        lines.append(Line(work.what, [kernel.name], kernel.seconds, max(moved, computed), bound))
    return lines


def roles(phase: str, kernels: Sequence[Kernel], sizes: Sizes) -> list[Work | None]:
    """What each kernel does, None where its name and its place do not tell.

    Up comes before down and d_a before d_x, for one needs the other. Of two weight gradients the longer one is taken
    for gate_up's, which is twice the work.
    """
    work = works(sizes, keeps_h=phase != "forward")
    products = [i for i, kernel in enumerate(kernels) if kernel.name in PRODUCTS]
    gradients = [i for i, kernel in enumerate(kernels) if kernel.name == WEIGHT_GRADIENT]
    backward = phase == "backward"
    order = {1: ["d_x"], 2: ["d_a", "d_x"]} if backward else {2: ["up", "down"]}
    found: list[Work | None] = [None] * len(kernels)
    for i, name in zip(products, order.get(len(products), []), strict=False):
        found[i] = work[name]
    if len(gradients) == 2:
        first, second = sorted(gradients, key=lambda i: kernels[i].seconds)
        found[first], found[second] = work["d_down"], work["d_gate_up"]
    for i, kernel in enumerate(kernels):
        if kernel.name in OTHERS:
            found[i] = work[OTHERS[kernel.name]]
    return found


def works(sizes: Sizes, *, keeps_h: bool) -> dict[str, Work]:
    """By name: bytes read once and written once."""
    T, H, I, E, R, e = sizes.T, sizes.H, sizes.I, sizes.E, sizes.R, sizes.bytes  # noqa: E741
    up, down = 2 * sizes.active * I * H, sizes.active * I * H
    tokens, rows, a, h = T * H, R * H, R * I, 2 * R * I
    return {
        "up": Work("up and gate", e * (tokens + up + a + (h if keeps_h else 0)), "up"),
        "down": Work("down", e * (a + down + rows), "down"),
        "d_a": Work("gradient of a", e * (rows + down + a), "d_a"),
        "d_x": Work("gradient of the rows of x", e * (h + up + rows), "d_x"),
        "d_h": Work("gradient of h, a again", e * (rows + down + h + h + a), "d_a"),
        "d_down": Work("gradient of down", e * (rows + a + E * I * H), "d_down"),
        "d_gate_up": Work("gradient of gate_up", e * (h + tokens + 2 * E * I * H), "d_gate_up"),
        "gate gradient": Work("gradient of h, a again", e * (a + h + h + a)),
        "gather": Work("rows gathered", e * (tokens + rows)),
        "combine": Work("rows combined", e * (rows + tokens)),
    }
