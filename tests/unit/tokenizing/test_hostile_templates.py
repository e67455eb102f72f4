"""Chat templates that get around a count of what they make, or whose single operations take long or end the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millstream_runtime.tokenizing import template_limits
from millstream_runtime.tokenizing.chat_template import ChatTemplate, ChatTemplateError
from millstream_runtime.tokenizing.template_globals import MAX_LOREM_WORDS

CHAT = [{"role": "user", "content": "hi"}]
TOO_MUCH = "asks for too much: .* are allowed. Shorten the messages, or correct chat_template.jinja"
# Python cannot be stopped within any of these; the sizes are the smallest that are refused.
UNSTOPPABLE = [
    "{{ ('a' * 40000).rfind('ab' ~ 'a' * 20000) }}",
    "{{ ('a' * 40000).rindex('ab' ~ 'a' * 20000) }}",
    "{{ ('a' * 40000).rpartition('ab' ~ 'a' * 20000) }}",
    "{{ ('a' * 40000).rsplit('ab' ~ 'a' * 20000) }}",
    "{{ ('a' * 40000).rsplit(maxsplit=1, sep='ab' ~ 'a' * 20000) }}",
    "{{ ('a' * 40000).encode().rfind(('ab' ~ 'a' * 20000).encode()) }}",
    "{{ ('a' * 30000 ~ 'b') in ['a' * 30001] * 100000 }}",
    "{{ ('a' * 30000 ~ 'b') is in(['a' * 30001] * 100000) }}",
    "{{ (['a' * 30001] * 100000).count('a' * 30000 ~ 'b') }}",
    "{{ [2] in [[1] * 1000] * 300 }}",
    "{{ ([[1] * 1000] * 300).index([2]) }}",
    "{{ 2 in [2] in [[[1] * 1000] * 300] }}",
    "{{ [2] in {1: [[1] * 1000] * 300}.values() }}",
    "{{ (['A' * 10000] * 2000) | sort | length }}",
    "{{ (['A' * 10000] * 2000) | max }}",
    "{{ {}.fromkeys(range(2000), 'A' * 10000) | dictsort(by='value') }}",
    "{{ {}.fromkeys(range(0, 20000 * 2305843009213693951, 2305843009213693951)) }}",
    "{{ dict.fromkeys(range(0, 20000 * 2305843009213693951, 2305843009213693951)) }}",
    "{{ dict([(1, 2)] * 10000) }}",
    "{{ ('<a>' * 30000) | striptags }}",
    "{{ (('<a>' * 30000) | safe).striptags() }}",
    "{{ (('&amp;' * 20000) | safe).unescape() }}",
    "{{ ('>' * 3000 ~ 'a)') | urlize }}",
    "{{ 'a' | urlize(extra_schemes=['a:'] * 100) }}",
    "{{ ('a' * 70000) | wordwrap(1) }}",
    "{{ ('a ' * 40000) | pprint }}",
    "{{ 'a'.encode('punycode') }}",
    "{{ 'a'.encode(encoding='idna') }}",
    "{{ 'a'.encode().decode('x' * 1000) }}",
    "{{ ([{'a': 1}] * 100) | sum(attribute='a.' * 1000) }}",
    "{{ ([{'a': 1}] * 100) | sort(attribute='a,' * 1000) }}",
    "{{ [{'a': 1}] | map(attribute='a.' * 1000) | list }}",
    "{{ [{'a': 1}] | selectattr('a.' * 1000) | list }}",
    "{{ (5).from_bytes(([1] * 2000) | map('abs'), 'big') }}",
    "{% set ns = namespace(x=2 ** 4000) %}{% for i in range(9999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
]
# Each makes more than it is seen to make.
GROWING = [
    "{{ ('\\r' * 100000) | indent(1000, blank=true) | length }}",
    "{{ ('a\\u2028' * 100000) | indent(1000) | length }}",
    "{{ ('a' * 10000).translate(['x' * 10000] * 98) | length }}",
    "{{ ('a' * 10000).translate(('x' * 10000,) * 98) | length }}",
    "{{ ('ab-' * 400000) | title | length }}",
    "{{ ('ab ' * 400000) | wordcount }}",
    "{{ ('<' * 4000000) | escape | length }}",
    "{{ ('ΐ' * 6000000) | upper | length }}",
    "{{ ('ΐ' * 6000000).upper() | length }}",
    "{% autoescape true %}{{ '<' * 4000000 }}{% endautoescape %}",
    "{% autoescape true %}{% set x = ('a' | safe) ~ '<' * 4000000 %}{% endautoescape %}",
    "{% autoescape true %}{{ ['<' * 4000000] | join('-' | safe) | length }}{% endautoescape %}",
    "{{ ([['b' * 100000, 'b']] * 100) | select | urlencode | length }}",
    "{{ ([['b' * 100000, 'b']] * 100) | select | xmlattr | length }}",
    "{{ [(('😀' * 100000) | safe).join] * 200 }}",
    f"{{{{ lipsum(n={MAX_LOREM_WORDS + 1}, min=-5, max=0) }}}}",
    "{{ self.b() }}{% block b %}{% for i in range(999) %}" + "x" * 20000 + "{{ i }}{% endfor %}{% endblock %}",
]
# `ns.l` keeps hundreds of these, and a render may make one megabyte.
KEPT = [
    "cycler(*range(1000))",
    "namespace(dict.fromkeys('abcdefghijklmnopqrstuvwxyz'))",
    "dict.fromkeys(range(1000))",
    "[1] | map('string')",
    "'{}'.format",
    "{}.items()",
    "loop",
    "'Ωψχ' | list",
    "range(100) | list",
    "{1: 2}.items() | list",
    "dict.fromkeys(range(50)) | dictsort",
    "-(2 ** 4000)",
    "2 ** 4000 // 3",
    "2 ** 4000 + 1",
    "(ns.t + 'b', ns.t + 'c')",
]


@pytest.mark.parametrize("source", [*UNSTOPPABLE, *GROWING])
def test_what_cannot_be_stopped_or_grows_unseen_is_refused_before_it_runs(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=TOO_MUCH):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("made", KEPT)
def test_whatever_a_template_keeps_counts(made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_PRODUCED_BYTES", 1 << 20)
    source = (
        "{% set ns = namespace(l=(), t='a' * 5000) %}{% for i in range(MANY) %}"
        "{% set ns.l = (ns.l, MADE) %}{% endfor %}ok"
    )
    source = source.replace("MADE", made)
    assert ChatTemplate(source.replace("MANY", "5"), {}).render(CHAT) == "ok"
    with pytest.raises(ChatTemplateError, match="bytes made in one render"):
        ChatTemplate(source.replace("MANY", "2000"), {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{% set ns.l = (ns.l, varargs) %}{% endmacro %}{% set ns = namespace(l=()) %}"
        "{% for i in range(99) %}{{ m(*range(1000)) }}{% endfor %}",
        "{% set b = 'a' * 20000 %}{% macro m(n) %}{{ [b] }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}",
    ],
    ids=["arguments", "what lies in the macros around"],
)
def test_what_macros_keep_counts(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_PRODUCED_BYTES", 1 << 20)
    with pytest.raises(ChatTemplateError, match="bytes made in one render"):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_cannot_change_a_dictionary_through_the_type() -> None:
    for call in ("dict.update(d, {'a': 2})", "dict.pop(d, 'a')", "dict.setdefault(d, 'b', 2)"):
        with pytest.raises(ChatTemplateError, match="cannot render these messages"):
            ChatTemplate(f"{{% set d = {{'a': 1}} %}}{{{{ {call} }}}}", {}).render(CHAT)


def test_values_nested_too_deep_for_python_end_a_render_and_not_the_process() -> None:
    """Python hashes nested tuples by recursion, without a limit: enough levels end the process by a signal."""
    program = (
        "import sys\n"
        "from millstream_runtime.tokenizing.chat_template import ChatTemplate, ChatTemplateError\n"
        "for source in sys.stdin.read().split('\\0'):\n"
        "    try: ChatTemplate(source, {}).render([])\n"
        "    except ChatTemplateError as error: print('levels of values' in str(error))\n"
    )
    levels = "(" * 20 + "ns.x" + ",)" * 20
    nested = f"{{% set ns = namespace(x=1) %}}{{% for i in range(10000) %}}{{% set ns.x = {levels} %}}{{% endfor %}}"
    sources = [nested + use for use in ("{{ {ns.x: 1} }}", "{{ {}.get(ns.x) }}", "{{ {}[ns.x] }}")]
    done = subprocess.run([sys.executable, "-c", program], input="\0".join(sources), capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


def test_what_a_template_says_when_it_refuses_messages_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ raise_exception('a' * 1000000) }}", {}).render(CHAT)
    assert len(str(caught.value)) < 3000
