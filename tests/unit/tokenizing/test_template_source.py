"""Which file has the chat template, and what a template makes of a chat; `transformers` says what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.openai.requests import ChatCompletionRequest
from millstream_runtime.tokenizing.chat_template import ChatTemplate
from millstream_runtime.tokenizing.folder.template_source import (
    LEGACY_FILE,
    MAX_FILE_BYTES,
    NAMED_DEFAULT_FILE,
    PROCESSOR_FILES,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    choose_template,
)
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is a cake baked?"},
    {"role": "assistant", "content": "Hot."},
    {"role": "user", "content": "  And bread?\n"},
]
OF_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}<answer>"
)
# As of Llama 3.2 Vision: the system prompt is text, whatever form the others have.
OF_BOTH = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
PARTS_ONLY = {
    "a loop": OF_PARTS,
    "a loop over a filter": OF_PARTS.replace("m['content']", "m.content | selectattr('type', 'equalto', 'text')"),
    "a loop over some messages": "{% set rest = messages[0:] %}" + OF_PARTS.replace("in messages", "in rest"),
    "the first part": "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}",
    "a macro": "{% macro show(parts) %}{% for part in parts %}{{ part.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
}
TEXT_TOO = {
    "a text alone": "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "both": OF_BOTH,
    "a field of another kind": "{% for m in messages %}{{ m.content }}{{ m.text }}{% endfor %}",
}


def by_file(*names: str) -> dict[str, str]:
    """Contents of files, each with a template that says the file's name."""
    contents = {}
    for name in names:
        template = f"{name}|{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
        contents[name] = json.dumps({"chat_template": template}) if name.endswith(".json") else template
    return contents


def write(folder: Path, contents: dict[str, str]) -> Path:
    write_tiny_model(folder)
    for name in (SETTINGS_FILE, TEMPLATE_FILE):
        (folder / name).unlink(missing_ok=True)
    for name, text in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    return json.loads(path.read_text()) if path.is_file() else {}


@pytest.mark.parametrize(
    "names",
    [
        *((SETTINGS_FILE,), (TEMPLATE_FILE,), (TEMPLATE_FILE, SETTINGS_FILE), (LEGACY_FILE, SETTINGS_FILE)),
        *((TEMPLATE_FILE, LEGACY_FILE), (NAMED_DEFAULT_FILE, TEMPLATE_FILE), (NAMED_DEFAULT_FILE, SETTINGS_FILE)),
        (TEMPLATE_FILE, "additional_chat_templates/tool_use.jinja"),
    ],
)
def test_the_template_is_that_of_transformers(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", by_file(*names))
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_folder(folder).encode_chat(CHAT) == expected


@pytest.mark.parametrize("named", [[{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}], "a"])
def test_named_templates_have_a_default(named: object, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {SETTINGS_FILE: json.dumps({"chat_template": named})})
    expected = AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert choose_template(folder, settings_of(folder)).source == expected == "a"


def test_chat_template_json_is_read_and_counts_where_there_is_a_processor(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", by_file(LEGACY_FILE))
    assert choose_template(folder, {}).file == LEGACY_FILE
    assert Tokenizer.from_folder(folder).has_chat_template
    write(folder, by_file(LEGACY_FILE, SETTINGS_FILE))
    choice = choose_template(folder, settings_of(folder))
    assert (choice.file, len(choice.notes)) == (SETTINGS_FILE, 1)
    (folder / PROCESSOR_FILES[1]).write_text("{}")
    choice = choose_template(folder, settings_of(folder))
    assert (choice.file, len(choice.notes)) == (LEGACY_FILE, 1)


def test_a_folder_without_a_default_has_no_template_and_says_so(tmp_path: Path) -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "a"}]}
    folder = write(tmp_path / "model", {SETTINGS_FILE: json.dumps(named)})
    choice = choose_template(folder, settings_of(folder))
    assert (choice.source, choice.file) == (None, "")
    assert "tool_use" in choice.notes[0]


@pytest.mark.parametrize("name", [TEMPLATE_FILE, LEGACY_FILE, NAMED_DEFAULT_FILE])
@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"x" * (MAX_FILE_BYTES + 1), None])
def test_a_broken_file_is_refused_by_name(name: str, content: bytes | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(RuntimeFailure, match=Path(name).name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"chat_template": 1}', '{"chat_template": ""}', '{"chat_template": "a", "chat_template": "b"}', "{"],
)
def test_a_chat_template_json_without_a_template_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=LEGACY_FILE):
        Tokenizer.from_folder(write(tmp_path / "model", {LEGACY_FILE: text}))


def with_parts(chat: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]


@pytest.mark.parametrize("name", PARTS_ONLY | TEXT_TOO)
def test_content_has_the_form_that_the_template_takes(name: str, tiny_model: Path) -> None:
    source = (PARTS_ONLY | TEXT_TOO)[name]
    given: list[dict[str, Any]] = with_parts(CHAT) if name in PARTS_ONLY else list(CHAT)
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    expected = theirs.apply_chat_template(given, chat_template=source, tokenize=False, add_generation_prompt=True)
    template = ChatTemplate(source, {})
    assert template.takes_parts is (name in PARTS_ONLY)
    assert template.render(CHAT) == expected
    assert "cake" in expected


def test_parts_of_a_request_stay_parts_for_such_a_template(tiny_model: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = {"model": "m", "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]}
    messages = ChatCompletionRequest.model_validate(request).messages
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    expected = theirs.apply_chat_template(
        [{"role": "user", "content": parts}, *with_parts([{"role": "assistant", "content": "c"}])],
        chat_template=OF_PARTS,
        tokenize=False,
    )
    assert ChatTemplate(OF_PARTS, {}).render([message.for_template(True) for message in messages]) == expected
    assert [message.for_template()["content"] for message in messages] == ["a\nb", "c"]


def test_a_template_that_shows_the_users_words_in_no_form_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {TEMPLATE_FILE: OF_PARTS.replace("== 'text'", "== 'image'")})
    with pytest.raises(RuntimeFailure, match=r"chat_template\.jinja.* leaves out what the user says"):
        Tokenizer.from_folder(folder)


def test_a_template_that_never_ends_is_judged_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream_runtime.tokenizing.chat_template.TRIAL_SECONDS", 0.0)
    endless = OF_PARTS + "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    assert ChatTemplate(endless, {}).takes_parts
