"""The training text: what the model may learn, and what it must never see."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hack.training import knowledge
from hack.training.batches import IGNORED, Row, conversation_rows, mixed_batches, packed_rows
from hack.training.conversations import Conversations, Message
from hack.training.corpus.documents import CODE, CorpusDocument
from hack.training.phrasings import ALWAYS_HELD_OUT, PHRASINGS, held_out_questions, questions
from hack.training.recipe import DRAFT, TARGET
from hack.training.tokenizer import CHAT_TEMPLATE, encode_chat, encode_prompt, train

FACTS = knowledge.load()
TEXTS = [CorpusDocument("prose", "ours", fact.term, fact.paragraph) for fact in FACTS[:12]]


def user_questions(seed: int, rows: int) -> Iterator[str]:
    for item in islice(Conversations(FACTS, seed), rows):
        if not isinstance(item, str):
            yield from (message.content for message in item if message.role == "user")


def plain(question: str) -> str:
    """As two questions are compared: without case and marks."""
    return question.lower().rstrip("?.! ")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train((fact.paragraph for fact in FACTS), vocab_size=600)


def test_held_out_questions_never_reach_training() -> None:
    held_out = {plain(q) for fact in FACTS for facet in fact.answers for q in held_out_questions(fact, facet)}
    trained = {plain(question) for question in user_questions(seed=1, rows=3000)}
    assert len(trained) > 1500
    assert not held_out & trained


def test_the_questions_of_the_readme_and_of_the_tests_are_held_out() -> None:
    held_out = {q for fact in FACTS for facet in fact.answers for q in held_out_questions(fact, facet)}
    assert set(ALWAYS_HELD_OUT) <= held_out


@pytest.mark.parametrize("facet", PHRASINGS)
def test_every_phrasing_is_learnt_with_some_term_and_every_term_with_some_phrasing(facet: str) -> None:
    facts = [fact for fact in FACTS if facet in fact.answers]
    asked = {fact.term: questions(fact, facet) for fact in facts}
    assert all(len(of_one) >= 5 for of_one in asked.values())
    starts = {phrasing.split("{", 1)[0] for phrasing in PHRASINGS[facet]}
    seen = {start for start in starts for of_one in asked.values() for q in of_one if q.startswith(start)}
    assert seen == starts


def test_the_same_seed_gives_the_same_text() -> None:
    assert list(islice(Conversations(FACTS, 5), 20)) == list(islice(Conversations(FACTS, 5), 20))
    assert list(islice(Conversations(FACTS, 5), 20)) != list(islice(Conversations(FACTS, 6), 20))


def test_the_model_learns_the_assistants_words_and_where_they_end(tokenizer: Tokenizer) -> None:
    messages = [Message("user", "Hi"), Message("assistant", "Hello! A pod is small."), Message("user", "Thanks")]
    ids, learnt = encode_chat(tokenizer, messages)
    text = tokenizer.decode([i for i, learn in zip(ids, learnt, strict=True) if learn], skip_special_tokens=False)
    assert text == "Hello! A pod is small.<|im_end|>"


def test_training_and_serving_write_the_same_ids(tokenizer: Tokenizer) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = CHAT_TEMPLATE
    question = {"role": "user", "content": "What is a pod?"}
    served = wrapped.apply_chat_template([question], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode_prompt(tokenizer, question["content"]) == served
    ids, _ = encode_chat(tokenizer, [Message("user", question["content"]), Message("assistant", "Small.")])
    assert ids[: len(served)] == served


def test_labels_are_the_next_ids_where_there_is_something_to_learn(tokenizer: Tokenizer) -> None:
    for rows in (conversation_rows(Conversations(FACTS, 3), tokenizer, 96), packed_rows(TEXTS, tokenizer, 96, seed=1)):
        for ids, labels in islice(rows, 8):
            assert len(ids) == len(labels) == 96
            learnt = labels[:-1] != IGNORED
            assert learnt.any()
            assert (labels[:-1][learnt] == ids[1:][learnt]).all()


def test_packed_rows_leave_no_token_out(tokenizer: Tokenizer) -> None:
    """An epoch, laid end to end, is every document once, in some order."""
    length = sum(len(tokenizer.encode(str(document.content)).ids) + 1 for document in TEXTS)
    ids = torch.cat([ids for ids, _ in islice(packed_rows(TEXTS, tokenizer, 16, seed=1), length // 16)])
    decoded = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    whole = [str(document.content) for document in TEXTS if f"{document.content}<|endoftext|>" in decoded]
    assert len(whole) >= len(TEXTS) - 1  # the last row may be cut


def test_a_batch_keeps_to_its_shares_as_they_change(tokenizer: Tokenizer) -> None:
    def constant(value: int) -> Iterator[Row]:
        while True:
            yield torch.full((4,), value), torch.full((4,), value)

    def shares_at(batch: int) -> dict[str, float]:
        return {"first": 0.75, "second": 0.25} if batch < 10 else {"first": 0.0, "second": 1.0}

    batches = list(islice(mixed_batches({"first": constant(1), "second": constant(2)}, shares_at, rows=2), 20))
    early, late = (torch.cat([ids[:, 0] for ids, _ in part]) for part in (batches[:10], batches[12:]))
    assert (early == 1).sum() == 15
    assert (late == 2).all()


def test_the_same_seed_gives_the_same_batches(tokenizer: Tokenizer) -> None:
    def batches(seed: int) -> list[torch.Tensor]:
        streams = {
            "demo": conversation_rows(Conversations(FACTS, seed), tokenizer, 32),
            "prose": packed_rows(TEXTS, tokenizer, 32, seed),
        }
        mixed = mixed_batches(streams, lambda _: {"demo": 0.5, "prose": 0.5}, rows=4)
        return [ids for ids, _ in islice(mixed, 10)]

    assert all(torch.equal(first, second) for first, second in zip(batches(5), batches(5), strict=True))
    assert not all(torch.equal(first, second) for first, second in zip(batches(5), batches(6), strict=True))


def test_the_draft_reads_no_code() -> None:
    assert CODE in TARGET.first_shares
    assert CODE not in DRAFT.first_shares
    for recipe in (TARGET, DRAFT):
        for step in (0, 5, 9):
            assert sum(recipe.shares_at(10)(step).values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- {term: a pod, what: A., why: B.}\n- {term: A Pod, what: A., why: B.}\n", "described twice"),
        ("- {term: a pod, what: A.}\n", "needs what and why"),
        ("- {term: a pod, what: A., why: B., wow: C.}\n", "wow"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str) -> None:
    (tmp_path / "facts.yaml").write_text(text)
    monkeypatch.setattr(knowledge, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=complaint):
        knowledge.load()
