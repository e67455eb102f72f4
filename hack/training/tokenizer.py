"""One byte-level BPE for the target and the draft: any text can be encoded, and both mean the same ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from hack.training.conversations import Message

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('A message is of the role system, user or assistant.') }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Radford et al., 2019) with exactly `vocab_size` ids; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"The text is too short for {vocab_size} ids: it gives {tokenizer.get_vocab_size()}.")
    return tokenizer


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation as `CHAT_TEMPLATE` writes it, and which of them the model is to learn to write.

    It learns the assistant's words and the mark that ends them, nothing that a user says.
    """
    ids: list[int] = []
    learnt: list[bool] = []
    for message in messages:
        head = tokenizer.encode(f"{TURN_START}{message.role}\n").ids
        body = tokenizer.encode(f"{message.content}{TURN_END}").ids
        tail = tokenizer.encode("\n").ids
        ids += head + body + tail
        learnt += [False] * len(head) + [message.role == "assistant"] * len(body) + [False] * len(tail)
    return ids, learnt


def encode_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """Ids of one question, up to where the answer begins."""
    text = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
    return list(tokenizer.encode(text).ids)
