"""The recipe, as a script and as `dagpack train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dagpack_hf.cli import main
from dagpack_hf.recipe import SessionArguments, make_parser, parse, run
from dagpack_hf.sample import sample_sessions

ROOT = Path(__file__).parents[1]
SHORT = sorted(map(str, sample_sessions().glob("*.jsonl")))[9]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def script(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "recipes" / "sft_pi.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def test_help():
    done = script("--help")
    assert done.returncode == 0
    for text in ("--sessions", "--loss_weighting", "--model_name_or_path", "--use_peft", "--config FILE"):
        assert text in done.stdout
    assert "accelerate launch --cpu recipes/sft_pi.py --config recipes/sft_pi_sample.yaml" in done.stdout


def test_the_sample_config_runs(tmp_path):
    out = tmp_path / "out"
    done = script(
        *("--config", str(ROOT / "recipes" / "sft_pi_sample.yaml"), "--output_dir", str(out), "--max_steps", "2"),
        *("--sessions", SHORT, "--max_length", "4096"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 session files" in done.stdout and "reuse ratio" in done.stdout and f"Model saved in {out}" in done.stdout
    assert done.stdout.count("'loss':") == 2
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(os.listdir(out))


def test_every_option_of_the_sample_config_is_known():
    config = yaml.safe_load((ROOT / "recipes" / "sft_pi_sample.yaml").read_text())
    path = str(ROOT / "recipes" / "sft_pi_sample.yaml")
    session_args, training_args, _ = make_parser().parse_args_and_config(["--config", path])
    assert session_args == SessionArguments(sessions=["sample"], tiny_model=True)
    assert (training_args.max_length, training_args.use_cpu, training_args.bf16) == (7168, True, False)
    assert training_args.learning_rate == config["learning_rate"] and training_args.report_to == []


CONFIGS = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml") if path.name not in ("sft_pi_sample.yaml",))


def test_there_is_a_config_for_each_way_of_training():
    assert CONFIGS == ["ddp.yaml", "fsdp2.yaml", "lora.yaml", "one_gpu.yaml", "qlora.yaml", "zero3.yaml"]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_starts_on_cpu(tmp_path, capfd, name):
    path = ROOT / "recipes" / name
    head = path.read_text().split("\nmodel_name_or_path")[0]
    assert "recipes/sft_pi.py --config recipes/" + name in head and "GPU" in head and "CPU with --smoke" in head
    out = tmp_path / "out"
    run(["--config", str(path), "--output_dir", str(out), "--push_to_hub", "true", "--smoke"])
    printed = capfd.readouterr().out
    assert printed.count("'loss':") == 2 and f"Model saved in {out}" in printed
    weights = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    assert (out / weights).is_file()
    card = (out / "README.md").read_text()
    for said in (
        "| logical tokens | 299,108 |",
        "| loss weighting | `once`: each distinct target counts once |",
        "Pi sessions: 13 files with 139 turns, of which 125 are targets; left out: 12 x",
        "No secrets or personal data were found",
    ):
        assert said in card
    assert str(sample_sessions()) not in card


def test_options_of_a_config_are_all_known_and_kept():
    """What `--smoke` does not say is as the file says."""
    for name in CONFIGS:
        path = ROOT / "recipes" / name
        said = yaml.safe_load(path.read_text())
        session_args, training_args, model_args = parse(["--config", str(path), "--smoke"])
        assert (session_args.smoke, training_args.max_steps, model_args.model_name_or_path) == (True, 2, None)
        assert (training_args.learning_rate, training_args.output_dir) == (said["learning_rate"], said["output_dir"])
        assert model_args.use_peft == said.get("use_peft", False) and not model_args.load_in_4bit
        assert training_args.gradient_checkpointing and training_args.warmup_steps == said["warmup_steps"]


def test_smoke_is_an_option_of_the_command_line(tmp_path):
    config = tmp_path / "smoke.yaml"
    config.write_text("smoke: true\noutput_dir: out\nbf16: false\n")
    with pytest.raises(ValueError, match="smoke is an option of the command line only"):
        parse(["--config", str(config)])


def test_turns_are_not_cut_by_default():
    _, training_args, _ = make_parser().parse_args_and_config(["--output_dir", "x", "--bf16", "false"])
    assert (training_args.max_length, training_args.overflow) == (32768, "error")


@pytest.mark.parametrize("weighting", ["once", "paths"])
def test_train_command(capfd, tmp_path, weighting):
    argv = ["--sessions", SHORT, "--tiny_model", "true", "--max_length", "4096", "--loss_weighting", weighting]
    argv += ["--use_cpu", "--bf16", "false", "--report_to", "none", "--max_steps", "1", "--use_peft", "--lora_r", "2"]
    argv += ["--output_dir", str(tmp_path / "out"), "--save_strategy", "no"]
    assert main(["train", *argv]) == 0
    out = capfd.readouterr().out
    assert repr(weighting) in out and (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_packed_rows_are_trained_on(capfd, tmp_path):
    rows = str(tmp_path / "rows")
    assert main(["pack", SHORT, "--tokenizer", "sample", "--max-length", "4096", "--out", rows]) == 0
    argv = ["--rows", rows, "--tiny_model", "true", "--max_length", "4096", "--use_cpu", "--bf16", "false"]
    argv += ["--report_to", "none", "--max_steps", "1", "--save_strategy", "no"]
    argv += ["--output_dir", str(tmp_path / "out")]
    assert main(["train", *argv]) == 0
    assert "Model saved in" in capfd.readouterr().out
    assert main(["train", *argv, "--sessions", SHORT]) == 1
    assert "--rows are packed already, so they go without --sessions" in capfd.readouterr().err


def test_all_options_of_the_train_command(capfd):
    assert main(["train", "--help-all"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("usage: dagpack train [--config FILE] [OPTION ...]") and "--packing_scope" in out


def test_train_command_says_what_is_wrong(capfd, tmp_path):
    (tmp_path / "s.jsonl").write_text('{"type":"session","version":3,"id":"s","timestamp":"","cwd":"/"}\n')
    argv = ["train", "--tiny_model", "true", "--output_dir", str(tmp_path / "out"), "--bf16", "false", "--use_cpu"]
    assert main([*argv, "--sessions", str(tmp_path / "s.jsonl")]) == 1
    assert "dagpack train: There is no turn to train" in capfd.readouterr().err
    assert main([*argv, "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml: No such file" in capfd.readouterr().err
    assert main([*argv, "--no_such_option", "1"]) != 0
    assert "no_such_option" in capfd.readouterr().err
