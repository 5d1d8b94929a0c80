"""What tests and benchmarks share: inputs, error budgets, hostile memory, backends broken on purpose.

torch and the standard library only, but for :mod:`anabranch.testing.aot`, which compiles Triton kernels, and
:mod:`anabranch.testing.device_functions`, which runs them. Nothing a user's program needs imports it.
"""

from anabranch.testing.backends import here, on, usable_backends
from anabranch.testing.budget import assert_component_wise, assert_same, assert_within_budget, in_any_order
from anabranch.testing.inputs import ROUTINGS, STRIDES, empty_patterns, randn, routing, strided
from anabranch.testing.memory import guard_band, poison

__all__ = [
    "ROUTINGS",
    "STRIDES",
    "assert_component_wise",
    "assert_same",
    "assert_within_budget",
    "empty_patterns",
    "guard_band",
    "here",
    "in_any_order",
    "on",
    "poison",
    "randn",
    "routing",
    "strided",
    "usable_backends",
]
