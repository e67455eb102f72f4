"""The same of the kernels that norm, rotate, quantize, sample and route tokens."""

from __future__ import annotations

from tests.mutations.kernel_traps import kernel_mutation

ELEMENTWISE = [
    kernel_mutation(
        "float8 overflows beyond 448",
        "elementwise/codes",
        "absolute = tl.minimum(tl.abs(tl.where(finite, numbers, 0.0)), 448.0)",
        "absolute = tl.abs(tl.where(finite, numbers, 0.0))",
        "test_rope_kv_write.py::test_codes_are_those_of_the_engines_pool",
        "test_elementwise.py::test_codes_of_float8_are_torchs_at_every_tie",
    ),
    kernel_mutation(
        "a row of zeros is divided by its scale of 0",
        "elementwise/codes",
        'return scale, tl.where(scale == 0.0, float("inf"), scale)',
        "return scale, scale",
        "test_elementwise.py::test_a_row_of_zeros_has_codes_of_zero_and_a_row_with_nan_a_scale_that_is_nan",
    ),
    kernel_mutation(
        "int8 rounds half up",
        "elementwise/codes",
        "whole = (numbers + 12582912.0) - 12582912.0",
        "whole = tl.floor(numbers + 0.5)",
        "test_elementwise.py::test_codes_of_int8_round_half_to_even",
    ),
    kernel_mutation(
        "the largest of a row leaves NaN out",
        "elementwise/codes",
        'return tl.where(is_nan, float("nan"), tl.max(tl.abs(numbers), 1))',
        "return tl.max(tl.abs(numbers), 1)",
        "test_elementwise.py::test_a_row_of_zeros_has_codes_of_zero_and_a_row_with_nan_a_scale_that_is_nan",
    ),
    kernel_mutation(
        "Gemma's 1 + w is rounded to 16 bits",
        "elementwise/rms_norm",
        "weights += 1.0",
        "weights = (weights + 1.0).to(dtype).to(tl.float32)",
        "test_elementwise.py::test_gemmas_one_is_added_to_the_weight_in_float32",
    ),
    kernel_mutation(
        "Llama's reference rounds before the weight",
        "elementwise/rms_norm",
        "normed = normed.to(dtype).to(tl.float32)",
        "normed = normed.to(tl.float32)",
        "test_elementwise.py::test_llamas_reference_rounds_before_the_weight_too",
    ),
    kernel_mutation(
        "neighbours turn as halves",
        "elementwise/rope_kv_write",
        "partners, angles, is_first = dims ^ 1, dims // 2, dims % 2 == 0",
        "partners, angles, is_first = tl.where(dims < HALF, dims + HALF, dims - HALF), dims // 2, dims < HALF",
        "test_rope_kv_write.py::test_queries_and_keys_turn_and_values_do_not",
    ),
    kernel_mutation(
        "a padded token is stored in slot -1",
        "elementwise/rope_kv_write",
        "is_stored = is_head & (heads >= num_heads) & (slot >= 0)",
        "is_stored = is_head & (heads >= num_heads)",
        "test_rope_kv_write.py::test_a_slot_below_0_is_skipped",
    ),
    kernel_mutation(
        "slot times stride overflows 32 bits",
        "elementwise/rope_kv_write",
        "slot = tl.load(slots + token).to(tl.int64)\n    pool_heads = (heads - num_heads).to(tl.int64)",
        "slot = tl.load(slots + token).to(tl.int32)\n    pool_heads = heads - num_heads",
        "test_rope_kv_write.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    kernel_mutation(
        "codes are made by the scale before it is rounded to 16 bits",
        "elementwise/rope_kv_write",
        "wide = scale.to(tl.float32)",
        "wide = tl.div_rn(largest_of(numbers), 127.0)",
        "test_rope_kv_write.py::test_codes_are_those_of_the_engines_pool",
    ),
]

SAMPLING = [
    kernel_mutation(
        "of the tokens that equal the last one kept, some go",
        "sampling/sample",
        "is_kept = (weights.to(tl.int32, bitcast=True) >= lowest) & (weights > 0.0)",
        "is_kept = (weights.to(tl.int32, bitcast=True) > lowest) & (weights > 0.0)",
        "test_sample.py::test_tokens_that_equal_the_last_one_kept_are_kept_too",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    kernel_mutation(
        "a share of 0 draws a masked token",
        "sampling/sample",
        "exceeds = is_kept & (before + tl.cumsum(kept, 0) > target)",
        "exceeds = before + tl.cumsum(kept, 0) >= target",
        "test_sample.py::test_a_share_of_0_and_the_largest_below_1_draw_the_first_and_the_last_that_is_kept",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
    ),
    kernel_mutation(
        "a masked row, or one with an infinite logit, gives a token",
        "sampling/sample",
        'is_finite = is_number & (tl.abs(highest) < float("inf"))',
        "is_finite = is_number",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
        "test_sample.py::test_an_infinite_logit_is_an_error_of_its_row",
    ),
    kernel_mutation(
        "a maximum leaves NaN out",
        "sampling/sample",
        "return highest, token, has_nan == 0",
        "return highest, token, has_nan < 2",
        "test_sample.py::test_masked_tokens_are_never_drawn_and_masked_rows_have_none",
    ),
    kernel_mutation(
        "of equal highest logits the last tile's is taken",
        "sampling/sample",
        "token = tl.where(of_tile > highest, first, token)",
        "token = tl.where(of_tile >= highest, first, token)",
        "test_sample.py::test_temperature_0_takes_the_first_of_the_highest",
    ),
    kernel_mutation(
        "a vocabulary that is no multiple of the tile has tokens behind its end",
        "sampling/sample",
        'logits = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)\n'
        "    weights = tl.exp",
        "logits = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32)\n    weights = tl.exp",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    kernel_mutation(
        "a number depends on the row's place in the batch",
        "sampling/sample",
        "tl.load(positions + program), attempt.to(tl.int64)",
        "tl.load(positions + program) + program, attempt.to(tl.int64)",
        "test_sample.py::test_a_row_draws_the_engines_token",
    ),
    kernel_mutation(
        "a refused draw is drawn again as it was",
        "sampling/uniform",
        "counter = position.to(tl.uint64, bitcast=True) ^ (attempt.to(tl.uint64, bitcast=True) << 48)",
        "counter = position.to(tl.uint64, bitcast=True) ^ (attempt.to(tl.uint64, bitcast=True) << 64)",
        "test_sample.py::test_another_attempt_is_another_draw",
    ),
    kernel_mutation(
        "-0 is less than 0",
        "sampling/logprobs",
        "bits = (logits + 0.0).to(tl.int32, bitcast=True)",
        "bits = logits.to(tl.int32, bitcast=True)",
        "test_logprobs.py::test_of_equal_logits_the_lower_token_comes_first_and_none_ranks_above_another",
        "test_logprobs.py::test_the_numbers_are_those_of_a_sort_in_float64",
    ),
]

EXPERTS = [
    kernel_mutation(
        "of equal experts the higher number is chosen",
        "experts/routing",
        "first = tl.min(tl.min(tl.where(is_left & (choice == highest), experts, 2147483647), 1), 0)",
        "first = tl.max(tl.max(tl.where(is_left & (choice == highest), experts, -1), 1), 0)",
        "test_experts.py::test_of_equal_experts_the_lower_number_is_chosen",
    ),
    kernel_mutation(
        "a token with NaN chooses experts that do not exist",
        "experts/routing",
        'choice = tl.where(choice != choice, float("inf"), choice)\n',
        "choice = choice + 0.0\n",
        "test_experts.py::test_a_token_with_nan_becomes_nan_and_chooses_experts_that_exist",
    ),
    kernel_mutation(
        "a bias that chooses also weighs",
        "experts/routing",
        "tl.store(shares_out + targets, shares * scale, mask=is_chosen)",
        "tl.store(shares_out + targets, choice * scale, mask=is_chosen)",
        "test_experts.py::test_tokens_get_the_engines_experts_and_shares",
    ),
]

TRAPS = [*ELEMENTWISE, *SAMPLING, *EXPERTS]
