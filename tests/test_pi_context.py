"""What the model saw at each turn, against lists written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagpack_hf.pi import Turn, iter_turns
from dagpack_hf.pi.call_ids import chat_call_id
from tests.pi_sessions import SessionBuilder, call, image, schema, text, thinking, tool

SUMMARY = "The conversation history before this point was compacted into the following summary:\n\n<summary>\n"
BRANCH = "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n"


@pytest.fixture
def session() -> SessionBuilder:
    return SessionBuilder()


@pytest.fixture
def turns(tmp_path: Path, session: SessionBuilder) -> Any:
    """Write the session and return its turns by entry id."""

    def read(**options: Any) -> dict[str, Turn]:
        return {turn.entry: turn for turn in iter_turns(session.write(tmp_path / "s.jsonl"), **options)}

    return read


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def calls(*given: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in given
    ]


def result(call_id: str, content: str, name: str = "read") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def test_a_turn_with_thinking_text_and_calls(session: SessionBuilder, turns: Any) -> None:
    session.user("Look")
    first = session.assistant(
        thinking("Hm."), thinking("Ok."), "I ", "look.", call("c1", "read", b=1, a={"x": [None]})
    )
    session.result("c1", "line 1", "line 2")
    second = session.assistant("Done.")
    read = turns()
    reply = assistant(
        "I look.", reasoning_content="Hm.\nOk.", tool_calls=calls(("c1", "read", {"b": 1, "a": {"x": [None]}}))
    )
    assert read[first].messages == [user("Look")]
    assert read[first].reply == reply
    assert list(read[first].reply["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert read[first].stop_reason == "toolUse"
    assert read[second].messages == [user("Look"), reply, result("c1", "line 1\nline 2")]
    assert read[second].reply == assistant("Done.")
    assert read[second].tools is None


def test_branches_see_their_own_path(session: SessionBuilder, turns: Any) -> None:
    root = session.user("Explore")
    found = session.assistant("Found.")
    session.user("A")
    left = session.assistant("a")
    session.user("B", parent=found)
    session.entry("label", targetId=root, label="x")
    session.entry("some_future_type", data=1)
    right = session.assistant("b")
    other = session.assistant("again", parent=root)
    read = turns()
    assert read[left].messages == [user("Explore"), assistant("Found."), user("A")]
    assert read[right].messages == [user("Explore"), assistant("Found."), user("B")]
    assert read[other].messages == [user("Explore")]
    tree = read[left].tree
    assert tree is read[right].tree
    assert tree.path(read[left].context)[:2] == tree.path(read[right].context)[:2]
    assert tree.parents[read[left].context] == tree.parents[read[right].context] == read[found].target


def test_an_orphan_starts_a_path(session: SessionBuilder, turns: Any) -> None:
    session.user("lost")
    session.user("tail", parent="gone")
    turn = session.assistant("ok")
    assert turns()[turn].messages == [user("tail")]


def test_a_fork_that_lost_its_labels_is_whole_where_it_was_copied(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    first = session.assistant("one")
    session.user("2", parent="a label that is not here")
    copied = session.assistant("two")
    session.entry("label", targetId=first, label="x")
    session.lines[0]["timestamp"] = "2026-01-01T00:00:06.000Z"
    session.user("3")
    own = session.assistant("three")
    read = turns()
    assert read[copied].messages == [user("1"), assistant("one"), user("2")]
    assert read[own].messages == [user("2"), assistant("two"), user("3")]


def test_a_branched_file_with_a_lost_parent_is_no_such_fork(session: SessionBuilder, turns: Any) -> None:
    root = session.user("1")
    session.assistant("one")
    session.user("2", parent="gone")
    lost = session.assistant("two")
    session.assistant("other", parent=root)
    session.lines[0]["timestamp"] = "2026-01-01T00:01:00.000Z"
    assert turns()[lost].messages == [user("2")]


def test_compaction_keeps_what_it_says(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    session.assistant("one")
    kept = session.user("2")
    session.assistant("two")
    session.entry("compaction", summary="S", firstKeptEntryId=kept, tokensBefore=9)
    session.user("3")
    turn = session.assistant("three")
    assert turns()[turn].messages == [user(SUMMARY + "S\n</summary>"), user("2"), assistant("two"), user("3")]


def test_a_second_compaction_replaces_the_first_even_in_its_kept_range(session: SessionBuilder, turns: Any) -> None:
    kept = session.user("1")
    session.assistant("one")
    session.entry("compaction", summary="S1", firstKeptEntryId=kept)
    session.user("2")
    between = session.assistant("two")
    session.entry("compaction", summary="S2", firstKeptEntryId=kept)
    session.user("3")
    turn = session.assistant("three")
    read = turns()
    assert read[between].messages == [user(SUMMARY + "S1\n</summary>"), user("1"), assistant("one"), user("2")]
    assert read[turn].messages == [
        user(SUMMARY + "S2\n</summary>"),
        user("1"),
        assistant("one"),
        user("2"),
        assistant("two"),
        user("3"),
    ]


@pytest.mark.parametrize("kept", ["gone", "e3", None])
def test_compaction_that_keeps_nothing(session: SessionBuilder, turns: Any, kept: str | None) -> None:
    session.user("1")
    session.assistant("one")
    session.entry("compaction", summary="S", firstKeptEntryId=kept)
    turn = session.assistant("go on")
    assert turns()[turn].messages == [user(SUMMARY + "S\n</summary>")]


def test_summaries_custom_messages_and_shell_commands(session: SessionBuilder, turns: Any) -> None:
    session.entry("branch_summary", fromId="root", summary="B", parent=None)
    session.entry("branch_summary", fromId="root", summary="")
    session.entry("custom_message", customType="x", content="note", display=True)
    session.entry("custom_message", customType="x", content=[text("p"), text("q")], display=True)
    session.entry("custom", customType="x", data={"not": "sent"})
    shell = {"role": "bashExecution", "command": "ls", "output": "a\nb", "exitCode": 0, "cancelled": False}
    session.entry("message", message=shell)
    session.entry("message", message={**shell, "output": "", "exitCode": 2})
    session.entry(
        "message", message={**shell, "exitCode": None, "cancelled": True, "truncated": True, "fullOutputPath": "/t"}
    )
    session.entry("message", message={**shell, "excludeFromContext": True})
    turn = session.assistant("ok")
    assert turns()[turn].messages == [
        user(BRANCH + "B</summary>"),
        user("note"),
        user("p\nq"),
        user("Ran `ls`\n```\na\nb\n```"),
        user("Ran `ls`\n(no output)\n\nCommand exited with code 2"),
        user("Ran `ls`\n```\na\nb\n```\n\n(command cancelled)\n\n[Output truncated. Full output: /t]"),
    ]
    assert turns(images="keep")[turn].messages[2] == user([text("p"), text("q")])


def test_context_edits_count_below_them_only(session: SessionBuilder, turns: Any) -> None:
    asked = session.user("secret")
    session.assistant(call("c1", "read"))
    output = session.result("c1", "long output")
    before = session.assistant("read it")
    session.entry("context_edit", targetId=output, replacement={"content": "short"})
    session.entry("context_edit", targetId=output, replacement={"content": [text("shorter")]})
    session.entry("context_edit", targetId=asked, replacement={"content": "public"})
    dropped = session.user("never mind")
    session.entry("context_edit", targetId=dropped, replacement=None)
    after = session.assistant("ok")
    read = turns()
    asks = assistant(tool_calls=calls(("c1", "read", {})))
    assert read[before].messages == [user("secret"), asks, result("c1", "long output")]
    assert read[after].messages == [user("public"), asks, result("c1", "shorter"), assistant("read it")]


def test_an_edit_may_stand_above_what_it_edits(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    session.entry("context_edit", targetId="e3", replacement={"content": "edited"})
    session.user("2")
    turn = session.assistant("ok")
    assert turns()[turn].messages == [user("1"), user("edited")]


def test_system_messages_fold_into_the_first(session: SessionBuilder, turns: Any) -> None:
    session.system("Base.", sections={"rules": "<rules>", "cwd": "<cwd>"}, toolsAdded=[tool("read"), tool("bash")])
    session.user("1")
    first = session.assistant("one")
    session.system(
        "More.",
        sections={"rules": None, "cwd": "<new>", "skills": "<skills>"},
        toolsRemoved=[{"name": "read"}],
        toolsAdded=[tool("edit"), tool("bash", "2")],
    )
    second = session.assistant("two")
    read = turns()
    assert read[first].messages == [{"role": "system", "content": "Base.\n\n<rules>\n\n<cwd>"}, user("1")]
    assert read[first].tools == [schema("read"), schema("bash")]
    assert read[second].messages == [
        {"role": "system", "content": "Base.\n\nMore.\n\n<new>\n\n<skills>"},
        user("1"),
        assistant("one"),
    ]
    assert read[second].tools == [schema("bash", "2"), schema("edit")]


def test_system_messages_in_place_wait_for_open_calls(session: SessionBuilder, turns: Any) -> None:
    session.system("Base.", sections={"rules": "<rules>"})
    session.user("1")
    session.assistant(call("c1", "read"))
    session.system(sections={"rules": None, "cwd": "<cwd>"}, toolsAdded=[tool("edit")])
    session.result("c1", "out")
    turn = session.assistant("two")
    read = turns(system_update_models=["local/tiny"])
    assert read[turn].messages == [
        {"role": "system", "content": "Base.\n\n<rules>"},
        user("1"),
        assistant(tool_calls=calls(("c1", "read", {}))),
        result("c1", "out"),
        {
            "role": "system",
            "content": 'Removed system prompt section "rules".\n\nUpdated system prompt section "cwd":\n\n<cwd>',
        },
    ]
    assert read[turn].tools == [schema("edit")]


def test_compaction_carries_the_system_prompt(session: SessionBuilder, turns: Any) -> None:
    kept = session.system("Old.")
    session.user("1")
    session.assistant("one")
    carried = {"role": "system", "content": "New.", "toolsAdded": [tool("read")]}
    session.entry("compaction", summary="S", firstKeptEntryId=kept, systemMessage=carried)
    turn = session.assistant("two")
    read = turns()
    assert read[turn].messages == [
        {"role": "system", "content": "New."},
        user(SUMMARY + "S\n</summary>"),
        user("1"),
        assistant("one"),
    ]
    assert read[turn].tools == [schema("read")]


def test_prompt_and_tools_can_be_supplied_where_none_is_recorded(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    old = session.assistant("one")
    session.system("Recorded.", toolsAdded=[tool("edit")])
    new = session.assistant("two")
    read = turns(system_prompt=lambda file: f"Prompt of {file.session_id}.", tools=[schema("read")])
    assert read[old].messages == [{"role": "system", "content": "Prompt of s1."}, user("1")]
    assert read[old].tools == [schema("read")]
    assert read[new].messages[0] == {"role": "system", "content": "Recorded."}
    assert read[new].tools == [schema("edit")]


def test_failed_turns_are_seen_by_no_one_and_not_trained(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    aborted = session.assistant("half", call("c1", "read"), stop="aborted")
    failed = session.assistant(stop="error")
    cut = session.assistant("long", stop="length")
    good = session.assistant("good")
    read = turns()
    assert read[aborted].messages == read[failed].messages == read[cut].messages == [user("1")]
    assert read[good].messages == [user("1"), assistant("long")]
    assert [turn.trained for turn in read.values()] == [False, False, False, True]
    assert read[cut].untrained == "stop reason length"
    assert [turn.trained for turn in turns(target_stop_reasons=("stop", "length")).values()] == [
        False,
        False,
        True,
        True,
    ]
    with pytest.raises(ValueError, match="failed turn"):
        turns(target_stop_reasons=["error"])


def test_unanswered_calls_are_answered(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    asking = session.assistant(call("c1", "read"), call("c2", "bash"), call("c3", "read"))
    session.result("c2", "two", name="bash")
    at_end = session.assistant("retry")
    session.user("go on", parent=asking)
    before_user = session.assistant("ok")
    asks = assistant(tool_calls=calls(("c1", "read", {}), ("c2", "bash", {}), ("c3", "read", {})))
    none = "No result provided"
    read = turns()
    assert read[at_end].messages == [
        user("1"),
        asks,
        result("c2", "two", "bash"),
        result("c1", none),
        result("c3", none),
    ]
    assert read[before_user].messages == [
        user("1"),
        asks,
        result("c1", none),
        result("c2", none, "bash"),
        result("c3", none),
        user("go on"),
    ]


def test_an_earlier_result_does_not_answer_a_call_of_the_same_id(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    session.result("c1", "early")
    session.assistant(call("c1", "read"))
    turn = session.assistant("ok")
    assert turns()[turn].messages == [
        user("1"),
        result("c1", "early"),
        assistant(tool_calls=calls(("c1", "read", {}))),
        result("c1", "No result provided"),
    ]


@pytest.mark.parametrize("arguments", [None, [1, 2], "text", 1e21])
def test_arguments_that_are_no_object_stay_what_they_are(session: SessionBuilder, turns: Any, arguments: Any) -> None:
    session.assistant({**call("c1", "read"), "arguments": arguments})
    turn = session.assistant("ok")
    (asks, _) = turns()[turn].messages
    assert asks["tool_calls"][0]["function"]["arguments"] == arguments


def test_empty_replies_vanish_and_so_do_empty_prompts(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    empty = session.assistant(" \n")
    session.message("user", [text("")])
    session.message("user", None)
    session.message("user", "")
    session.assistant(call("c1", "bash"))
    session.result("c1", name="bash")
    session.result("c9", "orphan", name="")
    turn = session.assistant("ok")
    read = turns()
    assert read[empty].reply == assistant("")
    assert read[turn].messages == [
        user("1"),
        user(""),
        assistant(tool_calls=calls(("c1", "bash", {}))),
        result("c1", "(no tool output)", "bash"),
        {"role": "tool", "tool_call_id": "c9", "content": "orphan"},
    ]


def test_thinking_goes_back_to_its_own_model_only(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    session.assistant(thinking("mine"), "a")
    session.assistant(thinking("unsigned", None), "b")
    session.assistant(thinking("theirs"), thinking(" "), "c", model="big")
    own = session.assistant("d")
    other = session.assistant(thinking("new", None), "e", model="big")
    read = turns()
    assert read[own].messages == [user("1"), assistant("a", reasoning_content="mine"), assistant("b"), assistant("c")]
    assert read[other].messages == [
        user("1"),
        assistant("a"),
        assistant("b"),
        assistant("c", reasoning_content="theirs"),
        assistant("d"),
    ]
    assert read[other].reply == assistant("e", reasoning_content="new")


def test_models_share_what_they_see_alike(session: SessionBuilder, turns: Any) -> None:
    session.system("Base.")
    asked = session.user([text("look"), text("here")])
    plain = session.assistant("a")
    session.result("c0", "out")
    thought = session.assistant(thinking("mine"), "b")
    session.user("more")
    own = session.assistant("c")
    other = session.assistant("d", parent=session.lines[-2]["id"], model="big")
    read = turns()
    tree = read[own].tree
    mine, theirs = (tree.path(read[entry].context) for entry in (own, other))
    assert [tree.entries[text] for text in mine] == ["e1", asked, plain, "e4", thought, "e6"]
    assert [left == right for left, right in zip(mine[1:], theirs[1:], strict=True)] == [True, True, True, False, True]
    assert tree.path(read[thought].target)[1:] == mine[1:5]  # a reply is the message that later requests hold


def test_old_sessions_send_other_models_thinking_as_text(session: SessionBuilder, turns: Any) -> None:
    session.user("1")
    session.assistant(thinking("theirs."), "c", model="big")
    session.assistant(call("c1", "bash"))
    session.result("c1", name="bash")
    turn = session.assistant("d")
    for line in session.lines[1:]:
        line["message"].pop("durationMs", None)
    assert turns()[turn].messages == [
        user("1"),
        assistant("theirs.c"),
        assistant(tool_calls=calls(("c1", "bash", {}))),
        result("c1", "(see attached image)", "bash"),
    ]


def test_images_follow_the_run_of_results(session: SessionBuilder, turns: Any) -> None:
    session.user([text("see"), image("dQ=="), image("dg==")])
    session.assistant(call("c1", "read"), call("c2", "read"))
    session.result("c1", "png", image())
    session.result("c2", image())
    turn = session.assistant("ok")
    asks = assistant(tool_calls=calls(("c1", "read", {}), ("c2", "read", {})))

    def part(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    kept = [
        user([text("see"), part("dQ=="), part("dg==")]),
        asks,
        result("c1", "png"),
        result("c2", "(see attached image)"),
        user([text("Attached image(s) from tool result:"), part("aGk="), part("aGk=")]),
    ]
    placeholder = [
        user("see\n(image omitted: model does not support images)"),
        asks,
        result("c1", "png\n(tool image omitted: model does not support images)"),
        result("c2", "(tool image omitted: model does not support images)"),
    ]
    in_parts = [
        user([text("see"), text("(image omitted: model does not support images)")]),
        *placeholder[1:],
    ]
    assert turns(images="keep")[turn].messages == kept
    assert turns()[turn].messages == placeholder
    assert turns(images="keep", text_only_models=["tiny"])[turn].messages == in_parts


@pytest.mark.parametrize(
    ("note", "details"),
    [
        ("png", {"imageUnsupportedByModel": "tiny"}),
        ("png\n[Current model does not support images. It is left out.]", {}),
    ],
)
def test_a_marked_tool_result_shows_a_model_without_images(
    session: SessionBuilder, turns: Any, note: str, details: dict[str, Any]
) -> None:
    session.user([image()])
    first = session.assistant("?")
    session.assistant(call("c1", "read"))
    session.result("c1", note, image(), details=details)
    other = session.assistant("!", model="big")
    read = turns(images="keep")
    assert read[first].messages == [user("(image omitted: model does not support images)")]
    assert read[other].messages[0]["content"][0]["type"] == "image_url"


def test_a_mark_names_the_model_of_its_provider_only(session: SessionBuilder, turns: Any) -> None:
    session.user([image()])
    session.assistant(call("c1", "read"))
    session.result("c1", "png", image(), details={"imageUnsupportedByModel": "tiny"})
    marked = session.assistant("!")
    other = session.assistant("!", provider="remote")
    read = turns(images="keep")
    assert read[marked].messages[0] == user("(image omitted: model does not support images)")
    assert read[other].messages[0]["content"][0]["type"] == "image_url"


def test_lone_surrogates_are_dropped_from_texts(session: SessionBuilder, turns: Any, tmp_path: Path) -> None:
    session.user("a\\ud800b")
    turn = session.assistant(thinking("c\\ud800d"), "ok")
    path = session.write(tmp_path / "s.jsonl")
    path.write_bytes(path.read_bytes().replace(b"\\\\ud800", b"\\ud800"))
    (only,) = iter_turns(path)
    assert only.entry == turn
    assert only.messages == [user("ab")]
    assert only.reply == assistant("ok", reasoning_content="cd")


def test_call_ids_of_other_models_are_shortened(session: SessionBuilder, turns: Any) -> None:
    session.assistant(call("call_1|fc_2", "read"), model="gpt", api="openai-responses")
    session.result("call_1|fc_2", "out")
    turn = session.assistant("ok")
    assert turns()[turn].messages == [
        assistant(tool_calls=calls(("call_1_fc_2", "read", {}))),
        result("call_1_fc_2", "out"),
    ]


def test_a_result_keeps_its_id_where_nothing_is_left_of_it(session: SessionBuilder, turns: Any) -> None:
    session.assistant(call("|", "read"), model="gpt", api="openai-responses")
    session.result("|", "out")
    turn = session.assistant("ok")
    assert turns()[turn].messages == [
        assistant(tool_calls=calls(("", "read", {}))),
        result("|", "out"),
        result("", "No result provided"),
    ]


@pytest.mark.parametrize(
    ("call_id", "provider", "legacy", "expected"),
    [
        ("x" * 50, "local", False, "x" * 50),
        ("x" * 50, "openai", False, "x" * 40),
        ("call.1|", "local", False, "call_1"),
        ("call.1|fc", "local", True, "call_1"),
        ("call_abc|" + "fc+/=" * 20, "local", False, "call_abc_1ruiacm1"),
    ],
)
def test_chat_call_ids(call_id: str, provider: str, legacy: bool, expected: str) -> None:
    assert chat_call_id(call_id, provider, legacy=legacy) == expected


def test_malformed_content_is_survived(session: SessionBuilder, turns: Any) -> None:
    session.message("user", 7)
    session.message("user", [None, 3, {"type": "text"}, {"type": "text", "text": 5}, text("x"), {"type": "video"}])
    session.message("toolResult", {"a": 1})
    session.message("assistant", "plain string", stopReason="stop")
    session.entry("message", message={"role": "assistant"})
    session.message("system", 7, sections=[1], toolsAdded=[{"no": "name"}, 3], toolsRemoved="x")
    session.entry("context_edit", targetId=[1], replacement=3)
    session.entry("compaction")
    session.entry("custom_message")
    turn = session.assistant("ok")
    read = turns()
    assert [entry.messages for entry in read.values()][-1] == [user(SUMMARY + "\n</summary>")]
    assert read[turn].trained
