"""Where the tokens of a text lie in a forest.

A path is followed node by node: inside a node there is one way on, at its end the next token says which. So nothing
is compared, and a text costs as many steps as it passes nodes.

Cost: one dictionary entry for each node.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagpack_hf.trie import TokenForest

Range = tuple[int, int]
"""First token and one past the last, counted in node order."""

Place = tuple[int, int]
"""A node, and how many of its tokens are behind."""

START: Place = (-1, 0)
"""Before the first token of every path."""


class ForestWalk:
    """Follows token ids through a forest that holds them.

    Args:
        forest: The forest. Paths may have been cut; what lies beyond is not found.

    Example:
    >>> walk = ForestWalk(TokenForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]]))
    >>> ranges, place = walk.go(START, [1, 2])
    >>> ranges, walk.go(place, [4, 5])[0]
    ([(0, 2)], [(3, 5)])
    """

    def __init__(self, forest: TokenForest) -> None:
        self._start = forest.start.tolist()
        self._length = forest.length.tolist()
        first = forest.values[forest.source].tolist()
        self._child = {edge: node for node, edge in enumerate(zip(forest.parent.tolist(), first, strict=True))}

    def go(self, place: Place | None, ids: Sequence[int]) -> tuple[list[Range], Place | None]:
        """Go on from a place.

        Args:
            place: Where to begin; `None` beyond the end of a path that was cut.
            ids: Token ids that follow there.

        Returns:
            The tokens as ranges, and the place behind them.
        """
        if place is None:
            return [], None
        node, behind = place
        ranges: list[Range] = []
        at = 0
        while at < len(ids):
            if node < 0 or behind == self._length[node]:
                child = self._child.get((node, int(ids[at])))
                if child is None:
                    return ranges, None
                node, behind = child, 0
            step = min(len(ids) - at, self._length[node] - behind)
            first = self._start[node] + behind
            ranges.append((first, first + step))
            behind += step
            at += step
        return ranges, (node, behind)


def take(ranges: Sequence[Range], low: int, high: int) -> list[Range]:
    """Return the tokens `low` to `high` of a text that lies in these ranges, the latter not included."""
    taken = []
    passed = 0
    for first, end in ranges:
        start = max(first, first + low - passed)
        stop = min(end, first + high - passed)
        if start < stop:
            taken.append((start, stop))
        passed += end - first
    return taken
