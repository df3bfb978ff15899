"""Configuration of the trainer: TRL's `SFTConfig` and what packing adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, cast

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import SFTConfig

from dagpack_hf.attention import BACKENDS
from dagpack_hf.collator import PACKING_SCOPES
from dagpack_hf.layout import LOSS_WEIGHTINGS
from dagpack_hf.overflow import OVERFLOW_CHOICES
from dagpack_hf.pack import STRATEGIES
from dagpack_hf.pack_options import check_choice, check_examples, check_seconds
from dagpack_hf.window_order import RANK_BALANCES

LOSS_NORMALIZATIONS = ("corpus", "step")


@dataclass
class DagSFTConfig(SFTConfig):
    r"""Configuration class for the [`DagSFTTrainer`].

    This class includes only the parameters that are specific to packing by shared prefixes. For a full list of
    training arguments, please refer to the [`~trl.SFTConfig`] and [`~transformers.TrainingArguments`] documentation.

    Two parameters of [`~trl.SFTConfig`] have a meaning of their own here: `max_length` is the length of a window (two
    to four times the longest sequence keeps most of the sharing), and with `packing_scope="dataset"` the batch sizes
    count windows. Rows that `pack_dataset` has packed beforehand are trained as they are.

    Parameters:
        per_turn (`bool`, *optional*):
            Whether every trained assistant message is rendered in the context that the model is given for it at
            inference, which many chat templates render differently once other messages follow (they leave out earlier
            thinking). Needs conversational data; of prompt-completion data the completion is trained. `False` is
            [`~trl.SFTTrainer`]'s own tokenisation. By default `True` for conversations with a `trained` column, such
            as those of `load_sessions`, and `False` for all other data.
        per_turn_kwargs (`dict[str, Any]`, *optional*):
            Options of `tokenize_conversations` for that: `template`, `chat_template_kwargs`, `thinking`,
            `loss_on_thinking`, `loss_roles`, `control_tokens`, `date`, `windows`, `on_error`.
        packing_scope (`str`, *optional*, defaults to `"dataset"`):
            What is merged. Possible values are:

            - `"dataset"`: the whole data set is merged and packed before training (most sharing).
            - `"batch"`: the examples of each batch are merged on the fly, so that every optimizer step sees exactly
              the examples it would see with [`~trl.SFTTrainer`].

        loss_weighting (`str`, *optional*, defaults to `"once"`):
            Weight of a target that several sequences share. Possible values are:

            - `"once"`: each distinct target counts once.
            - `"paths"`: each target counts as often as sequences train it; loss and gradients are those of ordinary
              training on the unpacked data.

            Evaluation data always count as `"paths"`, so that `eval_loss` is that of the unpacked data.
        window_strategy (`str`, *optional*, defaults to `"best"`):
            How windows are filled where a data set is packed as a whole (with `packing_scope="batch"` evaluation data
            are; the examples of a batch are packed as `"best"`). Possible values are:

            - `"best"`: the best of several packings.
            - `"dfs"`: depth first, a new window when one is full. Never fewer windows than `"best"`.

        window_effort (`float`, *optional*, defaults to `0.0`):
            Seconds that are spent, on each data set that is packed as a whole, on a search for fewer windows. How far
            the search gets depends on the machine. So the first of several processes searches and the others take its
            rows, for which machines must share the folder of the data set; and of data on disk the rows are kept,
            while data in memory are searched anew when a run is resumed.
        bucket_size (`int`, *optional*):
            Pack training data within buckets of so many examples, drawn at random with `data_seed` (or `seed`), so
            that windows are less correlated. Every target is still trained exactly once, with its weight in the whole
            data set; what examples of several buckets share is computed in each of them. By default the whole data set
            is one bucket, as evaluation data always are. Needs `packing_scope="dataset"`.
        loss_normalization (`str`, *optional*):
            What the summed loss of an optimizer step is divided by. Possible values are:

            - `"corpus"`: a constant, the total weight of the data set divided by the optimizer steps of an epoch, so
              that every target has the same share of the gradient. The default with `packing_scope="dataset"`.
            - `"step"`: the weight of the step itself, as in [`~transformers.Trainer`]. The default with
              `packing_scope="batch"`.

        rank_balance (`str`, *optional*, defaults to `"step"`):
            How windows are dealt to the processes that train together, so that those which are computed at the same
            time have similar numbers of attention pairs and no process waits. Possible values are:

            - `"step"`: windows trade places within an optimizer step; training is that without.
            - `"epoch"`: they trade places with those of other steps too, so that each round has windows of similar
              cost. Needed where a step is one window for each process.
            - `"none"`: as they are shuffled.

            Needs windows, so with `packing_scope="batch"` there is nothing to balance.
        overflow (`str`, *optional*, defaults to `"truncate"`):
            What to do with sequences longer than `max_length`: `"truncate"` (as [`~trl.SFTTrainer`]), `"drop"` or
            `"error"`. What is lost is counted and shown.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            Backend of the attention: `"dense"`, `"tile"`, `"flex"`, or `"auto"` (flex on CUDA, tile on CPU).
        attn_kernel_options (`dict[str, Any]`, *optional*):
            Options of FlexAttention's kernel, such as `{"BLOCK_M": 64, "BLOCK_N": 64}` where a GPU has too little
            shared memory for its defaults. The other backends have none.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "per_turn_kwargs", "attn_kernel_options"]  # noqa: RUF012

    per_turn: bool | None = field(
        default=None,
        metadata={
            "help": "Whether every trained assistant message is rendered in the context that the model is given for "
            "it at inference. Needs conversational data. False is SFTTrainer's own tokenisation. Default: True for "
            "conversations with a trained column, such as pi sessions, else False."
        },
    )
    per_turn_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of tokenize_conversations for per_turn, as JSON: template, chat_template_kwargs, "
            "thinking, loss_on_thinking, loss_roles, control_tokens, date, windows, on_error."
        },
    )
    packing_scope: str = field(
        default="dataset",
        metadata={
            "help": "What is merged: 'dataset' (the whole data set, before training) or 'batch' (the examples of each "
            "batch, so that every optimizer step sees the examples it would see with SFTTrainer).",
            "choices": list(PACKING_SCOPES),
        },
    )
    loss_weighting: str = field(
        default="once",
        metadata={
            "help": "Weight of a target that several sequences share: 'once' (each distinct target counts once) or "
            "'paths' (as often as sequences train it; equals ordinary training on the unpacked data).",
            "choices": list(LOSS_WEIGHTINGS),
        },
    )
    window_strategy: str = field(
        default="best",
        metadata={
            "help": "How windows are filled: 'best' (the best of several packings) or 'dfs' (depth first, a new "
            "window when one is full).",
            "choices": list(STRATEGIES),
        },
    )
    window_effort: float = field(
        default=0.0,
        metadata={"help": "Seconds that are spent on each data set on a search for fewer windows."},
    )
    bucket_size: int | None = field(
        default=None,
        metadata={
            "help": "Pack training data within random buckets of so many examples, so that windows are less "
            "correlated; costs sharing. Needs packing_scope='dataset'. Default: all together."
        },
    )
    loss_normalization: str | None = field(
        default=None,
        metadata={
            "help": "What the summed loss of a step is divided by: 'corpus' (a constant, total weight / optimizer "
            "steps; default with packing_scope='dataset') or 'step' (the step's own weight; default with "
            "packing_scope='batch').",
            "choices": list(LOSS_NORMALIZATIONS),
        },
    )
    rank_balance: str = field(
        default="step",
        metadata={
            "help": "How windows are dealt to processes, so that those computed at the same time have similar numbers "
            "of attention pairs: 'step' (they trade places within an optimizer step), 'epoch' (with other steps too) "
            "or 'none'.",
            "choices": list(RANK_BALANCES),
        },
    )
    overflow: str = field(
        default="truncate",
        metadata={
            "help": "What to do with sequences longer than max_length: 'truncate', 'drop' or 'error'.",
            "choices": list(OVERFLOW_CHOICES),
        },
    )
    attn_backend: str = field(
        default="auto",
        metadata={
            "help": "Attention backend: 'dense', 'tile', 'flex' or 'auto' (flex on CUDA, tile on CPU).",
            "choices": list(BACKENDS),
        },
    )
    attn_kernel_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Options of FlexAttention\'s kernel, as JSON, such as {"BLOCK_M": 64}.'},
    )

    def __post_init__(self) -> None:
        """Check the options that packing adds, and refuse those that conflict with it."""
        super().__post_init__()
        for name, choices in (
            ("packing_scope", PACKING_SCOPES),
            ("loss_weighting", LOSS_WEIGHTINGS),
            ("window_strategy", STRATEGIES),
            ("loss_normalization", (*LOSS_NORMALIZATIONS, None)),
            ("rank_balance", RANK_BALANCES),
            ("overflow", OVERFLOW_CHOICES),
            ("attn_backend", BACKENDS),
        ):
            check_choice(name, getattr(self, name), choices)
        check_seconds("window_effort", self.window_effort)
        if self.bucket_size is not None:
            check_examples("bucket_size", self.bucket_size)
        self._refuse_conflicts()
        if self.loss_normalization is None:
            self.loss_normalization = "corpus" if self.packing_scope == "dataset" else "step"

    @property
    def loading(self) -> AcceleratorConfig:
        """How accelerate loads the data: `accelerator_config`, read."""
        return cast(AcceleratorConfig, self.accelerator_config)

    @classmethod
    def from_args(cls, args: TrainingArguments | None, model_name: str) -> DagSFTConfig:
        """Take over the arguments of another trainer; without any, all defaults.

        Args:
            args ([`~transformers.TrainingArguments`], *optional*):
                A [`DagSFTConfig`], which is returned as it is, or a configuration with fewer parameters.
            model_name (`str`):
                Names the output directory if there are no arguments.
        """
        if isinstance(args, cls):
            return args
        if args is None:
            return cls(f"{model_name.split('/')[-1]}-DagSFT")
        # not `to_dict`, which hides whatever is called a token, `eos_token` among it
        return cls(**{each.name: getattr(args, each.name) for each in fields(args) if each.init})

    def _refuse_conflicts(self) -> None:
        if self.per_turn_kwargs and self.per_turn is False:
            raise ValueError("per_turn_kwargs are options of per_turn rendering, which per_turn=False switches off.")
        own = "DagSFTTrainer packs by shared prefixes itself"
        conflicts = {
            "packing": (self.packing, f"{own}; leave packing=False."),
            "eval_packing": (self.eval_packing, f"{own}, evaluation data too; leave eval_packing unset."),
            "padding_free": (self.padding_free, f"{own}, and rows carry their own mask; leave padding_free=False."),
            "max_length": (self.max_length is None, "Windows need a length; set max_length, in tokens."),
            "label_smoothing_factor": (
                self.label_smoothing_factor > 0,
                "The loss is computed from log-probabilities without the full logits; leave label_smoothing_factor=0.",
            ),
            "neftune_noise_alpha": (
                self.neftune_noise_alpha is not None,
                "Noise on a shared token would be one draw for all its sequences; leave neftune_noise_alpha unset.",
            ),
            "bucket_size": (
                self.bucket_size is not None and self.packing_scope == "batch",
                "With packing_scope='batch' the examples of each batch are packed on their own already; leave "
                "bucket_size unset, or use packing_scope='dataset'.",
            ),
            "loss_normalization": (
                self.loss_normalization == "corpus"
                and self.packing_scope == "batch"
                and self.loss_weighting == "once",
                "The total weight of targets that count once is not known before all batches are packed; use "
                "loss_normalization='step' or loss_weighting='paths' with packing_scope='batch'.",
            ),
        }
        for name, (conflict, why) in conflicts.items():
            if conflict:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported. {why}")
