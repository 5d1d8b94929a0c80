"""An epilogue's result, with one pass over memory less where that is to be had."""

from __future__ import annotations

from torch import Tensor

from anabranch.epilogues import Epilogue, Gated


def activate(epilogue: Epilogue, *z: Tensor) -> Tensor:
    """``epilogue.forward(*z)``, to the bit; the result is new memory or, where forward returns it, an operand's.

    A gate's product goes where its activation is, which is in the cache. Forward itself may not do that: autograd
    would miss what it overwrote.
    """
    if not isinstance(epilogue, Gated) or type(epilogue).forward is not Gated.forward:
        return epilogue.forward(*z)
    gate, up = z
    active = epilogue.inner.forward(gate)
    own = active.is_contiguous() and active.data_ptr() != gate.data_ptr()
    return active.mul_(up) if own else active * up
