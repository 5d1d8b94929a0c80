"""Where a walk over experts is cut into blocks."""

from __future__ import annotations

from itertools import pairwise

from anabranch._backends.eager.product import Block, EvenBlock

BLOCK = 2**18
"""Elements of pre-activation in a block: large enough to outweigh the calls, small enough for the cache."""
EVEN, LARGEST = 2, 2.5
"""Blocks that an even one is as large as, and is at most: its two products outweigh more rows that leave the cache."""
STEPS = 512
"""How many the search for the best cut may take; where it would take more, blocks are as long as fillers allow."""
FILLERS, SPARE, WORTH = 1 / 5, 8, 48
"""How many those are: FILLERS beside each row and SPARE beside each expert, in all WORTH an expert. A product of its
own costs an expert as much as some dozens of rows."""
CALLS, PACKING, DEAREST = 20_000_000, 40, 256
"""What one more even block costs: multiplications that take as long as its calls, and rows that its products take
beyond those of its experts. DEAREST rows in all at most, for a row is moved as well as multiplied."""


def price(multiplications: int) -> int:
    """Rows, of so many multiplications each, that one more even block costs as much as."""
    return min(DEAREST, PACKING + CALLS // max(1, multiplications))


def blocks(offsets: list[int], rows: int) -> list[Block]:
    """Consecutive experts that have at least ``rows`` rows together; none without any."""
    found: list[Block] = []
    first = 0
    experts: list[tuple[int, int, int]] = []
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if stop > start:
            experts.append((expert, start - first, stop - first))
        if stop - first >= rows:
            found.append(Block(first, stop, experts))
            first, experts = stop, []
    if experts:
        found.append(Block(first, offsets[-1], experts))
    return found


def even_blocks(offsets: list[int], rows: int, price: int, most: int) -> list[EvenBlock]:
    """Experts that follow on each other, each with places for the tallest's rows, as long as few are fillers.

    A block ends at an expert without rows, which has none to fill up with. None at all if it were more than
    ``most``: many blocks of an expert or two cost more than their products gain.
    """
    counts = [stop - start for start, stop in pairwise(offsets)]
    # About as many steps as there are pairs of experts that may lie in one block.
    limit = int(LARGEST * rows)
    few = len(counts) ** 2 * min(limit, offsets[-1]) <= STEPS * offsets[-1]
    ends = _cheapest(counts, limit, price) if few else _longest(counts, EVEN * rows, most)
    found: list[EvenBlock] = []
    place, first = 0, 0
    for last in ends:
        height = max(counts[first:last])
        if height:
            members = [(e, (e - first) * height, (e - first + 1) * height) for e in range(first, last)]
            stop = place + height * len(members)
            found.append(EvenBlock(place, stop, members, slice(offsets[first], offsets[last])))
            place = stop
        first = last
    return found if len(found) <= most else []


def _cheapest(counts: list[int], limit: int, price: int) -> list[int]:
    """Where blocks end that have the fewest places in all, each of them counted as ``price`` places more.

    A block of several experts has up to ``limit`` places.
    """
    best, starts = [0], [0]
    for last, count in enumerate(counts, 1):
        start = last - 1
        height, least = count, best[start] + count
        if count:
            for first in range(last - 2, -1, -1):
                if counts[first] > height:
                    height = counts[first]
                places = height * (last - first)
                if not counts[first] or places > limit:
                    break
                if best[first] + places < least:
                    least, start = best[first] + places, first
            least += price
        best.append(least)
        starts.append(start)
    ends, last = [], len(counts)
    while last:
        ends.append(last)
        last = starts[last]
    return ends[::-1]


def _longest(counts: list[int], rows: int, most: int) -> list[int]:
    """Where blocks end that go on to ``rows`` rows and the expert there, or as far as their fillers allow.

    Leaves off when they are more than ``most``.
    """
    ends: list[int] = []
    first = found = 0
    while first < len(counts) and found <= most:
        last, height, total = first, counts[first], counts[first]
        while total and total < rows and last + 1 < len(counts) and counts[last + 1]:
            taller, more, experts = max(height, counts[last + 1]), total + counts[last + 1], last + 2 - first
            if taller * experts - more > min(FILLERS * more + SPARE * experts, WORTH * experts):
                break
            last, height, total = last + 1, taller, more
        found += total > 0
        first = last + 1
        ends.append(first)
    return ends
