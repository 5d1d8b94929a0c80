"""Launches past Triton's launcher: which launchers are known, what the one in C is called with, and the fallback."""

import importlib.util
import os
from functools import lru_cache
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


def made(count=3):
    return [torch.zeros(128, 64, dtype=torch.float16) for _ in range(count)]


def recorded(kernel, x):
    """Two launches, through a temporary and a part of a result."""
    from anabranch._backends.triton import recording, replay

    launch = described(kernel)
    with recording.recording([x]) as found:
        temporary, out, h = (torch.empty(128, 64, dtype=torch.float16) for _ in range(3))
        launch(x, temporary, None)
        launch(temporary, h[:, 32:], out)
    return replay.of(found, [x], [out, h])


def repeated(again, *given):
    return again.run(given, [value.data_ptr() for value in given])


def test_a_replay_makes_the_recorded_launches_for_other_tensors(triton_36, monkeypatch):
    kernel = Kernel(triton_36.launcher)
    again = recorded(kernel, *made(1))
    assert len(kernel.asked) == 1
    kernel.seen.clear()
    (x,) = made(1)
    out, h = repeated(again, x)
    (first, second), memory = kernel.seen, kernel.seen[0][len(BEFORE) + 5][1]
    assert first == (*BEFORE, *expanded(x, 128, 64), ("map", memory, 3), 64, 64, 64, 1, None, 7, 16)
    part = ("map", h.data_ptr() + 64, 3), 64, 64, 64, 1
    assert second == (*BEFORE, ("map", memory, 3), 128, 64, 64, 1, *part, out.data_ptr(), 7, 16)
    assert memory not in {v.data_ptr() for v in (x, out, h)}


@pytest.mark.parametrize("why", ["hook", "launcher"])
def test_a_replay_for_who_has_to_see_tensors(why, triton_36, monkeypatch):
    kernel = Kernel(triton_36.launcher if why == "hook" else type("Other", (), {"__call__": lambda *_: None}))
    again = recorded(kernel, *made(1))
    assert (again.calls is None) == (why == "launcher")
    seen = []
    monkeypatch.setattr(type(again.steps[0][0]), "__call__", lambda self, *tensors: seen.append(tensors))
    kernel.pre_run_hooks.append(print)
    (x,) = made(1)
    out, h = repeated(again, x)
    (a, temporary, none), (b, part, c) = seen
    assert a is x
    assert c is out
    assert none is None
    assert b is temporary
    assert (temporary.shape, temporary.dtype) == ((128, 64), torch.float16)
    assert part.data_ptr() == h.data_ptr() + 64


def test_a_replay_allocates_results(triton_36):
    from anabranch._backends.triton import recording, replay

    kernel = Kernel(triton_36.launcher)
    launch, (x,) = described(kernel), made(1)
    with recording.recording([x]) as found:
        passing = torch.empty(128, 64, dtype=torch.float16)
        first = x.new_empty(4, 32, dtype=torch.int32)
        launch(x, passing, first)
        address = passing.data_ptr()
        del passing
        second = torch.empty_like(x.mT)  # most likely there
        launch(x, second, None)
    results = first.view(2, 64), None, second
    again = replay.of(found, [x], results)
    assert [size for size, *_ in again.temporaries] == [(128, 64)]
    kernel.seen.clear()
    (y,) = made(1)
    a, none, c = repeated(again, y)
    assert none is None
    assert [(v.shape, v.stride(), v.dtype) for v in (a, c)] == [
        ((2, 64), (64, 1), torch.int32), ((64, 128), (1, 64), torch.float16)
    ]  # fmt: skip
    one, two = kernel.seen
    memory = one[len(BEFORE) + 5][1]
    assert one == (*BEFORE, *expanded(y, 128, 64), ("map", memory, 3), 64, 64, 64, 1, a.data_ptr(), 7, 16)
    assert two == (*BEFORE, *expanded(y, 128, 64), *expanded(c, 64, 64), None, 7, 16)
    assert memory not in {v.data_ptr() for v in (y, a, c, x, first, second)} - {address}
    assert len({a.data_ptr(), c.data_ptr(), memory}) == 3
    assert repeated(again, y)[0].data_ptr() != a.data_ptr()


def test_what_cannot_be_replayed(triton_36):
    from anabranch._backends.triton import recording, replay

    x, y, out = made()
    launch = described(Kernel(triton_36.launcher))

    def replayed(body, *given):
        given = given or (x, y, out)
        with recording.recording(given) as found:
            results = body()
        return replay.of(found, given, results)

    def plain(a=x, b=y, c=out, *results):
        launch(a, b, c)
        return results

    def views():
        kept = torch.empty(8, 8)
        launch(x.view(64, 128).mT, y, kept[:, 4:])
        return (kept[None],)

    assert replayed(plain) is not None
    assert replayed(views) is not None
    assert replayed(plain, x, out) is None  # y is nobody's
    assert replayed(plain, x, x[:], y, out) is not None  # two places, one tensor
    assert replayed(plain, x, x.view(torch.bfloat16), y, out) is None  # which of them was meant?
    assert replayed(lambda: plain(x[1:])) is None  # a part of the caller's
    for other in (
        lambda: torch.zeros(8), lambda: x.sum(), lambda: x.clone(), lambda: out.zero_(), lambda: out.copy_(x),
        lambda: x.float(), lambda: out.sum().item(), lambda: torch.empty(8, 8).mT.contiguous(),
    ):  # fmt: skip
        assert replayed(lambda other=other: plain() or other() is None or ()) is None
    both = torch.empty(8, 8)
    for results in (
        lambda: [x], lambda: [out], lambda: [both], lambda: [torch.empty(8, 8)[1:]],
        lambda: [v := torch.empty(8, 8), v[:]], lambda: [torch.empty(8, 8)[:4]],
        lambda: [torch.empty(8, 8).view(torch.int32)],
    ):  # fmt: skip
        assert replayed(results) is None
    replay_most = replay.MOST
    replay.MOST = 2**16
    try:
        assert replayed(lambda: plain(c=torch.empty(2**16 + 1, dtype=torch.uint8))) is None
        assert replayed(lambda: [torch.empty(2**16 + 1, dtype=torch.uint8)]) is not None
    finally:
        replay.MOST = replay_most


def test_memory_that_no_later_launch_uses_is_used_again():
    from anabranch._backends.triton import replay

    # The last is used by none; the third starts where the first was, before the second, which is still in use.
    assert replay._packed([100, 300, 100, 50], [[0, 1], [1, 2], [2, 3], []]) == ([0, 256, 0, 0], 556)
    assert replay._packed([100, 300, 300, 300], [[0, 1], [1, 2], [2], [3]]) == ([0, 256, 768, 0], 1068)
    assert replay._packed([], []) == ([], 0)


def test_recordings_inside_each_other_and_where_one_fails(triton_36):
    from anabranch._backends.triton import recording
    from anabranch._backends.triton.prepared import recorder

    launch = described(Kernel(triton_36.launcher))
    x, y, out = made()

    def fail():
        with recording.recording([x, y, out]) as found:
            inner.append(found)
            launch(x, y, out)
            raise ZeroDivisionError

    inner = []
    with recording.recording([x, y, out]) as outer:
        with pytest.raises(ZeroDivisionError):
            fail()
        launch(x, y, out)
    assert (len(inner[0].steps), len(outer.steps)) == (1, 1)
    assert recorder.recording is None


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
    again = recorded(kernel, *made(1))
    launch = again.steps[0][0]
    monkeypatch.setattr(prepared, "current", current)
    monkeypatch.setattr(replay, "current", current)
    (x,) = made(1)
    for stream, elsewhere in (("s1", False), ("s2", True)):
        kernel.seen.clear()
        inside.clear()
        now[0] = stream
        for module in (prepared, replay):
            monkeypatch.setattr(module, "elsewhere", lambda device, there=elsewhere: there)
        launch(x, x, x)
        assert inside == ([CPU, "left"] if elsewhere else [])
        repeated(again, x)
        assert inside == ([CPU, "left"] * 2 if elsewhere else [])
        assert [given[3] for given in kernel.seen] == [stream] * 3


def test_a_tensor_where_a_passing_one_was(triton_36):
    from anabranch._backends.triton import recording

    memory = torch.zeros(256, 64, dtype=torch.float16)
    with recording.recording([]) as found:
        for value in (memory[128:], memory, memory[:64]):  # as an allocator hands out memory
            found.allocate(value)
    assert found.place(memory) == (2, 0)
    assert found.place(memory[32:]) == (2, 32 * 128)
    assert found.place(memory[128:]) == (1, 128 * 128)
    assert found.whole


@pytest.fixture
def remembered(monkeypatch):
    """A kernel of (x, y, size), remembered by size: what it launched, allocated and returned, and how often."""
    from anabranch import tuning
    from anabranch._backends.triton import remembered

    monkeypatch.setattr(remembered, "_remembered", lru_cache(remembered._remembered.__wrapped__))
    monkeypatch.setattr(tuning, "standing", lambda device: "a")

    def run(make, *given, decides=("size",)):
        return remembered.results(make, given, given, decides)

    return run


def counted(launch, form=tuple, also=lambda *_: None):
    """A kernel that notes in ``calls`` whether each call was recorded."""
    from anabranch._backends.triton.prepared import recorder

    def kernel(*given):
        kernel.calls.append(recorder.recording is not None)
        found = [torch.empty(128, 64, dtype=torch.float16) for _ in range(2)]
        launch(*given[:2], found[0])
        launch(found[0], given[1], found[1])
        also(found, *given)
        return found[1] if form is None else form(found)

    kernel.calls = []
    return kernel


@pytest.mark.parametrize("form", [tuple, list, None])
def test_the_second_of_calls_that_look_alike_is_recorded(form, triton_36, remembered):
    triton = Kernel(triton_36.launcher)
    kernel = counted(described(triton), form)
    for _ in range(2):
        remembered(kernel, *made(2))
    for _ in range(2):
        x, y = made(2)
        triton.seen.clear()
        found = remembered(kernel, x, y)
        assert isinstance(found, torch.Tensor if form is None else form)
        one, two = triton.seen
        first = one[-3] if form is None else found[0].data_ptr()
        second = (found if form is None else found[1]).data_ptr()
        assert one == (*BEFORE, *expanded(x, 128, 64), *expanded(y, 64, 64), first, 7, 16)
        assert two == (*BEFORE, ("map", first, 3), 128, 64, 64, 1, *expanded(y, 64, 64), second, 7, 16)
    assert kernel.calls == [False, True]
    assert len(triton.asked) == 1


def test_calls_that_do_not_look_alike(triton_36, remembered, monkeypatch):
    from anabranch import tuning
    from anabranch._backends.triton import device

    kernel = counted(described(Kernel(triton_36.launcher)))
    x, y = made(2)
    wide = torch.zeros(128, 128, dtype=torch.float16)
    changes = (
        ((x, y), {}), ((x, y), dict(decides=("other",))), ((x, y, None), {}), ((x, y, x), {}), ((x, y, y), {}),
        ((x, y, made(1)[0]), {}), ((x[:64], y), {}), ((wide[:, :64], y), {}), ((wide[:, 1:65], y), {}),
        ((x.view(torch.bfloat16), y), {}),
    )  # fmt: skip
    for i, (given, options) in enumerate(changes, 1):
        for _ in range(3):
            remembered(kernel, *given, **options)
        assert kernel.calls == [False, True] * i, i
    for name, value in (("INT32_MAX", 5), ("input_precision", lambda _: "tf32")):
        kernel.calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(device, name, value)
            for _ in range(3):
                remembered(kernel, x, y)
        assert kernel.calls == [False, True]
        remembered(kernel, x, y)
        assert len(kernel.calls) == 2
    # What the tuner comes to changes all; while it may search, or values are to be checked, nothing is remembered.
    for standing in ("b", None):
        kernel.calls.clear()
        monkeypatch.setattr(tuning, "standing", lambda device, by=standing: by)
        for _ in range(4):
            remembered(kernel, x, y)
        assert kernel.calls == ([False, True] if standing else [False] * 4)
    monkeypatch.setattr(tuning, "standing", lambda device: "b")
    monkeypatch.setenv("ANABRANCH_CHECK_VALUES", "1")
    remembered(kernel, x, y)
    assert len(kernel.calls) == 5


def test_a_call_that_cannot_be_made_again_is_recorded_once(triton_36, remembered, monkeypatch):
    from anabranch import tuning

    triton = Kernel(triton_36.launcher)
    kernel = counted(described(triton), also=lambda found, x, y: found[1].zero_())
    for _ in range(4):
        remembered(kernel, *made(2))
    assert kernel.calls == [False, True, False, False]
    assert len(triton.asked) + len(triton.seen) == 8
    # What the tuner found meanwhile may let it be.
    monkeypatch.setattr(tuning, "standing", lambda device: "another")
    for _ in range(3):
        remembered(kernel, *made(2))
    assert kernel.calls[4:] == [False, True, False]
