"""The same ids as `transformers`, without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.tokenizing import template_limits
from millstream_runtime.tokenizing.chat_template import ChatTemplate, ChatTemplateError
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_model

REPOSITORY = Path(__file__).parents[3]
CHATS = [
    [{"role": "user", "content": "What is a pod?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🚀\n  <|im_end|>"}],
    [
        {"role": "user", "content": "  leading and trailing  "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "again"},
    ],
]
# The constructs that published templates use beyond plain loops.
TEMPLATES = {
    "trimmed blocks": "{% for m in messages %}\n    {% if loop.first %}\n{{ bos_token }}\n    {% endif %}\n"
    "{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "absent arguments": "{% if tools is none and documents is none %}{{ 'none' }}{% endif %}{{ unknown_variable }}",
    "the date": "{{ strftime_now('%Y') }}{% if add_generation_prompt %}>{% endif %}",
}


@pytest.fixture(scope="module", params=["tiny", "demo-chat"])
def folder(request: pytest.FixtureRequest, tiny_model: Path) -> Path:
    if request.param == "tiny":
        return tiny_model
    demo = REPOSITORY / "models" / "demo-chat"
    if not (demo / "tokenizer.json").is_file():
        pytest.skip("models/demo-chat is not in this checkout")
    return demo


def test_other_threads_run_while_what_is_long_is_encoded_and_decoded(folder: Path) -> None:
    """The library's own `encode` and `decode` hold the interpreter, and kept the event loop waiting for 0.4 s."""
    tokenizer = Tokenizer.from_folder(folder)
    long, ids = "hello world " * 40_000, 100_000 * tokenizer.encode("hello")
    assert turns_during(lambda: tokenizer.encode(long)) > LEAST_TURNS
    assert turns_during(lambda: tokenizer.encode_chat([{"role": "user", "content": long}])) > LEAST_TURNS
    assert turns_during(lambda: tokenizer.decode(ids)) > LEAST_TURNS


LEAST_TURNS = 4  # so many there are around a call that holds the interpreter from its beginning to its end


def turns_during(work: Callable[[], object]) -> int:
    """How often this thread had the interpreter while another did `work`."""
    other, turns = threading.Thread(target=work), 0
    other.start()
    while other.is_alive():
        time.sleep(0.0005)
        turns += 1
    return turns


def test_what_is_long_has_the_ids_and_the_text_of_its_parts(folder: Path) -> None:
    tokenizer, text = Tokenizer.from_folder(folder), "Grüße 🚀 <|im_end|>\n"
    ids = tokenizer.encode(text * 200)
    assert ids == tokenizer._fast.encode(text * 200).ids
    assert tokenizer.decode(ids) == tokenizer._fast.decode(ids)
    assert tokenizer.encode(text * 200, add_special_tokens=False) == 200 * tokenizer.encode(
        text, add_special_tokens=False
    )


def test_chats_give_the_ids_of_apply_chat_template(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat) == expected


def test_plain_prompts_give_the_ids_of_the_fast_tokenizer(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("Hello, world", " two  spaces ", "Grüße 🚀 漢字", "<|im_start|>user\n", "\n\n\t"):
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tiny_model: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": theirs.bos_token, "eos_token": theirs.eos_token})
    for chat in CHATS:
        expected = theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
        )
        assert ours.render(chat) == expected


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__init__=1) %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{% for i in range(99999999) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_and_the_error_tells_nothing_of_the_inside(attack: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(attack, {}).render(CHATS[0])
    assert str(caught.value) == "The model's chat template cannot render these messages."


@pytest.mark.parametrize(
    "source",
    [
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",  # RecursionError
        "{{ 1 / (messages | length - 1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.text }}",
        "{{ strftime_now(1) }}",
        "{{ messages | sum | list }}",
    ],
)
def test_whatever_a_template_raises_is_an_error_of_the_template(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_template_that_does_not_end_gives_its_thread_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_RENDER_SECONDS", 0.0)
    hours = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="takes too long to render the messages"):
        ChatTemplate(hours, {}).render(CHATS[0])


@pytest.mark.parametrize("repeats", [1, 5000])
def test_a_template_that_makes_half_of_a_surrogate_pair_is_refused(tmp_path: Path, repeats: int) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(f"{{{{ ('%c' % 55296) * {repeats} }}}}")
    with pytest.raises(ChatTemplateError, match="makes no text"):
        Tokenizer.from_folder(folder).encode_chat(CHATS[0])


def test_a_file_beside_the_settings_is_the_template_that_counts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.from_folder(folder).encode_chat(CHATS[0]) == Tokenizer.from_folder(folder).encode("What is a pod?")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json must hold a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not readable JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not readable JSON"),
        ("chat_template.jinja", "{% for %}", "chat template is not valid Jinja"),
    ],
)
def test_a_broken_folder_is_refused_with_the_file_named(
    tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(RuntimeFailure) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}],
        [{"name": ["odd"], "template": "no"}, "odd", {"name": "default", "template": "yes"}],
        {"rag": "no", "default": "yes"},
    ],
)
def test_several_named_templates_mean_the_default_one(tmp_path: Path, templates: object) -> None:
    folder = write_tiny_model(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode_chat(CHATS[0]) == tokenizer.encode("yes")


def test_the_server_never_imports_transformers() -> None:
    program = (
        "import sys, millstream_runtime.server.model_server, millstream_runtime.tokenizing.tokenizer;"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
