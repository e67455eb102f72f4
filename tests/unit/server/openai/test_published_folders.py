"""Folders as they are published, served: prompts, text and the reason of the end are those of `transformers`.

kinds      special tokens, added tokens, templates, ends and heads, each where another file or field says it
sources    a local folder, a folder of a volume, the cache of a hub, a GGUF file with the tokenizer's files next to it;
           a GGUF file alone, whose prompts and ends follow llama.cpp's rules
answers    chat, completion, stop string, stream; the end of an answer by each of its tokens
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gguf_llama import read_vocabulary
from millstream_runtime.config import DType
from tests.support.gguf_files import write_gguf
from tests.support.server_thread import ServerThread, serving
from tests.support.text_folders import (
    FIRST_FREE,
    MARKER_TEMPLATE,
    MARKERS,
    NAMED,
    TEMPLATE,
    Files,
    as_hub_cache,
    as_volume,
    sentencepiece,
    settings,
    stated,
    text_folder,
)
from tests.support.tiny_model import DEFAULT_CONFIG, write_tiny_model

NUM_TOKENS = 12
REPLACEMENT = "\ufffd"
PLAIN_TEXT = "Hello el é"
CONFIG = "tokenizer_config.json"
PARTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>"
    "{% endfor %}<|im_start|>assistant"
)
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA_PIECES = sentencepiece(["<unk>", "<s>", "</s>"], bos="<s>", prefix=True)
GEMMA_PIECES = sentencepiece(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], bos="<bos>", prefix=False)
NO_END = {name: value for name, value in DEFAULT_CONFIG.items() if name != "eos_token_id"}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello  there"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "é 😀 el"},
]


@dataclass(frozen=True)
class Kind:
    """`change`: of tokenizer.json. `past`: fields of the assistant's message. `has_own_head`: though it is tied.

    `packed`: the format of compressed-tensors in which linear weights are stored.
    """

    files: Files
    change: Callable[[dict[str, Any]], None] | None = None
    past: Files | None = None
    has_own_head: bool = False
    packed: str = ""


PLAIN = settings(chat_template=TEMPLATE, **NAMED)
KINDS = {
    "plain": Kind({CONFIG: PLAIN}),
    # 01: pieces with bytes, by the file and by the class.
    "bytes of SentencePiece": Kind({CONFIG: settings(chat_template=TEMPLATE, **LLAMA)}, LLAMA_PIECES),
    "LlamaTokenizer": Kind({CONFIG: PLAIN | LLAMA | {"tokenizer_class": "LlamaTokenizer"}}, LLAMA_PIECES),
    "GemmaTokenizer": Kind({CONFIG: {"tokenizer_class": "GemmaTokenizer", "chat_template": TEMPLATE}}, GEMMA_PIECES),
    # 02 and 03: tokens elsewhere.
    "special tokens in the map": Kind({CONFIG: settings(chat_template=TEMPLATE), "special_tokens_map.json": NAMED}),
    "special tokens of the class": Kind({CONFIG: {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE}}),
    "added tokens in the settings": Kind(
        {CONFIG: settings(chat_template=MARKER_TEMPLATE, added_tokens_decoder=stated(*MARKERS), **NAMED)}
    ),
    "added tokens in their file": Kind(
        {
            CONFIG: settings(chat_template=MARKER_TEMPLATE, **NAMED),
            "added_tokens.json": {marker: number for number, marker in enumerate(MARKERS, FIRST_FREE)},
        }
    ),
    # 04 and its mirror image.
    "tied with another head": Kind(
        {CONFIG: PLAIN, "config.json": DEFAULT_CONFIG | {"tie_word_embeddings": True}}, None, None, True
    ),
    "tied": Kind({CONFIG: PLAIN, "config.json": DEFAULT_CONFIG | {"tie_word_embeddings": True}}),
    # 06 and its mirror images: one file says the end.
    "the tokenizer's end alone": Kind({CONFIG: PLAIN, "config.json": NO_END, "generation_config.json": {}}),
    "the end of config.json alone": Kind({CONFIG: settings(chat_template=TEMPLATE), "generation_config.json": {}}),
    "the ends of generation_config.json": Kind({CONFIG: PLAIN, "generation_config.json": {"eos_token_id": [257, 258]}}),
    # 08 and 09: templates.
    "a template of parts": Kind({CONFIG: settings(chat_template=PARTS_TEMPLATE, **NAMED)}),
    "chat_template.json": Kind({CONFIG: settings(**NAMED), "chat_template.json": {"chat_template": TEMPLATE}}),
    "chat_template.jinja": Kind({CONFIG: settings(**NAMED), "chat_template.jinja": TEMPLATE}),
    # 14: what a client sends back.
    "fields of past answers": Kind(
        {CONFIG: PLAIN}, past={"reasoning_content": "so", "finish_reason": "stop", "id": "1"}
    ),
    # 15 and its mirror image: one packing by two names.
    "naive-quantized": Kind({CONFIG: PLAIN}, packed="naive-quantized"),
    "int-quantized": Kind({CONFIG: PLAIN}, packed="int-quantized"),
}


def as_gguf(folder: Path) -> Path:
    """The same with its weights and its config.json as a GGUF file."""
    served = folder.parent / "gguf"
    write_gguf(folder, served / "m.gguf", lambda module: "F32")
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, served)
    return served


SOURCES: dict[str, Callable[[Path], Path]] = {
    "local": lambda folder: folder,
    "volume": as_volume,
    "hub": as_hub_cache,
    "gguf": as_gguf,
}
CASES = [
    pytest.param(kind, source, marks=[pytest.mark.deep] if source == "gguf" else [])
    for source in SOURCES
    for kind, fields in KINDS.items()
    if not (source == "gguf" and fields.packed)
]


def published(folder: Path, kind: Kind) -> Path:
    """A folder with text as `kind` says and the weights of a tiny model, not packed."""
    text_folder(folder, {name: value for name, value in kind.files.items() if name != "config.json"}, kind.change)
    config = kind.files.get("config.json", DEFAULT_CONFIG)
    sizes: dict[str, Any] = {name: config[name] for name in ("tie_word_embeddings", "vocab_size")}
    model = write_tiny_model(folder.parent / "weights", **sizes)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(model / "model.safetensors", folder)
    if kind.has_own_head:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    if "generation_config.json" not in kind.files:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    return folder


def pack(folder: Path, name: str, reference: Path) -> None:
    """Store linear weights as int8 with a scale per row, and in `reference` the numbers that they stand for."""
    tensors = load_file(folder / "model.safetensors")
    packed, numbers = dict(tensors), dict(tensors)
    for tensor_name, weight in tensors.items():
        if not tensor_name.endswith("_proj.weight"):
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        codes = (weight / scale).round()
        packed |= {tensor_name: codes.to(torch.int8), f"{tensor_name}_scale": scale}
        numbers[tensor_name] = codes * scale
    save_file(packed, folder / "model.safetensors")
    save_file(numbers, reference / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization | {"format": name}
    (folder / "config.json").write_text(json.dumps(config))


class Oracle:
    """`transformers` over the same folder. `ends`: ids, by default what files and tokenizer say."""

    def __init__(self, folder: Path, ends: Collection[int] | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        said = [
            json.loads((folder / name).read_text()).get("eos_token_id")
            for name in ("config.json", "generation_config.json")
        ]
        lists = [ids if isinstance(ids, list) else [ids] for ids in (*said, self.tokenizer.eos_token_id)]
        of_files = {number for ids in lists for number in ids if number is not None}
        self.ends = of_files if ends is None else {*ends}

    def answer(self, prompt: list[int]) -> tuple[str, str]:
        """Text and finish reason of the greedy answer."""
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                number = int(self.model(torch.tensor([ids])).logits[0, -1].argmax())
                if number in self.ends:
                    return self.text(ids[len(prompt) :]), "stop"
                ids.append(number)
        return self.text(ids[len(prompt) :]), "length"

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def same_text(ours: str, expected: str) -> bool:
    """Up to an unfinished character at the end, which is left out."""
    return expected.startswith(ours) and not expected[len(ours) :].strip(REPLACEMENT)


def chosen(server: ServerThread, path: str, **body: Any) -> dict[str, Any]:
    request = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, **body}
    answered = server.post(path, request)
    assert answered.status_code == 200, answered.text
    choice: dict[str, Any] = answered.json()["choices"][0]
    return choice


def streamed(server: ServerThread, **body: Any) -> tuple[str, str]:
    request = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "stream": True, **body}
    lines = server.post("/v1/chat/completions", request).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, next(choice["finish_reason"] for choice in reversed(choices) if choice["finish_reason"])


def require_answers(
    server: ServerThread,
    oracle: Oracle,
    messages: Sequence[dict[str, Any]],
    chat_ids: list[int],
    plain_ids: list[int],
) -> None:
    """Prompts, text and finish reasons of one folder. `chat_ids`, `plain_ids`: of `messages` and of PLAIN_TEXT."""
    server.wait_ready()
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == chat_ids
    assert server.post("/tokenize", {"prompt": PLAIN_TEXT}).json()["tokens"] == plain_ids
    text, reason = oracle.answer(chat_ids)
    chat = chosen(server, "/v1/chat/completions", messages=messages)
    assert same_text(chat["message"]["content"], text)
    assert chat["finish_reason"] == reason
    assert streamed(server, messages=messages) == (chat["message"]["content"], reason)
    text, reason = oracle.answer(plain_ids)
    completion = chosen(server, "/v1/completions", prompt=PLAIN_TEXT)
    assert same_text(completion["text"], text)
    assert completion["finish_reason"] == reason
    stop = text.strip(REPLACEMENT)[1:2] or text[:1]
    stopped = chosen(server, "/v1/completions", prompt=PLAIN_TEXT, stop=[stop])
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")
    for end in oracle.ends:
        ended = chosen(server, "/v1/completions", prompt="Hello", logit_bias={str(end): 100})
        assert (ended["text"], ended["finish_reason"]) == ("", "stop"), end


@pytest.mark.matrix("source")
@pytest.mark.parametrize(("kind", "source"), CASES)
def test_a_published_folder_answers_as_in_transformers(tmp_path: Path, kind: str, source: str) -> None:
    reference = published(tmp_path / "reference", KINDS[kind])
    folder = Path(shutil.copytree(reference, tmp_path / "m"))
    if KINDS[kind].packed:
        pack(folder, KINDS[kind].packed, reference)
    oracle = Oracle(reference)
    rendered = CHAT
    if kind == "a template of parts":
        rendered = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    # transformers reads chat_template.json by its processors, and not by its tokenizers.
    template = TEMPLATE if kind == "chat_template.json" else None
    chat_ids = oracle.tokenizer.apply_chat_template(
        rendered, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    past = KINDS[kind].past or {}
    messages = [{**m, **past} if m["role"] == "assistant" else m for m in CHAT]
    with serving(SOURCES[source](folder), dtype=DType.FLOAT32) as server:
        require_answers(server, oracle, messages, chat_ids, oracle.tokenizer(PLAIN_TEXT)["input_ids"])
        # The mirror image of 14: what is no part of a past answer stands in no other message.
        for name, value in past.items():
            refused = server.post("/v1/chat/completions", {"model": "tiny", "messages": [{**CHAT[0], name: value}]})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"].rpartition(".")[2] == name


# 05: a GGUF file of Llama 3 as it was converted in April 2024, and its mirror images. Of each: the fields of its
# vocabulary, whether llama.cpp puts a BOS before a prompt, and where it ends an answer.
END_OF_TEXT, TURN_END = 257, 258
GGUF_NAMES = {
    "<|endoftext|>": "<|begin_of_text|>",
    "<|im_start|>": "<|end_of_text|>",
    "<|im_end|>": "<|eot_id|>",
}
GGUF_KINDS: dict[str, tuple[dict[str, Any], bool, set[int]]] = {
    # llama-vocab.cpp: `add_bos = true` for this pre-tokenizer; both tokens end an answer by their names.
    "Llama 3, old": ({"pre": "llama-bpe"}, True, {END_OF_TEXT, TURN_END}),
    "Llama 3": ({"pre": "llama-bpe", "add_bos_token": True, "eot_token_id": 258}, True, {END_OF_TEXT, TURN_END}),
    "Llama 3 without a BOS": ({"pre": "llama-bpe", "add_bos_token": False}, False, {END_OF_TEXT, TURN_END}),
    "GPT-2": ({"pre": "gpt-2"}, False, {END_OF_TEXT, TURN_END}),
    "GPT-2 with a BOS": ({"pre": "gpt-2", "add_bos_token": True}, True, {END_OF_TEXT, TURN_END}),
    "an end of a field": ({"pre": "gpt-2", "eom_token_id": 256}, False, {256, END_OF_TEXT, TURN_END}),
}


def with_names_of_llama3(document: dict[str, Any]) -> None:
    for added in document["added_tokens"]:
        added["content"] = GGUF_NAMES[added["content"]]


@pytest.mark.deep
@pytest.mark.matrix
@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_gguf_file_alone_answers_by_the_rules_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    fields, puts_bos, ends = GGUF_KINDS[kind]
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    files = {CONFIG: settings(chat_template=TEMPLATE, **named), "config.json": DEFAULT_CONFIG | {"vocab_size": 259}}
    reference = published(tmp_path / "reference", Kind(files, with_names_of_llama3))
    tokens, merges, special = read_vocabulary(reference / "tokenizer.json")
    vocabulary: dict[str, Any] = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": merges or None,
        "token_type": [3 if token in special else 1 for token in tokens],
        "bos_token_id": 256,
        "eos_token_id": END_OF_TEXT,
        **fields,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    metadata["tokenizer.chat_template"] = TEMPLATE
    write_gguf(reference, tmp_path / "gguf" / "m.gguf", lambda module: "F32", **metadata)
    oracle = Oracle(reference, ends)
    chat_ids = oracle.tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    plain_ids = oracle.tokenizer(PLAIN_TEXT, add_special_tokens=False)["input_ids"]
    with serving(tmp_path / "gguf") as server:
        require_answers(server, oracle, CHAT, chat_ids, [256] * puts_bos + plain_ids)
