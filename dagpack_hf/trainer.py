"""`DagSFTTrainer`: TRL's `SFTTrainer`, with every shared prefix computed once.

Design. The host's hooks and nothing else: `_prepare_dataset` packs what TRL has tokenised, `compute_loss` weighs the
per-token log-probabilities of TRL's fused LM head, `_get_num_items_in_batch` counts weight in place of tokens,
`_get_train_sampler` balances processes (`window_order`), and metrics are kept as sums (`training_metrics`). The
model's attention is switched only while training or evaluation runs, so that the model generates as before in between.

Cost. Beyond the forward and backward pass: ten sums for each micro-batch, and one gather of them for each entry of the
log.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer

from dagpack_hf import attention
from dagpack_hf.checkpoints import last_complete_checkpoint
from dagpack_hf.collator import DagCollator
from dagpack_hf.columns import is_row_dataset, is_tree_dataset
from dagpack_hf.config import DagSFTConfig
from dagpack_hf.layout import COUNT_COLUMN
from dagpack_hf.model_card import training_section
from dagpack_hf.pack_report import PackReport
from dagpack_hf.preparation import (
    SIGNATURE_COLUMNS,
    as_rows,
    fill_up,
    is_counted,
    is_per_turn,
    keep_trainable,
    limit_sequences,
    make_collator,
    pack_as_whole,
    render_per_turn,
    source_targets,
)
from dagpack_hf.refusals import (
    refuse_arguments,
    refuse_dispatch,
    refuse_evaluation_of_four_bits,
    refuse_parallelism,
    refuse_stream,
    warn_if_unsharded,
)
from dagpack_hf.render import RenderReport, conversation_columns
from dagpack_hf.router_loss import check_router_loss, load_balancing_loss, recorded_router_logits, wants_router_loss
from dagpack_hf.training_metrics import CorpusShares, Metering
from dagpack_hf.window_order import EpochSetter, Rounds, window_sampler

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

    from dagpack_hf.pi import LoadReport
    from dagpack_hf.redact import RedactionReport

logger = logging.getLogger(__name__)


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
            Dataset to use for evaluation. It is packed as a whole in either scope and weighted as `"paths"`; rows that
            were packed beforehand keep the weights they have.
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
        refuse_dispatch(args, isinstance(train_dataset, IterableDataset))
        if not isinstance(model, str):
            attention.check_model(model)
        self.pack_reports: dict[str, PackReport] = {}
        self.render_reports: dict[str, RenderReport] = {}
        self.load_report: LoadReport | None = None
        self.redaction_report: RedactionReport | None = None
        self._metering = Metering()
        self._total_weight = 0.0
        self._wants_counts = wants_router_loss(model, args)
        self._is_counted = False
        self._epoch_setter = EpochSetter()

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
        self.add_callback(self._epoch_setter)
        counting = self.aux_loss_enabled and self._is_counted
        self.data_collator = data_collator or make_collator(self.args, self._tokenizer, counting)
        if self.aux_loss_enabled:
            self.aux_loss_enabled = check_router_loss(self.model, self.args, self.data_collator.count_sequences)
        refuse_parallelism(self.accelerator.parallelism_config)
        refuse_evaluation_of_four_bits(self.model, self.args)
        warn_if_unsharded(self.args, self.is_fsdp_enabled)
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
            if is_per_turn(conversation_columns(dataset), args):
                return self._render(dataset, args, dataset_name)
            self._is_counted = self._wants_counts and is_counted(dataset)
            return super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)
        if is_row_dataset(dataset.column_names):
            rows = as_rows(dataset)
        else:
            if is_per_turn(conversation_columns(dataset), args):
                dataset = self._render(dataset, args, dataset_name)
            elif not is_tree_dataset(dataset.column_names):
                dataset = self._tokenize_plain(dataset, processing_class, args, formatting_func, dataset_name)
            if training and args.packing_scope == "batch":
                self._total_weight = float(source_targets(dataset, _window(args)))
                self._is_counted = self._wants_counts and is_counted(dataset)
                return dataset
            rows, report = pack_as_whole(dataset, args, training, self._wants_counts and training)
            self.pack_reports[dataset_name] = report
            logger.info("Packed the %s data set:\n%s", dataset_name, report)
        if training:
            self._is_counted = COUNT_COLUMN in rows.column_names
            self._total_weight = float(sum(weights.sum() for weights in rows.with_format("numpy")["loss_weight"]))
        batch_size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        return fill_up(rows, batch_size * args.world_size)

    def _render(
        self, dataset: Dataset | IterableDataset, args: DagSFTConfig, dataset_name: str
    ) -> Dataset | IterableDataset:
        trees, self.render_reports[dataset_name] = render_per_turn(dataset, self._tokenizer, args)
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

    @property
    def _rounds(self) -> Rounds:
        """How windows are spread over processes. Tensor-parallel processes have the same batch."""
        processes = self.accelerator.num_processes // self.get_tp_size()
        batch_size = self._train_batch_size
        if self.args.loading.split_batches:
            batch_size //= processes
        return Rounds(processes, batch_size, self.args.gradient_accumulation_steps)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> torch.utils.data.Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        is_shuffled = self.args.train_sampling_strategy == "random" and self.args.loading.use_seedable_sampler
        if not is_shuffled or not isinstance(dataset, Dataset):
            return super()._get_train_sampler(train_dataset)
        self._epoch_setter.sampler = window_sampler(dataset, self.args, self._rounds)
        return self._epoch_setter.sampler

    # Loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        """Weight of all targets of an optimizer step, over all processes if tokens are averaged over them."""
        self._metering.stopwatch.start()
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
        extra = attention.inputs_for(self.model, visibility)
        with_router_loss = self.aux_loss_enabled and "sequence_count" in inputs
        if self.aux_loss_enabled:
            extra["output_router_logits"] = with_router_loss
        if self.args.attn_kernel_options:
            extra["kernel_options"] = self.args.attn_kernel_options
        with recorded_router_logits(self.model, with_router_loss) as router_logits:
            outputs = model(
                input_ids=inputs["input_ids"],
                shift_labels=inputs["shift_labels"],
                use_cache=False,
                fused_lm_head=True,
                **extra,
            )
        weight = inputs["loss_weight"].to(outputs.log_probs.device)
        loss = -outputs.log_probs
        if self.args.loss_type == "dft":
            loss = loss * outputs.log_probs.exp().detach()
        loss = (loss * weight).sum()
        router_loss = None
        if router_logits:
            config = self.model.config.get_text_config()
            router_loss = load_balancing_loss(config, router_logits[-1], inputs["sequence_count"])
        training = self.model.training
        shares = CorpusShares.of(self.pack_reports.get("train")) if training else None
        self._metering.add("train" if training else "eval", loss, weight, outputs, inputs, shares, router_loss)
        if training and self.args.loss_normalization == "corpus":
            loss = loss / self._corpus_normalizer() * (self.accelerator.num_processes // self.get_tp_size())
        else:
            total = weight.sum() if num_items_in_batch is None else num_items_in_batch
            loss = loss / torch.as_tensor(total, device=loss.device, dtype=loss.dtype).clamp(min=1e-12)  # 0 of 0 is 0
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        if router_loss is not None:
            steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * router_loss.to(loss.device) / steps
        return (loss, outputs) if return_outputs else loss

    def _corpus_normalizer(self) -> float:
        """Total weight of the data set over the optimizer steps of an epoch: the mean weight of a step."""
        batches = -(-len(cast(Dataset, self.train_dataset)) // self._rounds.windows)
        steps = -(-batches // self.args.gradient_accumulation_steps)
        return max(self._total_weight / max(steps, 1), 1e-12)

    # Model card

    def create_model_card(  # type: ignore[override]  # TRL's arguments, which differ from those of Trainer
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's card, and what the model was trained on, how that was packed, and how it was weighted."""
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            section = training_section(
                self.args,
                self.pack_reports.get("train"),
                self.render_reports.get("train"),
                self.load_report,
                self.redaction_report,
            )
            with open(os.path.join(cast(str, self.args.output_dir), "README.md"), "a", encoding="utf-8") as card:
                card.write(section)

    # Metrics

    def _collect_metrics(self, mode: str) -> dict[str, float]:
        """Sum over all processes, and hand the metrics to TRL for the next entry of the log."""
        sums = self._metering.take(mode, self.accelerator, self.get_tp_size())
        if mode == "train":
            self._total_train_tokens += round(sums["tokens"])
        self._metrics[mode].clear()
        for name, value in (self._metering.metrics(mode, sums) | {"num_tokens": self._total_train_tokens}).items():
            self._metrics[mode][name] = [value]
        return sums

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._collect_metrics("train")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._metering.stopwatch.paused():
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, besides what TRL logs, tokens per second and how much is shared.

        Under `"corpus"` normalisation the loss of a step grows with its weight; logged is the mean of its targets.
        """
        mean_loss = self._metering.pop_mean_loss()
        if mean_loss is not None and "loss" in logs and self.args.loss_normalization == "corpus":
            logs["loss"] = mean_loss
        super().log(logs, start_time)

    # Where packed attention is on

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as [`~transformers.Trainer.train`]; the model has its own attention again afterwards.

        `resume_from_checkpoint=True` resumes from the last checkpoint in `output_dir` that was saved to its end.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(cast(str, self.args.output_dir))
        try:
            with attention.packed_attention(self.model):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._metering.stopwatch.stop()
        self._collect_metrics("train")
        self._metrics["train"].clear()
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all labelled tokens, however unequally rows are filled."""
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        self._metering.drop("eval")
        with self._metering.stopwatch.paused(), attention.packed_attention(self.model):
            output = super().evaluation_loop(*args, **kwargs)
            sums = self._collect_metrics("eval")
        if sums["weight"] > 0 and output.metrics is not None:
            output.metrics[f"{prefix}_loss"] = sums["loss"] / sums["weight"]
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
        attention.probe_head(self.model)


def _window(args: DagSFTConfig) -> int:
    return cast(int, args.max_length)  # DagSFTConfig refuses None
