"""Which class of `transformers` a folder's tokenizer is, and the special tokens that the class has by itself.

Published folders leave out what their class says anyway: a Llama 2 without `bos_token` has `<s>`. The tables hold what
`transformers` 5.23 does; a test compares each entry with it. No class of a *model's* config is read: the EOS of
LlamaConfig is 2, whatever the vocabulary has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_runtime.tokenizing.folder.token import wrong

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERIC = "TokenizersBackend"  # has no tokens by itself; PreTrainedTokenizerFast is another name of it


def _tokens(*contents: str | None) -> Mapping[str, str]:
    """In the order of SPECIAL_TOKEN_NAMES; None and what is left out: the class has none."""
    return {name: token for name, token in zip(SPECIAL_TOKEN_NAMES, contents, strict=False) if token is not None}


_ALBERT = _tokens("[CLS]", "[SEP]", "<unk>", "[SEP]", "<pad>", "[CLS]", "[MASK]")
_ROBERTA = _tokens("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>", "<mask>")
_BERT = _tokens(None, None, "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
_DEBERTA = _tokens("[CLS]", "[SEP]", "[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
_GPT2 = _tokens("<|endoftext|>", "<|endoftext|>", "<|endoftext|>")
_LLAMA = _tokens("<s>", "</s>", "<unk>")
_XLNET = _tokens("<s>", "</s>", "<unk>", "<sep>", "<pad>", "<cls>", "<mask>")
_GEMMA = _tokens("<bos>", "<eos>", "<unk>", None, "<pad>", None, "<mask>")
_T5 = _tokens(None, "</s>", "<unk>", None, "<pad>")
_QWEN2 = _tokens(None, "<|endoftext|>", "<|endoftext|>", None, "<|endoftext|>")
_XGLM = _tokens("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>")

# By the class's name without the "Fast" at its end.
CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("AlbertTokenizer", "FNetTokenizer", "RemBertTokenizer"), _ALBERT),
    **dict.fromkeys(("BartTokenizer", "BarthezTokenizer", "BlenderbotTokenizer", "CamembertTokenizer"), _ROBERTA),
    **dict.fromkeys(("LEDTokenizer", "LayoutLMv3Tokenizer", "LayoutXLMTokenizer", "LukeTokenizer"), _ROBERTA),
    **dict.fromkeys(("MBartTokenizer", "MLukeTokenizer", "MarkupLMTokenizer", "MvpTokenizer"), _ROBERTA),
    **dict.fromkeys(("NllbTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer"), _ROBERTA),
    **dict.fromkeys(("BertTokenizer", "ConvBertTokenizer", "LayoutLMv2Tokenizer", "LxmertTokenizer"), _BERT),
    **dict.fromkeys(("MobileBertTokenizer", "RoFormerTokenizer", "SplinterTokenizer", "SqueezeBertTokenizer"), _BERT),
    "BigBirdTokenizer": _tokens("<s>", "</s>", "<unk>", "[SEP]", "<pad>", "[CLS]", "[MASK]"),
    "CLIPTokenizer": _tokens("<|startoftext|>", "<|endoftext|>", "<|endoftext|>", None, "<|endoftext|>"),
    **dict.fromkeys(("CodeGenTokenizer", "GPT2Tokenizer", "WhisperTokenizer"), _GPT2),
    **dict.fromkeys(("CodeLlamaTokenizer", "LlamaTokenizer"), _LLAMA),
    "CohereTokenizer": _tokens(
        "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<UNK>", "<SEP>", "<PAD>", "<CLS>", "<MASK_TOKEN>"
    ),
    **dict.fromkeys(("FunnelTokenizer", "XLNetTokenizer"), _XLNET),
    **dict.fromkeys(("DebertaTokenizer", "DebertaV2Tokenizer"), _DEBERTA),
    "EsmcTokenizer": _tokens(None, "<eos>", "<unk>", None, "<pad>", "<cls>", "<mask>"),
    "GPTNeoXTokenizer": _tokens("<|endoftext|>", "<|endoftext|>", "<|endoftext|>", None, "<|padding|>"),
    **dict.fromkeys(("GemmaTokenizer", "Siglip2Tokenizer"), _GEMMA),
    "HerbertTokenizer": _tokens(None, None, "<unk>", "</s>", "<pad>", "<s>", "<mask>"),
    **dict.fromkeys(("LasrTokenizer", "T5Tokenizer", "VideoPrismTokenizer"), _T5),
    "MBart50Tokenizer": _tokens(None, "</s>", "<unk>", "</s>", "<pad>", "<s>", "<mask>"),
    "MPNetTokenizer": _tokens("<s>", "</s>", "[UNK]", "</s>", "<pad>", "<s>", "<mask>"),
    "NougatTokenizer": _tokens("<s>", "</s>", "<unk>", None, "<pad>"),
    "OpenAIGPTTokenizer": _tokens(None, None, "<unk>"),
    "PegasusTokenizer": _tokens(None, "</s>", "<unk>", None, "<pad>", None, "<mask_2>"),
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen3_5Tokenizer"), _QWEN2),
    "ReformerTokenizer": _tokens(None, "</s>", "<unk>"),
    **dict.fromkeys(("SeamlessM4TTokenizer", "XGLMTokenizer"), _XGLM),
    "UdopTokenizer": _tokens(None, "</s>", "<unk>", "</s>", "<pad>"),
}

# Tokens with names that the class alone has.
OWN_TOKENS_OF_CLASS: Mapping[str, Mapping[str, str]] = {
    "CodeLlamaTokenizer": {
        "prefix_token": "\u2581<PRE>",
        "middle_token": "\u2581<MID>",
        "suffix_token": "\u2581<SUF>",
        "eot_token": "\u2581<EOT>",
        "fill_token": "<FILL_ME>",
    },
}

# Of the families that the runtime knows; `transformers` has no class of their own for llama, deepseek and falcon.
CLASS_OF_MODEL_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("mistral", "mistral3", "ministral", "ministral3", "mixtral", "phi3", "internlm3"), GENERIC),
    **dict.fromkeys(("iquestcoder", "internlm2", "llava", "nemotron", "granite"), GENERIC),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
}
# Of these the class above counts and not the one that their tokenizer_config.json names, which is known to be wrong.
MODEL_TYPES_WITH_A_WRONG_CLASS = frozenset(
    {"qwen2", "phi3", "internlm2", "internlm3", "iquestcoder", "llava", "nemotron"}
)
_GENERIC_NAMES = frozenset({GENERIC, "PreTrainedTokenizer", "PythonBackend"})


def tokenizer_class(
    settings: Mapping[str, Any], config: Mapping[str, Any], *, settings_file: str, is_byte_level: bool
) -> str:
    """The class that `AutoTokenizer` makes of a folder, without the "Fast" at its end.

    Args:
        settings, config: of tokenizer_config.json, whose name `settings_file` is, and of config.json.
        is_byte_level: whether the tokenizer.json has a byte-level pre-tokenizer or decoder, which no Llama class has.

    Raises:
        RuntimeFailure: CheckpointInvalid, a class is no text.
    """
    model_type = config.get("model_type")
    registered = CLASS_OF_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    named = _named(settings, settings_file) or _named(config, "config.json")
    if named is None:
        return registered or GENERIC
    is_wrong = isinstance(model_type, str) and model_type in MODEL_TYPES_WITH_A_WRONG_CLASS
    if named == "LlamaTokenizer" and is_byte_level and not is_wrong:
        return GENERIC
    if registered is None or registered == named:
        return GENERIC if named in _GENERIC_NAMES else named
    if registered == GENERIC or (named in _GENERIC_NAMES and not is_wrong):
        return GENERIC
    return registered if is_wrong else named


def _named(values: Mapping[str, Any], file: str) -> str | None:
    name = values.get("tokenizer_class")
    if name is None or name == "":
        return None
    if not isinstance(name, str):
        raise wrong(file, "tokenizer_class", name, "a text")
    name = name.removesuffix("Fast")
    return GENERIC if name in _GENERIC_NAMES else name
