"""Questions about a term, and which of them training never sees.

For every term and facet two phrasings are held out, chosen by a hash, so that each phrasing is learnt with other terms
and each term with other phrasings: a model that answers a held-out question has put the two together.
"""

from __future__ import annotations

import hashlib

from hack.training.knowledge import Fact

PHRASINGS: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {name}?",
        "Explain {name}.",
        "Define {name}.",
        "What does {bare} mean?",
        "Can you explain {name}?",
        "Tell me about {name}.",
        "Describe {name}.",
        "I keep hearing about {name}. What is it?",
        "What exactly is {name}?",
        "Give me a definition of {bare}.",
        "Please explain {name} in simple words.",
        "What's {name}?",
    ),
    "why": (
        "Why does {name} matter?",
        "Why is {name} important?",
        "Why do I need {name}?",
        "What is {name} good for?",
        "Why would I use {name}?",
        "What is the point of {name}?",
        "Why should I care about {name}?",
        "Explain why {name} matters.",
        "What is the use of {name}?",
        "Tell me why {name} is useful.",
    ),
    "how": (
        "How does {name} work?",
        "Explain how {name} works.",
        "Can you explain how {name} works?",
        "Describe how {name} works.",
        "Tell me how {name} works.",
        "In simple words, how does {name} work?",
        "How does {name} work inside?",
        "What does {name} do, step by step?",
    ),
}
FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "why": ("Why does it matter?", "Why is it important?", "And why do I need it?", "What is it good for?"),
    "how": ("How does it work?", "And how does it work?", "Can you explain how it works?"),
}
HELD_OUT_PHRASINGS = 2
# Asked by the README, by `make demo` and by the tests: never trained on, whatever the hash says.
ALWAYS_HELD_OUT = ("What is a KV cache?", "What is a Kubernetes pod?", "Why does continuous batching matter?")


def questions(fact: Fact, facet: str) -> list[str]:
    """Every question about this facet that training may use, under every name of the term."""
    return [
        question
        for name in fact.names
        for phrasing in PHRASINGS[facet]
        if phrasing not in held_out_phrasings(fact, facet) and (question := ask(phrasing, name)) not in ALWAYS_HELD_OUT
    ]


def held_out_questions(fact: Fact, facet: str) -> list[str]:
    """Every question about this facet that training never sees, by the term's usual name."""
    chosen = [ask(phrasing, fact.term) for phrasing in held_out_phrasings(fact, facet)]
    always = [ask(p, name) for name in fact.names for p in PHRASINGS[facet] if ask(p, name) in ALWAYS_HELD_OUT]
    return list(dict.fromkeys(chosen + always))


def held_out_phrasings(fact: Fact, facet: str) -> tuple[str, ...]:
    """The phrasings that are never used with this term. Stable: it depends on the term and the phrasing alone."""

    def rank(phrasing: str) -> bytes:
        return hashlib.sha256(f"{fact.term}\0{phrasing}".encode()).digest()

    return tuple(sorted(PHRASINGS[facet], key=rank)[:HELD_OUT_PHRASINGS])


def ask(phrasing: str, name: str) -> str:
    """The question, starting with a capital letter."""
    bare = name.split(" ", 1)[1] if name.split(" ", 1)[0] in ("a", "an", "the") else name
    question = phrasing.format(name=name, bare=bare)
    return question[0].upper() + question[1:]
