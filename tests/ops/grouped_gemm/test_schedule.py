"""Which rows each tile of a grouped product has, and in what order tiles follow one another."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from anabranch._backends.triton.schedule import schedule, tile_of_expert

pytestmark = [
    pytest.mark.op("grouped_gemm", "triton"),
    # NumPy, which interprets, warns of how the interpreter reads a scalar.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@triton.jit
def _order_kernel(tiles, found, size, num_n, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr):
    tile = tl.program_id(0)
    m = tile // num_n
    row = tl.load(tiles + size + m)
    end = tl.load(tiles + 2 * size + m)
    first = tl.load(tiles + 3 * size + m)
    row, n = tile_of_expert(tile, m, row, end, first, num_n, BLOCK_M, GROUP_M)
    tl.store(found + 2 * tile, row)
    tl.store(found + 2 * tile + 1, n)


@pytest.mark.parametrize("num_n", [1, 3])
def test_the_order_of_tiles(num_n):
    offsets = [0, 0, 5, 165, 165, 1005, 1006, 1166]
    table = schedule(torch.tensor(offsets, dtype=torch.int32), 1200, 16)
    size = (len(table) - 2) // 4
    count = int(table[-2])
    found = table.new_full((count * num_n, 2), -1)
    _order_kernel[(count * num_n,)](table, found, size, num_n, 4, 16)
    expected = []
    # An expert's row tiles by fours or so, in groups of one height but for the last.
    for start, end in pairwise(offsets):
        rows = list(range(start, end, 16))
        groups = max((len(rows) + 2) // 4, 1)
        height = -(-len(rows) // groups)
        for first in range(0, len(rows), max(height, 1)):
            expected += [(row, n) for n in range(num_n) for row in rows[first : first + height]]
    assert [tuple(pair) for pair in found.tolist()] == expected


def test_the_table_of_tiles():
    offsets = [0, 0, 5, 69, 69, 134, 135]
    tiles = [
        (e, r, b, sum(-((x - y) // 32) for x, y in pairwise(offsets[: e + 1])))
        for e, (a, b) in enumerate(pairwise(offsets))
        for r in range(a, b, 32)
    ]
    *table, count, used = schedule(torch.tensor(offsets, dtype=torch.int32), 140, 32).tolist()
    assert (count, used) == (len(tiles), 135)
    assert [tuple(table[i :: len(table) // 4]) for i in range(count)] == tiles
