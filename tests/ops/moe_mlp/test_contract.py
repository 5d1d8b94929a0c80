"""moe_mlp's contract on routing, memory, autocast and tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anabranch import explain, moe_mlp
from anabranch.testing import assert_same, randn, routing

pytestmark = pytest.mark.op("moe_mlp")


def make(T: int, H: int, I: int, E: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:  # noqa: E741
    x, up, down = randn(T, H, dtype=dtype), randn(E, 2 * I, H, dtype=dtype), randn(E, H, I, dtype=dtype)
    return x.requires_grad_(), up.requires_grad_(), down.requires_grad_()


def oracle(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        row = x[t] * 0
        for e, weight in zip(ids[t].tolist(), w[t], strict=True):
            if 0 <= e < up.shape[0]:
                gate, value = (up[e] @ x[t]).chunk(2)
                row = row + weight * (down[e] @ (torch.sigmoid(gate) * gate * value))
        rows.append(row)
    return torch.stack(rows)


DROPPED = torch.tensor([[0, -1], [-1, -1], [2, 1], [-1, 2], [1, 0], [3, -1]])
SENTINEL = torch.tensor([[0, 4], [4, 4], [2, 1], [4, 2], [1, 0], [3, 4]])
FAR = torch.tensor([[0, 2**40], [-(2**40), 2**31], [2, 1], [-(2**31), 2], [1, 0], [3, 99]])
TWICE = torch.tensor([[1, 1], [2, 2], [0, 1], [3, 3], [0, 0], [1, 2]])


@pytest.mark.fp64
@pytest.mark.parametrize("ids", [DROPPED, SENTINEL, FAR, TWICE], ids=["dropped", "sentinel", "far", "twice"])
def test_dropped_and_repeated_ids(ids: Tensor, backend: str) -> None:
    x, up, down = make(6, 8, 4, 4, torch.float64)
    w = torch.rand(6, 2, dtype=torch.float64).requires_grad_()
    out, expected = moe_mlp(x, up, down, ids, w, backend=backend), oracle(x, up, down, ids, w)
    torch.testing.assert_close(out, expected)
    lost = ((ids < 0) | (ids >= 4)).all(1)
    assert bool((out[lost] == 0).all())
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, up, down, w), grad)
    for a, b in zip(found, torch.autograd.grad(expected, (x, up, down, w), grad), strict=True):
        torch.testing.assert_close(a, b)
    assert bool((found[3][(ids < 0) | (ids >= 4)] == 0).all())


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_nothing_of_a_dropped_slot_is_read(weight_on: str) -> None:
    x, up, down = make(6, 8, 4, 4)
    w = torch.rand(6, 2)
    clean = moe_mlp(x, up, down, DROPPED, w, weight_on=weight_on)
    w[DROPPED < 0] = torch.nan
    with torch.no_grad():
        x[1] = torch.nan  # token 1 has no expert
    w.requires_grad_()
    out = moe_mlp(x, up, down, DROPPED, w, weight_on=weight_on)
    assert_same(out, clean)
    out.sum().backward()
    for value in (x, up, down, w):
        assert bool(value.grad.isfinite().all())


def test_a_down_bias_is_weighted_and_added_once_a_slot() -> None:
    x, up, down = torch.zeros(1, 4), torch.zeros(3, 4, 4), torch.zeros(3, 4, 2)
    bias = torch.ones(3, 4, requires_grad=True)
    w = torch.tensor([[0.7, 0.3]], requires_grad=True)
    out = moe_mlp(x, up, down, torch.tensor([[0, 2]]), w, down_bias=bias)
    torch.testing.assert_close(out, torch.ones(1, 4))
    out.sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([[0.7], [0.0], [0.3]]).expand(3, 4))
    torch.testing.assert_close(w.grad, torch.tensor([[4.0, 4.0]]))


def test_the_weight_layout_is_what_the_caller_says_where_both_fit() -> None:
    """I = H without a gate: (E, N, K_dim) and (E, K_dim, N) have one shape."""
    i, j = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    up, down = ((i - 2 * j) / 16).expand(2, 16, 16), ((3 * i - j) / 16).expand(2, 16, 16)
    x, ids, w = torch.randn(5, 16), torch.tensor([[0, 1]]).expand(5, 2), torch.full((5, 2), 0.5)
    stored = moe_mlp(x, up, down, ids, w, activation="relu")
    torch.testing.assert_close(stored, torch.relu(x @ up[0].T) @ down[0].T, rtol=1e-5, atol=1e-4)
    other = moe_mlp(x, up, down, ids, w, activation="relu", transpose_weight=True)
    torch.testing.assert_close(other, torch.relu(x @ up[0]) @ down[0], rtol=1e-5, atol=1e-4)
    assert not torch.allclose(other, stored)


def test_the_weight_layout_is_what_the_caller_says_where_the_first_fits_both() -> None:
    """2 I = H with a gate: gate_up is square."""
    i, j = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    up, down = ((i - 2 * j) / 16).double().expand(2, 16, 16), randn(2, 16, 8, dtype=torch.float64)
    x, ids, w = (
        randn(5, 16, dtype=torch.float64),
        torch.tensor([[0, 1]]).expand(5, 2),
        torch.full((5, 2), 0.5),
    )
    torch.testing.assert_close(moe_mlp(x, up, down, ids, w), oracle(x, up, down, ids, w))
    transposed = moe_mlp(x, up, down.mT, ids, w, transpose_weight=True)
    torch.testing.assert_close(transposed, oracle(x, up.mT, down, ids, w))


@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_kept_for_the_backward_are_the_layout_and_h_if_wanted(
    activation: str, weight_on: str, save: str
) -> None:
    T, H, I, E, K = 32, 16, 8, 4, 2  # noqa: E741
    N = 2 * I if activation == "swiglu" else I
    x, up, down = torch.randn(T, H), torch.randn(E, N, H, requires_grad=True), torch.randn(E, H, I)
    ids, w = routing(T, E, K), torch.rand(T, K)
    options = {"activation": activation, "weight_on": weight_on, "save": save}
    layout, h = 4 * (E + (E + 1) + 2 * T * K), 4 * T * K * N if save == "activations" else 0
    found = explain(moe_mlp, x, up, down, ids, w, **options)
    assert found.saved_bytes == h + layout
    assert f"  kept for the backward beyond the arguments: {h + layout:,} bytes" in str(found).splitlines()
    with torch.no_grad():
        assert explain(moe_mlp, x, up, down, ids, w, **options).saved_bytes == 0


def test_without_gradients_h_is_not_even_allocated() -> None:
    x, up, down = make(16, 8, 4, 4)
    ids, w = routing(16, 4, 2), torch.rand(16, 2)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.anabranch.moe_mlp.default:
                seen.append(out[1].numel())
            return out

    for grad, save in (
        (torch.no_grad(), "activations"),
        (torch.enable_grad(), "inputs"),
        (torch.enable_grad(), "activations"),
    ):
        with grad, Watch():
            moe_mlp(x, up, down, ids, w, save=save)
    assert seen == [0, 0, 32 * 8]


@pytest.mark.cpu
def test_saved_are_the_very_inputs() -> None:
    """No copy of x among what the node holds, and of the pre-activation a tensor without elements."""
    x, up, down = make(16, 8, 4, 4)
    ids, w = routing(16, 4, 2), torch.rand(16, 2, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: saved.append(v) or v, lambda v: v):
        moe_mlp(x, up, down, ids, w, save="inputs")
    given = {v.data_ptr() for v in (x, up, down, w)}
    rest = [v for v in saved if v.data_ptr() not in given]
    assert len(saved) == 9
    assert sorted(v.numel() for v in rest) == [0, 4, 5, 32, 32]
    assert all(v.dtype == torch.int32 for v in rest if v.numel())


@pytest.mark.cpu
def test_the_reference_keeps_nothing_of_inputs_and_gives_higher_derivatives() -> None:
    x, up, down = make(6, 8, 4, 4, torch.float64)
    w = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    leaves, found = (x, up, down, w), []
    for save in ("activations", "inputs"):
        given = dict(save=save, backend="reference")
        kept = explain(moe_mlp, x, up, down, DROPPED, w, **given).saved_bytes
        assert (kept == 0) == (save == "inputs")
        out = moe_mlp(x, up, down, DROPPED, w, **given)
        (d_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append([out, d_x, *torch.autograd.grad(d_x.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_as_matmul_does(x_dtype: torch.dtype, device: str) -> None:
    x, up, down = (v.detach() for v in make(6, 8, 4, 4))
    x = x.to(x_dtype).requires_grad_()
    up.requires_grad_(), down.requires_grad_()
    w = torch.rand(6, 2, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        out = moe_mlp(x, up, down, TWICE, w)
        torch.nn.functional.linear(out, torch.randn(3, 8))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    plain = [v.detach().bfloat16().requires_grad_() for v in (x, up, down)]
    again = w.detach().requires_grad_()
    expected = moe_mlp(*plain, TWICE, again)
    assert_same(out, expected)
    expected.float().sum().backward()
    for leaf, cast in zip((x, up, down, w), (*plain, again), strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_same(leaf.grad, cast.grad.to(leaf.dtype))


def test_mixed_dtypes_are_an_error_outside_autocast() -> None:
    x, up, down = make(6, 8, 4, 4)
    with pytest.raises(TypeError, match=r"^moe_mlp: gate_up: expected x's dtype bfloat16, got float32$"):
        moe_mlp(x.bfloat16(), up, down, TWICE, torch.rand(6, 2))


@pytest.mark.parametrize(
    "weight_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_routing_weights_keep_their_dtype(weight_dtype: torch.dtype) -> None:
    x, up, down = make(6, 8, 4, 4)
    w = torch.rand(6, 2).to(weight_dtype).requires_grad_()
    moe_mlp(x, up, down, TWICE, w).sum().backward()
    expected = torch.autograd.grad(
        oracle(x.double(), up.double(), down.double(), TWICE, v := w.double()).sum(), v
    )[0]
    assert w.grad.dtype == weight_dtype
    torch.testing.assert_close(
        w.grad.double(), expected, rtol=max(1e-4, 2 * torch.finfo(weight_dtype).eps), atol=1e-4
    )


FLAGS = ("swiglu", False, "concatenated", "output", None)


@pytest.mark.cpu
@pytest.mark.parametrize("ids", [routing(12, 4, 2), DROPPED.repeat(2, 1)], ids=["random", "dropped"])
def test_opcheck(ids: Tensor) -> None:
    x, up, down = make(12, 8, 4, 4)
    w, bias = torch.rand(12, 2, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    inputs = (x, up, down, w, None, bias)
    constants = tuple(v if v is None else v.detach() for v in inputs)
    torch.library.opcheck(torch.ops.anabranch.moe_mlp.default, (True, *inputs, ids, *FLAGS))
    torch.library.opcheck(torch.ops.anabranch.moe_mlp.default, (False, *constants, ids, *FLAGS))
    torch.library.opcheck(torch.ops.anabranch.moe_mlp.default, (False, *inputs, ids, *FLAGS))
    _, h, *layout = torch.ops.anabranch.moe_mlp(True, *constants, ids, *FLAGS)
    needs = [True, False, True, True, False, True]
    for kept in (h, h.new_empty(0)):
        args = (needs, torch.randn(12, 8), kept, *constants, *layout, *FLAGS)
        torch.library.opcheck(torch.ops.anabranch.moe_mlp_backward.default, args)


@pytest.mark.cpu
@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_one_graph_for_any_number_of_tokens(save: str) -> None:
    _, up, down = make(1, 8, 4, 4)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe_mlp, fullgraph=True, dynamic=True, backend=counter)
    for T in (7, 64, 65, 33):
        x, w = torch.randn(T, 8, requires_grad=True), torch.rand(T, 2, requires_grad=True)
        ids = routing(T, 4, 2, "every_other")
        out = compiled(x, up, down, ids, w, save=save)
        expected = moe_mlp(x, up, down, ids, w, save=save)
        assert_same(out, expected)
        for a, b in zip(
            *(torch.autograd.grad(y.sum(), (x, up, down, w)) for y in (out, expected)), strict=True
        ):
            assert_same(a, b)
    assert counter.frame_count == 1


@pytest.mark.cpu
def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, up: Tensor, down: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            return moe_mlp(x, up, down, ids, w)

    args = (*(v.detach() for v in make(9, 8, 4, 4)), routing(9, 4, 2), torch.rand(9, 2))
    program = torch.export.export(Layer(), args)
    assert_same(program.module()(*args), moe_mlp(*args))


@pytest.mark.cpu
@pytest.mark.parametrize("save", ["activations", "inputs"])
def test_fake_tensors(save: str) -> None:
    with FakeTensorMode():
        x, up, down = make(9, 8, 4, 4, torch.bfloat16)
        w = torch.rand(9, 2, requires_grad=True)
        out = moe_mlp(x, up, down, torch.zeros(9, 2, dtype=torch.int64), w, save=save)
        assert (out.shape, out.dtype) == ((9, 8), torch.bfloat16)
        out.sum().backward()
        assert w.grad.shape == (9, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_same_gradients(reentrant: bool) -> None:
    """512 copies of one token whose two experts tie: a recomputed routing must not differ."""
    router, up, down = torch.randn(8, 8), *make(1, 8, 4, 8)[1:]
    router[3] = router[5]

    def layer(x: Tensor) -> Tensor:
        weights, ids = torch.sort((x @ router.T).softmax(-1), dim=-1, descending=True, stable=True)
        return moe_mlp(x, up, down, ids[:, :2], weights[:, :2])

    x = torch.randn(1, 8).repeat(512, 1).requires_grad_()
    expected = torch.autograd.grad(layer(x).square().sum(), (x, up, down))
    for _ in range(5):
        again = checkpoint(layer, x, use_reentrant=reentrant)
        x.grad = up.grad = down.grad = None
        again.square().sum().backward()
        for value, grad in zip((x, up, down), expected, strict=True):
            assert_same(value.grad, grad)


@pytest.mark.cpu
def test_training_with_half_the_slots_dropped_stays_right() -> None:
    x, up, down = make(8, 32, 16, 4, torch.float64)
    ids = routing(8, 4, 2)
    ids[:, 1] = 4
    ids[3] = 4
    w = torch.where(ids < 4, torch.rand(8, 2, dtype=torch.float64), 0).requires_grad_()
    leaves = [x, up, down, w]
    twins = [v.detach().clone().requires_grad_() for v in leaves]
    ours, theirs = torch.optim.SGD(leaves, lr=1e-3), torch.optim.SGD(twins, lr=1e-3)
    for _ in range(3):
        for optimizer, loss in (
            (ours, moe_mlp(x, up, down, ids, w)),
            (theirs, oracle(*twins[:3], ids, twins[3])),
        ):
            optimizer.zero_grad()
            loss.square().mean().backward()
            optimizer.step()
    for a, b in zip(leaves, twins, strict=True):
        torch.testing.assert_close(a, b)
