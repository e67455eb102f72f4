"""The special tokens of a GGUF file by the rules of llama.cpp (`llama_vocab::impl::load`), which finds them by name
where the metadata says nothing.

    add_bos_token       absent: true for SentencePiece, and for the pre-tokenizers of Llama 3
    ids                 absent, or of no token of the vocabulary: 1, 2 and 0 for BOS, EOS and unknown of SentencePiece,
                        none for all others
    ends of an answer   eos, eot, eom and the fill-in-the-middle tokens `pad`, `rep` and `sep` of the metadata, and
                        every token with one of the names below, whatever its type says
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from millstream_runtime.gguf.metadata_fields import MetadataFields

PREFIX = "tokenizer.ggml."
SENTENCEPIECE_IDS: Mapping[str, int] = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
END_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What ends an answer, by the name of the token.
END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)
# Tokens of fill-in-the-middle that end an answer: the fields of their ids, and their names where no field says one.
FIM_ENDS: Mapping[str, frozenset[str]] = {
    "fim_pad_token_id": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
    "fim_rep_token_id": frozenset({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}),
    "fim_sep_token_id": frozenset({"<|file_sep|>"}),
}
_ALL_NAMES = END_NAMES.union(*FIM_ENDS.values())
PRE_TOKENIZERS_WITH_BOS = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    }
)


def token_id(metadata: Mapping[str, Any], field: str) -> int | None:
    """The id that a field says, else the one that the kind of the vocabulary has by itself; None: there is none."""
    said, size = metadata.get(f"{PREFIX}{field}"), _vocabulary_size(metadata)
    if _is_integer(said) and (size is None or 0 <= said < size):
        return int(said)
    by_itself = SENTENCEPIECE_IDS.get(field) if metadata.get(f"{PREFIX}model") == "llama" else None
    return by_itself if by_itself is not None and size is not None and by_itself < size else None


def ignored_ids(metadata: Mapping[str, Any]) -> list[str]:
    """A sentence for each id of a special token that is none of the vocabulary's; 4294967295 stands for none."""
    size = _vocabulary_size(metadata)
    return [
        f"{name} is {value}, and the vocabulary has {size} tokens: it is ignored, as in llama.cpp."
        for name, value in metadata.items()
        if name.startswith(PREFIX) and name.endswith("_token_id") and _is_integer(value)
        if size is not None and not 0 <= value < size
    ]


def _vocabulary_size(metadata: Mapping[str, Any]) -> int | None:
    tokens = metadata.get(f"{PREFIX}tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def adds_bos(fields: MetadataFields) -> bool:
    """Whether a BOS stands before a plain prompt. `fields`: those with PREFIX."""
    by_default = fields.word("model") == "llama" or fields.word("pre") in PRE_TOKENIZERS_WITH_BOS
    return fields.flag("add_bos_token", by_default)


def named_ends(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens that end an answer by their names, with their ids. They are special, whatever the file says."""
    tokens = metadata.get(f"{PREFIX}tokens")
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens if isinstance(tokens, list) else ()):
        if isinstance(token, str) and token in _ALL_NAMES:
            ids.setdefault(token, number)
    ends = {token: number for token, number in ids.items() if token in END_NAMES}
    for field, names in FIM_ENDS.items():
        present = {token: number for token, number in ids.items() if token in names}
        if token_id(metadata, field) is None and present:
            first = min(present, key=present.__getitem__)
            ends[first] = present[first]
    is_harmony = {"<|return|>", "<|call|>"} <= ends.keys()
    if is_harmony or ("<|flush|>" in ends and ends.keys() & {"<|call|>", "<|calls|>"}):
        ends.pop("<|end|>", None)  # ends a message there, and not the answer
    if "<|tool_response>" in ends:
        ends.pop("</s>", None)
    return ends


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of all tokens that end an answer, in ascending order."""
    fields = (*END_FIELDS, *FIM_ENDS)
    ids = {number for field in fields if (number := token_id(metadata, field)) is not None}
    ends = named_ends(metadata)
    left_out = _not_ends(metadata, ends)
    return sorted((ids | set(ends.values())) - left_out)


def _not_ends(metadata: Mapping[str, Any], ends: Mapping[str, int]) -> set[int]:
    """Ids of `<|end|>` and `</s>` where the vocabulary says by its other tokens that they are no ends."""
    tokens = metadata.get(f"{PREFIX}tokens")
    names = {"<|end|>", "</s>"} - ends.keys()
    return {number for number, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in names}
