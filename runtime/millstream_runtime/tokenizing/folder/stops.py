"""Where an answer ends: the union of what the files of a folder say.

    generation_config.json   eos_token_id
    config.json              eos_token_id, of the whole model before that of its text_config; or a GGUF file's metadata
    the tokenizer            eos_token, by its id

vLLM stops at the first and the last; we stop at config.json's, too. One exception: where generation_config.json names
ends, an id of config.json that is ordinary text is no end. Fine-tunes of Llama 3 carry the 2 of LlamaConfig, which is
`#` there. The default of a *model's* class never counts. Pure: files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_runtime.tokenizing.folder.files import JsonFile, invalid

FIELD = "eos_token_id"


@dataclass(frozen=True, slots=True)
class EndTokens:
    """`ids`: that end an answer. `sources`: file → what it says. `left_out`: id → why it is no end."""

    ids: frozenset[int]
    sources: Mapping[str, Sequence[int]]
    left_out: Mapping[int, str]

    @property
    def difference(self) -> str:
        """What the files say, where they differ; else empty."""
        if len({frozenset(ids) for ids in self.sources.values()}) < 2 and not self.left_out:
            return ""
        said = "; ".join(f"{file} says {_listed(ids)}" for file, ids in self.sources.items())
        reasons = "".join(f" {number} is left out: {reason}." for number, reason in self.left_out.items())
        return f"{said}: an answer ends at {_listed(sorted(self.ids))}.{reasons}"


def decide_end_tokens(
    config: JsonFile,
    generation: JsonFile | None,
    tokenizer_end: tuple[str, int] | None,
    *,
    vocab_size: int | None,
    is_plain_text: Callable[[int], bool],
) -> EndTokens:
    """Decide.

    Args:
        config: config.json, or a GGUF file's metadata as such.
        tokenizer_end: the file that says the tokenizer's EOS, and its id.
        vocab_size: of the model; None: unknown.
        is_plain_text: whether an id is one of the vocabulary's ordinary pieces of text.

    Raises:
        RuntimeFailure: CheckpointInvalid, an id is no integer; the message names the file.
    """
    of_generation = () if generation is None else _ids(generation.values.get(FIELD), generation.name)
    of_config = _ids(_config_value(config.values), config.name)
    of_tokenizer = () if tokenizer_end is None else (tokenizer_end[1],)
    left_out: dict[int, str] = {}
    for number in (*of_generation, *of_config, *of_tokenizer):
        if number < 0 or (vocab_size is not None and number >= vocab_size):
            left_out[number] = "the model has no such token"
    for number in of_config:
        others = (*of_generation, *of_tokenizer)
        if of_generation and number not in others and number not in left_out and is_plain_text(number):
            left_out[number] = "it is ordinary text, and generation_config.json names other ends"
    said = ((generation.name if generation is not None else "", of_generation), (config.name, of_config))
    sources: dict[str, Sequence[int]] = {name: ids for name, ids in said if ids}
    if tokenizer_end is not None:
        sources[tokenizer_end[0]] = of_tokenizer
    ids = frozenset((*of_generation, *of_config, *of_tokenizer)) - left_out.keys()
    return EndTokens(ids, sources, left_out)


def _config_value(values: Mapping[str, Any]) -> object:
    """What the whole model says counts before what its language model says."""
    if values.get(FIELD) is not None:
        return values[FIELD]
    text = values.get("text_config")
    return text.get(FIELD) if isinstance(text, Mapping) else None


def _ids(value: object, file: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise invalid(f"{file}: eos_token_id is {value!r:.80}; it must be an integer or a list of them.")
    return tuple(dict.fromkeys(ids))


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or "none"
