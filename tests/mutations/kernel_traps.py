"""The traps of GPU kernels for attention and linear layers, as mutations of the kernels that avoid them."""

from __future__ import annotations

from tests.mutations.mutation import KERNELS, Mutation


def kernel_mutation(trap: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    """`file` without its suffix; `tests` beneath tests/unit/kernels."""
    return Mutation.of(trap, f"{KERNELS}/{file}.py", old, new, *(f"kernels/{test}" for test in tests))


ATTENTION = [
    kernel_mutation(
        "2^(-inf - -inf) is NaN where a row has seen nothing yet",
        "attention/tile",
        'reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "reference = new_maximum",
        "test_decode.py::test_scores_that_are_minus_infinity_weigh_nothing",
    ),
    kernel_mutation(
        "the same where splits are combined",
        "attention/decode",
        'reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)',
        "reference = new_maximum",
        "test_decode.py::test_scores_that_are_minus_infinity_weigh_nothing",
    ),
    kernel_mutation(
        "0 / 0 is NaN in a padded request",
        "attention/decode",
        "result = result / tl.where(total == 0.0, 1.0, total)",
        "result = result / total",
        "test_decode.py::test_a_padded_request_of_length_0_gets_zeros",
    ),
    kernel_mutation(
        "the same in a prompt",
        "attention/prefill",
        "attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]",
        "attended = attended / total[:, None]",
        "test_prefill.py::test_a_padded_request_of_length_0_gets_zeros",
    ),
    kernel_mutation(
        "0 * NaN of a stale value is NaN: only scores are masked",
        "attention/decode",
        "values + places_of_tokens[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0",
        "values + places_of_tokens[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0",
        "test_decode.py::test_it_is_as_good_as_torch",
        "test_decode.py::test_a_request_with_nan_leaves_its_neighbours_alone",
    ),
    kernel_mutation(
        "the same in a prompt",
        "attention/prefill",
        "values + places[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0",
        "values + places[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0",
        "test_prefill.py::test_it_is_as_good_as_torch",
        "test_prefill.py::test_a_request_with_nan_leaves_its_neighbours_alone",
    ),
    kernel_mutation(
        "the same in a latent",
        "attention/mla",
        "cached + latents[None, :], mask=is_token[:, None] & is_latent[None, :], other=0.0",
        "cached + latents[None, :], mask=is_latent[None, :], other=0.0",
        "test_mla.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "page times page size overflows 32 bits",
        "attention/tile",
        "pages.to(tl.int64) * PAGE",
        "pages.to(tl.int32) * PAGE",
        "test_decode.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
        "test_prefill.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    kernel_mutation(
        "0 * NaN of a stale scale is NaN",
        "attention/tile",
        "tl.load(scales + slots, mask=is_token, other=0.0)",
        "tl.load(scales + slots)",
        "test_quantized_attention.py::test_scales_behind_the_last_token_are_not_read",
    ),
    kernel_mutation(
        "a key whose scale is infinite may have a score of minus infinity, and no sum shows it",
        "attention/tile",
        'tl.where(tl.abs(found) < float("inf"), found, float("nan"))',
        "found",
        "test_quantized_attention.py::test_a_scale_that_is_not_finite_is_seen",
    ),
    kernel_mutation(
        "the e4m3 code of NaN counts as 480",
        "attention/tile",
        "| (magnitude << 7) | no_number)",
        "| (magnitude << 7))",
        "test_quantized_attention.py::test_a_code_that_is_no_number_is_seen",
    ),
    kernel_mutation(
        "a float16 of a weight times a small scale is subnormal",
        "attention/tile",
        "StoredAs.INT8: 8.0",
        "StoredAs.INT8: 1.0",
        "test_quantized_attention.py::test_small_values_keep_their_bits_in_float16",
    ),
    kernel_mutation(
        "values are scaled as keys are",
        "attention/decode",
        "value_scales = kv_scales + (kv_head + num_kv_heads)",
        "value_scales = kv_scales + kv_head",
        "test_quantized_attention.py::test_decodes_are_as_good_as_torch",
    ),
    kernel_mutation(
        "scales of heads are taken to follow one another",
        "attention/prefill",
        "key_scales = kv_scales + kv_head.to(tl.int64) * scale_head",
        "key_scales = kv_scales + kv_head.to(tl.int64) * 64",
        "test_quantized_attention.py::test_scales_lie_as_far_apart_as_their_stride_says",
    ),
    kernel_mutation(
        "a window of w does not count the token itself",
        "attention/decode",
        "seen &= tokens[None, :] > positions[:, None] - window",
        "seen &= tokens[None, :] >= positions[:, None] - window",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "a split that ends where the window begins is combined, and nothing was stored of it",
        "attention/decode",
        "first = tl.maximum(position - window + 1, 0) // SPLIT_TOKENS",
        "first = tl.maximum(position - window, 0) // SPLIT_TOKENS",
        "test_decode.py::test_a_split_that_ends_before_the_window_is_not_combined",
    ),
    kernel_mutation(
        "the same in a prompt",
        "attention/prefill",
        "seen &= tokens[None, :] > positions[:, None] - window",
        "seen &= tokens[None, :] >= positions[:, None] - window",
        "test_prefill.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "a token does not see itself",
        "attention/decode",
        "seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])",
        "seen = is_token[None, :] & (tokens[None, :] < positions[:, None])",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "a head of 80 numbers is read as 128",
        "attention/decode",
        "mask=is_token[None, :] & is_dim[:, None], other=0.0",
        "mask=is_token[None, :], other=0.0",
        "test_decode.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "padded rows of a group of 5 are stored",
        "attention/decode",
        "tl.store(maxima + partials, maximum, mask=is_row)",
        "tl.store(maxima + partials, maximum)",
        "test_decode.py::test_it_is_as_good_as_torch",
        "test_decode.py::test_a_row_has_one_result_alone_in_company_and_as_a_draft",
    ),
    kernel_mutation(
        "the tile of a window begins where the row does, so that company moves it",
        "attention/decode",
        "begin += tl.maximum(first_seen - begin, 0) // BLOCK_TOKENS * BLOCK_TOKENS",
        "begin += tl.maximum(first_seen - begin, 0)",
        "test_decode.py::test_a_window_that_ends_inside_a_split_changes_no_bit_with_the_company",
    ),
]

LINEARS = [
    kernel_mutation(
        "a mask before the shift keeps the sign",
        "linear/w4a16",
        "high = 16.0 + ((words >> (16 + 4 * RUN_NUMBER)) & 0xF).to(tl.float32)",
        "high = 16.0 + ((words & (0xF << (16 + 4 * RUN_NUMBER))) >> (16 + 4 * RUN_NUMBER)).to(tl.float32)",
        "test_w4a16.py::test_the_high_half_byte_of_a_word_has_no_sign",
        "test_w4a16.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "zero points are stored less one (GPTQ v1 only)",
        "linear/w4a16",
        "((words >> 16) + 16).to(tl.float32).to(DTYPE)",
        "((words >> 16) + 17).to(tl.float32).to(DTYPE)",
        "test_w4a16.py::test_codes_less_zero_points_are_exact_at_every_value",
    ),
    kernel_mutation(
        "a tile of inputs crosses a group",
        "linear/w4a16",
        "if run % GROUP_RUNS == 0:",
        "if run == 0:",
        "test_w4a16.py::test_a_group_of_32_ends_within_a_tile_and_has_a_scale_of_its_own",
    ),
    kernel_mutation(
        "inputs beyond the last are multiplied",
        "linear/w4a16",
        "inside &= (first + inputs < num_inputs * UNIT)[:, None]",
        "inside &= (first + inputs < num_inputs * UNIT + TILE)[:, None]",
        "test_w4a16.py::test_it_is_as_good_as_torch",
    ),
    kernel_mutation(
        "row times stride overflows 32 bits",
        "linear/w4a16",
        "x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT",
        "x_places = x + rows[None, :] * x_row * UNIT",
        "test_w4a16.py::test_indices_beyond_two_to_the_31_are_computed_in_64_bits",
    ),
    kernel_mutation(
        "splits follow from how many rows there are",
        "linear/launch",
        "splits = splits_of(num_outputs, num_inputs)",
        "splits = splits_of(num_outputs * num_rows * 4, num_inputs)",
        "test_w8a8.py::test_a_row_has_one_result_alone_and_in_company",
    ),
    kernel_mutation(
        "the same in 16 bits: few rows need no splits",
        "linear/launch",
        "splits = splits_of(num_outputs, num_inputs)",
        "splits = splits_of(num_outputs if num_rows <= 16 else num_outputs << 20, num_inputs)",
        "test_w16a16.py::test_a_row_has_one_result_alone_in_company_and_as_a_row_of_a_check",
        "test_w16a16.py::test_how_a_weight_is_split_follows_from_its_shape_alone",
    ),
    kernel_mutation(
        "0 * NaN of what is behind the end of a row is NaN",
        "linear/w16a16",
        "mask=is_row[None, :] & inside[:, None], other=0.0)",
        "mask=is_row[None, :], other=0.0)",
        "test_w16a16.py::test_its_error_is_at_most_twice_that_of_torch",
    ),
    kernel_mutation(
        "a split does not end where the next begins",
        "linear/w16a16",
        "end = tl.minimum(begin + split_tiles * TILE, size)",
        "end = size",
        "test_w16a16.py::test_its_error_is_at_most_twice_that_of_torch",
    ),
    kernel_mutation(
        "float8 sums of a whole row stay in 14 bits on sm_90",
        "linear/w8a8",
        "max_num_imprecise_acc=TILE, out_dtype=SUMS",
        "out_dtype=SUMS",
        "test_w8a8.py::test_a_long_sum_of_float8_is_promoted_to_float32_after_each_tile",
    ),
    kernel_mutation(
        "sums of int8 products in float32 round",
        "linear/w8a8",
        "SUMS: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32",
        "SUMS: tl.constexpr = tl.float32",
        "test_w8a8.py::test_the_largest_sums_of_int8_do_not_overflow",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
    kernel_mutation(
        "a block's scale is that of the row's first block",
        "linear/w8a8",
        "x_scale = tl.load(x_scale_places + tile, mask=is_row, other=0.0)",
        "x_scale = tl.load(x_scale_places, mask=is_row, other=0.0)",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
    kernel_mutation(
        "the bias is added in each split",
        "linear/splits",
        "total += tl.load(partials + places, mask=inside, other=0.0)",
        "total += tl.load(partials + places, mask=inside, other=0.0) + tl.load("
        "bias + columns, mask=(columns < num_outputs) & (has_bias != 0) & (split > 0), other=0.0).to(tl.float32)",
        "test_w8a8.py::test_a_bias_is_added_before_the_one_rounding",
        "test_w8a8.py::test_it_is_right_within_the_rounding_of_float32",
    ),
]

TRAPS = [*ATTENTION, *LINEARS]
