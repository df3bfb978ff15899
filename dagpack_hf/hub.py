"""Packed rows on the Hub: the folder that `save_rows` writes, pushed in one commit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, DatasetDict
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from dagpack_hf.card import DATA_FOLDER, pointed_folder
from dagpack_hf.pack_report import PackReport
from dagpack_hf.redact.deny import Deny
from dagpack_hf.redact.rows import scan_rows
from dagpack_hf.sample import sample_tokenizer
from dagpack_hf.shards import CARD, MAX_SHARD_SIZE, save_rows, saved_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def push_rows_to_hub(
    rows: Dataset | DatasetDict,
    repo_id: str,
    report: PackReport | Mapping[str, PackReport],
    *,
    private: bool | None = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload packed rows",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    tokenizer: str | None = None,
    details: Mapping[str, Any] | None = None,
    progress: bool = True,
    decoder: PreTrainedTokenizerBase | None = None,
    deny: Deny | None = None,
    allow_unredacted: bool = False,
) -> CommitInfo:
    """Push packed rows to the Hub, with a card that states the report, in one commit.

    Rows hold the texts of their sources as token ids: pushing those of your sessions uploads your sessions. So only
    rows of redacted texts are pushed, after a last scan, and the repository is private unless you ask for another one.

    Args:
        rows: what `pack_dataset` returned.
        repo_id: the data set on the Hub, as `name` or `owner/name`. It is made if it is not there; rows of an earlier
            push and the card are replaced, other files stay.
        report: the report, or one for each split.
        private: `True`: push into a private repository only. `False`: make a public one if there is none. `None`: the
            same by the default of the organization. The last two take a repository that is there as it is.
        token: token of the Hub; by default that of `hf auth login`.
        revision: branch to push to, made if it is not there; by default the main one.
        commit_message: of the commit.
        max_shard_size: as in `save_rows`.
        tokenizer: as in `save_rows`.
        details: as in `save_rows`. They are uploaded too. `{"redaction": report.to_dict()}` says that the texts were
            redacted, with the report of `redact_conversations`.
        progress: show a progress bar.
        decoder: the tokenizer that made the ids, for the last scan; by default `tokenizer` is loaded.
        deny: what else the last scan looks for, as in `redact_conversations`.
        allow_unredacted: push rows whose texts were not redacted, without a scan.

    Returns:
        The commit.

    Raises:
        ValueError: `private` is set and the repository is public; the rows are not redacted, cannot be decoded, or
            something is still found in them; or as in `save_rows`.
    """
    with tempfile.TemporaryDirectory(prefix="dagpack-") as folder:
        save_rows(
            rows,
            folder,
            report,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            details=details,
            progress=progress,
        )
        return push_saved_rows(
            folder,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            decoder=decoder,
            deny=deny,
            allow_unredacted=allow_unredacted,
        )


def push_saved_rows(
    path: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload packed rows",
    decoder: PreTrainedTokenizerBase | None = None,
    deny: Deny | None = None,
    allow_unredacted: bool = False,
) -> CommitInfo:
    """Push a folder that `save_rows` wrote; arguments as in `push_rows_to_hub`.

    Raises:
        FileNotFoundError: the folder holds no saved rows.
        ValueError: `private` is set and the repository is public; the rows are not redacted, cannot be decoded, or
            something is still found in them.
    """
    folder = Path(path)
    data = pointed_folder(folder / CARD)
    if data is None or not (folder / data).is_dir():
        raise FileNotFoundError(f"{path} holds no packed rows; save some with save_rows(rows, path, report)")
    if not allow_unredacted:
        _check_redacted(folder, decoder, deny)
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True).repo_id
    if private and not api.dataset_info(repo_id).private:
        raise ValueError(
            f"The data set {repo_id} is public, and packed rows hold their source texts. Choose another repository, "
            "make this one private, or push with private=False."
        )
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, repo_type="dataset", exist_ok=True)
    new = {f"{data}/{file.name}": file for file in sorted((folder / data).iterdir())} | {CARD: folder / CARD}
    there = api.list_repo_files(repo_id, repo_type="dataset", revision=revision)
    old = [path for path in there if DATA_FOLDER.fullmatch(path.partition("/")[0]) and path not in new]
    # upload_folder may make several commits
    return api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(path, file) for path, file in new.items()),
            *(CommitOperationDelete(path, is_folder=False) for path in old),
        ],
        commit_message=commit_message,
        repo_type="dataset",
        revision=revision,
    )


def _check_redacted(folder: Path, decoder: PreTrainedTokenizerBase | None, deny: Deny | None) -> None:
    """Refuse rows whose texts were not redacted, or in which something is still found.

    Raises:
        ValueError: so it is, or the rows cannot be decoded to see.
    """
    saved = saved_report(folder)
    done = saved.get("redaction") or {}
    if not done.get("redacted") or done.get("remaining"):
        raise ValueError(
            "These rows do not say that their texts were redacted, and pushing them would upload whatever the texts "
            "hold. Redact first: dagpack pack --push-to-hub does, and so does redact_conversations, whose report goes "
            'into details={"redaction": report.to_dict()}. To push the texts as they are, pass allow_unredacted=True.'
        )
    data = folder / str(pointed_folder(folder / CARD))
    report = scan_rows(sorted(data.glob("*.parquet")), decoder or _load_decoder(saved.get("tokenizer")), deny=deny)
    if report.found:
        raise ValueError(f"Nothing is pushed: {report.still_there}.")


def _load_decoder(name: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return sample_tokenizer() if name == "sample" else AutoTokenizer.from_pretrained(name or "")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"The tokenizer of these rows, {name or 'of which they do not give the name'}, cannot be loaded, so they "
            "cannot be read once more before they are pushed. Pass it as decoder=tokenizer."
        ) from error
