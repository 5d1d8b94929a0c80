"""The three errors: what they are caught as, and how they read."""

import pickle

import pytest

from anabranch.errors import ArgumentError, ArgumentTypeError, UnsupportedError


@pytest.mark.parametrize(
    ("error", "caught_as"),
    [(ArgumentError, ValueError), (ArgumentTypeError, TypeError), (UnsupportedError, NotImplementedError)],
)
def test_wording(error, caught_as):
    raised = error("rope", "q", expected="rank 4", got=(1, 2))
    assert isinstance(raised, caught_as)
    assert str(raised) == "rope: q: expected rank 4, got (1, 2)"


@pytest.mark.parametrize("error", [ArgumentError, ArgumentTypeError, UnsupportedError])
def test_errors_cross_processes(error):
    raised = error("rope", "q", expected="rank 4", got=3)
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert str(copy) == str(raised)
