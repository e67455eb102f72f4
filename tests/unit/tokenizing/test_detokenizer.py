"""However a character is spread over tokens, the client sees it whole or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from millstream_runtime.tokenizing.detokenizer import (
    ByteLevelDetokenizer,
    ByteLevelVocabulary,
    Detokenizer,
    StepwiseDecoder,
    StepwiseDetokenizer,
    is_byte_level,
)
from millstream_runtime.tokenizing.tokenizer_parts import read_parts
from tests.support.tiny_model import byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
VOCABULARY = ByteLevelVocabulary(BYTE_LEVEL)


def sentencepiece_like() -> Tokenizer:
    """Llama 2's decoder: words with ▁, and a token for every byte."""
    pieces = ["▁", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stepwise(tokenizer: Tokenizer) -> StepwiseDetokenizer:
    return StepwiseDetokenizer(StepwiseDecoder(tokenizer, read_parts(tokenizer.to_str()).decoders))


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 270)))
def test_any_tokens_give_what_the_tokenizer_decodes_at_once(token_ids: list[int]) -> None:
    streamed = "".join(pieces_of(ByteLevelDetokenizer(VOCABULARY), token_ids))
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert whole.startswith(streamed)
    assert whole[len(streamed) :] in ("", "\ufffd")  # an unfinished character at the very end is left out


@given(st.text(max_size=40))
def test_text_in_any_script_survives_byte_by_byte(text: str) -> None:
    for detokenizer in (ByteLevelDetokenizer(VOCABULARY), stepwise(BYTE_LEVEL)):
        pieces = pieces_of(detokenizer, BYTE_LEVEL.encode(text).ids)
        assert "".join(pieces) == text
        assert all(set(piece) <= set(text) for piece in pieces)  # no replacement character, not even for a moment


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_byte_fallback_of_sentencepiece_models_survives_too(text: str) -> None:
    tokenizer = sentencepiece_like()
    token_ids = [1, 2, *(4 + byte for byte in text.encode()), 3]
    pieces = pieces_of(stepwise(tokenizer), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == f"Hello world{text}!"
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_and_ids_past_the_vocabulary_have_no_text() -> None:
    for detokenizer in (ByteLevelDetokenizer(VOCABULARY), stepwise(BYTE_LEVEL)):
        assert pieces_of(detokenizer, [256, 257, 258, 265] * 20) == [""] * 81


@pytest.mark.parametrize(("tokenizer", "expected"), [(BYTE_LEVEL, True), (sentencepiece_like(), False)])
def test_the_exact_way_is_taken_only_where_it_is_exact(tokenizer: Tokenizer, expected: bool) -> None:
    assert is_byte_level(read_parts(tokenizer.to_str()).decoders) is expected
