"""Timing: medians of rounds in which everything runs once, another one first each round."""

import time

import torch

from anabranch.tuning.timing import medians


def test_rounds_are_interleaved_and_the_first_is_not_counted(monkeypatch):
    order, now = [], [0.0]

    def run(name, seconds):
        order.append(name)
        now[0] += 100.0 if len(order) <= 3 else seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    runs = {
        name: lambda name=name, s=seconds: run(name, s)
        for name, seconds in zip("abc", (1, 2, 4), strict=True)
    }
    assert medians(runs, 2, torch.device("cpu")) == {"a": 1, "b": 2, "c": 4}
    assert "".join(order) == "abcbcacab"
