"""The one table of production variants: what is compiled ahead, and what the compile gate of `hack.kernels` holds."""

from __future__ import annotations

from millstream_kernels.attention.decode import decode_variants
from millstream_kernels.attention.mla import mla_variants
from millstream_kernels.attention.prefill import prefill_variants
from millstream_kernels.elementwise.gated_activation import gated_activation_variants
from millstream_kernels.elementwise.quantize_rows import quantize_rows_variants
from millstream_kernels.elementwise.rms_norm import rms_norm_variants
from millstream_kernels.elementwise.rope_kv_write import rope_kv_write_variants
from millstream_kernels.experts.combine import combine_variants
from millstream_kernels.experts.placement import placement_variants
from millstream_kernels.experts.product import expert_product_variants
from millstream_kernels.experts.routing import routing_variants
from millstream_kernels.linear.nf4 import nf4_variants
from millstream_kernels.linear.splits import sum_splits_variants
from millstream_kernels.linear.w4a16 import w4a16_variants
from millstream_kernels.linear.w8a8 import w8a8_variants
from millstream_kernels.linear.w8a16 import w8a16_variants
from millstream_kernels.linear.w16a16 import w16a16_variants
from millstream_kernels.sampling.logprobs import logprobs_variants
from millstream_kernels.sampling.sample import sample_variants
from millstream_kernels.variant import Variant

VARIANTS: tuple[Variant, ...] = (
    *decode_variants(),
    *prefill_variants(),
    *mla_variants(),
    *rms_norm_variants(),
    *gated_activation_variants(),
    *quantize_rows_variants(),
    *w4a16_variants(),
    *w8a8_variants(),
    *w8a16_variants(),
    *nf4_variants(),
    *w16a16_variants(),
    *sum_splits_variants(),
    *rope_kv_write_variants(),
    *sample_variants(),
    *logprobs_variants(),
    *routing_variants(),
    *placement_variants(),
    *expert_product_variants(),
    *combine_variants(),
)
