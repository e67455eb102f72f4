"""Which fields of a published config.json the runtime accounts for. Any other is refused by name.

    read                          a field that some reader of the runtime takes
    without effect                it changes no arithmetic of an answer: tokens, training, sampling, bookkeeping
    off                           null, false, 0, or empty: what it would switch on is not there (`ON_BY_DEFAULT` are
                                  fields of which false switches something off)
    at the value that is computed the field has one value at which it changes nothing here

A field that changes arithmetic and is dropped gives other answers than the model's, and nobody notices. The planner
refuses the same before a pod exists, so this imports nothing but the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

MAX_NAMED = 4  # fields in one message

# fmt: off
READ = frozenset((
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps",
    "max_position_embeddings", "original_max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype",
    "rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "attention_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "use_bidirectional_attention", "eos_token_id", "quantization_config", "compression_config", "text_config",
    # Experts and latent attention.
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "n_routed_experts", "n_shared_experts", "n_group", "topk_group",
    "topk_method", "routed_scaling_factor", "first_k_dense_replace", "moe_layer_freq", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
))
WITHOUT_EFFECT = frozenset((
    # Where it comes from, and how code runs it.
    "transformers_version", "auto_map", "name_or_path", "model_name", "model_name_or_path", "custom_pipelines",
    "transformers.js_config", "attn_implementation", "use_flash_attn", "use_cache", "use_cache_quantization",
    "use_cache_kernel", "torchscript", "use_bfloat16", "bf16", "fp16", "fp32", "gradient_checkpointing", "ep_size",
    "pretraining_tp", "tensor_parallel_size", "unsloth_fixed", "unsloth_version", "is_llama_config", "license",
    "finetuning_task", "task_specific_params", "quantization", "cache_implementation", "base_model_name_or_path",
    "is_unsloth", "use_fused_rms_norm", "use_fused_rope", "use_fused_cross_entropy", "onnx_export", "neuron",
    "flash_attn", "flash_attention", "flash_attn_2_enabled", "use_sdpa", "torch_compile", "num_logits_to_keep",
    "init_device", "output_past", "use_memory_efficient_attention",
    # What transformers does not read either: Qwen2.5-1M's sparse attention of contexts beyond its chunks.
    "dual_chunk_attention_config",
    # Derived from fields that are read.
    "qk_head_dim", "num_key_value_groups", "head_size", "kv_channels", "n_embd", "n_head", "n_layer", "n_layers",
    "n_inner", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "model_max_length", "max_seq_len",
    "max_seq_length", "tokenizer_class", "tokenizer_model_max_length", "hidden_sizes", "num_heads", "num_layers",
    # Of the general class, and of outputs that are not asked for.
    "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "is_encoder_decoder",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads",
    "chunk_size_feed_forward", "problem_type", "id2label", "label2id", "num_labels", "prefix", "tf_legacy_loss",
    "keys_to_ignore_at_inference", "remove_invalid_values", "exponential_decay_length_penalty",
    # Defaults of sampling: generation_config.json has the word.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "min_p", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    "sampler_seed", "chat_template",
    # Of training.
    "initializer_range", "router_jitter_noise", "input_jitter_noise", "router_z_loss_coef", "aux_loss_alpha", "seq_aux",
    "z_loss", "label_smoothing", "use_aux_loss", "sequence_parallel", "recompute_granularity", "lora", "peft_config",
    "freeze_embeddings", "seq_aux_loss", "loss_type", "train_method", "init_std",
    # Layers that draft tokens: their tensors are left out.
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "eagle_config", "medusa_config",
    # Only what is switched off in every published folder has a use for them.
    "shared_expert_intermediate_size", "layer_norm_eps", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop",
    # Around the language model.
    "vision_config", "audio_config", "thinker_config", "projector_hidden_act", "projector_layer_norm_eps",
    "multimodal_projector_bias", "spatial_merge_size", "mm_tokens_per_image", "image_grid_pinpoints",
    "image_seq_length", "tokens_per_second", "encoder", "use_image_id", "ignore_index", "tokenizer_padding_side",
))
# fmt: on
_BY_NAME = re.compile(
    r"_.*"  # private bookkeeping of transformers
    r"|.*_(token_id|token_ids|token_index|token|tokens_ids|dropout|dropout_prob|pdrop|version|loss_coef|loss_weight)"
    r"|(vision|image|video|audio|mm|projector|training|train|wandb|dataset|tokenizer|mtp|lora|neftune|summary)_.*"
)
ONE = (1, 1.0)
# Names of other families' fields, and the value at which Llama's layers compute the same.
AT_VALUE: Mapping[str, tuple[object, ...]] = {
    "residual_multiplier": ONE,
    "embedding_multiplier": ONE,
    "logits_scaling": ONE,
    "logit_scale": ONE,
    "rotary_pct": ONE,
    "rotary_emb_base": (10000, 10000.0),
    "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
    "activation": ("silu", "swiglu"),
    "position_embedding_type": ("rope", "absolute"),  # transformers wrote the second into every config once
    "layernorm_type": ("rms_norm", "rmsnorm"),
    "use_rms_norm": (True,),
    "is_causal": (True,),
    "full_attn_mod": ONE,  # Phi-4-mini
    "interpolate_factor": ONE,  # Phi-4-mini
}
ON_BY_DEFAULT = frozenset(("is_causal", "use_rms_norm"))  # false is another model
# ... and by family.
OF_FAMILY: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "qwen2": {"qkv_bias": (True,), "no_bias": (True,)},
    "qwen3": {"use_qk_norm": (True,), "qk_norm": (True,)},
    "qwen3_moe": {"use_qk_norm": (True,), "qk_norm": (True,)},
    "gemma3": {"use_qk_norm": (True,), "qk_norm": (True,), "query_rescale_scalar": ONE},
    "deepseek_v2": {"scoring_func": ("softmax",)},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "moe_router_activation_func": ("sigmoid",)},
}
# Fields that a reader of one family takes, or refuses by itself, with its own words.
BY_READERS: Mapping[str, frozenset[str]] = {
    "llama": frozenset(("bias", "qkv_bias", "clip_qkv")),
    "gemma2": frozenset(("sliding_window_size",)),  # a second name of `sliding_window`, in Google's own files
    # Planned only: no layer of these is here yet.
    "falcon": frozenset(
        (
            *("multi_query", "parallel_attn", "num_kv_heads", "new_decoder_architecture", "bias", "ffn_hidden_size"),
            "num_ln_in_parallel_attn",
        )
    ),
    "gpt_neox": frozenset(("use_parallel_residual", "rotary_pct", "rotary_emb_base")),
}
# fmt: off
OF_ROPE = frozenset((
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "full_attention",
    "sliding_attention", "short_mscale", "long_mscale", "finetuned", "max_position_embeddings",
    "attn_factor",  # of DeepSeek-R1-0528-Qwen3-8B; transformers reads `attention_factor` alone, and so does this
))
OF_QUANTIZATION = frozenset((
    "quant_method", "elements", "modules", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "sym",
    "desc_act", "version", "format", "fmt", "checkpoint_format", "activation_scheme", "weight_block_size",
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload",
    "kv_cache_scheme", "quant_algo", "kv_cache_quant_algo", "lm_head", "is_marlin_format", "dynamic",
    "sparsity_config", "modules_to_not_convert", "modules_in_block_to_quantize", "llm_int8_skip_modules",
    "config_groups", "ignored_layers", "ignore", "quantization_status", "global_compression_ratio",
    # How it was made, and how other code runs it.
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_seqlen", "model_name_or_path",
    "model_file_base_name", "meta", "pack_dtype", "packing_format", "packing", "pack_method", "backend", "use_exllama",
    "exllama_config", "max_input_length", "cache_block_outputs", "use_cuda_fp16", "dataset", "tokenizer",
    "batch_size", "pad_token_id", "block_name_to_quantize", "module_name_preceding_first_block", "provider", "mse",
    "act_group_aware", "hyb_act", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "scale_fmt", "hessian", "method",
    "is_checkpoint_fp8_serialized", "activation_scale_ub", "observer", "nsamples", "seqlen", "iters", "lr",
    "minmax_lr", "low_gpu_mem_usage", "train_bs", "data_type", "scale_dtype", "amp", "autoround_version",
    "to_quant_block_names", "enable_minmax_tuning", "enable_quanted_input", "enable_norm_bias_tuning", "producer",
    "quantizer", "quantization_version", "calibration", "offload_to_disk", "failsafe", "lm_head_quantized", "fallback",
    "gradient_accumulate_steps", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "disable_exllama",
    "cache_examples_on_gpu",
))
# fmt: on
ROPE_AT_VALUE: Mapping[str, tuple[object, ...]] = {"extrapolation_factor": ONE}
QUANTIZATION_AT_VALUE: Mapping[str, tuple[object, ...]] = {"act_bits": (16, 32)}  # AutoRound's for "are not quantized"
SECTIONS = {
    "rope_scaling": (OF_ROPE, ROPE_AT_VALUE),
    "rope_parameters": (OF_ROPE, ROPE_AT_VALUE),
    "quantization_config": (OF_QUANTIZATION, QUANTIZATION_AT_VALUE),
    "compression_config": (OF_QUANTIZATION, QUANTIZATION_AT_VALUE),
}


def unread_fields(config: Mapping[str, object], family: str) -> list[str]:
    """Return the fields that change arithmetic and that nothing reads, by their paths.

    Args:
        config: the language model's fields, of which none was checked.
        family: `model_type` of its row of `model_families.py`.
    """
    at_value = {**AT_VALUE, **OF_FAMILY.get(family, {})}
    known = READ | WITHOUT_EFFECT | BY_READERS.get(family, frozenset())
    found = [name for name in _unknown(config, known, at_value) if _BY_NAME.fullmatch(name) is None]
    for section, (names, values) in SECTIONS.items():
        inner = config.get(section)
        if isinstance(inner, Mapping):
            unknown = _unknown(inner, names, values)
            found += [f"{section}.{name}" for name in unknown if not name.startswith(("_", "bnb_"))]
    return found


def problem_with_unread(names: list[str]) -> str:
    """Return a sentence about `unread_fields`, to follow the name of the file."""
    listed = ", ".join(name[:80] for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    is_one = len(names) == 1
    return (
        f"{listed}{more} {'is a field' if is_one else 'are fields'} that this version does not read, so the answers "
        f"could differ from the model's; remove {'it' if is_one else 'them'} if transformers ignores "
        f"{'it' if is_one else 'them'} for this architecture, or take another checkpoint."
    )


def _unknown(
    values: Mapping[str, object], known: frozenset[str], at_value: Mapping[str, tuple[object, ...]]
) -> Iterator[str]:
    for name, value in values.items():
        is_off = value is None if name in ON_BY_DEFAULT else not value
        if is_off or name in known:
            continue
        if isinstance(value, str | int | float) and value in at_value.get(name, ()):
            continue
        yield str(name)
