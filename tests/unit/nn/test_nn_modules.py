"""What every module can do: be saved, copied, built on the meta device, compiled."""

import copy
import inspect
import io

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import anabranch.nn
from anabranch.nn import Experts, MoE, MultiExpertLinear, Rotary, Router, SharedExpert
from anabranch.testing import assert_same, randn

H, INNER, E, K = 16, 12, 6, 2


def full_router(device=None, dtype=None):
    return Router(H, E, K, score="sigmoid", selection_bias=True, bias=True, device=device, dtype=dtype)


def full_moe(device=None, dtype=None):
    return MoE(
        H,
        INNER,
        E,
        K,
        router=full_router(device, dtype),
        experts=Experts(E, H, INNER, bias=True, device=device, dtype=dtype),
        shared_intermediate_size=8,
        shared_gate=True,
        device=device,
        dtype=dtype,
    )


# Maker, arguments of the forward for a number of tokens, and the frozen names in the state dict.
MODULES = {
    "router": (full_router, lambda t: (randn(t, H),), ["weight", "bias", "selection_bias"]),
    "experts": (
        lambda **kw: Experts(E, H, INNER, bias=True, **kw),
        lambda t: (randn(t, H), torch.randint(0, E, (t, K)), randn(t, K)),
        ["gate_up", "down", "gate_up_bias", "down_bias"],
    ),
    "shared": (
        lambda **kw: SharedExpert(H, INNER, gate=True, **kw),
        lambda t: (randn(t, H),),
        ["gate_up.weight", "down.weight", "gate.weight"],
    ),
    "moe": (
        full_moe,
        lambda t: (randn(t, H),),
        [
            "router.weight",
            "router.bias",
            "router.selection_bias",
            "experts.gate_up",
            "experts.down",
            "experts.gate_up_bias",
            "experts.down_bias",
            "shared.gate_up.weight",
            "shared.down.weight",
            "shared.gate.weight",
        ],
    ),
    "plain_moe": (
        lambda **kw: MoE(H, INNER, E, K, **kw),
        lambda t: (randn(t, H),),
        ["router.weight", "experts.gate_up", "experts.down"],
    ),
    "multi_expert_linear": (
        lambda **kw: MultiExpertLinear((8, 4), (5, 6), bias=True, **kw),
        lambda t: ([randn(t, 8), randn(t + 2, 4)],),
        ["weights.0", "weights.1", "biases.0", "biases.1"],
    ),
    "rotary": (
        lambda **kw: Rotary(16, sections=[4, 2, 2]),
        lambda t: (randn(1, 2, t, 16), randn(1, 1, t, 16), torch.arange(t).expand(3, 1, t)),
        [],
    ),
}
every_module = pytest.mark.parametrize("name", MODULES)


def leaves(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def assert_all_same(found, expected):
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert_same(a, b)


@every_module
def test_state_dict_round_trip(name):
    make, inputs, keys = MODULES[name]
    module, other = make(), make()
    assert list(module.state_dict()) == keys
    args = inputs(5)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert_all_same(other(*args), module(*args))


@every_module
def test_deepcopy(name):
    make, inputs, _ = MODULES[name]
    module, args = make(), inputs(5)
    twin = copy.deepcopy(module)
    assert_all_same(twin(*args), module(*args))
    for a, b in zip(twin.parameters(), module.parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr()


@every_module
def test_meta_device(name):
    make, inputs, keys = MODULES[name]
    module = make(device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    module.to_empty(device="cpu")
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.fill_(float("nan"))
    if keys:
        module.reset_parameters()
    assert not any(value.isnan().any() for value in (*module.parameters(), *module.buffers()))
    assert all((p != 0).any() for p in module.parameters())
    module.float()(*inputs(5))


@every_module
def test_reset_draws_anew_as_the_constructor_does(name):
    make, _, keys = MODULES[name]
    torch.manual_seed(3)
    module = make()
    first = copy.deepcopy(module.state_dict())
    if keys:
        module.reset_parameters()
        assert not any(torch.equal(p, first[key]) for key, p in module.named_parameters())
    torch.manual_seed(3)
    assert_all_same(list(make().state_dict().values()), list(first.values()))


@every_module
def test_compiles_once(name):
    make, inputs, _ = MODULES[name]
    module = make()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)

    def results(module, args):
        outputs = leaves(module(*args))
        total = sum(y.square().sum() for y in outputs if y.is_floating_point())
        parameters = list(module.parameters())
        return [*outputs, *(torch.autograd.grad(total, parameters) if parameters else [])]

    for tokens in (7, 64, 65):
        args = inputs(tokens)
        for a, b in zip(results(compiled, args), results(module, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2  # a float attribute makes the compiler start over once


def test_compiles_with_losses_under_autocast():
    module = full_moe()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            y, routing = module(x, return_routing=True)
        balance = anabranch.nn.load_balance_loss(routing, score="sigmoid")
        return y.float().square().mean() + balance + anabranch.nn.z_loss(routing.logits)

    x = randn(9, H)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(x), list(module.parameters()))
    for a, b in zip(torch.autograd.grad(compiled(x), list(module.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_compiled_checkpoint_recomputes_the_same():
    module = full_moe()
    x = randn(1, H).expand(64, H).clone().requires_grad_()
    inputs = (x, *module.parameters())

    def saving(x):
        return checkpoint(module, x, use_reentrant=False)

    found, expected = (
        torch.autograd.grad(
            torch.compile(f, fullgraph=True, backend="aot_eager")(x).square().sum(), inputs, allow_unused=True
        )
        for f in (saving, module)
    )
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)


def test_exports():
    module, x = full_moe().requires_grad_(False), randn(9, H)
    program = torch.export.export(
        module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2, max=2**20)},)
    )
    other = randn(5, H)
    assert_same(program.module()(other), module(other))


def test_public_names_are_frozen():
    assert sorted(anabranch.nn.__all__) == [
        "Experts",
        "MoE",
        "MultiExpertLinear",
        "Rotary",
        "Router",
        "Routing",
        "SharedExpert",
        "expert_counts",
        "load_balance_loss",
        "z_loss",
    ]


@pytest.mark.parametrize("name", anabranch.nn.__all__)
def test_each_parameter_is_documented(name):
    value = getattr(anabranch.nn, name)
    text = inspect.getdoc(value)
    assert text
    if inspect.isclass(value) and issubclass(value, nn.Module):
        assert not [p for p in inspect.signature(value).parameters if f"{p}:" not in text]


CHOOSERS = {
    "Router": (lambda **o: Router(H, E, K, **o), lambda m: m(torch.ones(3, H)).weights),
    "Rotary": (
        lambda **o: Rotary(8, **o),
        lambda m: m(torch.ones(1, 2, 3, 8), None, torch.arange(3))[0],
    ),
    "MultiExpertLinear": (
        lambda **o: MultiExpertLinear([4, 3], [5, 2], **o),
        lambda m: torch.cat([y.flatten() for y in m([torch.ones(2, 4), torch.ones(1, 3)])]),
    ),
    "Experts": (
        lambda **o: Experts(E, H, INNER, **o),
        lambda m: m(torch.ones(2, H), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)),
    ),
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_a_backend_asked_for_runs_or_raises(name):
    make, run = CHOOSERS[name]
    torch.manual_seed(0)
    plain = run(make())
    torch.manual_seed(0)
    torch.testing.assert_close(run(make(backend="reference")), plain)
    assert make(backend="reference").extra_repr().endswith("backend='reference'")
    with pytest.raises(NotImplementedError, match="hopper: "):
        run(make(backend="hopper"))
    with pytest.raises(ValueError, match=f"{name}: backend: expected None or one of .*, got 'gpu'"):
        make(backend="gpu")


MADE = {
    "Router": lambda **k: Router(8, 4, 2, **k),
    "Experts": lambda **k: Experts(4, 8, 6, **k),
    "SharedExpert": lambda **k: SharedExpert(8, 6, **k),
    "MultiExpertLinear": lambda **k: MultiExpertLinear([2, 3], [4, 5], **k),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    ("dtype", "got"), [(torch.int32, "int32"), (torch.complex64, "complex64"), ("float32", "str")], ids=str
)
def test_only_floats_are_parameters(made, dtype, got):
    with pytest.raises(TypeError, match=f"^{made}: dtype: expected None or float16 or .*, got {got}"):
        MADE[made](dtype=dtype)


@pytest.mark.parametrize(
    ("made", "flag"),
    [
        ("Router", "renormalize"),
        ("Router", "selection_bias"),
        ("Router", "bias"),
        ("Experts", "bias"),
        ("Experts", "transpose_weight"),
        ("SharedExpert", "gate"),
    ],
)
def test_flags_are_checked_when_a_module_is_made(made, flag):
    with pytest.raises(TypeError, match=f"^{made}: {flag}: expected a bool, got int"):
        MADE[made](**{flag: 1})


def test_shared_gate_is_a_flag():
    with pytest.raises(TypeError, match=r"^MoE: shared_gate: expected a bool, got int"):
        MoE(8, 6, 4, 2, shared_intermediate_size=4, shared_gate=1)


def test_a_shared_expert_elsewhere_is_refused():
    with pytest.raises(ValueError, match=r"^SharedExpert: x: expected gate_up.weight's device cpu, got meta"):
        SharedExpert(8, 6)(torch.zeros(3, 8, device="meta"))
