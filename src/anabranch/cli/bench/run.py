"""One cell: checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from anabranch.cli.bench.check import Checked, check
from anabranch.cli.bench.limits import COPY, DENSE_FORWARD, DENSE_TRAINING, Limits, Sizes, ceilings
from anabranch.cli.bench.peers import reason
from anabranch.cli.bench.problem import Problem
from anabranch.cli.bench.report import Measured, Row
from anabranch.cli.bench.shapes import SMALL, Cell
from anabranch.cli.bench.timing import Clock, host_seconds, interleaved, medians, replay
from anabranch.cli.bench.variants import Variant

FORWARD, TRAINING, REPLAY = "forward", "training", "replay"


def measure(
    cell: Cell,
    variants: Sequence[Variant],
    device: torch.device,
    rounds: int,
    clock: Clock,
    share: float,
    say: Callable[[str], None],
) -> Measured:
    """Every variant that is right. Timing takes up to ``share`` of the time left after the check."""
    problem = Problem.make(cell.case, cell.dtype, device, cell.exponent)
    sizes = Sizes.of(problem)
    checked = check(problem, variants, say=say)
    refused = {name: found.wrong for name, found in checked.items() if found.wrong}
    left_out = {name: found.unable for name, found in checked.items() if found.unable}
    good = {name: found for name, found in checked.items() if found.view}

    runs, copied = ceilings(problem)
    for name, found in good.items():
        assert found.view is not None
        runs[f"{name}, {FORWARD}"] = found.view.forward
        if found.trains:
            runs[f"{name}, {TRAINING}"] = found.view.train
        if device.type == "cuda" and cell.case.tokens <= SMALL and not found.view.variant.waits:
            try:
                runs[f"{name}, {REPLAY}"] = replay(found.view.forward, device)
            except Exception as error:  # what waits for the device cannot be captured
                left_out[f"{name}, replayed"] = reason(error)
    times, failed = interleaved(runs, rounds, device, max(1.0, share * clock.left()))
    left_out |= failed
    for name in (COPY, DENSE_FORWARD, DENSE_TRAINING):
        if name not in times:
            raise RuntimeError(f"{name} failed: {failed[name]}")
    limits = Limits.of(sizes, medians(times), copied)
    row = partial(_row, times=times, limits=limits, sizes=sizes, small=cell.case.tokens <= SMALL)
    return Measured(
        part=cell.part,
        shape=cell.shape,
        sizes=dict(T=sizes.T, H=sizes.H, I=sizes.I, E=sizes.E, K=cell.case.top_k),
        active_experts=sizes.active,
        dtype=str(cell.dtype).removeprefix("torch."),
        routing=cell.routing,
        exponent=cell.exponent,
        dense_forward_seconds=limits.dense_forward,
        dense_training_seconds=limits.dense_training,
        copy_bytes_per_second=limits.copy_bandwidth,
        forward_limit_seconds=limits.forward,
        training_limit_seconds=limits.training,
        rows=[row(name, found) for name, found in good.items()],
        refused=refused,
        left_out=left_out,
    )


def _row(
    name: str,
    found: Checked,
    *,
    times: dict[str, list[float]],
    limits: Limits,
    sizes: Sizes,
    small: bool,
) -> Row:
    typical = medians(times)
    forward, training = typical.get(f"{name}, {FORWARD}"), typical.get(f"{name}, {TRAINING}")
    tflop = sizes.flops / 1e12
    view = found.view
    assert view is not None
    on_cuda = view.ids.is_cuda
    return Row(
        variant=name,
        forward_seconds=forward,
        training_seconds=training,
        forward_tflops=ratio(tflop, forward),
        training_tflops=ratio(3 * tflop, training),
        forward_of_dense=ratio(limits.dense_forward, forward),
        training_of_dense=ratio(limits.dense_training, training),
        forward_of_limit=ratio(limits.forward, forward),
        training_of_limit=ratio(limits.training, training),
        replay_seconds=typical.get(f"{name}, {REPLAY}"),
        host_seconds=host_seconds(view.forward, view.ids.device) if small and forward and on_cuda else None,
        saved_bytes=view.saved_bytes() if training else None,
        errors=found.errors,
        rounds=len(times.get(f"{name}, {FORWARD}", [])),
    )


def ratio(value: float, seconds: float | None) -> float | None:
    """``value / seconds``, or None without seconds."""
    return value / seconds if seconds else None
