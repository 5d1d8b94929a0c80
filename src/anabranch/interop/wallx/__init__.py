"""wall-x's fused operators, by its own names, over anabranch's functions.

``backend`` has the lower level, where outputs are arguments, and ``ops`` the upper one, with gradients. Both have a
permute and an unpermute, which differ, so neither level is re-exported here.
"""

from anabranch.interop.wallx import backend, ops

__all__ = ["backend", "ops"]
