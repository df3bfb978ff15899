"""Fine-tune on pi sessions: what `dagpack train` and `recipes/sft_pi.py` run.

In the manner of TRL's scripts: three dataclasses make the command line, and a YAML file (`--config`) can hold the same
options.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from dagpack_hf.cli.arguments import session_paths
from dagpack_hf.cli.reading import read_prompt
from dagpack_hf.cli.redaction import redact_or_scan
from dagpack_hf.config import DagSFTConfig
from dagpack_hf.pi import LoadReport, load_sessions
from dagpack_hf.redact import RedactionReport
from dagpack_hf.sample import sample_tokenizer
from dagpack_hf.shards import saved_report
from dagpack_hf.trainer import DagSFTTrainer

DESCRIPTION = """\
Fine-tune a model on pi coding-agent sessions. Every assistant turn of every branch is trained in its exact context,
and prefixes that turns share are computed once.
"""

EPILOG = """\
The options are those of SessionArguments (which sessions), DagSFTConfig (training and packing; TRL's SFTConfig and
transformers' TrainingArguments) and ModelConfig (model, LoRA, quantization), in this order. They can also stand in a
YAML file: --config FILE; the command line wins.
"""


@dataclass
class SessionArguments:
    """Which sessions are trained on.

    Parameters:
        sessions (`list[str]`, *optional*):
            Session files, or folders that are searched at any depth for `*.jsonl`; `sample` stands for the bundled
            sessions. Defaults to pi's own folder.
        system_prompt (`str`, *optional*):
            Text file with the system prompt of turns for which none is recorded (pi before 0.86).
        tools (`str`, *optional*):
            JSON file with the list of their tools' function schemas.
        html_exports (`list[str]`, *optional*):
            HTML files that pi exported from running sessions, for prompt and tools of these sessions.
        models (`list[str]`, *optional*):
            Only turns of these models are targets: patterns of `model` or `provider/model`, as in a shell.
        providers (`list[str]`, *optional*):
            Only turns of these providers are targets.
        since (`str`, *optional*):
            Only turns from this time on are targets, such as `2026-01-31` (UTC).
        until (`str`, *optional*):
            Only turns before this time are targets.
        cwd (`list[str]`, *optional*):
            Only sessions in these working directories, or below them, have targets.
        names (`list[str]`, *optional*):
            Only sessions with such names have targets: patterns.
        labels (`list[str]`, *optional*):
            Only branches through an entry with such a label have targets: patterns.
        rows (`str`, *optional*):
            Packed rows to train on instead of sessions: a folder of `dagpack pack`, or a data set on the Hub.
        redact (`bool`, *optional*, defaults to `False`):
            Replace secrets and personal data by placeholders before anything is trained. They are counted in any
            case. A model that is pushed is always trained on redacted sessions.
        deny (`str`, *optional*):
            File of regular expressions, one on each line, of what else is to be looked for.
        tiny_model (`bool`, *optional*, defaults to `False`):
            Train a tiny Llama with random weights and the bundled tokenizer, to try things out without a download.
        smoke (`bool`, *optional*, defaults to `False`):
            Try a configuration on CPU: two steps on the bundled sample with the tiny model, in float32, whatever it
            says of model, sessions, precision and quantization. Nothing is pushed.
    """

    sessions: list[str] | None = field(
        default=None,
        metadata={
            "help": "Session files, or folders that are searched at any depth for *.jsonl; 'sample' stands for the "
            "bundled sessions. Default: pi's own folder."
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "Text file with the system prompt of turns for which none is recorded (pi before 0.86)."},
    )
    tools: str | None = field(
        default=None, metadata={"help": "JSON file with the list of their tools' function schemas."}
    )
    html_exports: list[str] | None = field(
        default=None,
        metadata={"help": "HTML files that pi exported from running sessions (/export), for their prompt and tools."},
    )
    models: list[str] | None = field(
        default=None,
        metadata={"help": "Only turns of these models are targets: patterns of model or provider/model."},
    )
    providers: list[str] | None = field(
        default=None, metadata={"help": "Only turns of these providers are targets: patterns."}
    )
    since: str | None = field(
        default=None, metadata={"help": "Only turns from this time on are targets, such as 2026-01-31 (UTC)."}
    )
    until: str | None = field(default=None, metadata={"help": "Only turns before this time are targets."})
    cwd: list[str] | None = field(
        default=None, metadata={"help": "Only sessions in these working directories, or below them, have targets."}
    )
    names: list[str] | None = field(
        default=None, metadata={"help": "Only sessions with such names have targets: patterns."}
    )
    labels: list[str] | None = field(
        default=None, metadata={"help": "Only branches through an entry with such a label have targets: patterns."}
    )
    rows: str | None = field(
        default=None,
        metadata={
            "help": "Packed rows to train on instead of sessions: a folder of dagpack pack, or a data set on the Hub."
        },
    )
    redact: bool = field(
        default=False,
        metadata={
            "help": "Replace secrets and personal data by placeholders before anything is trained. They are counted "
            "in any case. With --push_to_hub sessions are always redacted."
        },
    )
    deny: str | None = field(
        default=None,
        metadata={"help": "File of regular expressions, one on each line, of what else is to be looked for."},
    )
    tiny_model: bool = field(
        default=False,
        metadata={
            "help": "Train a tiny Llama with random weights and the bundled tokenizer, to try things out without a "
            "download, instead of --model_name_or_path."
        },
    )
    smoke: bool = field(
        default=False,
        metadata={
            "help": "Try a configuration on CPU: two steps on the bundled sample with the tiny model, in float32. "
            "Nothing is pushed."
        },
    )


SMOKE = (
    *("--sessions", "sample", "--tiny_model", "true", "--max_length", "7168", "--max_steps", "2"),
    *("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false", "--dtype", "float32"),
    *("--load_in_4bit", "false", "--load_in_8bit", "false", "--push_to_hub", "false", "--report_to", "none"),
    *("--logging_steps", "1", "--save_strategy", "no", "--gradient_accumulation_steps", "1"),
)
"""What `--smoke` says after everything else."""

_READING = ("html_exports", "models", "providers", "since", "until", "cwd", "names", "labels")


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the lines of description and examples."""


def make_parser(prog: str | None = None, examples: str = "") -> TrlParser:
    """Return the parser; windows are long and nothing is cut by default, since turns of agents are long.

    Args:
        prog: Name of the program in the help.
        examples: Shown at the end of the help.
    """
    parser = TrlParser(
        (SessionArguments, DagSFTConfig, ModelConfig),  # type: ignore[arg-type]
        prog=prog,
        usage="%(prog)s [--config FILE] [OPTION ...]",
        description=DESCRIPTION,
        epilog=f"{EPILOG}\n{examples}",
        formatter_class=_HelpFormatter,
    )
    parser.set_defaults(max_length=32768, overflow="error")
    return parser


def run(argv: Sequence[str] | None = None, prog: str | None = None, examples: str = "") -> None:
    """Parse the command line and train.

    Args:
        argv: Arguments, `sys.argv[1:]` by default.
        prog: Name of the program in the help.
        examples: Shown at the end of the help.
    """
    session_args, training_args, model_args = parse(argv, prog, examples)
    train(session_args, training_args, model_args)


def parse(
    argv: Sequence[str] | None = None, prog: str | None = None, examples: str = ""
) -> tuple[SessionArguments, DagSFTConfig, ModelConfig]:
    """Parse the command line; arguments as of `run`.

    Raises:
        ValueError: `smoke` is in a configuration file.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    is_smoke = "--smoke" in given
    session_args, training_args, model_args = make_parser(prog, examples).parse_args_and_config(
        [*given, *(SMOKE if is_smoke else ())]
    )
    if session_args.smoke and not is_smoke:
        raise ValueError("smoke is an option of the command line only: leave it out of the file and add --smoke.")
    if is_smoke:
        model_args.model_name_or_path = None
    return session_args, training_args, model_args


def train(session_args: SessionArguments, training_args: DagSFTConfig, model_args: ModelConfig) -> DagSFTTrainer:
    """Load sessions, train on them, and save the model in `training_args.output_dir`.

    Args:
        session_args: Which sessions.
        training_args: Training and packing.
        model_args: Model and adapter.

    Returns:
        The trainer, after training.

    Raises:
        ValueError: No model, or no turn to train.
    """
    if session_args.tiny_model == bool(model_args.model_name_or_path):
        raise ValueError("Give either --model_name_or_path NAME_OR_FOLDER, or --tiny_model true to try things out.")
    dataset, report, private = _training_data(session_args, training_args)
    set_seed(training_args.seed)
    tokenizer: PreTrainedTokenizerBase
    model: str | LlamaForCausalLM
    if session_args.tiny_model:
        tokenizer = sample_tokenizer()
        model = tiny_llama(tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
        model = cast(str, model_args.model_name_or_path)
        training_args.model_init_kwargs = _model_init_kwargs(training_args, model_args)
    trainer = DagSFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    trainer.load_report, trainer.redaction_report = report, private
    reports = [report, private, trainer.render_reports.get("train"), trainer.pack_reports.get("train")]
    trainer.accelerator.print("\n\n".join(str(each) for each in reports if each is not None) + "\n")

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.create_model_card(model_name=os.path.basename(os.path.abspath(cast(str, training_args.output_dir))))
    trainer.accelerator.print(f"Model saved in {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub()
    trainer.end()
    return trainer


def _training_data(
    session_args: SessionArguments, training_args: DagSFTConfig
) -> tuple[Dataset, LoadReport | None, RedactionReport | None]:
    """Packed rows, or conversations, what was read of them, and what secrets they hold."""
    if session_args.rows is not None:
        ignored = [name for name in ("sessions", "system_prompt", "tools", *_READING) if getattr(session_args, name)]
        if ignored:
            raise ValueError(f"--rows are packed already, so they go without --{' and --'.join(ignored)}.")
        if training_args.push_to_hub:
            _check_redacted(session_args.rows)
        return load_dataset(session_args.rows, split="train"), None, None
    reading = {name: getattr(session_args, name) for name in _READING}
    dataset, report = load_sessions(
        session_paths(session_args.sessions),
        num_proc=training_args.dataset_num_proc,
        return_report=True,
        **reading,
        **read_prompt(session_args.system_prompt, session_args.tools),
    )
    if not len(dataset):
        raise ValueError(f"There is no turn to train in these sessions: {report}")
    redact = session_args.redact or bool(training_args.push_to_hub)
    if not redact and training_args.process_index:
        return dataset, report, None
    with training_args.main_process_first(desc="redaction") if redact else nullcontext():
        dataset, private = redact_or_scan(
            dataset,
            redact,
            session_args.deny,
            training_args.dataset_num_proc,
            push=bool(training_args.push_to_hub),
        )
    return dataset, report, private


def _check_redacted(rows: str) -> None:
    """Refuse to push a model that is trained on rows in a folder that do not say that they are redacted."""
    if os.path.isdir(rows) and not (saved_report(rows).get("redaction") or {}).get("redacted"):
        raise ValueError(
            f"--push_to_hub: the rows in {rows} are not redacted, and a model may repeat what it was trained on. Pack "
            "them again with --redact, or train without --push_to_hub."
        )


def tiny_llama(tokenizer: PreTrainedTokenizerBase, seed: int | None = None) -> LlamaForCausalLM:
    """Return a Llama of 0.34 M parameters with random weights, for the vocabulary of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        seed: Seed of the weights; `None` draws them from torch's own state.
    """
    if seed is not None:
        set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def _model_init_kwargs(training_args: DagSFTConfig, model_args: ModelConfig) -> dict[str, Any]:
    options = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    return options | cast(dict[str, Any], training_args.model_init_kwargs or {})
