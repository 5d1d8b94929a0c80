"""Whether this Triton's Gluon is one that the kernels were checked with."""

from __future__ import annotations

from functools import cache

CHECKED = ((3, 6),)
"""Releases of Triton whose Gluon compiled the kernels and gave right numbers on a GPU."""


@cache
def refusal() -> str | None:
    """Why the kernels cannot be compiled here, or None if they can."""
    import triton

    release = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    if release not in CHECKED:
        known = ", ".join(".".join(map(str, r)) for r in CHECKED)
        return f"its kernels are known to work with Triton {known}, not with {triton.__version__}"
    try:
        from anabranch._backends.hopper import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Gluon of Triton {triton.__version__} lacks what its kernels use: {error}"
    return None
