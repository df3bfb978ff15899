"""Trees of positions, of cells and of chains. Cost: linear in the positions and in the places of all cells."""

from __future__ import annotations

import numpy as np

from dagpack_hf.kernels import inlined, kernel

ROOT = -1
PADDING = -2


@kernel
def link_positions(end, length):
    """Parent and depth of each position of a batch, whose rows count as one vector.

    Args:
        end: `int64[B, T]`, one past the last position of each position's subtree.
        length: `int64[B]`, positions of each row before its padding. -1 where this is not known: trees of one position
            at the end of the row are padding then.

    Returns:
        `int64[B * T]` and `int64[B * T]`: parent, `ROOT` or `PADDING`, and depth.
    """
    rows, width = end.shape
    parent = np.full(rows * width, PADDING, np.int64)
    depth = np.zeros(rows * width, np.int64)
    path = np.empty(width, np.int64)
    for row in range(rows):
        stop = width if length[row] < 0 else length[row]
        first = row * width
        above = 0
        for i in range(stop):
            while above > 0 and end[row, path[above - 1]] <= i:
                above -= 1
            parent[first + i] = first + path[above - 1] if above > 0 else ROOT
            depth[first + i] = above
            path[above] = i
            above += 1
        while length[row] < 0 and stop > 0 and parent[first + stop - 1] == ROOT and end[row, stop - 1] == stop:
            stop -= 1
            parent[first + stop] = PADDING
    return parent, depth


@kernel
def lay_out_runs(parent, above):
    """Runs of positions, each the child of the one before, each run after its last ancestors.

    Padding goes on with the run before it, whose results it does not change.

    Args:
        parent: of `link_positions`.
        above: ancestors to put before a run.

    Returns:
        `int64[M]`, `int64[N]`: the position at each place, -1 for an ancestor above a root; and the place of each
        position.
    """
    n = len(parent)
    runs = 0
    for i in range(n):
        runs += parent[i] != PADDING and (parent[i] == ROOT or parent[i] != i - 1)
    position = np.full(n + runs * above, -1, np.int64)
    place = np.empty(n, np.int64)
    at = 0
    for i in range(n):
        if parent[i] != PADDING and (parent[i] == ROOT or parent[i] != i - 1):
            ancestor = parent[i]
            for k in range(above):
                if ancestor < 0:
                    break
                position[at + above - 1 - k] = ancestor
                ancestor = parent[ancestor]
            at += above
        position[at] = i
        place[i] = at
        at += 1
    return position, place


@inlined
def ends_cell(i, parent, depth, length):
    """Whether a position is the last of a cell."""
    if parent[i] == PADDING:
        return False
    return depth[i] % length == length - 1 or i + 1 == len(parent) or parent[i + 1] != i


@kernel
def count_cells(parent, depth, length):
    """Cells of a length, and positions in all of them; see `cut_cells`."""
    n = len(parent)
    cells = positions = 0
    for i in range(n):
        if ends_cell(i, parent, depth, length):
            cells += 1
            positions += depth[i] % length + 1
    return cells, positions


@kernel
def cut_cells(parent, depth, length):
    """Cut all paths into cells at multiples of a depth.

    A cell is the positions of one path with depths `c * length .. (c + 1) * length`, or up to the leaf. What lies
    above a branch point, down from the last such depth, is in the cells of all its branches.

    Args:
        parent: of `link_positions`.
        depth: of `link_positions`.
        length: depths of a cell.

    Returns:
        `int64[S]`, `int64[S]`, `int64[M]`, `int64[N]`, `int64[N]`: parent and first of the positions of each cell,
        parents first; the positions; for each position the first cell that has it, -1 for padding, and its place in
        that.
    """
    n = len(parent)
    cells, positions = count_cells(parent, depth, length)
    above = np.empty(cells, np.int64)
    first = np.empty(cells, np.int64)
    position = np.empty(positions, np.int64)
    cell = np.full(n, -1, np.int64)
    rank = np.zeros(n, np.int64)
    deepest = 0
    for i in range(n):
        deepest = max(deepest, depth[i])
    path = np.empty(deepest + 1, np.int64)
    ending_at = np.empty(deepest + 1, np.int64)
    at = filled = 0
    for i in range(n):
        path[depth[i]] = i
        if not ends_cell(i, parent, depth, length):
            continue
        start = depth[i] - depth[i] % length
        above[at] = ending_at[start - 1] if start > 0 else ROOT
        first[at] = filled
        for d in range(start, depth[i] + 1):
            if cell[path[d]] < 0:
                cell[path[d]] = at
                rank[path[d]] = d - start
            position[filled] = path[d]
            filled += 1
        ending_at[depth[i]] = at
        at += 1
    return above, first, position, cell, rank


@kernel
def cell_depths(above):
    """Number of cells above each cell."""
    depth = np.zeros(len(above), np.int64)
    for s in range(len(above)):
        depth[s] = depth[above[s]] + 1 if above[s] >= 0 else 0
    return depth


@kernel
def link_chains(above, size):
    """Join each cell with its child where that is its only one.

    Args:
        above: `int64[S]`, parent of each cell, parents first.
        size: `int64[S]`, positions of each cell.

    Returns:
        `int64[S]`, `int64[S]`, and for each chain parent, level and positions: the chain of each cell and its first
        place there. The level is the number of chains above a chain.
    """
    cells = len(above)
    children = np.zeros(cells, np.int64)
    for s in range(cells):
        if above[s] >= 0:
            children[above[s]] += 1
    chain = np.empty(cells, np.int64)
    place = np.zeros(cells, np.int64)
    parent = np.empty(cells, np.int64)
    level = np.zeros(cells, np.int64)
    length = np.zeros(cells, np.int64)
    chains = 0
    for s in range(cells):
        up = above[s]
        if up >= 0 and children[up] == 1:
            chain[s] = chain[up]
        else:
            chain[s] = chains
            parent[chains] = chain[up] if up >= 0 else ROOT
            level[chains] = level[chain[up]] + 1 if up >= 0 else 0
            chains += 1
        place[s] = length[chain[s]]
        length[chain[s]] += size[s]
    return chain, place, parent[:chains], level[:chains], length[:chains]


@kernel
def group_chains(level, length, chunk, waste):
    """Group chains of a level for calls that pad them to the longest.

    A group takes chains of at least three quarters of its longest, and shorter ones while they are padded little.
    Lengths count in whole chunks, which is what they cost.

    Args:
        level: `int64[C]`, in order.
        length: `int64[C]`, falling within a level.
        chunk: positions that a function computes at once.
        waste: chunks that the shorter ones of a group may be padded by, all together.

    Returns:
        `int64[G + 1]`: the first chain of each group, and the number of chains.
    """
    edges = np.empty(len(level) + 1, np.int64)
    groups = longest = wasted = 0
    for c in range(len(level)):
        chunks = (length[c] + chunk - 1) // chunk
        is_long = 4 * chunks >= 3 * longest
        if c == 0 or level[c] != level[c - 1] or not (is_long or wasted + longest - chunks <= waste):
            edges[groups] = c
            groups += 1
            longest = chunks
            wasted = 0
        elif not is_long:
            wasted += longest - chunks
    edges[groups] = len(level)
    return edges[: groups + 1]
