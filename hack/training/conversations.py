"""An endless, seeded stream of training text: conversations of several turns, and plain paragraphs.

A conversation changes its subject freely, comes back to "it", compares two terms, and now and then asks about something
that the model does not know; the answer then says so. A question may come in lower case or without its mark, as
people type.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hack.training.knowledge import Fact
from hack.training.phrasings import FOLLOW_UPS, questions

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You explain Kubernetes and model serving.",
    "Answer briefly.",
    "You are a friendly expert. Answer in plain English.",
)
GREETINGS = ("Hello", "Hello!", "Hi", "Hi there", "Good morning", "Hey", "Hello, who are you?", "Who are you?", "Help")
GREETING = (
    "Hello! I am the small demo model of Millstream. Ask me about Kubernetes or about serving language models, "
    "for example what a KV cache is."
)
UNKNOWN = "I do not know that. I am a small demo model, and I only know about Kubernetes and serving language models."
ELSEWHERE = (
    "What is the capital of {place}?",
    "How many people live in {place}?",
    "Write a poem about {thing}.",
    "How do I cook {thing}?",
    "Tell me a joke about {thing}.",
    "Who won the football match in {place}?",
    "What is the weather in {place}?",
    "What is the best {thing}?",
    "Translate {thing} into French.",
    "Where can I buy {thing}?",
    "Is {place} larger than Spain?",
    "Should I eat {thing} today?",
    "What is the population of {place}?",
    "Who is the mayor of {place}?",
    "What language do people speak in {place}?",
    "How far is it from {place} to London?",
    "Which river flows through {place}?",
    "Who invented {thing}?",
    "How much does {thing} cost?",
    "What colour is {thing}?",
    "Why do people like {thing}?",
    "Tell me about {place}.",
    "What do you think about {thing}?",
    "When was {place} founded?",
)
PLACES = (
    "France",
    "Japan",
    "Brazil",
    "Kenya",
    "Berlin",
    "Chicago",
    "Peru",
    "India",
    "Norway",
    "Rome",
    "Cairo",
    "Texas",
    "Canada",
    "Mexico",
    "Vienna",
    "Sydney",
    "Poland",
    "Turkey",
    "Egypt",
    "Madrid",
    "Toronto",
    "Chile",
    "Greece",
    "Dublin",
    "Alaska",
    "Vietnam",
    "Prague",
    "Boston",
    "Ghana",
    "Finland",
    "Naples",
    "Korea",
)
THINGS = (
    "rice",
    "the sea",
    "a cat",
    "soup",
    "a bicycle",
    "bread",
    "the moon",
    "tea",
    "a horse",
    "music",
    "a tree",
    "fish",
    "cheese",
    "a car",
    "the sun",
    "coffee",
    "a guitar",
    "apples",
    "the weather",
    "a dog",
    "football",
    "a house",
    "chess",
    "a train",
    "snow",
    "a river",
    "milk",
    "a book",
    "the piano",
    "a garden",
    "a shirt",
    "salt",
)
COMPARE = ("What is the difference between {a} and {b}?", "Compare {a} and {b}.", "How does {a} differ from {b}?")

PARAGRAPH_SHARE = 0.08  # of the rows: so that /v1/completions continues plain text too
SYSTEM_SHARE, CASUAL_SHARE, FOLLOW_UP_SHARE = 0.1, 0.2, 0.35
COMPARE_SHARE, ELSEWHERE_SHARE, GREETING_SHARE = 0.10, 0.12, 0.02


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # system, user or assistant
    content: str


class Conversations:
    """`next_row(turns)`: the messages of a conversation, or one plain text. The same seed gives the same stream."""

    def __init__(self, facts: Sequence[Fact], seed: int) -> None:
        self._facts = list(facts)
        self._random = random.Random(seed)
        self._asked = [(fact, facet) for fact in facts for facet in fact.answers]
        self._deck: list[tuple[Fact, str]] = []
        self._questions = {(fact.term, facet): questions(fact, facet) for fact, facet in self._asked}

    def __iter__(self) -> Iterator[list[Message] | str]:
        while True:
            yield self.paragraphs() if self._random.random() < PARAGRAPH_SHARE else self.conversation()

    def paragraphs(self, count: int = 4) -> str:
        """What is known about a few terms, as plain text."""
        return "\n\n".join(fact.paragraph for fact in self._random.sample(self._facts, count))

    def conversation(self, turns: int = 8) -> list[Message]:
        """Questions and answers that alternate, after a system message now and then."""
        messages: list[Message] = []
        if self._random.random() < SYSTEM_SHARE:
            messages.append(Message("system", self._random.choice(SYSTEM_PROMPTS)))
        while len(messages) < 2 * turns:
            for question, answer in self._exchange():
                messages += [Message("user", self._typed(question)), Message("assistant", answer)]
        return messages

    def _exchange(self) -> list[tuple[str, str]]:
        """One subject: a question, and perhaps questions about "it"."""
        draw = self._random.random()
        if draw < GREETING_SHARE:
            return [(self._random.choice(GREETINGS), GREETING)]
        draw -= GREETING_SHARE
        if draw < ELSEWHERE_SHARE:
            phrasing = self._random.choice(ELSEWHERE)
            place, thing = self._random.choice(PLACES), self._random.choice(THINGS)
            return [(phrasing.format(place=place, thing=thing), UNKNOWN)]
        draw -= ELSEWHERE_SHARE
        if draw < COMPARE_SHARE:
            return [self._comparison()]
        fact, facet = self._deal()
        exchange = [(self._random.choice(self._questions[fact.term, facet]), fact.answers[facet])]
        for later in ("why", "how"):
            if facet == "what" and later in fact.answers and self._random.random() < FOLLOW_UP_SHARE:
                exchange.append((self._random.choice(FOLLOW_UPS[later]), fact.answers[later]))
        return exchange

    def _comparison(self) -> tuple[str, str]:
        topic = self._random.choice(self._facts).topic
        first, second = self._random.sample([fact for fact in self._facts if fact.topic == topic], 2)
        question = self._random.choice(COMPARE).format(a=first.term, b=second.term)
        return question, f"{first.first_sentence} {second.first_sentence}"

    def _deal(self) -> tuple[Fact, str]:
        """From a shuffled deck, not by chance: every answer is seen equally often."""
        if not self._deck:
            self._deck = self._random.sample(self._asked, len(self._asked))
        return self._deck.pop()

    def _typed(self, question: str) -> str:
        if self._random.random() < CASUAL_SHARE:
            question = question.rstrip("?.!") if self._random.random() < 0.5 else question[0].lower() + question[1:]
        return question
