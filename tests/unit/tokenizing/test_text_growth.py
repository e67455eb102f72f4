"""The bounds of a tokenizer's steps hold for what the library does, and every kind of step has one."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from millstream_runtime.tokenizing import text_growth
from millstream_runtime.tokenizing.folder.token import Token
from millstream_runtime.tokenizing.text_growth import (
    DECODER_BOUNDS,
    NORMALIZER_BOUNDS,
    POST_PROCESSORS,
    PRE_TOKENIZER_BOUNDS,
    GrowthRefused,
    NormalizedLength,
    TextTooLong,
    check_growth,
    normalizer_bound,
    pre_tokenizer_bound,
)
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tokenizing.tokenizer_parts import AddedText, TokenizerParts, one_normalizer, read_parts
from tests.support.hostile_tokenizers import (
    METASPACE,
    Part,
    precompiled,
    replace,
    replace_matches,
    sequence,
    tokenizer_json,
)

BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
SETTINGS: dict[str, Part] = {"BertNormalizer": BERT, "Strip": {"strip_left": True, "strip_right": True}}
STEPS: list[Part] = [
    *({"type": kind, **SETTINGS.get(kind, {})} for kind in NORMALIZER_BOUNDS),
    *(replace(" ", "\u2581"), replace("ab", "c"), replace_matches(" {2,}", "\u2581"), replace_matches("", "x")),
    *({"type": "Prepend", "prepend": "\u2581"}, precompiled({"\ufdfa": "ab" * 20, "\u0130": "i"})),
]
# The blocks of Unicode that normal forms lengthen, and one of each other plane.
CHARACTERS = [
    chr(code_point)
    for block in (range(1, 0x600), range(0x1E00, 0x2100), range(0x3200, 0x3400), range(0xF900, 0xFFFE, 3))
    for code_point in (*block, 0x1D160, 0x1F680, 0x20000, 0xAC01)
]


def length(text: str) -> int:
    return len(text.encode())


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["type"])
def test_no_character_grows_beyond_the_bound_of_a_step(step: Part) -> None:
    normalizer, bound = one_normalizer(step), normalizer_bound(step)
    beyond = {one for one in CHARACTERS if length(normalizer.normalize_str(one)) > bound * length(one)}
    assert beyond == set()
    for text in ("ab ab  ab", "\u0416" * 9, " " * 9):
        assert length(normalizer.normalize_str(text)) <= bound * length(text)


@pytest.mark.parametrize(
    "step",
    [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        METASPACE,
        {**METASPACE, "replacement": "\U0001f680"},
    ],
    ids=str,
)
def test_no_piece_grows_beyond_the_bound_of_a_pre_tokenizer(step: Part) -> None:
    kinds = {"ByteLevel": pre_tokenizers.ByteLevel, "Metaspace": pre_tokenizers.Metaspace}
    pre_tokenizer = kinds[step["type"]](
        **{key: value for key, value in step.items() if key not in ("type", "trim_offsets")}
    )
    for text in ("a", "\u00e9", "\u0416", "\U0001f680", " ", "a b", "\u00ff" * 9):
        made = sum(length(piece) for piece, _ in pre_tokenizer.pre_tokenize_str(text))
        assert made <= pre_tokenizer_bound(step) * length(text)


def test_every_kind_of_step_of_the_library_has_a_bound() -> None:
    assert kinds_of(normalizers, "Normalizer") == {*NORMALIZER_BOUNDS, "Prepend", "Replace", "Precompiled", "Sequence"}
    assert kinds_of(pre_tokenizers, "PreTokenizer") == {*PRE_TOKENIZER_BOUNDS, "ByteLevel", "Metaspace", "Sequence"}
    assert kinds_of(decoders, "Decoder", "DecodeStream") == {*DECODER_BOUNDS, "Replace", "Sequence"}
    assert kinds_of(processors, "PostProcessor") == {*POST_PROCESSORS, "TemplateProcessing", "Sequence"}


def kinds_of(module: object, *others: str) -> set[str]:
    return {name for name in vars(module) if isinstance(getattr(module, name), type)} - set(others)


def test_a_kind_that_is_not_known_is_refused() -> None:
    for parts in (
        TokenizerParts(normalizers=[{"type": "New"}]),
        TokenizerParts(pre_tokenizers=[{"type": "New"}]),
        TokenizerParts(decoders=[{"type": "New"}]),
        TokenizerParts(post_processors=[{"type": "New"}]),
    ):
        with pytest.raises(GrowthRefused, match="has a step of the type 'New', which this version does not know"):
            check_growth(parts)


def test_all_of_unicode_in_its_longest_normal_form_is_below_the_limit() -> None:
    check_growth(read_parts(tokenizer_json(normalizer=sequence({"type": "NFKC"}, {"type": "Lowercase"}))))
    assert NORMALIZER_BOUNDS["NFKC"] < text_growth.MAX_GROWTH


def test_a_pattern_that_no_probe_has_is_measured_where_a_text_has_it() -> None:
    unseen = [replace_matches("a(?=a*#)", "aa")] * 24
    grown = check_growth(TokenizerParts(normalizers=unseen))
    grown.require("a" * 100)
    with pytest.raises(TextTooLong):
        grown.require("a#")
    with pytest.raises(TextTooLong):
        grown.require("b" * 5000 + "a#")


def test_a_pattern_that_looks_further_than_any_probe_is_measured_in_the_whole_text() -> None:
    far = replace_matches("z(?=z{4100})", "\u1234\u1234")
    doubled = [replace_matches("\u1234(?=\u1234{3})", "\u1234\u1234")] * 20
    grown = check_growth(TokenizerParts(normalizers=[far, *doubled]))
    with pytest.raises(TextTooLong):
        grown.require("z" * 4400)


def test_a_piece_between_tokens_that_are_cut_out_is_measured_by_itself() -> None:
    """The library normalizes each piece alone, so each has an end."""
    at_the_end = [replace_matches("k(?=w$)", "kkk")] * 60
    for cut_out in (True, False):
        token = AddedText("<s>", normalized=not cut_out)
        grown = check_growth(TokenizerParts(normalizers=at_the_end, added_tokens=[token]))
        text = "kw<s>" * 100
        if cut_out:
            with pytest.raises(TextTooLong):
                grown.require(text)
        else:
            grown.require(text)


@pytest.mark.parametrize("steps", [6, 24])
def test_an_added_token_that_grows_is_refused_before_the_library_reads_it(steps: int) -> None:
    far = replace_matches("z(?=.{70})", "\u1234\u1234")
    doubled = [replace_matches("\u1234(?=\u1234{3})", "\u1234\u1234")] * steps
    normalizer = sequence(far, *doubled)
    content = json.loads(tokenizer_json(normalizer=normalizer))
    token = {"id": 1, "content": "z" * 2000, "special": False, "normalized": True}
    content["added_tokens"] = [token | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)]
    with pytest.raises(GrowthRefused, match="of the added token 'zz"):
        check_growth(read_parts(json.dumps(content)))
    content["added_tokens"] = []
    more = [Token("z" * 2000)]
    with pytest.raises(GrowthRefused, match="of the added token 'zz"):
        Tokenizer(json.dumps(content).encode(), None, added_tokens=more)
    content["added_tokens"] = [
        token | {"normalized": False} | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    ]
    check_growth(read_parts(json.dumps(content)))


def test_a_text_that_is_short_for_the_bounds_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> int:
        raise AssertionError("measured")

    short = NormalizedLength([{"type": "NFC"}])
    monkeypatch.setattr(NormalizedLength, "_measured", measured)
    short.require("a" * 1_000_000)
    with pytest.raises(AssertionError):
        short.require("a" * 6_000_000)


def test_a_map_is_measured_for_all_short_characters() -> None:
    """A text of 48 bytes is little for a character of three bytes, and much for one of two."""
    check_growth(parts_of(precompiled({"\u4e2d": "x" * 48})))
    for character in short_characters():
        with pytest.raises(GrowthRefused):
            check_growth(parts_of(precompiled({character: "x" * 48})))
    with pytest.raises(GrowthRefused):
        check_growth(parts_of(precompiled({"\u4e2d": "x" * 49})))


def short_characters() -> Iterable[str]:
    return ("a", "\u0080", "\u07ff", "\u0416")


def parts_of(normalizer: Part) -> TokenizerParts:
    return read_parts(tokenizer_json(normalizer=normalizer))
