"""For any ids the streamed text is what the library decodes at once, but for an unfinished character at the end."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.engine.request import FinishReason, TokenOutput
from millstream_runtime.server.openai.choice import Choice
from millstream_runtime.tokenizing.decoder_steps import MAX_UNDECIDED_BYTES, byte_level_alphabet
from millstream_runtime.tokenizing.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = (
    *("<unk>", "\u2581", "\u2581Hello", "\u2581\u2581", " ", "  ", "a", "b", "do", "ä", "漢", "🦙", "\ufffd", "."),
    *(" .", "##ing", "##s", "n't", "'", "it</w>", "</w>", "x</w>y", "|", "<0x+A>", "<0xZZ>", "<0x4"),
)
FEW_LISTS, NUM_LISTS = 200, 2000
Replace, Strip = decoders.Replace, decoders.Strip
LLAMA = [Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), Strip(" ", 1, 0)]
DECODERS: dict[str, Callable[[], decoders.Decoder | None]] = {
    "Llama 2": lambda: decoders.Sequence(LLAMA),
    "Gemma": lambda: decoders.Sequence(LLAMA[:3]),
    "bytes alone": decoders.ByteFallback,
    "Unigram": decoders.Metaspace,
    "Unigram without a first space": lambda: decoders.Metaspace(prepend_scheme="never"),
    "Unigram with bytes": lambda: decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "WordPiece": decoders.WordPiece,
    "WordPiece as it is": lambda: decoders.WordPiece(cleanup=False),
    "BPE with ends of words": decoders.BPEDecoder,
    "CTC": lambda: decoders.CTC(pad_token="a", cleanup=True),
    "byte-level": decoders.ByteLevel,
    "byte-level, then the whole text": lambda: decoders.Sequence(
        [decoders.ByteLevel(), Replace("ab", "X"), Strip("a", 2, 0)]
    ),
    "the end of the text": lambda: decoders.Sequence([decoders.BPEDecoder(), decoders.Fuse(), Replace("it ", "@")]),
    "expressions": lambda: decoders.Sequence([*LLAMA[:3], Replace(Regex(" +"), " ")]),
    "one token": lambda: decoders.Sequence([decoders.Fuse(), decoders.Metaspace(), decoders.WordPiece()]),
    "nothing": lambda: decoders.Sequence([]),
    "no decoder": lambda: None,
}


def fast_tokenizer(decoder: decoders.Decoder | None, words: Sequence[str] = WORDS) -> FastTokenizer:
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys((*words, *BYTES)))}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    fast.add_special_tokens(["<s>", "</s>"])
    fast.add_tokens([AddedToken("<added>"), AddedToken("<né>")])
    if decoder is not None:
        fast.decoder = decoder
    return fast


@pytest.fixture(scope="module", params=DECODERS)
def fast(request: pytest.FixtureRequest) -> FastTokenizer:
    words = (*WORDS, *byte_level_alphabet()) if request.param.startswith("byte-level") else WORDS
    return fast_tokenizer(DECODERS[request.param](), words)


def id_of(fast: FastTokenizer, token: str) -> int:
    number = fast.token_to_id(token)
    assert number is not None, token
    return number


def served(fast: FastTokenizer) -> Tokenizer:
    return Tokenizer(fast.to_str().encode(), None)


def id_lists(fast: FastTokenizer, count: int) -> Iterator[list[int]]:
    """Random ids, some special and some past the vocabulary; and characters spelled in bytes, whole and damaged."""
    choices, size = random.Random(0), fast.get_vocab_size()
    byte_ids = [id_of(fast, token) for token in BYTES]
    for number in range(count):
        ids = [choices.randrange(size + 3) for _ in range(choices.randrange(16))]
        if number % 2:
            ids = [byte_ids[byte] for byte in "".join(choices.choices("aä漢🦙\n", k=4)).encode()]
            for _ in range(choices.randrange(3)):
                ids.insert(choices.randrange(len(ids)), choices.randrange(size + 3))
            del ids[choices.randrange(len(ids) + 1) :]
        yield ids


def decoded_at_once(fast: FastTokenizer, ids: Sequence[int]) -> str:
    """The library's text of these ids, without the tokens or the U+FFFD of an unfinished character at the end."""
    decoder = fast.decoder
    if decoder is not None and "ByteLevel" in repr(decoder):
        text = str(fast.decode(ids, skip_special_tokens=True))
        return text.removesuffix("\ufffd") if is_unfinished(byte_level_bytes(fast, ids)) else text
    spelled = [number for number in ids if has_text(fast, number)]
    if decoder is None or "ByteFallback" not in repr(decoder):
        return str(fast.decode(spelled, skip_special_tokens=True))
    run: list[int] = []
    for number in reversed(spelled):
        token = fast.id_to_token(number)
        if token not in BYTES and token != "<0x+A>":
            break
        run.insert(0, 10 if token == "<0x+A>" else BYTES.index(token))
    rest = num_unfinished_bytes(bytes(run))
    return str(fast.decode(spelled[: len(spelled) - rest], skip_special_tokens=True))


def has_text(fast: FastTokenizer, number: int) -> bool:
    special = [number for number, token in fast.get_added_tokens_decoder().items() if token.special]
    return fast.id_to_token(number) is not None and number not in special


def byte_level_bytes(fast: FastTokenizer, ids: Sequence[int]) -> bytes:
    alphabet, spelled = byte_level_alphabet(), b""
    for number in ids:
        token = (fast.id_to_token(number) or "") if has_text(fast, number) else ""
        is_bytes = all(character in alphabet for character in token)
        spelled += bytes(map(alphabet.index, token)) if is_bytes else token.encode()
    return spelled


def num_unfinished_bytes(run: bytes) -> int:
    """How many bytes at the end begin a character; 0 where what stands before is invalid."""
    try:
        _, num_bytes = codecs.utf_8_decode(run, "strict", False)
    except UnicodeDecodeError:
        return 0
    return len(run) - num_bytes


def is_unfinished(spelled: bytes) -> bool:
    """Whether bytes of which each invalid one is replaced end within a character."""
    return codecs.utf_8_decode(spelled, "replace", False)[1] < len(spelled)


def check_streams(fast: FastTokenizer, count: int) -> None:
    tokenizer = served(fast)
    for ids in id_lists(fast, count):
        detokenizer, text, pending = tokenizer.detokenizer(), "", ""
        for number in ids:
            text += detokenizer.push(number)
            pending = detokenizer.pending()
        end = detokenizer.finish()
        assert text + end == decoded_at_once(fast, ids), [fast.id_to_token(number) for number in ids]
        assert pending == end
        assert tokenizer.decode(ids) == fast.decode(ids, skip_special_tokens=True)


def test_any_ids_stream_the_text_of_decoding_them_at_once(fast: FastTokenizer) -> None:
    check_streams(fast, FEW_LISTS)


@pytest.mark.deep
def test_thousands_of_id_lists_stream_the_text_of_decoding_them_at_once(fast: FastTokenizer) -> None:
    check_streams(fast, NUM_LISTS)


def test_an_answer_that_begins_with_a_space_and_an_emoji_is_whole() -> None:
    """Each token of the dummy space and of a special token counted among those that are held back."""
    fast = fast_tokenizer(decoders.Sequence(LLAMA))
    llama = [id_of(fast, BYTES[byte]) for byte in "🦙".encode()]
    ids = [id_of(fast, "\u2581"), *llama, id_of(fast, "a"), id_of(fast, "</s>"), *llama]
    detokenizer = served(fast).detokenizer()
    pieces = [detokenizer.push(number) for number in ids]
    assert "".join(pieces) + detokenizer.finish() == fast.decode(ids) == "🦙a🦙"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_long_run_of_bytes_is_streamed() -> None:
    fast = fast_tokenizer(decoders.Sequence(LLAMA))
    text = "ሰላም" * MAX_UNDECIDED_BYTES
    detokenizer = served(fast).detokenizer()
    pieces = [detokenizer.push(id_of(fast, BYTES[byte])) for byte in text.encode()]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) * 3 <= MAX_UNDECIDED_BYTES + 3


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(fast: FastTokenizer) -> None:
    """Also where the detokenizer holds that token's characters back; up to `min_tokens` they are plain text."""
    tokenizer, stops, choices = served(fast), ["🦙", "漢\n", "a", "##s "], random.Random(1)
    for ids in id_lists(fast, FEW_LISTS):
        min_tokens = choices.randrange(3)
        choice = Choice(0, tokenizer.detokenizer(), stops, min_tokens)
        plain = len(decoded_at_once(fast, ids[:min_tokens]))
        text, num_tokens, reason = "", 0, None
        for num_tokens, number in enumerate(ids, start=1):
            is_last = num_tokens == len(ids)
            delta = choice.push(TokenOutput("id", number, FinishReason.LENGTH if is_last else None))
            text, reason = (text + delta.text, delta.finish_reason) if delta is not None else (text, None)
            if reason is not None:
                break
        whole = decoded_at_once(fast, ids[:num_tokens])
        earlier = decoded_at_once(fast, ids[: max(num_tokens - 1, 0)])
        ends = [at for stop in stops if (at := whole.find(stop, plain)) >= 0] if num_tokens > min_tokens else []
        assert (reason is FinishReason.STOP) == bool(ends)
        assert text == (whole[: min(ends)] if ends else whole)
        assert num_tokens - 1 <= min_tokens or not any(stop in earlier[plain:] for stop in stops)
