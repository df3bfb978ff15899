"""Which checkpoint a run can be resumed from: the last one that was saved to its end.

A process that is killed while it saves leaves a folder that looks like a checkpoint. The host takes the one with the
highest number, and without the state of the trainer in it would begin at step 0 with a trained model and say nothing.

Cost: a look into each folder, the newest first, until one is complete.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved to its end.

    The state of the trainer is saved last. What torch has saved is an archive, whose directory is at its end.
    """
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return all(zipfile.is_zipfile(file) for pattern in ("*.pt", "*.pth") for file in checkpoint.glob(pattern))


def last_complete_checkpoint(output_dir: str) -> str:
    """The checkpoint with the highest step that is complete; those passed over are named.

    Raises:
        ValueError: there is none.
    """
    numbered = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.rpartition("-")[2]
        if folder.is_dir() and step.isdigit():
            numbered.append((int(step), folder))
    for _, folder in sorted(numbered, reverse=True):
        if is_complete(folder):
            return str(folder)
        logger.warning("%s is incomplete, it was not saved to its end; an earlier checkpoint is resumed from.", folder)
    incomplete = f"; {', '.join(folder.name for _, folder in sorted(numbered))} are incomplete" if numbered else ""
    raise ValueError(
        f"No complete checkpoint found in output_dir={output_dir!r}{incomplete}. Name another one with "
        "resume_from_checkpoint, or leave it out to train from the start."
    )
