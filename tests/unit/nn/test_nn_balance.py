"""The balancing losses, against loops and against transformers."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn import MoE, Router, Routing, expert_counts, load_balance_loss, z_loss
from anabranch.ops.topk_router.api import topk_router
from anabranch.testing import assert_same, randn

T, E, K = 30, 8, 3


def routing(logits, k=K, **options):
    return Routing(*topk_router(logits, k, **options), logits)


def test_counts():
    r = routing(randn(T, E))
    assert_same(expert_counts(r), torch.stack([(r.ids == e).sum() for e in range(E)]).int())


@pytest.mark.parametrize("k", [1, 3])
def test_load_balance_is_that_of_transformers(k):
    logits = randn(T, E).requires_grad_()
    other = logits.detach().clone().requires_grad_()
    loss = load_balance_loss(routing(logits, k))
    expected = load_balancing_loss_func((other,), E, k)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_by_a_loop(score):
    logits = randn(T, E, dtype=torch.float64)
    r = routing(logits, score=score)
    expected = 0.0
    for e in range(E):
        f = sum(int(e in ids) for ids in r.ids.tolist()) / T
        p = 0.0
        for row in logits:
            s = row.exp() if score == "softmax" else 1 / (1 + (-row).exp())
            p += (s[e] / s.sum()).item() / T
        expected += E * f * p
    assert load_balance_loss(r, score=score).item() == pytest.approx(expected, rel=1e-12)


def test_is_k_at_balance_and_larger_away_from_it():
    eye = torch.eye(E).repeat(4, 1) * 5
    assert load_balance_loss(routing(eye, 1)).item() == pytest.approx(1, rel=1e-6)
    skewed = eye.clone()
    skewed[:, 0] += 10
    assert load_balance_loss(routing(skewed, 1)).item() > 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_minimising_it_balances(score):
    router = Router(16, E, K, score=score)
    x = randn(200, 16) + 1
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    first = expert_counts(router(x)).float().std()
    for _ in range(30):
        optimizer.zero_grad()
        load_balance_loss(router(x), score=score).backward()
        optimizer.step()
    assert expert_counts(router(x)).float().std() < first / 2


def test_z_loss():
    logits = randn(T, E, dtype=torch.float64).requires_grad_()
    expected = sum(row.exp().sum().log().item() ** 2 for row in logits) / T
    assert z_loss(logits).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(z_loss, logits)
    low = logits.detach().bfloat16()
    assert_same(z_loss(low), z_loss(low.float()))


def test_no_tokens():
    logits = torch.empty(0, E, requires_grad=True)
    loss = load_balance_loss(routing(logits)) + z_loss(logits)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad.shape == (0, E)


def test_wrong_arguments():
    with pytest.raises(
        ArgumentError, match="load_balance_loss: score: expected 'softmax' or 'sigmoid', got 'x'"
    ):
        load_balance_loss(routing(randn(T, E)), score="x")
    with pytest.raises(ArgumentTypeError, match=r"z_loss: logits: expected a tensor \(T, E\), got Routing"):
        z_loss(routing(randn(T, E)))
    for loss in (load_balance_loss, expert_counts):
        with pytest.raises(
            ArgumentTypeError, match=f"{loss.__name__}: routing: expected a Routing, got tuple"
        ):
            loss(tuple(routing(randn(T, E))))


def test_the_pair_of_output_and_routing():
    pair = MoE(16, 8, E, K)(randn(2, 5, 16), return_routing=True)
    assert pair[1].logits.shape == (10, E)
    for loss in (load_balance_loss, expert_counts):
        with pytest.raises(ArgumentTypeError) as raised:
            loss(pair)
        assert str(raised.value) == (
            f"{loss.__name__}: routing: expected a Routing, got the pair of output and Routing; "
            "pass the second of the pair"
        )
        loss(pair[1])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_half_precision_logits_add_up_in_fp32(score):
    # The fp16 sum over so many tokens would be infinite.
    logits = torch.zeros(2**18, 2, dtype=torch.float16)
    loss = load_balance_loss(routing(logits, 1), score=score)
    assert loss.dtype == torch.float32
    assert loss.item() == 1


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"logits": None}, ArgumentTypeError, r"routing.logits: expected a tensor \(T, E\), got NoneType"),
        ({"logits": torch.zeros(E)}, ArgumentError, r"routing.logits: expected shape \(T, E\), got"),
        ({"logits": torch.zeros(T, E).long()}, ArgumentTypeError, "routing.logits: expected dtype"),
        ({"ids": torch.zeros(T, K)}, ArgumentTypeError, "routing.ids: expected dtype"),
        ({"ids": torch.zeros(T + 1, K).long()}, ArgumentError, "routing.ids: expected shape"),
        (
            {"ids": torch.zeros(T, K, device="meta").long()},
            ArgumentError,
            "routing.ids: expected logits's dev",
        ),
    ],
)
def test_a_routing_that_does_not_fit_is_refused(fields, kind, message):
    wrong = routing(randn(T, E))._replace(**fields)
    for loss in (expert_counts, load_balance_loss):
        with pytest.raises(kind, match=f"^{loss.__name__}: {message}"):
            loss(wrong)
