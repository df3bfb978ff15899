"""What the trainer cannot do, refused with the reason before anything is computed."""

from __future__ import annotations

import logging
from typing import Any

import torch

from dagpack_hf.attention.probe import repacks_weights
from dagpack_hf.attention.support import base_model_of
from dagpack_hf.collator import DagCollator
from dagpack_hf.config import DagSFTConfig

logger = logging.getLogger(__name__)


def refuse_arguments(kwargs: dict[str, Any], train_dataset: Any, data_collator: Any) -> None:
    """Refuse arguments of the trainer that need logits, foreign collators, and images.

    Raises:
        ValueError: one of them is given.
    """
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is not supported: it works on logits, which are not computed. The trainer logs loss, token "
                "accuracy and entropy; for another loss subclass DagSFTTrainer and override compute_loss."
            )
    if data_collator is not None and not isinstance(data_collator, DagCollator):
        raise ValueError(
            f"data_collator must be a DagCollator, got {type(data_collator).__name__}: the loss needs its columns."
        )
    columns = getattr(train_dataset, "column_names", None) or []
    if "image" in columns or "images" in columns:
        raise ValueError(
            "The data set has images; packing by shared prefixes is for text. Remove the column, or train with "
            "SFTTrainer."
        )


def refuse_dispatch(args: DagSFTConfig, is_stream: bool) -> None:
    """Refuse that the first process reads the batches of all where batches have different shapes.

    accelerate does so for streams unless it is told not to; here each process reads its own.

    Raises:
        ValueError: `dispatch_batches` is set with `packing_scope="batch"`.
    """
    if args.packing_scope == "batch" and args.loading.dispatch_batches:
        raise ValueError(
            "accelerator_config.dispatch_batches=True is not supported with packing_scope='batch': batches have as "
            "many rows as packing needs, and cannot be cut for the processes. Leave it unset, each process then reads "
            "its own batches."
        )
    if is_stream:
        args.loading.dispatch_batches = False


def refuse_stream(args: DagSFTConfig, training: bool) -> None:
    """Refuse what cannot be done with a stream.

    Raises:
        ValueError: an option needs the whole data set.
    """
    if training and args.packing_scope == "dataset":
        raise ValueError(
            'A stream cannot be packed as a whole. Use packing_scope="batch" (with loss_normalization="step"), or '
            "load the data set without streaming."
        )
    if not training:
        raise ValueError("Evaluation data are packed as a whole; load eval_dataset without streaming.")
    if args.overflow != "truncate" or args.loss_normalization == "corpus":
        raise ValueError('A stream needs overflow="truncate" and loss_normalization="step".')


def refuse_parallelism(config: Any) -> None:
    """Refuse the kinds of parallelism that cut rows into pieces.

    Args:
        config: the accelerator's `parallelism_config`, or `None`.

    Raises:
        ValueError: context or sequence parallelism is on.
    """
    if config is not None and (config.cp_enabled or config.sp_enabled):
        raise ValueError(
            "Context and sequence parallelism cut rows into pieces and mask them causally, which packed rows "
            "cannot have. Use data parallelism, FSDP or DeepSpeed ZeRO instead."
        )


def refuse_evaluation_of_four_bits(model: torch.nn.Module, args: DagSFTConfig) -> None:
    """Refuse evaluation between training steps where it leaves weights without gradients.

    Raises:
        ValueError: the model is quantised to four bits and on a CPU, and evaluation is on.
    """
    if args.eval_strategy != "no" and repacks_weights(base_model_of(model)):
        raise ValueError(
            "On a CPU bitsandbytes puts weights of four bits into a form for inference when the model is evaluated, "
            "and later steps would train on gradients of zero. Set eval_strategy='no', or train on a GPU."
        )


def warn_if_unsharded(args: DagSFTConfig, is_fsdp_enabled: bool) -> None:
    """Say that FSDP was asked for and is not there: accelerate replicates the model then, and says nothing."""
    if args.fsdp and args.world_size > 1 and not is_fsdp_enabled:
        logger.warning(
            "FSDP is not used: accelerate shards on accelerators only, not on %s. Each process has the whole model.",
            args.device.type,
        )
