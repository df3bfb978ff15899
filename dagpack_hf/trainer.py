"""`DagSFTTrainer`: TRL's `SFTTrainer`, with every shared prefix computed once.

Design. The host's hooks and nothing else: `_prepare_dataset` packs what TRL has tokenised, `compute_loss` weighs the
per-token log-probabilities of TRL's fused LM head, `_get_num_items_in_batch` counts weight in place of tokens, and
metrics are kept as sums. The model's attention is switched only while training or evaluation runs, so that the model
generates as before in between.

Cost. Beyond the forward and backward pass: one gather of four numbers for each micro-batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer

from dagpack_hf import attention
from dagpack_hf.collator import DagCollator
from dagpack_hf.columns import (
    OPTIONAL_TREE_COLUMNS,
    ROW_FEATURES,
    TREE_COLUMNS,
    is_row_dataset,
    is_tree_dataset,
)
from dagpack_hf.config import DagSFTConfig
from dagpack_hf.layout import ROW_COLUMNS
from dagpack_hf.pack_report import PackReport
from dagpack_hf.preparation import fill_up, keep_trainable, limit_sequences, pack_as_whole, source_targets
from dagpack_hf.refusals import refuse_arguments, refuse_parallelism, refuse_stream
from dagpack_hf.render import RenderError, RenderReport, conversation_columns, tokenize_conversations

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

logger = logging.getLogger(__name__)

SIGNATURE_COLUMNS = [*ROW_COLUMNS, "labels", *TREE_COLUMNS[1:], *OPTIONAL_TREE_COLUMNS]
"""Columns that reach the collator: those of rows, of plain sequences and of token trees."""


class DagSFTTrainer(SFTTrainer):
    """Trainer for supervised fine-tuning on sequences that share prefixes.

    A drop-in replacement for [`~trl.SFTTrainer`]: it takes the same models and data sets (language modeling,
    prompt-completion and conversational, tokenised or not), and besides them conversations from `load_sessions`, token
    trees from `tokenize_conversations` and rows from `pack_dataset`.

    Example:
    ```python
    >>> from datasets import load_dataset
    >>> from dagpack_hf import DagSFTConfig, DagSFTTrainer

    >>> trainer = DagSFTTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     args=DagSFTConfig(max_length=16384, per_device_train_batch_size=1),
    ...     train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.SFTTrainer`]. Models that the attention cannot serve exactly are refused
            by name, and the model is probed: packed against unpacked logits of two short sequences.
        args ([`DagSFTConfig`], *optional*):
            Configuration for this trainer.
        data_collator ([`DagCollator`], *optional*):
            Made from `args` if not given.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset to use for training. A stream needs `packing_scope="batch"`.
        eval_dataset ([`~datasets.Dataset`] or `dict[str, Dataset]`, *optional*):
            Dataset to use for evaluation. It is packed as a whole in either scope and weighted as `"paths"`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer, as in [`~trl.SFTTrainer`].
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            As in [`~trl.SFTTrainer`].
        optimizers (`tuple`, *optional*):
            As in [`~trl.SFTTrainer`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            As in [`~trl.SFTTrainer`].
        formatting_func (`Callable`, *optional*):
            As in [`~trl.SFTTrainer`].
        **kwargs:
            Further arguments of [`~trl.SFTTrainer`]. `compute_loss_func`, `compute_metrics` and
            `preprocess_logits_for_metrics` are refused: they work on logits, which are not computed.

    Attributes:
        pack_reports (`dict[str, PackReport]`):
            What packing did, for each data set that was packed as a whole.
        render_reports (`dict[str, RenderReport]`):
            What rendering did, for each data set that was rendered turn by turn. That of a stream fills as it is read.
    """

    _tag_names = ["trl", "sft", "dagpack"]  # noqa: RUF012
    _name = "SFT"
    loss_is_scaled_for_ga: bool | None = True  # type: ignore[assignment]  # compute_loss does it
    args: DagSFTConfig
    model: PreTrainedModel

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: DagSFTConfig | TrainingArguments | None = None,
        data_collator: DagCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        **kwargs: Any,
    ) -> None:
        args = DagSFTConfig.from_args(args, model if isinstance(model, str) else type(model).__name__)
        refuse_arguments(kwargs, train_dataset, data_collator)
        if not isinstance(model, str):
            attention.check_model(model)
        self.pack_reports: dict[str, PackReport] = {}
        self.render_reports: dict[str, RenderReport] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._total_weight = 0.0

        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            formatting_func=formatting_func,
            **kwargs,
        )
        self.data_collator = data_collator or self._default_collator()
        self._switch_off_router_loss()
        refuse_parallelism(self.accelerator.parallelism_config)
        self._check_attention()

    # Data

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: SFTConfig,
        packing: bool,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        training = dataset_name == "train"
        args = cast(DagSFTConfig, args)
        if isinstance(dataset, IterableDataset):
            refuse_stream(args, training)
            if self._per_turn(conversation_columns(dataset), args):
                return self._render(dataset, args, dataset_name)
            return super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)
        if is_row_dataset(dataset.column_names):
            rows = dataset.select_columns(list(ROW_COLUMNS)).cast(ROW_FEATURES)
        else:
            if self._per_turn(conversation_columns(dataset), args):
                dataset = self._render(dataset, args, dataset_name)
            elif not is_tree_dataset(dataset.column_names):
                dataset = self._tokenize_plain(dataset, processing_class, args, formatting_func, dataset_name)
            if training and args.packing_scope == "batch":
                self._total_weight = float(source_targets(dataset, _window(args)))
                return dataset
            rows, report = pack_as_whole(dataset, args, training)
            self.pack_reports[dataset_name] = report
            logger.info("Packed the %s data set:\n%s", dataset_name, report)
        if training:
            self._total_weight = float(sum(weights.sum() for weights in rows.with_format("numpy")["loss_weight"]))
        batch_size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        return fill_up(rows, batch_size * args.world_size)

    @staticmethod
    def _per_turn(columns: list[str], args: DagSFTConfig) -> bool:
        """Whether a data set with these conversational columns is rendered turn by turn."""
        if args.per_turn and not columns:
            raise ValueError(
                "per_turn=True needs conversational data (messages, conversations, or prompt and completion as lists "
                "of messages) that are not tokenised yet."
            )
        return bool(args.per_turn) if args.per_turn is not None else {"messages", "trained"} <= set(columns)

    def _render(
        self, dataset: Dataset | IterableDataset, args: DagSFTConfig, dataset_name: str
    ) -> Dataset | IterableDataset:
        """Token trees with every turn in its own context."""
        options = {"num_proc": args.dataset_num_proc, **cast(dict[str, Any], args.per_turn_kwargs or {})}
        try:
            trees, report = tokenize_conversations(dataset, self._tokenizer, return_report=True, **options)
        except RenderError as error:
            remedy = "Options of rendering go into per_turn_kwargs of DagSFTConfig."
            raise RenderError(error.reason, f"{error.detail}. {remedy}") from error
        self.render_reports[dataset_name] = report
        return trees

    def _tokenize_plain(
        self,
        dataset: Dataset,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        args: DagSFTConfig,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> Dataset:
        """TRL's tokenisation and labels; sequences that train nothing are left out, as in TRL."""
        unlimited = copy.copy(args)
        unlimited.max_length = None
        unlimited.shuffle_dataset = False
        dataset = super()._prepare_dataset(dataset, processing_class, unlimited, False, formatting_func, dataset_name)
        dataset = dataset.select_columns(["input_ids", "labels"])
        if dataset_name != "train" or args.packing_scope == "dataset":
            return keep_trainable(dataset)
        dataset = limit_sequences(dataset, _window(args), args.overflow)
        return super()._prepare_dataset(dataset, processing_class, args, False, None, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = SIGNATURE_COLUMNS  # type: ignore[assignment]

    def _default_collator(self) -> DagCollator:
        tokenizer = self._tokenizer
        args = self.args
        on_cuda = args.device.type == "cuda"
        return DagCollator(
            max_length=_window(args),
            pad_token_id=tokenizer.pad_token_id or 0,
            packing_scope=args.packing_scope,
            loss_weighting=args.loss_weighting,
            overflow=args.overflow,
            padding="max_length" if on_cuda and args.packing_scope == "dataset" else "longest",
            pad_to_multiple_of=int(args.pad_to_multiple_of or (128 if on_cuda else 1)),
        )

    # Loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        """Weight of all targets of an optimizer step, over all processes if tokens are averaged over them."""
        if not batch_samples:
            return None
        weight = (
            torch.stack([batch["loss_weight"].sum(dtype=torch.float64) for batch in batch_samples]).sum().to(device)
        )
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight).sum() / self.get_tp_size()
        return weight

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Weighted negative log-likelihood of the targets of a batch of rows."""
        visibility = attention.DagVisibility(inputs["subtree_end"], inputs["position_ids"], self.args.attn_backend)
        outputs = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            shift_labels=inputs["shift_labels"],
            dag_visibility=visibility,
            use_cache=False,
            fused_lm_head=True,
        )
        weight = inputs["loss_weight"].to(outputs.log_probs.device)
        loss = -outputs.log_probs
        if self.args.loss_type == "dft":
            loss = loss * outputs.log_probs.exp().detach()
        loss = (loss * weight).sum()
        self._record_sums(loss, weight, outputs, inputs["num_tokens"])

        training = self.model.training
        if training and self.args.loss_normalization == "corpus":
            loss = loss / self._corpus_normalizer() * (self.accelerator.num_processes // self.get_tp_size())
        else:
            total = weight.sum() if num_items_in_batch is None else num_items_in_batch
            loss = loss / torch.as_tensor(total, device=loss.device, dtype=loss.dtype).clamp(min=1)
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _corpus_normalizer(self) -> float:
        """Total weight of the data set over the optimizer steps of an epoch: the mean weight of a step."""
        per_step = self._train_batch_size * self.args.world_size // self.get_tp_size()
        batches = -(-len(cast(Dataset, self.train_dataset)) // per_step)
        steps = -(-batches // self.args.gradient_accumulation_steps)
        return max(self._total_weight / max(steps, 1), 1e-12)

    # Metrics are kept as sums: rows carry very unequal weight, so a mean of ratios would be wrong

    def _record_sums(self, loss: torch.Tensor, weight: torch.Tensor, outputs: Any, num_tokens: torch.Tensor) -> None:
        mode = "train" if self.model.training else "eval"
        entropy, is_top1 = outputs.entropy.detach(), outputs.is_top1
        local = [weight.sum(), loss.detach(), (entropy * weight).sum(), (is_top1 * weight).sum(), num_tokens.sum()]
        sums = torch.stack([figure.to(loss.device, torch.float64) for figure in local])
        sums = self.accelerator.gather(sums[None]).sum(0).cpu() / self.get_tp_size()
        self._sums[mode] = self._sums[mode] + sums if mode in self._sums else sums
        if mode == "train":
            self._total_train_tokens += int(sums[4])
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log token-weighted means in place of TRL's means of per-batch ratios.

        Under `"corpus"` normalisation the loss of a step grows with its weight; logged is the mean of its targets.
        """
        mode = "train" if self.model.training else "eval"
        sums = self._sums.pop(mode, None)
        if sums is not None and sums[0] > 0:
            weight, loss, entropy, correct, _ = sums.tolist()
            if "loss" in logs and self.args.loss_normalization == "corpus":
                logs["loss"] = loss / weight
            self._metrics[mode]["entropy"] = [entropy / weight]
            self._metrics[mode]["mean_token_accuracy"] = [correct / weight]
        super().log(logs, start_time)

    # Where packed attention is on

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as [`~transformers.Trainer.train`]; the model has its own attention again afterwards."""
        with attention.packed_attention(self.model):
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all labelled tokens, however unequally rows are filled."""
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        self._sums.pop("eval", None)
        with attention.packed_attention(self.model):
            output = super().evaluation_loop(*args, **kwargs)
        sums = self._sums.get("eval")
        if sums is not None and sums[0] > 0 and output.metrics is not None:
            output.metrics[f"{prefix}_loss"] = (sums[1] / sums[0]).item()
        return output

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Loss only: the logits are not computed."""
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    # Checks when the trainer is made

    def _check_attention(self) -> None:
        attention.check_model(self.model)
        if is_deepspeed_zero3_enabled():
            logger.warning("The parameters are partitioned (ZeRO-3), so the packed attention is not probed at start.")
            return
        with attention.packed_attention(self.model):
            attention.probe(self.model, self.args.attn_backend)

    def _switch_off_router_loss(self) -> None:
        if not self.aux_loss_enabled:
            return
        if self.args.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef={self.args.router_aux_loss_coef} is not supported: the load-balancing loss of "
                "a mixture of experts would count shared tokens once. Leave it unset or set it to 0."
            )
        logger.warning(
            "The load-balancing loss of the model (router_aux_loss_coef) is off; the routers train on the loss."
        )
        self.aux_loss_enabled = False
        self.model.config.get_text_config().output_router_logits = False


def _window(args: DagSFTConfig) -> int:
    return cast(int, args.max_length)  # DagSFTConfig refuses None
