"""The traps of GPU kernels that this project knows, as mutations of the kernels that avoid them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KERNELS = "kernels/millstream_kernels"
TESTS = "tests/unit/kernels"


def _mutation(trap: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    named = tuple(f"{TESTS}/{test}" for test in tests)
    return Mutation(trap, f"{KERNELS}/{file}.py", old, new, named)


ATTENTION = [
    _mutation(
        "2^(-inf - -inf) is NaN where a row has seen nothing yet",
        "attention/tile",
        'reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "reference = new_maximum",
        "test_decode.py::test_scores_that_are_minus_infinity_weigh_nothing",
    ),
    _mutation(
        "the same where splits are combined",
        "attention/decode",
        'reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "reference = new_maximum",
        "test_decode.py::test_scores_that_are_minus_infinity_weigh_nothing",
    ),
    _mutation(
        "0 / 0 is NaN in a padded request",
        "attention/decode",
        "result = result / tl.where(total == 0.0, 1.0, total)",
        "result = result / total",
        "test_decode.py::test_a_padded_request_of_length_0_gets_zeros",
    ),
    _mutation(
        "the same in a prompt",
        "attention/prefill",
        "attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]",
        "attended = attended / total[:, None]",
        "test_prefill.py::test_a_padded_request_of_length_0_gets_zeros",
    ),
    _mutation(
        "0 * NaN of a stale value is NaN: only scores are masked",
        "attention/decode",
        "values + places_of_tokens[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0",
        "values + places_of_tokens[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0",
        "test_decode.py::test_it_is_as_good_as_torch",
        "test_decode.py::test_a_request_with_nan_leaves_its_neighbours_alone",
    ),
    _mutation(
        "the same in a prompt",
        "attention/prefill",
        "values + places[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0",
        "values + places[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0",
        "test_prefill.py::test_it_is_as_good_as_torch",
        "test_prefill.py::test_a_request_with_nan_leaves_its_neighbours_alone",
    ),
    _mutation(
        "the same in a latent",
        "attention/mla",
        "cached + latents[None, :], mask=is_token[:, None] & is_latent[None, :], other=0.0",
        "cached + latents[None, :], mask=is_latent[None, :], other=0.0",
        "test_mla.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "page times page size overflows 32 bits",
        "attention/tile",
        "pages.to(tl.int64) * PAGE",
        "pages.to(tl.int32) * PAGE",
        "test_decode.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
        "test_prefill.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    _mutation(
        "0 * NaN of a stale scale is NaN",
        "attention/tile",
        "tl.load(scales + slots, mask=is_token, other=0.0)",
        "tl.load(scales + slots)",
        "test_quantized_attention.py::test_scales_behind_the_last_token_are_not_read",
    ),
    _mutation(
        "a key whose scale is infinite may have a score of minus infinity, and no sum shows it",
        "attention/tile",
        'tl.where(tl.abs(found) < float("inf"), found, float("nan"))',
        "found",
        "test_quantized_attention.py::test_a_scale_that_is_not_finite_is_seen",
    ),
    _mutation(
        "the e4m3 code of NaN counts as 480",
        "attention/tile",
        "| (magnitude << 7) | no_number)",
        "| (magnitude << 7))",
        "test_quantized_attention.py::test_a_code_that_is_no_number_is_seen",
    ),
    _mutation(
        "a float16 of a weight times a small scale is subnormal",
        "attention/tile",
        "StoredAs.INT8: 8.0",
        "StoredAs.INT8: 1.0",
        "test_quantized_attention.py::test_small_values_keep_their_bits_in_float16",
    ),
    _mutation(
        "values are scaled as keys are",
        "attention/decode",
        "value_scales = kv_scales + (kv_head + num_kv_heads)",
        "value_scales = kv_scales + kv_head",
        "test_quantized_attention.py::test_decodes_are_as_good_as_torch",
    ),
    _mutation(
        "scales of heads are taken to follow one another",
        "attention/prefill",
        "key_scales = kv_scales + kv_head.to(tl.int64) * scale_head",
        "key_scales = kv_scales + kv_head.to(tl.int64) * 64",
        "test_quantized_attention.py::test_scales_lie_as_far_apart_as_their_stride_says",
    ),
    _mutation(
        "a window of w does not count the token itself",
        "attention/decode",
        "seen &= tokens[None, :] > positions[:, None] - window",
        "seen &= tokens[None, :] >= positions[:, None] - window",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "the same in a prompt",
        "attention/prefill",
        "seen &= tokens[None, :] > positions[:, None] - window",
        "seen &= tokens[None, :] >= positions[:, None] - window",
        "test_prefill.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "a token does not see itself",
        "attention/decode",
        "seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])",
        "seen = is_token[None, :] & (tokens[None, :] < positions[:, None])",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "a head of 80 numbers is read as 128",
        "attention/decode",
        "mask=is_token[None, :] & is_dim[:, None], other=0.0",
        "mask=is_token[None, :], other=0.0",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "padded rows of a group of 5 are stored",
        "attention/decode",
        "tl.store(maxima + partials, maximum, mask=is_row)",
        "tl.store(maxima + partials, maximum)",
        "test_decode.py::test_it_is_as_good_as_torch",
        "test_decode.py::test_a_row_has_one_result_alone_in_company_and_as_a_draft",
    ),
    _mutation(
        "the tile of a window begins where the row does, so that company moves it",
        "attention/decode",
        "begin += tl.maximum(first_seen - begin, 0) // BLOCK_TOKENS * BLOCK_TOKENS",
        "begin += tl.maximum(first_seen - begin, 0)",
        "test_decode.py::test_a_window_that_ends_inside_a_split_changes_no_bit_with_the_company",
    ),
]

LINEARS = [
    _mutation(
        "a mask before the shift keeps the sign",
        "linear/w4a16",
        "high = 16.0 + ((words >> (16 + 4 * RUN_NUMBER)) & 0xF).to(tl.float32)",
        "high = 16.0 + ((words & (0xF << (16 + 4 * RUN_NUMBER))) >> (16 + 4 * RUN_NUMBER)).to(tl.float32)",
        "test_w4a16.py::test_the_high_half_byte_of_a_word_has_no_sign",
        "test_w4a16.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "zero points are stored less one (GPTQ v1 only)",
        "linear/w4a16",
        "((words >> 16) + 16).to(tl.float32).to(DTYPE)",
        "((words >> 16) + 17).to(tl.float32).to(DTYPE)",
        "test_w4a16.py::test_codes_less_zero_points_are_exact_at_every_value",
    ),
    _mutation(
        "a tile of inputs crosses a group",
        "linear/w4a16",
        "if run % GROUP_RUNS == 0:",
        "if run == 0:",
        "test_w4a16.py::test_a_group_of_32_ends_within_a_tile_and_has_a_scale_of_its_own",
    ),
    _mutation(
        "inputs beyond the last are multiplied",
        "linear/w4a16",
        "inside &= (first + inputs < num_inputs * UNIT)[:, None]",
        "inside &= (first + inputs < num_inputs * UNIT + TILE)[:, None]",
        "test_w4a16.py::test_it_is_as_good_as_torch",
    ),
    _mutation(
        "row times stride overflows 32 bits",
        "linear/w4a16",
        "x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT",
        "x_places = x + rows[None, :] * x_row * UNIT",
        "test_w4a16.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    _mutation(
        "splits follow from how many rows there are",
        "linear/launch",
        "splits = splits_of(num_outputs, num_inputs)",
        "splits = splits_of(num_outputs * num_rows * 4, num_inputs)",
        "test_w8a8.py::test_a_row_has_one_result_alone_and_in_company",
    ),
    _mutation(
        "the same in 16 bits: few rows need no splits",
        "linear/launch",
        "splits = splits_of(num_outputs, num_inputs)",
        "splits = splits_of(num_outputs if num_rows <= 16 else num_outputs << 20, num_inputs)",
        "test_w16a16.py::test_a_row_has_one_result_alone_in_company_and_as_a_row_of_a_check",
        "test_w16a16.py::test_how_a_weight_is_split_follows_from_its_shape_alone",
    ),
    _mutation(
        "0 * NaN of what is behind the end of a row is NaN",
        "linear/w16a16",
        "mask=is_row[None, :] & inside[:, None], other=0.0)",
        "mask=is_row[None, :], other=0.0)",
        "test_w16a16.py::test_its_error_is_at_most_twice_that_of_torch",
    ),
    _mutation(
        "a split does not end where the next begins",
        "linear/w16a16",
        "end = tl.minimum(begin + split_tiles * TILE, size)",
        "end = size",
        "test_w16a16.py::test_its_error_is_at_most_twice_that_of_torch",
    ),
    _mutation(
        "float8 sums of a whole row stay in 14 bits on sm_90",
        "linear/w8a8",
        "max_num_imprecise_acc=TILE, out_dtype=SUMS",
        "out_dtype=SUMS",
        "test_w8a8.py::test_a_long_sum_of_float8_is_promoted_to_float32_after_each_tile",
    ),
    _mutation(
        "sums of int8 products in float32 round",
        "linear/w8a8",
        "SUMS: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32",
        "SUMS: tl.constexpr = tl.float32",
        "test_w8a8.py::test_the_largest_sums_of_int8_do_not_overflow",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
    _mutation(
        "a block's scale is that of the row's first block",
        "linear/w8a8",
        "x_scale = tl.load(x_scale_places + tile, mask=is_row, other=0.0)",
        "x_scale = tl.load(x_scale_places, mask=is_row, other=0.0)",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
    _mutation(
        "the bias is added in each split",
        "linear/splits",
        "total += tl.load(partials + places, mask=inside, other=0.0)",
        "total += tl.load(partials + places, mask=inside, other=0.0) + tl.load("
        "bias + columns, mask=(columns < num_outputs) & (has_bias != 0) & (split > 0), other=0.0).to(tl.float32)",
        "test_w8a8.py::test_a_bias_is_added_before_the_one_rounding",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
]

ELEMENTWISE = [
    _mutation(
        "float8 overflows beyond 448",
        "elementwise/codes",
        "absolute = tl.minimum(tl.abs(tl.where(finite, numbers, 0.0)), 448.0)",
        "absolute = tl.abs(tl.where(finite, numbers, 0.0))",
        "test_rope_kv_write.py::test_codes_are_those_of_the_engines_pool",
        "test_elementwise.py::test_codes_of_float8_are_torchs_at_every_tie",
    ),
    _mutation(
        "a row of zeros is divided by its scale of 0",
        "elementwise/codes",
        'return scale, tl.where(scale == 0.0, float("inf"), scale)',
        "return scale, scale",
        "test_elementwise.py::test_a_row_of_zeros_has_codes_of_zero_and_a_row_with_nan_a_scale_that_is_nan",
    ),
    _mutation(
        "int8 rounds half up",
        "elementwise/codes",
        "whole = (numbers + 12582912.0) - 12582912.0",
        "whole = tl.floor(numbers + 0.5)",
        "test_elementwise.py::test_codes_of_int8_round_half_to_even",
    ),
    _mutation(
        "the largest of a row leaves NaN out",
        "elementwise/codes",
        'return tl.where(is_nan, float("nan"), tl.max(tl.abs(numbers), 1))',
        "return tl.max(tl.abs(numbers), 1)",
        "test_elementwise.py::test_a_row_of_zeros_has_codes_of_zero_and_a_row_with_nan_a_scale_that_is_nan",
    ),
    _mutation(
        "Gemma's 1 + w is rounded to 16 bits",
        "elementwise/rms_norm",
        "weights += 1.0",
        "weights = (weights + 1.0).to(dtype).to(tl.float32)",
        "test_elementwise.py::test_gemmas_one_is_added_to_the_weight_in_float32",
    ),
    _mutation(
        "Llama's reference rounds before the weight",
        "elementwise/rms_norm",
        "normed = normed.to(dtype).to(tl.float32)",
        "normed = normed.to(tl.float32)",
        "test_elementwise.py::test_llamas_reference_rounds_before_the_weight_too",
    ),
    _mutation(
        "neighbours turn as halves",
        "elementwise/rope_kv_write",
        "partners, angles, is_first = dims ^ 1, dims // 2, dims % 2 == 0",
        "partners, angles, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims // 2, dims < HALF",
        "test_rope_kv_write.py::test_queries_and_keys_turn_and_values_do_not",
    ),
    _mutation(
        "a padded token is stored in slot -1",
        "elementwise/rope_kv_write",
        "is_stored = is_head & (heads >= num_heads) & (slot >= 0)",
        "is_stored = is_head & (heads >= num_heads)",
        "test_rope_kv_write.py::test_a_slot_below_0_is_skipped",
    ),
    _mutation(
        "slot times stride overflows 32 bits",
        "elementwise/rope_kv_write",
        "slot = tl.load(slots + token).to(tl.int64)\n    pool_heads = (heads - num_heads).to(tl.int64)",
        "slot = tl.load(slots + token).to(tl.int32)\n    pool_heads = heads - num_heads",
        "test_rope_kv_write.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    _mutation(
        "codes are made by the scale before it is rounded to 16 bits",
        "elementwise/rope_kv_write",
        "wide = scale.to(tl.float32)",
        "wide = tl.div_rn(largest_of(numbers), 127.0)",
        "test_rope_kv_write.py::test_codes_are_those_of_the_engines_pool",
    ),
]

SAMPLING = [
    _mutation(
        "of the tokens that equal the last one kept, some go",
        "sampling/sample",
        "is_kept = (weights.to(tl.int32, bitcast=True) >= lowest) & (weights > 0.0)",
        "is_kept = (weights.to(tl.int32, bitcast=True) > lowest) & (weights > 0.0)",
        "test_sample.py::test_tokens_that_equal_the_last_one_kept_are_kept_too",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    _mutation(
        "a share of 0 draws a masked token",
        "sampling/sample",
        "exceeds = is_kept & (before + tl.cumsum(kept, 0) > target)",
        "exceeds = before + tl.cumsum(kept, 0) >= target",
        "test_sample.py::test_a_share_of_0_and_the_largest_below_1_draw_the_first_and_the_last_that_is_kept",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
    ),
    _mutation(
        "a masked row, or one with an infinite logit, gives a token",
        "sampling/sample",
        'is_finite = is_number & (tl.abs(highest) < float("inf"))',
        "is_finite = is_number",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
        "test_sample.py::test_an_infinite_logit_is_an_error_of_its_row",
    ),
    _mutation(
        "a maximum leaves NaN out",
        "sampling/sample",
        "return highest, token, has_nan == 0",
        "return highest, token, has_nan < 2",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
    ),
    _mutation(
        "of equal highest logits the last tile's is taken",
        "sampling/sample",
        "token = tl.where(of_tile > highest, first, token)",
        "token = tl.where(of_tile >= highest, first, token)",
        "test_sample.py::test_temperature_0_takes_the_first_of_the_highest",
    ),
    _mutation(
        "a vocabulary that is no multiple of the tile has tokens behind its end",
        "sampling/sample",
        'logits = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)\n'
        "    weights = tl.exp",
        "logits = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32)\n    weights = tl.exp",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    _mutation(
        "a number depends on the row's place in the batch",
        "sampling/sample",
        "tl.load(positions + program), attempt.to(tl.int64))",
        "tl.load(positions + program) + program, attempt.to(tl.int64))",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    _mutation(
        "a refused draw is drawn again as it was",
        "sampling/uniform",
        "counter = position.to(tl.uint64, bitcast=True) ^ (attempt.to(tl.uint64, bitcast=True) << 48)",
        "counter = position.to(tl.uint64, bitcast=True) ^ (attempt.to(tl.uint64, bitcast=True) << 64)",
        "test_sample.py::test_another_attempt_is_another_draw",
    ),
    _mutation(
        "-0 is less than 0",
        "sampling/logprobs",
        "bits = (logits + 0.0).to(tl.int32, bitcast=True)",
        "bits = logits.to(tl.int32, bitcast=True)",
        "test_logprobs.py::test_of_equal_logits_the_lower_token_comes_first_and_none_ranks_above_another",
        "test_logprobs.py::test_the_numbers_are_those_of_a_sort_in_float64",
    ),
]

EXPERTS = [
    _mutation(
        "of equal experts the higher number is chosen",
        "experts/routing",
        "first = tl.min(tl.min(tl.where(is_left & (choice == highest), experts, 2147483647), 1), 0)",
        "first = tl.max(tl.max(tl.where(is_left & (choice == highest), experts, -1), 1), 0)",
        "test_experts.py::test_of_equal_experts_the_lower_number_is_chosen",
    ),
    _mutation(
        "a token with NaN chooses experts that do not exist",
        "experts/routing",
        'choice = tl.where(choice != choice, float("inf"), choice)\n',
        "choice = choice + 0.0\n",
        "test_experts.py::test_a_token_with_nan_becomes_nan_and_chooses_experts_that_exist",
    ),
    _mutation(
        "a bias that chooses also weighs",
        "experts/routing",
        "tl.store(shares_out + targets, shares * scale, mask=is_chosen)",
        "tl.store(shares_out + targets, choice * scale, mask=is_chosen)",
        "test_experts.py::test_tokens_get_the_engines_experts_and_shares",
    ),
]

TRAPS = [*ATTENTION, *LINEARS, *ELEMENTWISE, *SAMPLING, *EXPERTS]
