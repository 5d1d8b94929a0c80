"""The oracle of routing: loops over plain Python ints."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.layout import ExpertLayout


def layout_from_topk(expert_ids: Tensor, num_experts: int) -> ExpertLayout:
    """Appends each slot to its expert's list, in slot order."""
    num_tokens, top_k = expert_ids.shape
    members: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(expert_ids.reshape(-1).tolist()):
        if 0 <= expert < num_experts:
            members[expert].append(slot)
    row_to_slot: list[int] = []
    slot_to_row, offsets = [-1] * (num_tokens * top_k), [0]
    for slots in members:
        for slot in slots:
            slot_to_row[slot] = len(row_to_slot)
            row_to_slot.append(slot)
        offsets.append(len(row_to_slot))
    row_to_slot += [-1] * (num_tokens * top_k - len(row_to_slot))

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=expert_ids.device)

    counts = int32([len(slots) for slots in members])
    return ExpertLayout(
        counts, int32(offsets), int32(row_to_slot), int32(slot_to_row).view(num_tokens, top_k)
    )
