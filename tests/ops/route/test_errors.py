"""Bad arguments of the constructors of ExpertLayout, word for word."""

import pytest
import torch

from anabranch import ExpertLayout
from anabranch.errors import ArgumentError, ArgumentTypeError

IDS, COUNTS, SLOTS = torch.zeros(3, 2, dtype=torch.long), torch.ones(4, dtype=torch.long), torch.arange(6)
HUGE = torch.zeros(1, dtype=torch.int32, device="meta").expand(2**31)


@pytest.mark.parametrize(
    ("constructor", "args", "error", "message"),
    [
        (
            "topk",
            (IDS.float(), 4),
            ArgumentTypeError,
            "expert_ids: expected dtype int32 or int64, got float32",
        ),
        ("topk", (IDS.short(), 4), ArgumentTypeError, "expert_ids: expected dtype int32 or int64, got int16"),
        ("topk", (IDS[0], 4), ArgumentError, "expert_ids: expected shape (T, K), got shape (2,)"),
        ("topk", ([[0]], 4), ArgumentTypeError, "expert_ids: expected a tensor (T, K), got list"),
        ("topk", (IDS, 0), ArgumentError, "num_experts: expected at least 1, got 0"),
        ("topk", (IDS, 4.0), ArgumentTypeError, "num_experts: expected an int, got float"),
        ("topk", (IDS, True), ArgumentTypeError, "num_experts: expected an int, got bool"),
        (
            "topk",
            (HUGE.view(-1, 2), 4),
            ArgumentError,
            "expert_ids: expected at most 2147483647 rows, got 2147483648",
        ),
        ("counts", (COUNTS[None], 4), ArgumentError, "counts: expected shape (E,), got shape (1, 4)"),
        ("counts", (COUNTS.bool(), 4), ArgumentTypeError, "counts: expected dtype int32 or int64, got bool"),
        ("counts", ([1, 2], 3), ArgumentTypeError, "counts: expected a tensor (E,), got list"),
        ("counts", (COUNTS, -1), ArgumentError, "num_rows: expected at least 0, got -1"),
        ("counts", (COUNTS, COUNTS[0]), ArgumentTypeError, "num_rows: expected an int, got Tensor"),
        (
            "counts",
            (COUNTS, 2**31),
            ArgumentError,
            "num_rows: expected at most 2147483647 rows, got 2147483648",
        ),
        (
            "sorted",
            (COUNTS[:, None], SLOTS, 2),
            ArgumentError,
            "counts: expected shape (E,), got shape (4, 1)",
        ),
        (
            "sorted",
            (COUNTS, IDS, 2),
            ArgumentError,
            "row_to_slot: expected shape (T * K,), got shape (3, 2)",
        ),
        (
            "sorted",
            (COUNTS, SLOTS, 4),
            ArgumentError,
            "row_to_slot: expected a multiple of top_k = 4 rows, got 6 rows",
        ),
        ("sorted", (COUNTS, SLOTS, 0), ArgumentError, "top_k: expected at least 1, got 0"),
        (
            "sorted",
            (COUNTS, SLOTS.to("meta"), 2),
            ArgumentError,
            "row_to_slot: expected counts's device cpu, got meta",
        ),
        (
            "sorted",
            (COUNTS, SLOTS.half(), 2),
            ArgumentTypeError,
            "row_to_slot: expected dtype int32 or int64, got float16",
        ),
        ("slot_to_row", (SLOTS, 6), ArgumentError, "slot_to_row: expected shape (T, K), got shape (6,)"),
        ("slot_to_row", (IDS, -3), ArgumentError, "num_rows: expected at least 0, got -3"),
        ("slot_to_row", (None, 6), ArgumentTypeError, "slot_to_row: expected a tensor (T, K), got NoneType"),
    ],
)
def test_bad_arguments(constructor, args, error, message):
    with pytest.raises(error) as raised:
        getattr(ExpertLayout, f"from_{constructor}")(*args)
    assert str(raised.value) == f"ExpertLayout.from_{constructor}: {message}"
