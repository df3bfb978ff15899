"""Worlds with actions: episodes of states and actions, merged to a graph, and walked into what text becomes.

`TransitionGraph` merges episodes and makes the `TokenForest`, or the data set of token trees, that packing and the
trainer take. `load_episodes` and `load_recordings` read episodes from files.
"""

from dagpack_hf.graph.episode_files import load_episodes
from dagpack_hf.graph.episodes import Episode
from dagpack_hf.graph.files import EpisodeReport, Problem
from dagpack_hf.graph.positions import trained_pairs, with_positions
from dagpack_hf.graph.recordings import load_recordings
from dagpack_hf.graph.transition_graph import Node, TransitionGraph
from dagpack_hf.graph.violations import Outcome, Violation, ViolationError

__all__ = [
    "Episode",
    "EpisodeReport",
    "Node",
    "Outcome",
    "Problem",
    "TransitionGraph",
    "Violation",
    "ViolationError",
    "load_episodes",
    "load_recordings",
    "trained_pairs",
    "with_positions",
]
