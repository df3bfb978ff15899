"""Train a world model: a small transformer that predicts the next state of a game from its history and an action.

    python recipes/world_model.py           # a minute or two on two cores
    python recipes/world_model.py --quick   # a try, without the accuracy

Random episodes of the small game (`dagpack_hf.games`) are merged to a transition graph, and walks over it are packed;
then the same episodes are trained as they are, one sequence each, by TRL's `SFTTrainer`. Both runs begin with the same
weights, and have the same learning rate and about as many positions in a step. A single walk trains each transition in
one context only, which such a small model learns by heart; so there are several walks, each in another order.

Reported is the next-state accuracy on held-out episodes, none of which is trained: the share of their transitions for
which every token of the next state is the most likely one, given the true episode up to the action and the true
tokens of that state before it (teacher forcing). Times are those of training; evaluation does not count.

The last line is all figures as JSON. For sessions of your own game replace `episodes_of` and the two encoders:
`load_recordings` and `load_episodes` of `dagpack_hf.graph` read them from files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from dagpack_hf import DagSFTConfig, DagSFTTrainer
from dagpack_hf.attention import ordinary_attention
from dagpack_hf.games import ACTIONS, KeysAndDoors, State, random_episodes
from dagpack_hf.graph import Episode, TransitionGraph
from dagpack_hf.sample import sample_tokenizer

FIELD = 32
"""Token ids for each field of a state; those of actions come first."""
STATE_TOKENS = len(State._fields)
VOCABULARY = FIELD * (1 + STATE_TOKENS)


def encode_action(action: str) -> list[int]:
    """One token."""
    return [ACTIONS.index(action)]


def encode_state(state: State) -> list[int]:
    """One token for each field."""
    return [FIELD * (1 + field) + value for field, value in enumerate(state)]


def encode_episode(episode: Episode) -> list[int]:
    """A state, an action, a state and so on."""
    tokens = encode_state(episode.states[0])
    for action, state in zip(episode.actions, episode.states[1:], strict=True):
        tokens += encode_action(action) + encode_state(state)
    return tokens


def episodes_of(options: argparse.Namespace) -> tuple[list[Episode], list[Episode]]:
    """Episodes to train on, and held-out ones, of which none is among them."""
    game = KeysAndDoors(steps=options.length)
    train = random_episodes(game, options.episodes, options.length, options.seed)
    played = {tuple(each.actions) for each in train}
    held_out = random_episodes(game, options.held_out, options.length, options.seed + 1)
    return train, [each for each in held_out if tuple(each.actions) not in played]


def transitions(episodes: list[Episode]) -> list[tuple[Any, Any, Any]]:
    """All transitions, in order."""
    return [step for each in episodes for step in zip(each.states[:-1], each.actions, each.states[1:], strict=True)]


class NextState:
    """The next-state accuracy on held-out episodes.

    Args:
        held_out: the episodes.
        seen: the transitions that are trained.
    """

    def __init__(self, held_out: list[Episode], seen: set[Any]) -> None:
        sequences = [encode_episode(each) for each in held_out]
        self.input_ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for index, sequence in enumerate(sequences):
            self.input_ids[index, : len(sequence)] = torch.tensor(sequence)
        self.episode = torch.tensor([index for index, each in enumerate(held_out) for _ in each.actions])
        step = torch.tensor([step for each in held_out for step in range(len(each.actions))])
        first = STATE_TOKENS + (STATE_TOKENS + 1) * step + 1
        self.position = first[:, None] + torch.arange(STATE_TOKENS)
        self.is_unseen = torch.tensor([each not in seen for each in transitions(held_out)])

    @torch.no_grad()
    def __call__(self, model: LlamaForCausalLM) -> tuple[float, float]:
        """The accuracy on all transitions, and on those that are trained nowhere."""
        was_training = model.training
        model.eval()
        with ordinary_attention(model, "sdpa"):
            batches = self.input_ids.split(50)
            predicted = torch.cat([model(batch, use_cache=False).logits.argmax(-1) for batch in batches])
        model.train(was_training)
        row = self.episode[:, None]
        right = (predicted[row, self.position - 1] == self.input_ids[row, self.position]).all(dim=1)
        return right.float().mean().item(), right[self.is_unseen].float().mean().item()


class UntilAccurate(TrainerCallback):
    """Evaluates now and then, and stops at an accuracy or when time is up.

    Args:
        accuracy: what is evaluated.
        options: the target, the time, and the steps between evaluations.
    """

    def __init__(self, accuracy: NextState, options: argparse.Namespace) -> None:
        self.accuracy, self.options = accuracy, options
        self.seconds = 0.0
        self.curve: list[tuple[int, float, float, float]] = []
        self._since = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Evaluate, with the clock stopped."""
        self.seconds += time.perf_counter() - self._since
        is_over = self.seconds >= self.options.budget
        if state.global_step % self.options.eval_steps == 0 or is_over:
            found, unseen = self.accuracy(model)
            self.curve.append((state.global_step, round(self.seconds, 2), round(found, 4), round(unseen, 4)))
            control.should_training_stop = is_over or found >= self.options.target
        self._since = time.perf_counter()


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 0.16 M parameters; the same seed gives the same weights."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def train(
    kind: str, dataset: Dataset, accuracy: NextState, options: argparse.Namespace, folder: str
) -> dict[str, Any]:
    """Train one of the two ways, and report."""
    is_packed = kind == "packed"
    config, trainer_class = (DagSFTConfig, DagSFTTrainer) if is_packed else (SFTConfig, SFTTrainer)
    own: dict[str, Any] = {"loss_weighting": "once", "overflow": "error"} if is_packed else {}
    callback = UntilAccurate(accuracy, options)
    trainer = trainer_class(
        model=make_model(options.seed),
        args=config(
            output_dir=folder,
            max_length=options.max_length,
            per_device_train_batch_size=options.windows if is_packed else options.sequences,
            num_train_epochs=10_000,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            weight_decay=0.0,
            gradient_checkpointing=False,
            seed=options.seed,
            use_cpu=True,
            bf16=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **own,
        ),
        train_dataset=dataset,
        processing_class=sample_tokenizer(),
        callbacks=[callback],
    )
    positions = sum(map(len, trainer.train_dataset["input_ids"]))
    print(f"{kind:>8}: {positions} positions in {len(trainer.train_dataset)} rows", flush=True)
    trainer.train()
    steps, seconds, found, unseen = callback.curve[-1]
    reached = next((at for _, at, each, _ in callback.curve if each >= options.target), None)
    return {
        "accuracy": found,
        "accuracy_unseen": unseen,
        "seconds": seconds,
        "seconds_to_target": reached,
        "steps": steps,
        "epochs": round(trainer.state.epoch, 2),
        "rows": len(trainer.train_dataset),
        "positions": positions,
        "curve": callback.curve,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000, help="episodes to train on")
    parser.add_argument("--held_out", type=int, default=100, help="held-out episodes")
    parser.add_argument("--length", type=int, default=24, help="actions of an episode, and of the step counter")
    parser.add_argument("--max_length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--walks", type=int, default=8, help="walks over the graph, in different orders")
    parser.add_argument("--windows", type=int, default=2, help="windows in a step of the packed run")
    parser.add_argument("--sequences", type=int, default=12, help="episodes in a step of the unpacked run")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--target", type=float, default=0.99, help="accuracy at which a run stops")
    parser.add_argument("--budget", type=float, default=290, help="seconds of training after which a run stops")
    parser.add_argument("--eval_steps", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; steps this small gain little from more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a try of some seconds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.episodes, options.held_out, options.budget, options.eval_steps = 40, 10, 2, 5
    return options


def describe(graph: TransitionGraph, episodes: list[Episode], accuracy: NextState) -> dict[str, Any]:
    """What is trained on and evaluated on, printed and as figures."""
    figures = {
        "episodes": len(episodes),
        "steps": graph.num_steps,
        "states": graph.num_states,
        "transitions": graph.num_transitions,
        "prefixes": graph.num_prefixes,
        "held_out_episodes": len(accuracy.input_ids),
        "held_out_transitions": len(accuracy.is_unseen),
        "held_out_unseen": int(accuracy.is_unseen.sum()),
    }
    print(
        f"{figures['episodes']} episodes, {figures['steps']} steps: {figures['states']} states, "
        f"{figures['transitions']} transitions merged by state, {figures['prefixes']} by prefix\n"
        f"{figures['held_out_episodes']} held-out episodes; {figures['held_out_unseen']} of their "
        f"{figures['held_out_transitions']} transitions are in no training episode",
        flush=True,
    )
    return figures


def packed_data(graph: TransitionGraph, options: argparse.Namespace) -> Dataset:
    """Walks over the graph, as token trees."""
    half = options.max_length // 2
    walks = [graph.to_dataset(encode_state, encode_action, max_path=half, seed=seed) for seed in range(options.walks)]
    return concatenate_datasets(walks)


def unpacked_data(episodes: list[Episode]) -> Dataset:
    """Episodes as sequences, in which the next states are trained."""
    sequences = [encode_episode(each) for each in episodes]
    labels = [
        [-100 if at < STATE_TOKENS or token < FIELD else token for at, token in enumerate(each)] for each in sequences
    ]
    return Dataset.from_dict({"input_ids": sequences, "labels": labels})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run both ways and print the figures."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    episodes, held_out = episodes_of(options)
    graph = TransitionGraph.from_episodes(episodes)
    accuracy = NextState(held_out, set(transitions(episodes)))
    figures = describe(graph, episodes, accuracy)
    data = {"packed": packed_data(graph, options), "unpacked": unpacked_data(episodes)}
    with tempfile.TemporaryDirectory() as folder:
        for kind, dataset in data.items():
            run = figures[kind] = train(kind, dataset, accuracy, options, folder)
            reached = run["seconds_to_target"]
            print(
                f"{kind:>8}: next-state accuracy {run['accuracy']:.2%} ({run['accuracy_unseen']:.2%} of the unseen) "
                f"after {run['seconds']:.1f} s, {run['steps']} steps, {run['epochs']} epochs; {options.target:.0%} "
                f"{'not reached' if reached is None else f'after {reached:.1f} s'}",
                flush=True,
            )
    print(json.dumps({**figures, "target": options.target, "threads": options.threads}))
    return figures


if __name__ == "__main__":
    main()
