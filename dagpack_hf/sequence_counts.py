"""How many sequences pass through each token of a forest, as a target or as context.

The load-balancing loss of a mixture of experts needs it: context has no target, and is sent to experts as often.

Design. A sequence passes through all tokens above its end, so what is needed is how many sequences end at each token.
Where every token is a target, and in a token tree, whose sequences are its turns and end with a target, that can be
read off the counts of targets: a sequence ends where fewer train what comes next. Labels of plain sequences say
nothing about their ends, so these are merged once more without them. In a tree a turn may end where another begins,
which looks like one that goes on; whether the ends were read rightly shows in the sum of the paths to them, which is
the number of logical tokens. If it is not, nothing is counted.

Cost: one pass over runs and nodes; for plain sequences with labels, merging them twice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dagpack_hf.kernels.passing import count_passing
from dagpack_hf.spans import IntArray, LongArray
from dagpack_hf.stretches import Stretches
from dagpack_hf.trie import TokenForest


class UncountedError(ValueError):
    """How many sequences pass through a token is not known."""


def count_tree_sequences(forest: TokenForest) -> TokenForest:
    """Count the sequences of token trees, which are their turns.

    Raises:
        UncountedError: the sequences do not end with their targets, or a target follows that is not of the same turn.
    """
    counted = count_from_targets(forest)
    passes = counted.num_source_tokens
    if passes != forest.logical_tokens:
        raise UncountedError(
            f"Where the sequences of these token trees end is not known: by their targets they have {passes:,} "
            f"tokens, by logical_tokens {forest.logical_tokens:,}. It is known if each sequence is one turn and ends "
            "with its target, before other targets begin. Pack plain sequences, or leave count_sequences out."
        )
    return counted


def count_plain_sequences(forest: TokenForest, without_labels: TokenForest) -> TokenForest:
    """Count plain sequences.

    Args:
        forest: of the sequences.
        without_labels: the forest of the same sequences when every token is a target. Sequences of one token are not
            counted in it.
    """
    return replace(forest, tally=forest.tally.with_sequences(*_passing(without_labels)))


def count_from_targets(forest: TokenForest) -> TokenForest:
    """Count the sequences that end with a target, where fewer of them train what comes next."""
    return count_plain_sequences(forest, forest)


def _passing(forest: TokenForest) -> tuple[LongArray, IntArray]:
    """How many sequences pass through each stretch, and one past its last token."""
    if not forest.num_nodes:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    stretches = Stretches.of(forest)
    return stretches.end, count_passing(forest.parent, stretches.first, stretches.count)
