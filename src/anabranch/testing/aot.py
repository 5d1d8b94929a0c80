"""Compiling the Triton kernels of a call ahead of time, for a GPU that need not be there.

Inside :func:`compiling`, operations on CPU tensors launch nothing: each launch compiles its kernel for the target
with the very arguments, tiles and load paths that the launcher chose, and what the compiler says of it is collected.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from anabranch._backends.triton import device

SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    "gfx942": 65_536,
}
"""Bytes of shared memory a program may have, by compute capability (CUDA C++ Programming Guide), or by AMD's name."""
SHARED_WORDS = 64
"""Bytes of what warpgroups start from, and know of a tile, that the compiler may keep in memory: used once a
tile, outside the loop over the reduction, they cost nothing."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled: its name and constants, and what it takes of a multiprocessor.

    Registers (of a thread) and spilled bytes are None where no tool can tell them.
    """

    name: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    registers: int | None
    spilled_bytes: int | None
    shared_bytes: int
    seconds: float

    def row(self, **more: Any) -> dict[str, Any]:
        """What a table of kernels says of it, and ``more``."""
        return dict(
            name=self.name,
            **more,
            registers=self.registers,
            spilled=self.spilled_bytes,
            shared=self.shared_bytes,
            seconds=round(self.seconds, 2),
        )


def gpu(arch: int | str) -> GPUTarget:
    """The target of a compute capability such as 90, or of an AMD GPU such as "gfx942"."""
    return GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)


@contextmanager
def compiling(arch: int | str) -> Iterator[list[Compiled]]:
    """Compiles launches for a GPU instead of running them; each kernel once.

    Args:
        arch: a key of :data:`SHARED_MEMORY`.
    """
    target = gpu(arch)
    backend = make_backend(target)
    found: list[Compiled] = []
    seen: set[str] = set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attributes = self._pack_args(
            backend, options, bound, specialization, options
        )
        kind = GluonASTSource if self.is_gluon() else ASTSource
        source = kind(self, signature, constants, attributes)
        key = source.hash() + str(options)
        if key in seen:
            return
        seen.add(key)
        start = time.perf_counter()
        kernel = triton.compile(source, target=target, options=options.__dict__)
        registers, spilled = resources(kernel.asm)
        found.append(
            Compiled(
                self.fn.__name__,
                {self.arg_names[path[0]]: value for path, value in constants.items()},
                options.num_warps,
                options.num_stages,
                registers,
                spilled,
                kernel.metadata.shared,
                time.perf_counter() - start,
            )
        )

    # What is not NVIDIA's has no tensor memory accelerator; that is all the kernels ask of a capability.
    capability = divmod(arch, 10) if isinstance(arch, int) else (0, 0)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(device, "capability", return_value=capability),
        mock.patch.object(device, "num_sms", return_value=132),
        mock.patch.object(device, "shared_memory_limit", return_value=SHARED_MEMORY[arch]),
    ):
        yield found


def resources(asm: dict[str, Any]) -> tuple[int | None, int | None]:
    """(registers a thread, bytes spilled) of a compiled kernel; None where they cannot be read."""
    if "amdgcn" in asm:
        registers, spills = (
            re.search(rf"\.{word}:\s*(\d+)", asm["amdgcn"]) for word in ("vgpr_count", "vgpr_spill_count")
        )
        return int(registers[1]) if registers else None, 4 * int(spills[1]) if spills else None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if not found:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [found, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    count, stack, local = (re.search(rf"{word}:(\d+)", text) for word in ("REG", "STACK", "LOCAL"))
    if count is None:
        return None, None
    return int(count[1]), sum(int(m[1]) for m in (stack, local) if m)
