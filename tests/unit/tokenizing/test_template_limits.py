"""Chat templates that would take the memory or the time of the server are stopped before they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.tokenizing import template_limits
from millstream_runtime.tokenizing.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateTooSlow

pytestmark = pytest.mark.deep

CHAT = [{"role": "user", "content": "hi"}]
TOO_MUCH = "asks for too much: .* are allowed. Shorten the messages, or correct chat_template.jinja"
# Each would make gigabytes.
GROWING = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ (range(100000) | list) * 100000 }}",
    "{{ [0] * 10**8 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x\\ny' | indent(10**9) }}",
    "{{ 'x' | indent(1000000000, first=true) }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ 2**100000 }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' | batch(10**9, 'x') | list }}",
    "{{ 'abc' | slice(10**9) | list }}",
    "{{ 'abc' | slice(1000000000, 1) | list }}",
    "{{ ('a b ' * 200000) | wordwrap(1, wrapstring='x' * 1000000) }}",
    "{{ 'aaaa' | truncate(1, end='x' * 10**9) }}",
    "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
    "{{ ('a' * 10000) | replace('', 'b' * 10000) }}",
    "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "{{ (['a'] * 10000) | join('b' * 10000) }}",
    "{{ range(100000) | join('b' * 10000) }}",
    "{{ ('b' * 10000).join(['a'] * 100000) }}",
    "{{ ('b' * 10000).join('a' * 100000) }}",
    "{{ ('b' * 10000).join(['b' * 1000000] * 100000) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ messages | tojson(separators=('x' * 10**7, 'y' * 10**7)) }}",
    "{{ ([range(100000) | list] * 1000) | sum(start=[]) | length }}",
    "{{ ([[range(100000) | list]] * 1000) | sum('0', []) | length }}",
    "{{ ([[]] * 1000000) | sum(start=range(100000) | list) | length }}",
    "{{ lipsum(n=10**9) }}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}"
    "{% call m() %}{{ 'a' * 9000000 }}{% endcall %}{% endcall %}{% endcall %}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(width=10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ ('\\t' * 10000).expandtabs(100000) }}",
    "{{ 'a'.encode().ljust(10**9) }}",
    "{{ (5).to_bytes(10**9, 'big') }}",
    "{{ (5).from_bytes(('a' * 10000000).encode(), 'big') }}",
    "{{ 'aa'.translate({97: 'x' * 16000000}) }}",
    "{{ {}.fromkeys(range(100000), 1).fromkeys(range(100000)) | string * 100 }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['a' * 10000000] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set b = 'a' * 10000000 %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [b[1:], b[2:], b[3:]] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% set b = 'a' * 10000000 %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [b.upper(), b | lower] %}{% endfor %}",
    "{{ ('a' * 8000000).strip('b' * 8000000 ~ 'a') }}",
    "{{ ('a' * 8000000) | trim('b' * 8000000 ~ 'a') }}",
    "{{ 1 | round(10**9) }}",
    "{{ 1.5 | round(10**9, 'ceil') }}",
    "{{ ('f' * 10000000) | int(base=16) }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "{{ ('a@' * 1000000) | urlize }}",
    "{{ ('a ' * 1000000) | pprint }}",
    "{{ ('é' * 3000000) | urlencode }}",
    "{{ ('é' * 1000000).encode('idna') }}",
    "{{ ('é' * 1000000).encode('ascii', 'namereplace') }}",
    "{{ cycler(*range(100000)).items * 1000 }}",
    "{{ joiner('a' * 10**9)() }}",
    "{{ namespace(**{'a': 'b' * 10**9}) }}",
    "{{ messages[0].content[::1] * 10**9 }}",
    "{{ -(10**9) * -1 * 'a' }}",
    "{{ ('a' * 16000000) ~ ('a' * 16000000) }}",
]
# Lists that hold one list twice, which holds another twice, and so on, a hundred levels down: `ns.x` and `ns.y`.
DOUBLED = (
    "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(99) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
)
NESTED = [
    "{{ ns.x }}",
    "{{ ns.x | pprint }}",
    "{{ ns.x | string | length }}",
    "{{ ns.x == ns.y }}",
    "{{ ns.x in [ns.y] }}",
    "{{ ns.x is eq(ns.y) }}",
    "{{ [ns.x].index(ns.y) }}",
    "{{ [ns.x, ns.y] | sort }}",
    "{{ {ns.x: 1} }}",
    "{{ {}[ns.x] }}",
    "{{ dict([(ns.x, 1)]) }}",
    "{{ ns.x ~ 'a' }}",
    "{{ [ns.x] | join }}",
    "{{ '%s' % (ns.x,) }}",
    "{{ '{}'.format(ns.x) }}",
    "{{ '{!r}'.format(ns.x) }}",
    "{{ raise_exception(ns.x) }}",
    "{{ ns.x | safe }}",
    "{{ ns.x | escape }}",
    "{{ ns.x | upper }}",
    "{{ ns.x is lower }}",
    "{{ 'abc' | replace('b', ns.x) }}",
    "{{ ns.x | unique | list }}",
    "{{ ns }}",
    "{{ ns.x | urlencode }}",
    "{{ ns.x | map('string') | list }}",
    "{{ ('a' | safe).replace('a', ns.x) }}",
    "{{ ('a' | safe).join([ns.x]) }}",
    "{{ ('%s' | safe) % ns.x }}",
    "{{ ['a', 'b'] | join(ns.x) }}",
    "{{ ns.x | xmlattr }}{{ {'a': ns.x} | xmlattr }}",
    "{% for a in [ns.x, ns.y] %}{{ loop.changed(a) }}{% endfor %}",
    "{{ [[1, ns.x], [1, ns.y]] | groupby(1) }}",
    "{{ [ns.x] | select('eq', ns.y) | list }}",
]
# They write nothing.
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}{% endset %}",
    "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}{% endset %}",
    "{% filter upper %}{% for i in range(99999) %}{% for j in range(99999) %}abc{% endfor %}"
    "{% endfor %}{% endfilter %}",
    "{% set ns = namespace(x=0) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set ns.x = ns.x + 1 %}"
    "{% endfor %}{% endfor %}",
    DOUBLED + "{{ ns.x | tojson }}",
    "{% macro m(n) %}{% if n > 0 %}{% set a = m(n - 1) %}{% set a = m(n - 1) %}{% endif %}{% endmacro %}{{ m(60) }}",
]
# What published templates do with texts, lists and helpers.
PLAIN = [
    "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text + m.role ~ ': ' ~ m.content %}"
    "{% endfor %}{{ ns.text.split('i')[-1].lstrip('\\n') }}{{ '%s-%05d' % (ns.text, 7) }}{{ '{:>9}|'.format('ab') }}",
    "{%- macro line(m, last=false) -%}{{ m.role | upper }}{% if last %}!{% endif %}{%- endmacro -%}"
    "{% for m in messages %}{{ line(m, loop.last) }}{{ loop.index0 }}{{ loop.length }}{% endfor %}",
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% set rest = messages[1:] %}"
    "{{ system }}{{ rest | length }}{{ (messages + [{'role': 'x', 'content': [1, 2.5, none, true]}]) | tojson }}",
    "{{ messages | tojson(indent=4) }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
    "{% set block %}a {{ messages[-1].content | trim | replace('h', 'H') | indent(2, first=true) }}{% endset %}"
    "{{ block }}{{ block | center(40) }}{{ [3, 1, 2] | sort | reverse | list }}{{ 2 ** 10 % 7 - 3 * 2 }}{{ 'ab' * 3 }}",
    "{% if 'user' in messages | map(attribute='role') | list and messages[0]['role'] in ['user', 'system'] %}yes"
    "{% endif %}{{ (1, 'a') }}{{ {'k': [1, 2]} }}{{ messages[0].get('name') }}{{ 'A b'.split() }}{{ '%1000000000d' }}",
    "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}{{ range(9) | batch(4, 0)"
    " | list }}{{ [[1], [2]] | sum(start=[]) }}{{ 3.14159 | round(2) }}{{ messages | dictsort if false else '-' }}",
]


@pytest.mark.parametrize("source", GROWING)
def test_what_would_take_the_memory_is_refused_with_the_limit(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=TOO_MUCH):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("source", NESTED)
def test_what_has_endless_paths_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=TOO_MUCH):
        ChatTemplate(DOUBLED + source, {}).render(CHAT)


@pytest.mark.parametrize("source", ENDLESS)
def test_what_computes_without_end_is_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateTooSlow, match="takes too long"):
        ChatTemplate(source, {}).render(CHAT, seconds=0.05)


def test_all_values_of_a_render_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_PRODUCED_BYTES", 1000)
    template = ChatTemplate("{% for m in messages %}{{ m.content + '!' }}{% endfor %}", {})
    assert template.render(CHAT * 5) == "hi!" * 5
    with pytest.raises(ChatTemplateError, match=r"bytes made in one render: 1,\d+, and at most 1,000"):
        template.render(CHAT * 50)
    assert template.render(CHAT) == "hi!", "every render has its own"


def test_the_memory_of_a_refused_template_is_not_taken() -> None:
    program = (
        "import resource, sys\n"
        "from millstream_runtime.tokenizing.chat_template import ChatTemplate, ChatTemplateError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for source in sys.stdin.read().split('\\0'):\n"
        "    try: ChatTemplate(source, {}).render([])\n"
        "    except ChatTemplateError as error: print('too much' in str(error))\n"
    )
    sources = ["{{ 'a' * 10**10 }}", "{{ 'x' | center(9999999999) }}", "{{ (0).to_bytes(9999999999, 'big') }}"]
    done = subprocess.run([sys.executable, "-c", program], input="\0".join(sources), capture_output=True, text=True)
    assert done.stdout.split() == ["True"] * 3, done.stderr


@pytest.mark.parametrize("source", PLAIN)
def test_what_published_templates_do_is_as_in_transformers(source: str, tiny_model: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    odd = {"role": "system", "content": 'Grüße \n 🚀 \x00 "q"'}
    chats = [CHAT, [odd, *CHAT, {"role": "assistant", "content": ""}]]
    for chat in chats:
        expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
        assert ChatTemplate(source, {}).render(chat) == expected


def test_a_template_that_is_nested_too_deep_is_a_broken_folder() -> None:
    for source in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30):
        with pytest.raises(RuntimeFailure) as caught:
            ChatTemplate(source, {})
        assert caught.value.reason is FailureReason.CHECKPOINT_INVALID
