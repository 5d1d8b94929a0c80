"""Compiling candidates ahead of their check, on all the processor's cores: that is most of what a search takes.

Threads, not processes: a CUDA context does not survive a fork. Of a Triton or Gluon kernel, compilers and assembler run
at once; what reads the kernel is Python, a third of it, for which threads take turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anabranch.tuning.search import Trial


def warm(trial: Trial, configs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Runs each once, from several threads, so that it is compiled. What they write or raise says nothing."""
    device = outputs[0].device
    if device.type != "cuda":
        return
    stream = torch.cuda.current_stream(device)

    def run(config: Any) -> None:
        try:
            # The compiler lets other threads run; launches go to one stream, which keeps them apart.
            with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(stream):
                trial.run(config, outputs)
        except Exception:
            pass  # the check runs it again, and keeps the reason

    with ThreadPoolExecutor(max_workers=min(16, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(run, configs))
    torch.cuda.synchronize(device)
