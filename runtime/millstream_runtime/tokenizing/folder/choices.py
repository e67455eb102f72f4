"""What was chosen from which file of a model folder: for the log of the boot and for `/ready`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED = 8  # tokens in one message


@dataclass(frozen=True, slots=True)
class TextChoices:
    """`tokenizer`, `template`: names of files; no template is an empty name.

    `pipeline`: the file, or the tokenizer's class, that decides how text becomes tokens and tokens text.

    `special_tokens`: name → (token, file or class). `added_tokens`: file → how many it says. `end_tokens`: ids, and
    `end_sources` what each file says. `notes`: what the files contradict each other in, a sentence each.
    """

    tokenizer: str
    tokenizer_class: str = ""
    pipeline: str = ""
    template: str = ""
    detokenizer: str = ""
    special_tokens: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    end_tokens: Sequence[int] = ()
    end_sources: Mapping[str, Sequence[int]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def measured(self) -> dict[str, Any]:
        """As JSON; what there is not is left out."""
        chosen: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "tokenizer_class": self.tokenizer_class,
            "pipeline": self.pipeline,
            "special_tokens": {
                name: {"token": token, "from": source} for name, (token, source) in self.special_tokens.items()
            },
            "added_tokens": dict(self.added_tokens),
            "chat_template": self.template,
            "detokenizer": self.detokenizer,
            "end_tokens": {
                "ids": list(self.end_tokens),
                "from": {file: list(ids) for file, ids in self.end_sources.items()},
            },
            "notes": list(self.notes),
        }
        return {name: value for name, value in chosen.items() if value}

    def log_fields(self) -> dict[str, Any]:
        """The same, each field a short text."""
        tokens = " ".join(f"{name}={token}({source})" for name, (token, source) in self.special_tokens.items())
        ends = " ".join(f"{file}:{','.join(map(str, ids))}" for file, ids in self.end_sources.items())
        return {
            "tokenizer": self.tokenizer,
            "tokenizer_class": self.tokenizer_class,
            "pipeline": self.pipeline,
            "special_tokens": tokens,
            "added_tokens": " ".join(f"{file}:{count}" for file, count in self.added_tokens.items()),
            "chat_template": self.template or "none",
            "detokenizer": self.detokenizer,
            "end_tokens": ",".join(map(str, self.end_tokens)) or "none",
            "end_tokens_from": ends,
        }


def named_tokens(tokens: Sequence[str]) -> str:
    """Tokens for a message: the first ones, and how many more there are."""
    shown = ", ".join(f"{token:.40}" for token in tokens[:MAX_NAMED])
    return shown + (f" and {len(tokens) - MAX_NAMED} more" if len(tokens) > MAX_NAMED else "")
