"""Launches past Triton's launcher: which launchers are known, what the one in C is called with, and the fallback."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton's launcher, for which the interpreter stands in",
)
CPU = torch.device("cpu")
TILE = dict(swizzle=3, elem_size=2, elem_type=8, block_size=[64, 64], fp4_padded=False)


@pytest.fixture(autouse=True)
def triton_36(monkeypatch):
    """Triton's launcher of the known form, whatever the release; no GPU, whose streams and descriptors are noted."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from anabranch._backends.triton import native

    class CudaLauncher:
        def __call__(self, gridX, gridY, gridZ, stream, function, *args):
            options = self.launch_cooperative_grid, self.launch_pdl, None, None
            self.launch(gridX, gridY, gridZ, stream, function, *options, *args)

    def make_tensordesc_arg(found, metadata):
        encoded.append(found.base.data_ptr())
        return [("map", found.base.data_ptr(), metadata["swizzle"]), *found.shape, *found.strides]

    encoded = []
    monkeypatch.setattr(nvidia, "CudaLauncher", CudaLauncher)
    monkeypatch.setattr(nvidia, "_BASE_ARGS_FORMAT", native.BEFORE_ARGUMENTS, raising=False)
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", make_tensordesc_arg)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: "stream"))
    native._known.cache_clear()
    native.encoded.cache_clear()
    yield SimpleNamespace(launcher=CudaLauncher, module=nvidia, encoded=encoded)
    native._known.cache_clear()
    native.encoded.cache_clear()


def wrapped(launcher, tensordesc_indices, tensordesc_meta):
    """As Triton wraps the launcher in C of a kernel with descriptors."""

    def inner(*args):
        return launcher, tensordesc_indices, tensordesc_meta

    return inner


def launcher_of(cls, **changes):
    run = cls()
    given = dict(
        global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True
    )
    for name, value in {**given, "launch": max, **changes}.items():
        setattr(run, name, value)
    return run


def tiles(*sizes):
    from anabranch._backends.triton.ragged import Tiles

    return Tiles(list(sizes), [sizes[1], 1], [64, 64])


def test_known_launchers(triton_36):
    from anabranch._backends.triton import native

    plain = native.of(launcher_of(triton_36.launcher), {})
    assert plain == (max, (False, True, None, None), ())
    described = native.of(
        launcher_of(triton_36.launcher, launch=wrapped(min, {2, 0}, [TILE, TILE])), {0: 1, 2: 2}
    )
    assert described.launch is min
    assert [place for place, _ in described.encoders] == [2, 0]


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        (dict(global_scratch_size=8), ()),
        (dict(profile_scratch_size=8), ()),
        ({}, (0,)),  # tiles for what the kernel does not take as a descriptor
        (dict(launch=wrapped(min, {0}, [TILE])), ()),  # a descriptor that whoever launches makes
        (dict(launch=wrapped(min, {0}, [None])), (0,)),  # no hardware for descriptors
        (dict(launch=lambda *args: None), ()),  # put around it by somebody
        (dict(launch=SimpleNamespace()), ()),
    ],
    ids=["scratch", "profile scratch", "tiles", "described", "no hardware", "function", "object"],
)
def test_launchers_that_are_left_alone(changes, places, triton_36):
    from anabranch._backends.triton import native

    assert native.of(launcher_of(triton_36.launcher, **changes), dict.fromkeys(places, tiles(64, 64))) is None


def test_other_releases_are_left_alone(triton_36, monkeypatch):
    from anabranch._backends.triton import native

    class Later:
        def __call__(self, gridX, gridY, gridZ, stream, function, kernel_metadata, *args):
            pass

    assert native.of(launcher_of(Later), {}) is None  # nor Triton's: AMD's, or a profiler's
    monkeypatch.setattr(triton_36.module, "CudaLauncher", Later)
    native._known.cache_clear()
    assert native.of(launcher_of(Later), {}) is None
    monkeypatch.setattr(triton_36.module, "CudaLauncher", triton_36.launcher)
    monkeypatch.setattr(triton_36.module, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOOO")
    native._known.cache_clear()
    assert native.of(launcher_of(triton_36.launcher), {}) is None


def test_the_installed_launcher_is_recognised_or_not_by_its_release(monkeypatch):
    import triton

    from anabranch._backends.triton import native

    monkeypatch.undo()
    driver = importlib.import_module(native.DRIVER)
    native._known.cache_clear()
    assert native._known(driver.CudaLauncher) == triton.__version__.startswith("3.6.")


class Kernel:
    """Takes (a, b, c, n, BLOCK), of which a and b may be descriptors; notes what Triton and the launcher in C get."""

    arg_names = ("a", "b", "c", "n", "BLOCK")

    def __init__(self, cls, **changes):
        self.pre_run_hooks, self.asked, self.seen = [], [], []
        self.cls, self.changes = cls, changes

    def __getitem__(self, grid):
        return lambda *tensors, **constants: self.asked.append(tensors) or self.compiled()

    def compiled(self):
        from triton.compiler import CompiledKernel

        launch = wrapped(lambda *given: self.seen.append(given), {0, 1}, [TILE, TILE])
        found = launcher_of(self.cls, **{"launch": launch, **self.changes})

        class Compiled(CompiledKernel):
            function, packed_metadata, run = "function", "packed", found
            metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))

            def __init__(self):
                pass

        return Compiled()


def described(kernel):
    from anabranch._backends.triton.prepared import Launch

    return Launch(CPU, kernel, (5,), 7, BLOCK=16).tiled({0: tiles(128, 64), 1: tiles(64, 64), 2: None})


BEFORE = (5, 1, 1, "stream", "function", False, True, None, None, "packed", None, None, None)


def expanded(x, *sizes):
    return ("map", x.data_ptr(), 3), *sizes, sizes[1], 1


def test_the_launcher_in_c_gets_addresses_and_encoded_descriptors(triton_36):
    kernel = Kernel(triton_36.launcher)
    launch = described(kernel)
    x, y, z = (torch.zeros(128, 64, dtype=torch.float16) for _ in range(3))
    launch(x, y, z)
    assert len(kernel.asked) == 1
    assert not kernel.seen
    calls = [(x, y, z), (x, y, None), (x, z, y), (y, z[8:], x)]
    for call in calls:
        launch(*call)
    assert len(kernel.asked) == 1
    assert kernel.seen == [
        (*BEFORE, *expanded(a, 128, 64), *expanded(b, 64, 64), None if c is None else c.data_ptr(), 7, 16)
        for a, b, c in calls
    ]
    # Once for each address that a place has had.
    assert sorted(triton_36.encoded) == sorted(v.data_ptr() for v in (x, y, y, z, z[8:]))


def test_descriptors_of_passing_addresses_are_forgotten(triton_36):
    from anabranch._backends.triton import native

    encoder = native.Encoder(tiles(64, 64), TILE)
    for address in range(16, 16 * (2 * native.ENCODED + 1), 16):
        assert native.encoded(encoder, address)[0] == ("map", address, 3)
    assert native.encoded.cache_info().currsize == native.ENCODED


def test_hooks_bring_back_tritons_way(triton_36):
    from triton import knobs

    kernel = Kernel(triton_36.launcher)
    launch = described(kernel)
    x = torch.zeros(128, 64, dtype=torch.float16)
    for hooks in (
        kernel.pre_run_hooks,
        knobs.runtime.launch_enter_hook.calls,
        knobs.runtime.launch_exit_hook.calls,
    ):
        launch(x, x, x)
        hooks.append(lambda *_: None)
        launch(x, x, x)
        hooks.pop()
    launch(x, x, x)
    assert len(kernel.asked) == 1 + 3
    assert len(kernel.seen) == 2 + 1


def test_an_unknown_launcher_is_called_with_tensors_and_descriptors(triton_36):
    from triton.tools.tensor_descriptor import TensorDescriptor

    called = []

    class Other:
        def __call__(self, *given):
            called.append(given)

    kernel = Kernel(Other)
    launch = described(kernel)
    x = torch.zeros(128, 64, dtype=torch.float16)
    for _ in range(3):
        launch(x, x, x)
    assert len(kernel.asked) == 1
    assert len(called) == 2
    a, b, c = called[0][9:12]
    assert isinstance(a, TensorDescriptor)
    assert isinstance(b, TensorDescriptor)
    assert a.base is b.base is c is x


def recorded(kernel, x, out, h):
    """Two launches, through a temporary and a part of h."""
    from anabranch._backends.triton import replay

    launch, temporary = described(kernel), torch.zeros(128, 64, dtype=torch.float16)
    with replay.recording() as found:
        launch(x, temporary, None)
        launch(temporary, h[:, 32:], out)
    return replay.of(found, [x], [out, h], [temporary])


def test_a_replay_makes_the_recorded_launches_for_other_tensors(triton_36, monkeypatch):
    kernel = Kernel(triton_36.launcher)
    make = lambda: [torch.zeros(128, 64, dtype=torch.float16) for _ in range(3)]  # noqa: E731
    again = recorded(kernel, *make())
    assert len(kernel.asked) == 1 + 0
    kernel.seen.clear()
    x, out, h = make()
    again.run([x, out, h])
    (first, second), memory = kernel.seen, kernel.seen[0][len(BEFORE) + 5][1]
    assert first == (*BEFORE, *expanded(x, 128, 64), ("map", memory, 3), 64, 64, 64, 1, None, 7, 16)
    part = ("map", h.data_ptr() + 64, 3), 64, 64, 64, 1
    assert second == (*BEFORE, ("map", memory, 3), 128, 64, 64, 1, *part, out.data_ptr(), 7, 16)
    assert memory not in {v.data_ptr() for v in (x, out, h)}


@pytest.mark.parametrize("why", ["hook", "launcher"])
def test_a_replay_for_who_has_to_see_tensors(why, triton_36, monkeypatch):
    kernel = Kernel(triton_36.launcher if why == "hook" else type("Other", (), {"__call__": lambda *_: None}))
    again = recorded(kernel, *(torch.zeros(128, 64, dtype=torch.float16) for _ in range(3)))
    assert (again.calls is None) == (why == "launcher")
    seen = []
    monkeypatch.setattr(type(again.steps[0][0]), "__call__", lambda self, *tensors: seen.append(tensors))
    kernel.pre_run_hooks.append(print)
    x, out, h = (torch.zeros(128, 64, dtype=torch.float16) for _ in range(3))
    again.run([x, out, h])
    (a, temporary, none), (b, part, c) = seen
    assert a is x
    assert c is out
    assert none is None
    assert b is temporary
    assert (temporary.shape, temporary.dtype) == ((128, 64), torch.float16)
    assert part.data_ptr() == h.data_ptr() + 64


def test_what_cannot_be_replayed(triton_36):
    from anabranch._backends.triton import replay

    x, y, out = (torch.zeros(128, 64, dtype=torch.float16) for _ in range(3))
    launch = described(Kernel(triton_36.launcher))
    with replay.recording() as found:
        launch(x, y, out)
    assert replay.of(found, [x, y], [out], []) is not None
    assert replay.of(found, [x], [out], []) is None  # y is nobody's
    assert replay.of(found, [x, x[:], y], [out], []) is None  # one address, two tensors
    assert replay.of(found, [x, y[:], out], [], []) is not None
    with replay.recording() as found:
        launch(x[1:], y, out)
    assert replay.of(found, [x, y], [out], []) is None  # a part of the caller's


def test_each_launch_is_on_the_stream_and_the_device_of_its_moment(triton_36, monkeypatch):
    from contextlib import contextmanager

    from triton.runtime import driver

    from anabranch._backends.triton import prepared, replay

    now, inside = ["s0"], []

    @contextmanager
    def current(device):
        inside.append(device)
        yield
        inside.append("left")

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: now[0]))
    kernel = Kernel(triton_36.launcher)
    again = recorded(kernel, *(torch.zeros(128, 64, dtype=torch.float16) for _ in range(3)))
    launch = again.steps[0][0]
    monkeypatch.setattr(prepared, "current", current)
    monkeypatch.setattr(replay, "current", current)
    x, out, h = (torch.zeros(128, 64, dtype=torch.float16) for _ in range(3))
    for stream, elsewhere in (("s1", False), ("s2", True)):
        kernel.seen.clear()
        inside.clear()
        now[0] = stream
        monkeypatch.setattr(prepared, "elsewhere", lambda device, there=elsewhere: there)
        launch(x, x, x)
        assert inside == ([CPU, "left"] if elsewhere else [])
        again.run([x, out, h])
        assert inside[-2:] == [CPU, "left"]
        assert [given[3] for given in kernel.seen] == [stream] * 3


def forward(make, topk=None):
    """A moe_mlp like all others of here, remembered: the call, its output, and the fields of its layout."""
    from anabranch.epilogues import resolve
    from anabranch.ops.moe_mlp.backends.triton import remembered
    from anabranch.ops.moe_mlp.call import MoeMlpCall
    from anabranch.ops.route.autograd import topk_fake
    from anabranch.ops.route.call import Routing

    x, up, down = torch.zeros(6, 8), torch.zeros(2, 8, 8), torch.zeros(2, 8, 4)
    ids, weights, out = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, 2), torch.zeros(6, 8)
    options = None, None, resolve("test", "swiglu"), False, "concatenated", "output", "triton"
    call = MoeMlpCall(x, up, down, weights, *options, expert_ids=ids)
    return call, out, remembered.forward(make, call, out, None, Routing(topk or topk_fake, topk_fake))


def test_a_remembered_forward_routes_into_new_fields(triton_36, monkeypatch):
    from anabranch import tuning
    from anabranch._backends.triton.prepared import recorder
    from anabranch.ops.route.autograd import topk_fake

    kernel = Kernel(triton_36.launcher)
    route, rest, routed, recorded = described(kernel), described(kernel), [], []

    def topk(ids, experts):
        fields = topk_fake(ids, experts)
        route(ids, fields[2], fields[3])
        routed.append(fields)
        return fields

    def make(call, out, h):
        recorded.append(recorder.recording is not None)
        assert call.layout.slot_to_row is routed[-1][3]
        rest(call.x, call.layout.slot_to_row, out)
        return []

    forward(make, topk)
    kernel.seen.clear()
    for _ in range(2):
        call, out, fields = forward(make, topk)
        first, second = kernel.seen[-2:]
        assert first == (
            *BEFORE, *expanded(call.expert_ids, 128, 64), *expanded(fields[2], 64, 64), fields[3].data_ptr(), 7, 16
        )  # fmt: skip
        assert second == (
            *BEFORE, *expanded(call.x, 128, 64), *expanded(fields[3], 64, 64), out.data_ptr(), 7, 16
        )  # fmt: skip
        assert [(v.shape, v.dtype) for v in fields] == [(v.shape, v.dtype) for v in routed[0]]
    assert len(routed) == 1
    assert len(kernel.asked) == 2
    # While tiles may be searched for, nothing is remembered, and nobody keeps the trials' tensors.
    monkeypatch.setattr(tuning, "standing", lambda device: None)
    forward(make, topk)
    assert len(routed) == 2
    assert recorded == [True, False]


@pytest.mark.parametrize("why", ["did more", "wrote elsewhere"])
def test_a_forward_that_cannot_be_made_again_is_recorded_once(why, triton_36, monkeypatch):
    from anabranch import tuning
    from anabranch._backends.triton.prepared import recorder

    kernel = Kernel(triton_36.launcher)
    launch, recorded = described(kernel), []

    def make(call, out, h):
        recorded.append(recorder.recording is not None)
        launch(call.x, call.layout.slot_to_row, out if why == "did more" else torch.zeros(6, 8))
        return None if why == "did more" else []

    for _ in range(3):
        forward(make)
    assert recorded == [True, False, False]
    assert len(kernel.asked) + len(kernel.seen) == 3
    # What the tuner found meanwhile may let it be.
    monkeypatch.setattr(tuning, "standing", lambda device: "another")
    forward(make)
    assert recorded == [True, False, False, True]
