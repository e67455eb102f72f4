"""What published chat templates do with many and long messages stays within the limits, and is as in `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millstream_runtime.tokenizing.chat_template import ChatTemplate

# Written for these tests, in the ways of published templates.
TEMPLATES = {
    "adds every message to one text": (
        "{% set ns = namespace(out=bos_token) %}{% for m in messages %}"
        "{% set ns.out = ns.out + '<' + m.role + '>' + m.content + '\n' %}{% endfor %}{{ ns.out }}"
    ),
    "joins every message to one text": (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out ~ m.role ~ ' ' ~ m.content %}"
        "{% set ns.out = ns.out ~ eos_token %}{% endfor %}{{ ns.out }}"
    ),
    "makes a list of messages": (
        "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] + [] %}{% endfor %}"
        "{% for m in ns.kept %}{{ m.content | trim }}{{ loop.index0 }}{% endfor %}"
    ),
    "cuts the thoughts out of answers": (
        "{% set ns = namespace(last=messages | length - 1) %}{% for m in messages[::-1] %}"
        "{% set index = (messages | length - 1) - loop.index0 %}"
        "{% if m.role == 'user' and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}"
        "{% set ns.last = index %}{% break %}{% endif %}{% endfor %}{% for m in messages %}"
        "{% set content = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content %}"
        "{{ m.role ~ '\n' ~ content }}{{ '|' if loop.index0 > ns.last }}{% endfor %}"
    ),
    "writes messages in macros": (
        "{% macro body(text, last=false) %}{% set text = text | replace('\r', '') %}{{ text | trim }}"
        "{% if last %}!{% endif %}{% endmacro %}{% macro turn(m, last) %}[{{ m.role | title }}] "
        "{{ body(m.content, last=last) }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m, loop.last) }}{{ '%(context)s' | format(context=loop.index) }}{% endfor %}"
    ),
}


def _chat(messages: int, characters: int, start: str) -> list[dict[str, str]]:
    text = "The quick brown fox.\n" * (characters // messages // 21)
    roles = ["system", *["user", "assistant"] * messages][:messages]
    return [{"role": role, "content": f"{index} {start} {text}"} for index, role in enumerate(roles)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_long_chat_is_rendered_as_in_transformers(name: str, tiny_model: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(TEMPLATES[name], tokens)
    for chat in (_chat(200, 500_000, "🚀"), _chat(4096, 500_000, "<think>a</think>"), _chat(300, 3_000_000, "Ä")):
        expected = theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, **tokens
        )
        assert ours.render(chat) == expected
