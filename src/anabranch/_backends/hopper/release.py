"""Which releases of Triton the kernels are compiled with: Gluon moves between them, and so do its compiler's faults.

Each release that is served is compiled with ahead of time at every change (`make aot`). Multicast and clusters, which
Gluon has from 3.7 on, are not used: no GPU that the kernels were measured on had such a release.
"""

from __future__ import annotations

import re
from functools import cache

RUN = ((3, 6),)
"""Releases with which the kernels' results were checked on a GPU."""
COMPILED = ((3, 9),)
"""Releases that compile the kernels as well, with which no GPU has run them yet: they have to be asked for."""
FAULTS = {
    (3, 7): "there are reports of wrong code from Triton 3.7 on Hopper",
    (3, 8): "Triton 3.8 spills registers in its kernels",
}
"""Why a release that compiles the kernels is refused all the same."""


@cache
def refusal(backend: str | None = "hopper") -> str | None:
    """Why the kernels cannot be used with this Triton, or None. ``backend`` is the one that the caller named."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    reason = unfit(triton.__version__, backend)
    if reason is not None:
        return reason
    # Whatever a build of a known release lacks, another backend can serve the call.
    try:
        from anabranch._backends.hopper import gluon  # noqa: F401
    except Exception as error:
        return f"Gluon of Triton {triton.__version__} lacks what its kernels use: {error}"
    return None


def unfit(version: str, backend: str | None) -> str | None:
    """Why a release of Triton is not served, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release in FAULTS:
        return FAULTS[release]
    if release not in RUN + COMPILED:
        known = ", ".join(f"{major}.{minor}" for major, minor in RUN + COMPILED)
        return f"its kernels are known to work with Triton {known}, not with {version}"
    if release not in RUN and backend is None:
        return f"no GPU has run its kernels with Triton {version} yet, so it has to be asked for by name"
    return None
