"""Gluon under names that stay: it moves between releases of Triton, and this module alone knows where to."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "barrier",
    "copy",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "reinterpret",
    "store_wait",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

jit = gluon.jit
# Triton 3.9 gave these new names.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = tma.store_wait

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @jit
    def reinterpret(buffer, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as tiles of another shape."""
        return buffer.reinterpret(buffer.dtype, shape, layout)

else:

    @jit
    def reinterpret(buffer, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared memory as tiles of another shape."""
        return buffer._reinterpret(buffer.dtype, shape, layout)
