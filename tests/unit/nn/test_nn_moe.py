"""Experts, SharedExpert and MoE: values and gradients against a loop, and training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anabranch.errors import ArgumentError, ArgumentTypeError
from anabranch.nn import Experts, MoE, Router, SharedExpert, load_balance_loss, z_loss
from anabranch.testing import assert_same, assert_within_budget, randn

T, H, INNER, E, K = 24, 16, 12, 6, 2


def loop(experts, x, ids, weights):
    """Experts, token by token and expert by expert, in the dtype of the parameters."""
    gate_up, down = experts.gate_up, experts.down
    if experts.transpose_weight:
        gate_up, down = gate_up.mT, down.mT
    rows = []
    for t in range(x.shape[0]):
        y = x.new_zeros(H)
        for k in range(ids.shape[1]):
            e, w = int(ids[t, k]), weights[t, k]
            h = gate_up[e] @ (x[t] * w if experts.weight_on == "input" else x[t])
            if experts.gate_up_bias is not None:
                h = h + experts.gate_up_bias[e]
            interleaved = experts.gate_layout == "interleaved"
            gate, up = (h[0::2], h[1::2]) if interleaved else (h[:INNER], h[INNER:])
            out = down[e] @ (F.silu(gate) * up)
            if experts.down_bias is not None:
                out = out + experts.down_bias[e]
            y = y + (out if experts.weight_on == "input" else out * w)
        rows.append(y)
    return torch.stack(rows)


def plain(moe, x):
    """MoE from the parameters alone."""
    tokens = x.reshape(-1, H)
    scores = (tokens @ moe.router.weight.T).softmax(-1)
    ids = scores.detach().argsort(-1, descending=True)[:, :K]
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    y = loop(moe.experts, tokens, ids, weights)
    if moe.shared is not None:
        gate, up = (tokens @ moe.shared.gate_up.weight.T).chunk(2, -1)
        shared = (F.silu(gate) * up) @ moe.shared.down.weight.T
        y = y + shared * torch.sigmoid(tokens @ moe.shared.gate.weight.T)
    return y.view(x.shape)


def moe(**options):
    options.setdefault("shared_intermediate_size", 10)
    router = Router(H, E, K, renormalize=True, dtype=options.get("dtype"))
    return MoE(H, INNER, E, K, router=router, shared_gate=True, **options)


EXPERTS = {
    "plain": {},
    "bias": dict(bias=True),
    "interleaved": dict(gate_layout="interleaved", transpose_weight=True, bias=True),
    "transposed": dict(transpose_weight=True),
    "input": dict(weight_on="input"),
    "inputs kept": dict(save="inputs", bias=True),
}


@pytest.mark.parametrize("options", EXPERTS.values(), ids=EXPERTS)
def test_experts(options):
    experts = Experts(E, H, INNER, dtype=torch.float64, **options)
    x, weights = (randn(T, n, dtype=torch.float64).requires_grad_() for n in (H, K))
    ids = torch.randint(0, E, (T, K))
    y = experts(x, ids, weights)
    expected = loop(experts, x, ids, weights)
    inputs = (x, weights, *experts.parameters())
    up = randn(T, H, dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(y, inputs, up)
    for grad, other in zip(grads, torch.autograd.grad(expected, inputs, up), strict=True):
        assert (grad != 0).any()
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-12)


def test_experts_of_an_activation_without_a_gate():
    experts = Experts(E, H, INNER, activation="relu_squared", bias=True)
    assert experts.gate_up.shape == (E, INNER, H)
    assert experts.gate_up_bias.shape == (E, INNER)
    x = randn(1, H)
    y = experts(x, torch.tensor([[4]]), torch.ones(1, 1))
    h = F.relu(experts.gate_up[4] @ x[0] + experts.gate_up_bias[4]) ** 2
    torch.testing.assert_close(y[0], experts.down[4] @ h + experts.down_bias[4])


@pytest.mark.parametrize("where", ["moe", "experts"])
def test_what_is_kept_is_passed_on(where):
    """Of a module in fp64, with the same results: less by the pre-activation, T * K * 2 * I numbers."""

    def kept(save):
        given = dict(save=save) if where == "moe" else dict(experts=Experts(E, H, INNER, save=save))
        module, saved = MoE(H, INNER, E, K, **given).double(), {}
        module.load_state_dict(state)

        def note(value):
            saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            y = module(x)
        y.sum().backward()
        return sum(saved.values()), [y, *(v.grad for v in module.parameters())]

    state, x = MoE(H, INNER, E, K).double().state_dict(), randn(T, H, dtype=torch.float64)
    (more, expected), (less, found) = kept("activations"), kept("inputs")
    assert more - less == 8 * T * K * 2 * INNER
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


def test_moe_in_fp64():
    module, x = moe(dtype=torch.float64), randn(2, T // 2, H, dtype=torch.float64).requires_grad_()
    y, routing = module(x, return_routing=True)
    assert_same(y, module(x))
    assert_same(routing.ids, module.router(x).ids)
    expected, up = plain(module, x), randn(2, T // 2, H, dtype=torch.float64)
    inputs = (x, *module.parameters())
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(y, inputs, up)
    for grad, other in zip(grads, torch.autograd.grad(expected, inputs, up), strict=True):
        assert (grad != 0).any()
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moe_within_budget(dtype):
    module, x = moe(dtype=dtype), randn(T, H, dtype=dtype).requires_grad_()
    exact, wide = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    y, up = module(x), randn(T, H, dtype=dtype)
    assert y.dtype == dtype
    truth = plain(exact, wide)
    low = x.detach().clone().requires_grad_()
    baseline = loop(module.experts, low, *_route(module, low))
    baseline = baseline + module.shared(low)
    assert_within_budget(y, truth, baseline, rows=False)
    names = [name for name, _ in module.named_parameters()]
    found = torch.autograd.grad(y, (x, *module.parameters()), up)
    exact_grads = torch.autograd.grad(truth, (wide, *exact.parameters()), up.double())
    rough = torch.autograd.grad(baseline, (low, *module.parameters()), up)
    for name, grad, true, near in zip(["x", *names], found, exact_grads, rough, strict=True):
        assert_within_budget(grad, true, near, name=name, rows=False)


def _route(module, x):
    scores = (x.float() @ module.router.weight.T.float()).softmax(-1)
    ids = scores.detach().argsort(-1, descending=True)[:, :K]
    weights = scores.gather(1, ids)
    return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


@pytest.mark.parametrize("shape", [(0, H), (H,), (1, H), (2, 0, H), (2, 3, 4, H)])
def test_any_leading_dimensions(shape):
    module, x = moe(), randn(*shape).requires_grad_()
    y, routing = module(x, return_routing=True)
    assert y.shape == shape
    assert routing.ids.shape == (x.numel() // H, K)
    y.sum().backward()
    assert x.grad.shape == shape
    if x.numel():
        torch.testing.assert_close(y, plain(module, x), rtol=1e-4, atol=1e-6)


def test_strided_input_and_gradient():
    module = moe()
    x = randn(H, 5, 4).permute(2, 1, 0).requires_grad_()
    up = torch.ones(1, 1, 1).expand(4, 5, H)
    (grad,) = torch.autograd.grad(module(x), x, up)
    (expected,) = torch.autograd.grad(module(x.contiguous()), x, up.contiguous())
    assert_same(module(x), module(x.contiguous()))
    assert_same(grad, expected)


def test_autocast():
    module, x = moe(), randn(T, H).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = module(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (x, *module.parameters()))
    low, tokens = copy.deepcopy(module).bfloat16(), x.detach().bfloat16()
    with torch.no_grad():
        expected = low.experts(tokens, routing.ids, routing.weights)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(module.experts(x, routing.ids, routing.weights), expected)


def test_training_lowers_the_loss():
    module = MoE(H, INNER, E, K, shared_intermediate_size=8)
    x = randn(32, H)
    target = torch.sin(3 * x)
    optimizer = torch.optim.Adam(module.parameters(), lr=2e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        y, routing = module(x, return_routing=True)
        loss = F.mse_loss(y, target)
        losses.append(loss.item())
        (loss + 1e-2 * load_balance_loss(routing) + 1e-3 * z_loss(routing.logits)).backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert (module.router.weight.grad != 0).any()


def test_checkpoint_recomputes_near_ties_the_same():
    module = MoE(H, INNER, E, 1, router=Router(H, E, 1))
    with torch.no_grad():
        module.router.weight[4] = module.router.weight[1]
        x = module.router.weight[1:2].expand(512, H).clone()
    x.requires_grad_()
    assert module(x, return_routing=True)[1].ids.unique().tolist() == [1]
    inputs = (x, *module.parameters())
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    for _ in range(20):
        found = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), inputs)
        for grad, other in zip(found, expected, strict=True):
            assert_same(grad, other)


def test_a_frozen_part_gets_no_gradient():
    module = moe()
    module.experts.requires_grad_(False)
    module(randn(T, H)).sum().backward()
    assert module.experts.gate_up.grad is None
    assert module.experts.down.grad is None
    assert (module.router.weight.grad != 0).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_experts=0), "num_experts: expected at least 1, got 0"),
        (dict(intermediate_size=-1), "intermediate_size: expected at least 1, got -1"),
        (dict(activation="swish"), "activation: expected one of .*, got 'swish'"),
        (dict(gate_layout="mixed"), "gate_layout: expected 'concatenated' or 'interleaved', got 'mixed'"),
        (dict(weight_on="both"), "weight_on: expected 'output' or 'input', got 'both'"),
        (dict(save="x"), "save: expected 'activations' or 'inputs', got 'x'"),
        (dict(backend="gpu"), "backend: expected None or one of .*, got 'gpu'"),
        (
            dict(activation="silu", gate_layout="interleaved"),
            "gate_layout: expected 'concatenated' for silu, which has no gate, got 'interleaved'",
        ),
    ],
)
def test_wrong_experts(arguments, message):
    with pytest.raises(ArgumentError, match=f"Experts: {message}"):
        Experts(**(dict(num_experts=E, hidden_size=H, intermediate_size=INNER) | arguments))


def test_wrong_parts():
    with pytest.raises(ArgumentError, match="MoE: router: expected one with top_k = 2, got top_k = 3"):
        MoE(H, INNER, E, K, router=Router(H, E, 3))
    with pytest.raises(
        ArgumentError, match="MoE: experts: expected one with num_experts = 6, got num_experts = 5"
    ):
        MoE(H, INNER, E, K, experts=Experts(E - 1, H, INNER))
    with pytest.raises(ArgumentTypeError, match="MoE: router: expected None or a Router, got Linear"):
        MoE(H, INNER, E, K, router=nn.Linear(H, E))
    with pytest.raises(ArgumentError, match="MoE: shared_gate: expected a shared_intermediate_size"):
        MoE(H, INNER, E, K, shared_gate=True)
    with pytest.raises(ArgumentError, match="SharedExpert: intermediate_size: expected at least 1, got 0"):
        MoE(H, INNER, E, K, shared_intermediate_size=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(save="inputs"), "save: expected nothing beside experts=, which have their own, got 'inputs'"),
        (
            dict(backend="eager"),
            "backend: expected nothing beside experts=, which have their own, got 'eager'",
        ),
        (
            dict(save="inputs", shared_intermediate_size=8),
            "save: expected nothing beside experts=, which have their own, got 'inputs'",
        ),
        (dict(activation="geglu"), "activation: expected nothing beside experts=, .*, got 'geglu'"),
        (
            dict(dtype=torch.bfloat16),
            "dtype: expected None or the dtype of experts=, float32, got bfloat16",
        ),
        (
            dict(dtype=torch.float32, router=Router(H, E, K)),
            r"dtype: expected nothing beside router= and experts=, .*, got torch.float32",
        ),
        (
            dict(device="meta", router=Router(H, E, K)),
            "device: expected nothing beside router= and experts=, .*, got 'meta'",
        ),
    ],
)
def test_options_that_no_part_would_have(options, message):
    with pytest.raises(ArgumentError, match=f"^MoE: {message}$"):
        MoE(H, INNER, E, K, experts=Experts(E, H, INNER), **options)


def test_options_of_what_is_made_beside_given_parts():
    experts = Experts(E, H, INNER, activation="gpt_oss")
    module = MoE(H, INNER, E, K, experts=experts, shared_intermediate_size=8, activation="geglu")
    assert module.shared.activation.spec == "geglu"
    assert module.experts is experts
    low = MoE(H, INNER, E, K, experts=Experts(E, H, INNER, dtype=torch.bfloat16), dtype=torch.bfloat16)
    assert low.router.weight.dtype == torch.bfloat16
    # A router that is handed over stays as it is.
    mixed = MoE(H, INNER, E, K, router=Router(H, E, K), dtype=torch.bfloat16)
    assert mixed.router.weight.dtype == torch.float32
    assert mixed.experts.gate_up.dtype == torch.bfloat16
    x = randn(T, H, dtype=torch.bfloat16)
    y, routing = mixed(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    assert routing.logits.dtype == torch.float32


def test_a_shared_expert_is_as_the_experts_that_are_handed_over():
    experts = Experts(E, H, INNER, dtype=torch.bfloat16)
    module = MoE(H, INNER, E, K, experts=experts, shared_intermediate_size=8)
    assert {p.dtype for p in module.shared.parameters()} == {torch.bfloat16}
    assert module(torch.zeros(3, H, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_sizes_in_the_order_of_the_layer():
    rotated = Experts(H, INNER, E)
    hint = "Experts takes num_experts, hidden_size, intermediate_size in this order"
    expected = rf"^MoE: experts: expected one with hidden_size = 16, got hidden_size = 12; {hint}$"
    with pytest.raises(ArgumentError, match=expected):
        MoE(H, INNER, E, K, experts=rotated)
    x, ids, weights = torch.zeros(3, H), torch.zeros(3, 1).long(), torch.ones(3, 1)
    with pytest.raises(ArgumentError) as raised:
        rotated(x, ids, weights)
    assert str(raised.value) == (
        "Experts: x: expected shape (T, H) = (3, 12), got shape (3, 16), "
        "which fits Experts(num_experts=6, hidden_size=16, intermediate_size=12)"
    )
    with pytest.raises(ArgumentError, match=r"got shape \(3, 5\)$"):
        rotated(torch.zeros(3, 5), ids, weights)


def test_wrong_inputs():
    with pytest.raises(
        ArgumentError, match=r"MoE: x: expected shape \(..., H\) with H = 16, got shape \(3, 15\)"
    ):
        moe()(torch.zeros(3, H - 1))
    with pytest.raises(ArgumentError, match=r"SharedExpert: x: expected shape \(..., H\)"):
        SharedExpert(H, INNER)(torch.zeros(3, H - 1))
    with pytest.raises(ArgumentError, match=r"Experts: x: expected shape \(T, H\), got shape \(1, 3, 16\)"):
        Experts(E, H, INNER)(torch.zeros(1, 3, H), torch.zeros(3, 1).long(), torch.ones(3, 1))
    with pytest.raises(
        ArgumentError, match=r"Experts: x: expected shape \(T, H\) = \(3, 16\), got shape \(3, 5\)"
    ):
        Experts(E, H, INNER)(torch.zeros(3, 5), torch.zeros(3, 1).long(), torch.ones(3, 1))
    with pytest.raises(
        ArgumentTypeError, match=r"^Experts: expert_ids: expected dtype int32 or int64, got f"
    ):
        Experts(E, H, INNER)(torch.zeros(3, H), torch.zeros(3, 1), torch.ones(3, 1))


@pytest.mark.parametrize(("own", "given"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_inputs_of_another_dtype(own, given):
    x, ids, weights = torch.zeros(3, H, dtype=given), torch.zeros(3, 1).long(), torch.ones(3, 1)
    got = f"dtype {str(own)[6:]}, got {str(given)[6:]}$"
    layer = moe().to(own)
    with pytest.raises(ArgumentTypeError, match=f"^MoE: x: expected the experts' {got}"):
        layer(x)
    with pytest.raises(ArgumentTypeError, match=f"^Experts: x: expected the parameters' {got}"):
        layer.experts(x, ids, weights)
    with pytest.raises(ArgumentTypeError, match=f"^SharedExpert: x: expected the parameters' {got}"):
        layer.shared(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).shape == x.shape
        with pytest.raises(ArgumentTypeError, match=r"^MoE: x: expected the experts' dtype .*, got float64$"):
            layer(x.double())


def test_repr():
    assert repr(Experts(2, 3, 4)) == "Experts(2, 3, 4, activation='swiglu')"
    experts = Experts(
        2, 3, 4, activation="gpt_oss", bias=True, gate_layout="interleaved", transpose_weight=True
    )
    assert repr(experts) == (
        "Experts(2, 3, 4, activation='gpt_oss(alpha=1.702,limit=7.0)', bias=True, "
        "gate_layout='interleaved', transpose_weight=True)"
    )
    assert repr(Experts(2, 3, 4, weight_on="input", backend="eager")).endswith("'input', backend='eager')")
    assert repr(Experts(2, 3, 4, save="inputs")) == "Experts(2, 3, 4, activation='swiglu', save='inputs')"
    assert "(shared): SharedExpert(\n    activation='swiglu'" in repr(moe())
