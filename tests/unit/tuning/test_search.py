"""The search: only right configurations win, and nobody's memory is touched but the trial's own."""

import logging

import pytest
import torch

from anabranch.tuning.search import LOG, NothingToCheck, search

FAULTS = {
    1: "zeros",
    2: "one element",
    3: "scaled",
    4: "rows swapped",
    5: "not written",
    6: "adds",
    8: "past the end",
}


def test_the_fastest_wins(product, tiles, clock):
    outcome = search(product().trial(tiles(1)), clock)
    assert outcome.best == tiles(4)
    assert outcome.rejected == {}
    assert outcome.default_seconds / outcome.seconds == pytest.approx(4)
    assert outcome.entry()["config"] == {"size": 4, "fault": 0, "deep": False}


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
def test_wrong_numbers_never_win(product, tiles, clock, fault, dtype, size):
    """However small or large the numbers are: an absolute tolerance would let some of these pass."""
    fast = tiles(64, fault)
    subject = product(size=size, dtype=dtype, candidates=(tiles(2), fast))
    outcome = search(subject.trial(tiles(1)), clock)
    assert outcome.best == tiles(2)
    assert set(outcome.rejected) == {fast}


def test_what_fails_to_compile_is_left_out_with_its_reason(product, tiles, clock):
    outcome = search(product(candidates=(tiles(64, 7), tiles(2))).trial(tiles(1)), clock)
    assert outcome.best == tiles(2)
    assert outcome.rejected == {tiles(64, 7): "RuntimeError: out of resource: shared memory"}


def test_no_memory_ends_the_search(product, tiles, clock, monkeypatch):
    subject = product()

    def run(config, outputs):
        if config != tiles(1):
            raise torch.OutOfMemoryError("no memory")
        original(config, outputs)

    original, subject.run = subject.run, run
    with pytest.raises(torch.OutOfMemoryError):
        search(subject.trial(tiles(1)), clock)


def test_a_wrong_heuristic_is_not_what_others_are_compared_with(product, tiles, clock):
    with pytest.raises(AssertionError, match=r"y: \d+ of \d+ elements are out of bounds"):
        search(product().trial(tiles(1, 3)), clock)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_data_that_tell_nothing(product, tiles, clock, value):
    subject = product()
    subject.x.fill_(value)
    with pytest.raises(NothingToCheck):
        search(subject.trial(tiles(1)), clock)


def test_a_little_faster_is_not_enough(product, tiles):
    def even(runs, rounds):
        return {config: 1.0 - 0.01 * (config.size > 1) for config in runs}

    assert search(product().trial(tiles(1)), even).best == tiles(1)


def test_every_candidate_is_timed_in_turn_and_the_best_again(product, tiles):
    timed = []

    def clock(runs, rounds):
        timed.append((rounds, list(runs)))
        return {config: 1.0 / config.size for config in runs}

    candidates = tuple(tiles(size) for size in (2, 3, 4, 5, 6, 7, 8))
    search(product(candidates=candidates).trial(tiles(1)), clock)
    assert timed[0] == (3, [tiles(1), *candidates])
    assert timed[-1] == (15, [tiles(1), *(tiles(size) for size in (8, 7, 6, 5, 4))])


def test_only_the_best_families_are_searched_whole(product, tiles, clock):
    candidates = tuple(tiles(size, deep=deep) for size in (2, 3, 4, 5) for deep in (True, False))
    subject = product(candidates=candidates)
    outcome = search(subject.trial(tiles(1)), clock)
    tried = set(subject.launched)
    assert {tiles(size) for size in (2, 3, 4, 5)} <= tried  # the most like the heuristic's first
    assert tiles(5, deep=True) in tried
    assert tiles(4, deep=True) in tried
    assert tiles(2, deep=True) not in tried
    assert outcome.best.size == 5


def test_steps_are_logged(product, tiles, clock, caplog):
    with caplog.at_level(logging.INFO, LOG.name):
        outcome = search(product().trial(tiles(1)), clock)
    steps = [record.tuning for record in caplog.records]
    assert [step.done for step in steps] == [0, 0, 1, 2]
    assert steps[-1].outcome == outcome
    assert "4.00 x the heuristic's speed" in caplog.messages[-1]
