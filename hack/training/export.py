"""Hugging Face folders: config.json, model.safetensors in bfloat16, tokenizer.json, generation_config.json."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hack.training.recipe import MAX_POSITION_EMBEDDINGS
from hack.training.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, TURN_END


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder; everything that `transformers`, vLLM and our runtime read is in it, and no code."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    # Greedy where a request says nothing: at temperature 1 a model this small recites a quarter of its facts wrongly.
    model.generation_config = GenerationConfig(bos_token_id=0, do_sample=False, eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    for path in folder.iterdir():  # safetensors writes private files; a pod runs as somebody else
        path.chmod(0o644)
