"""What another window length would give, from the certificate alone: no packing is made for it.

Cost: O(nodes) for each length.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagpack_hf.pack import least_executed_tokens
from dagpack_hf.trie import TokenForest

FACTORS = (1, 2, 4)
"""Window lengths to tell of, in lengths of the longest path."""


@dataclass(frozen=True)
class LengthAdvice:
    """What windows of a length can give at best.

    Args:
        factor: the length in lengths of the corpus' longest path, so that 1 loses nothing.
        max_length: the length in tokens.
        executed_tokens: positions that any packing into such windows executes at least.
        speedup_bound: logical tokens over these.
    """

    factor: int
    max_length: int
    executed_tokens: int
    speedup_bound: float


def advise(forest: TokenForest) -> tuple[LengthAdvice, ...]:
    """What windows of 1, 2 and 4 times the longest path can give at best; nothing for an empty forest."""
    longest = forest.longest_path
    if not longest:
        return ()
    least = {factor: least_executed_tokens(forest, factor * longest) for factor in FACTORS}
    return tuple(
        LengthAdvice(factor, factor * longest, tokens, forest.logical_tokens / tokens)
        for factor, tokens in least.items()
    )
