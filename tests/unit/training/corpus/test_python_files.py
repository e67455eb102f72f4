"""What is read from a Python file: running text of its documentation, and its code without that."""

from __future__ import annotations

from hack.training.corpus.python_files import code, entries, paragraphs

FILE = '''"""Tools that count the words of a text and print them."""

import sys


class Counter:
    """A counter of the words that a text holds.

    >>> Counter("a b").total
    2
    """

    limit: int = 5
    """The largest number of words that one line may hold.

    More words than these are counted on the next line.
    """

    total: int = Field(default=0, description="How many words the text holds after it was read.")

    def count(self, text):
        """Short."""
        return len(text.split())  # not a docstring

    def clear(self):
        """Forget every word that was counted until now."""
'''


def test_docstrings_attributes_and_descriptions_are_entries() -> None:
    found = {(entry.kind, entry.name): entry.paragraphs for entry in entries(FILE)}
    assert found == {
        ("module", ""): ("Tools that count the words of a text and print them.",),
        ("class", "Counter"): ("A counter of the words that a text holds.",),
        ("field", "Counter.limit"): (
            "The largest number of words that one line may hold.",
            "More words than these are counted on the next line.",
        ),
        ("field", "Counter.total"): ("How many words the text holds after it was read.",),
        ("function", "Counter.clear"): ("Forget every word that was counted until now.",),
    }


def test_code_is_the_file_without_its_docstrings_and_still_compiles() -> None:
    text = code(FILE)
    compile(text, "file.py", "exec")
    assert "Tools that count" not in text
    assert "Forget every word" not in text
    assert "return len(text.split())  # not a docstring" in text


def test_paragraphs_are_whole_sentences_on_one_line() -> None:
    documentation = """Send a request to :class:`~http.Server` and
    return what ``read`` gives.

    Example of how a request is sent to it:

        server.send(1)

    Args:
        name: the name of the server that is asked.

    ```python
    Every line in a fence is code, even if it reads so.

    And so is the second paragraph of a fence here.
    ```

    and no sentence begins in lower case here.

    Notes
    -----
    The heading of a section is not part of its text.
    """
    assert paragraphs(documentation) == (
        "Send a request to `http.Server` and return what `read` gives.",
        "Example of how a request is sent to it:",
        "The heading of a section is not part of its text.",
    )


def test_a_file_that_is_no_python_gives_nothing() -> None:
    assert entries("def (") == []
    assert code("def (") == ""
