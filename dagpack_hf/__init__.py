"""dagpack_hf: fine-tune on sequences that share prefixes, and compute every shared prefix once."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

try:
    __version__ = metadata.version("dagpack-hf")
except metadata.PackageNotFoundError:  # a checkout on the path that is not installed
    __version__ = "0+unknown"

_EXPORTS = {
    "TokenForest": "trie",
    "TokenTree": "trie",
    "BatchPacker": "packing",
    "PackReport": "packing",
    "pack_dataset": "packing",
    "pack_forest": "packing",
    "pack_ray_dataset": "external.distributed",
    "TransitionGraph": "graph",
    "load_episodes": "graph",
    "load_recordings": "graph",
    "baseline_rows": "baselines",
    "layout_costs": "stats",
    "sequence_costs": "stats",
    "Rows": "layout",
    "unpack": "layout",
    "save_rows": "shards",
    "push_rows_to_hub": "hub",
    "push_saved_rows": "hub",
    "load_sessions": "pi",
    "redact_conversations": "redact",
    "scan_conversations": "redact",
    "redact_objects": "redact",
    "RedactionReport": "redact",
    "tokenize_conversations": "render",
    "DagCollator": "collator",
    "DagSFTConfig": "config",
    "DagSFTTrainer": "trainer",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from dagpack_hf.baselines import baseline_rows as baseline_rows
    from dagpack_hf.collator import DagCollator as DagCollator
    from dagpack_hf.config import DagSFTConfig as DagSFTConfig
    from dagpack_hf.external.distributed import pack_ray_dataset as pack_ray_dataset
    from dagpack_hf.graph import TransitionGraph as TransitionGraph
    from dagpack_hf.graph import load_episodes as load_episodes
    from dagpack_hf.graph import load_recordings as load_recordings
    from dagpack_hf.hub import push_rows_to_hub as push_rows_to_hub
    from dagpack_hf.hub import push_saved_rows as push_saved_rows
    from dagpack_hf.layout import Rows as Rows
    from dagpack_hf.layout import unpack as unpack
    from dagpack_hf.packing import BatchPacker as BatchPacker
    from dagpack_hf.packing import PackReport as PackReport
    from dagpack_hf.packing import pack_dataset as pack_dataset
    from dagpack_hf.packing import pack_forest as pack_forest
    from dagpack_hf.pi import load_sessions as load_sessions
    from dagpack_hf.redact import RedactionReport as RedactionReport
    from dagpack_hf.redact import redact_conversations as redact_conversations
    from dagpack_hf.redact import redact_objects as redact_objects
    from dagpack_hf.redact import scan_conversations as scan_conversations
    from dagpack_hf.render import tokenize_conversations as tokenize_conversations
    from dagpack_hf.shards import save_rows as save_rows
    from dagpack_hf.stats import layout_costs as layout_costs
    from dagpack_hf.stats import sequence_costs as sequence_costs
    from dagpack_hf.trainer import DagSFTTrainer as DagSFTTrainer
    from dagpack_hf.trie import TokenForest as TokenForest
    from dagpack_hf.trie import TokenTree as TokenTree


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the numpy parts do not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
