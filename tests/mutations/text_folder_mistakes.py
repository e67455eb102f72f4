"""Mistakes in what a model folder says about text."""

from __future__ import annotations

from tests.mutations.mutation import RUNTIME, Mutation

FOLDER = f"{RUNTIME}/tokenizing/folder"
KINDS = "tokenizing/folder/test_folder_tokens.py::test_chats_prompts_and_text_are_those_of_transformers"
CLASSES = "tokenizing/folder/test_class_pipelines.py"
ENDS = "tokenizing/folder/test_stops.py"

MISTAKES = [
    Mutation.of(
        "a space stands before every piece of a Llama tokenizer whose settings do not say legacy",
        f"{FOLDER}/class_pipelines.py",
        'scheme = ("always" if options.legacy else "first")',
        'scheme = ("first" if options.legacy is False else "always")',
        f"{CLASSES}::test_a_class_builds_the_pipeline_that_it_builds_in_transformers",
    ),
    Mutation.of(
        "added tokens of tokenizer.json count where its class reads those of the settings alone",
        f"{FOLDER}/folder_text.py",
        "            vocabulary = vocabulary.with_class()",
        "            pass",
        f"{CLASSES}::test_ids_and_text_of_random_texts_are_those_of_transformers",
    ),
    Mutation.of(
        "special_tokens_map.json is not read",
        f"{FOLDER}/special_tokens.py",
        "    for file in (settings, map_file):",
        "    for file in (settings,):",
        KINDS,
    ),
    Mutation.of(
        "added tokens get their ids in the order of the file",
        f"{FOLDER}/added_tokens.py",
        "special.flagged(token) for _, token in sorted(stated.items())]",
        "special.flagged(token) for _, token in stated.items()]",
        KINDS,
    ),
    Mutation.of(
        "a list of special_tokens_map.json that another replaces makes no token of added_tokens.json special",
        f"{FOLDER}/added_tokens.py",
        "contents = special.listed | {",
        "contents = {",
        "tokenizing/folder/test_folder_tokens.py::test_a_token_of_added_tokens_json_that_the_map_lists_is_no_text",
    ),
    Mutation.of(
        "generation_config.json replaces the end of config.json",
        f"{FOLDER}/stops.py",
        "ids = frozenset((*of_generation, *of_config, *of_tokenizer)) - left_out.keys()",
        "ids = frozenset((*(of_generation or of_config), *of_tokenizer)) - left_out.keys()",
        f"{ENDS}::test_an_answer_ends_at_all_ends_of_the_files_and_of_the_tokenizer",
    ),
    Mutation.of(
        "a GGUF file without add_bos_token adds none",
        f"{RUNTIME}/gguf/special_tokens.py",
        'fields.word("model") == "llama" or fields.word("pre") in PRE_TOKENIZERS_WITH_BOS',
        'fields.word("model") == "llama"',
        "gguf/test_special_tokens.py::test_a_bos_stands_before_prompts_of_the_pre_tokenizers_of_llama_3",
    ),
    Mutation.of(
        "an id of a GGUF file that is no token of its vocabulary counts",
        f"{RUNTIME}/gguf/special_tokens.py",
        "if _is_integer(said) and (size is None or 0 <= said < size):",
        "if _is_integer(said):",
        "gguf/test_special_tokens.py::test_an_id_that_is_no_token_is_none_of_other_vocabularies_and_is_named",
    ),
    Mutation.of(
        "an answer that is sent back with its thinking is refused",
        f"{RUNTIME}/server/openai/request_fields.py",
        'REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})',
        'REASONING_PARTS = frozenset({"redacted_thinking", "reasoning"})',
        "server/openai/test_past_answers.py::test_the_text_of_an_answer_is_read_from_its_parts_without_its_reasoning",
    ),
]
