"""The card of a data set of packed rows: front matter for `datasets` and the Hub, then the report for people.

The front matter says where the shards of each split are, their features, and how many rows they have, so that a folder
in which a shard is missing is refused when it is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from datasets import DatasetInfo, Features, SplitDict, SplitInfo
from datasets.info import DatasetInfosDict
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCardData
from huggingface_hub.repocard import metadata_load

from dagpack_hf import __version__
from dagpack_hf.pack_report import PackReport

TAG = "dagpack-hf"

DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
"""Names of the subfolders that rows lie in."""

_PAGE = """\
---
{front_matter}
---

# Packed rows

Token sequences merged by their common prefixes and packed into windows with dagpack_hf {version}, to be trained with
it: every shared prefix is computed once.

**The rows hold their source texts as token ids.** Who has the tokenizer can read them; publish them only if you would
publish the texts.
{redaction}
## Train

```python
from datasets import load_dataset
from dagpack_hf import DagSFTConfig, DagSFTTrainer

trainer = DagSFTTrainer(
    model="the model whose tokenizer made the ids",
    args=DagSFTConfig(max_length={max_length}, loss_weighting="{loss_weighting}", per_device_train_batch_size=1),
    train_dataset=load_dataset("this folder or repository", split="{split}"),
)
trainer.train()
```

The rows cannot be trained as plain sequences: each position attends to its own ancestors only.

## How they were packed

{options}

## What packing did

{figures}

*Logical* tokens are those of all source sequences, each written out. *Unique* tokens are those that are left when
prefixes are merged. *Executed* tokens are the positions of the windows. No packing can do with fewer windows than the
*lower bound*. `{folder}/report.json` has all figures.

## Columns

| column | type | meaning |
| --- | --- | --- |
| `input_ids` | int32 | the token at this position |
| `shift_labels` | int32 | the target of this position, -100 for none; nothing is shifted when training |
| `position_ids` | int32 | depth in the tree of prefixes |
| `subtree_end` | int32 | position `i` attends to `j` exactly when `j <= i < subtree_end[j]` |
| `loss_weight` | float32 | weight of the target |
"""


@dataclass(frozen=True)
class Saved:
    """What the front matter says of saved rows.

    Args:
        folder: name of the subfolder with the shards.
        features: types of the columns.
        splits: name and size of each split.
        download_size: bytes of all shards.
    """

    folder: str
    features: Features
    splits: Sequence[SplitInfo]
    download_size: int


def dataset_card(
    saved: Saved,
    reports: Mapping[str, PackReport],
    tokenizer: str | None = None,
    redaction: Mapping[str, Any] | None = None,
) -> str:
    """Text of the card.

    Args:
        saved: the data set.
        reports: the report of each split.
        tokenizer: name of the tokenizer, if that is known.
        redaction: the `to_dict()` of a `RedactionReport`, if the texts were scanned for secrets.
    """
    first = next(iter(reports))
    return _PAGE.format(
        front_matter=_front_matter(saved),
        version=__version__,
        folder=saved.folder,
        split=first,
        max_length=reports[first].max_length,
        loss_weighting=reports[first].loss_weighting,
        options=table({name: _options(report, tokenizer) for name, report in reports.items()}),
        figures=table({name: packing_figures(report) for name, report in reports.items()}),
        redaction=redaction_note(redaction),
    )


def pointed_folder(card: Path) -> str | None:
    """The subfolder that a card of packed rows points to, `None` for other files and none."""
    try:
        metadata = metadata_load(card) or {}
        folder = str(metadata["configs"][0]["data_files"][0]["path"]).partition("/")[0]
        return folder if TAG in metadata["tags"] and DATA_FOLDER.fullmatch(folder) else None
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None


def redaction_note(redaction: Mapping[str, Any] | None) -> str:
    """What was found in the texts, by kind."""
    if redaction is None:
        return ""
    if not redaction["distinct"]:
        return f"\nNo secrets or personal data were found in the texts ({redaction['scanner']}).\n"
    done = "replaced by placeholders" if redaction["redacted"] else "left in them"
    kinds = ", ".join(f"{count:,} {code(kind)}" for kind, count in redaction["distinct"].items())
    return f"\nSecrets and personal data in the texts, {done} ({redaction['scanner']}): {kinds}.\n"


def _front_matter(saved: Saved) -> DatasetCardData:
    """As `Dataset.push_to_hub` writes it."""
    data = DatasetCardData(task_categories=["text-generation"], tags=[TAG, "packing", "sft"])
    splits = SplitDict()
    for split in saved.splits:
        splits.add(split)
    size = sum(split.num_bytes for split in saved.splits)
    info = DatasetInfo(features=saved.features, splits=splits, download_size=saved.download_size, dataset_size=size)
    DatasetInfosDict({"default": info}).to_dataset_card_data(data)
    files = [{"split": split.name, "path": f"{saved.folder}/{split.name}-*"} for split in saved.splits]
    MetadataConfigs({"default": {"data_files": files}}).to_dataset_card_data(data)
    return data


def _options(report: PackReport, tokenizer: str | None) -> dict[str, str]:
    return {
        **({"tokenizer": code(tokenizer)} if tokenizer else {}),
        "window length (`max_length`)": f"{report.max_length:,}",
        "loss weighting": code(report.loss_weighting),
        "strategy": code(report.strategy),
        "search for a better packing": f"{report.effort:g} s",
        "packed together": "all" if report.bucket_size is None else f"{report.bucket_size:,} examples",
    }


def packing_figures(report: PackReport) -> dict[str, str]:
    """What packing did, as names and values."""
    return {
        "logical tokens": f"{report.logical_tokens:,}",
        "unique tokens": f"{report.unique_tokens:,}",
        "executed tokens": f"{report.executed_tokens:,}",
        "reuse ratio (logical to unique)": f"{report.reuse_ratio:.2f}",
        "speedup bound (logical to executed)": f"{report.speedup_bound:.2f}",
        "loss tokens": f"{report.loss_tokens:,}",
        "total loss weight": f"{round(report.loss_weight, 2):,.15g}",
        "windows": f"{report.windows:,}",
        "lower bound": f"{report.lower_bound:,}",
        "gap to the lower bound": f"{report.gap:.1%}",
        "longest path": f"{report.longest_path:,}",
        "labelled tokens lost to the window length": f"{report.lost_share:.2%}",
        **{f"overflow: {reason.replace('_', ' ')}": f"{count:,}" for reason, count in report.overflow.items()},
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A table with a column for each split and a line for each figure that one of them has."""
    figures = dict.fromkeys(figure for column in columns.values() for figure in column)
    lines = [["", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[figure, *(column.get(figure, "") for column in columns.values())] for figure in figures]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """A name of any kind as code inside a table."""
    return f"`{' '.join(text.split()).replace('`', '').replace('|', '')}`"
