"""Which windows hold which tokens.

A window holds the paths of its leaves; the first window that holds a stretch trains it, in the others it is replay.

Cost: the packing, and one visit for each segment of each window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagpack_hf.forest_packing import pack_forest
from dagpack_hf.overflow import limit_paths
from dagpack_hf.pack import Windows, pack_windows, window_sizes
from dagpack_hf.pack_report import PackReport
from dagpack_hf.segments import Segments, build_segments
from dagpack_hf.trie import TokenForest


@dataclass(frozen=True)
class Plan:
    """A packed token tree.

    Args:
        forest: The tree; what lies beyond the window is cut off.
        segments: The tree as it is written.
        windows: The leaf segments of each window.
        size: `int64[W]`, positions of each window.
        trained: `int64[W]`, targets that each window trains.
        report: What packing did.
    """

    forest: TokenForest
    segments: Segments
    windows: Windows
    size: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    report: PackReport

    def held(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Each window with its segments, in preorder."""
        parent = self.segments.parent
        for window, leaves in enumerate(self.windows):
            found: set[int] = set()
            for leaf in leaves.tolist():
                while leaf >= 0 and leaf not in found:
                    found.add(leaf)
                    leaf = int(parent[leaf])
            yield window, np.array(sorted(found), np.int64)


def plan_windows(forest: TokenForest, max_length: int) -> Plan:
    """Pack a forest, and cut what lies beyond a window."""
    fitting, _ = limit_paths(forest, max_length, "truncate")
    segments = build_segments(fitting)
    windows = pack_windows(segments, max_length)
    rows, report = pack_forest(forest, max_length, overflow="truncate")
    trained = [int(np.count_nonzero(row["loss_weight"])) for row in rows]
    return Plan(fitting, segments, windows, window_sizes(segments, windows), np.array(trained, np.int64), report)


def default_length(forest: TokenForest) -> int:
    """Twice the longest path, rounded up to a multiple of 128: windows that keep most of what can be shared."""
    return -(-2 * max(forest.longest_path, 1) // 128) * 128
