"""Recorded sessions and a tokenizer that come with the package, so that everything can be tried without a download.

`sessions/` holds thirteen session files written by pi 1.6.0 (format version 3) at work on a toy repository; what the
model says in them is scripted, the tool results are real. They share one system prompt and tool set:

* one exploration with four tasks branching from it, the last of which begins with a branch summary;
* one review with four repairs branching from it, the first of which branches again;
* one exploration that goes on in its own file and in two forks;
* one long session with a compaction in the middle;
* six short independent sessions;
* one session with a failed request that was retried, an aborted answer and a shell command of the user.

`tokenizer/` is a byte-level BPE of 2,048 tokens trained on their text, with a chat template that renders tools,
reasoning, tool calls and results. The 125 trained turns are 0.30 M tokens as one sequence per turn, and 17 k distinct
ones; the longest is about 3,550 tokens, 1,300 of them system prompt and tools. Both folders together take 0.45 MB;
`benchmarks/make_sample/` in the source repository makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["sample_sessions", "sample_tokenizer"]

_HERE = Path(__file__).parent


def sample_sessions() -> Path:
    """Folder of the bundled session files.

    Returns:
        `Path`: folder that holds the `*.jsonl` files. Their names sort in order of recording, a fork after its parent.

    Example:
    ```python
    >>> from dagpack_hf.sample import sample_sessions
    >>> len(list(sample_sessions().glob("*.jsonl")))
    13

    ```
    """
    return _HERE / "sessions"


def sample_tokenizer() -> PreTrainedTokenizerFast:
    """Load the bundled tokenizer with its chat template.

    Encoding has no normaliser, so that `decode(encode(text)) == text` for every text. `<|end|>` ends each message and
    is `eos_token`; the template renders a conversation so that each assistant turn continues the rendered context
    before it, and marks the turn's own tokens, its `<|end|>` included, for `return_assistant_tokens_mask`. Reasoning
    is kept in every turn. Text that contains a control token such as `<|end|>` is encoded as that token.

    Returns:
        `PreTrainedTokenizerFast`: a new instance on every call.

    Example:
    ```python
    >>> from dagpack_hf.sample import sample_tokenizer
    >>> messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    >>> sample_tokenizer().apply_chat_template(messages, tokenize=False)
    '<|user|>Hi<|end|><|assistant|>Hello<|end|>'

    ```
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(_HERE / "tokenizer")
