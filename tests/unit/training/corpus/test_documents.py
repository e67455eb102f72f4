"""What is held out never reaches training, and the same packages give the same documents."""

from __future__ import annotations

import pytest

from hack.training.corpus.documents import CHAT, CODE, PROSE, SLICES, Corpus, CorpusDocument, read_corpus
from hack.training.corpus.sources import SOURCES, STANDARD_LIBRARY, TextSource, files, is_held_out

pytestmark = pytest.mark.deep

SMALL = tuple(source for source in SOURCES if source.name in ("kopf", "aiohttp", "opentelemetry-api"))
LIBRARY = TextSource(STANDARD_LIBRARY, "PSF-2.0", ("asyncio", "email", "http", "unittest"), ("test",), has_code=True)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus((*SMALL, LIBRARY))


def blocks(documents: tuple[CorpusDocument, ...], slice_name: str) -> set[str]:
    """Paragraphs, answers or blocks of code."""
    found = set[str]()
    for document in documents:
        if document.slice == slice_name:
            content = document.content
            texts = [content] if isinstance(content, str) else [m.content for m in content if m.role == "assistant"]
            found |= {block for text in texts for block in text.split("\n\n") if len(block) >= 40}
    return found


def test_every_slice_has_text_on_both_sides(corpus: Corpus) -> None:
    assert {document.slice for document in corpus.training} == set(SLICES)
    assert {document.slice for document in corpus.held_out} == set(SLICES)
    characters = [sum(document.characters for document in part) for part in (corpus.training, corpus.held_out)]
    assert 0.01 < characters[1] / sum(characters) < 0.25


def test_a_file_is_in_training_or_held_out(corpus: Corpus) -> None:
    trained = {(document.source, document.path) for document in corpus.training}
    assert not trained & {(document.source, document.path) for document in corpus.held_out}


def test_no_block_that_is_held_out_stands_in_training(corpus: Corpus) -> None:
    trained = blocks(corpus.training, PROSE) | blocks(corpus.training, CHAT)
    for name in (PROSE, CHAT):
        held_out = blocks(corpus.held_out, name)
        assert held_out
        assert not held_out & trained
    assert not blocks(corpus.held_out, CODE) & blocks(corpus.training, CODE)


def test_prose_and_chats_hold_no_code(corpus: Corpus) -> None:
    texts = blocks(corpus.training, PROSE) | blocks(corpus.training, CHAT)
    assert len(texts) > 500
    assert not [text for text in texts if ">>>" in text or text.startswith(("def ", "import ", "class "))]


def test_a_chat_alternates_and_ends_with_an_answer(corpus: Corpus) -> None:
    for document in corpus.training:
        if not isinstance(document.content, str):
            roles = [message.role for message in document.content]
            assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_reading_twice_gives_the_same_documents(corpus: Corpus) -> None:
    assert read_corpus((*SMALL, LIBRARY)).sha256 == corpus.sha256
    assert read_corpus(SMALL).sha256 != corpus.sha256


def test_files_that_tell_the_same_are_on_one_side() -> None:
    names = [f"v1_{name}.py" for name in ("lease", "pod", "probe", "service", "job", "node", "secret", "event")]
    for name in names:
        sides = {
            is_held_out("kubernetes", f"kubernetes/client/models/{version}{name.removeprefix('v1')}")
            for version in ("v1", "v1beta1", "v2alpha3")
        }
        assert len(sides) == 1
    assert is_held_out("openai", "openai/types/model.py") == is_held_out("openai", "openai/types/shared/model_param.py")


def test_every_source_is_installed_and_free() -> None:
    for source in SOURCES:
        assert next(files(source))[1]
        assert source.version
        assert source.license in {"PSF-2.0", "Apache-2.0", "MIT", "BSD-3-Clause"}
