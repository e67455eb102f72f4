"""Benchmarks: ratios against a peer from one run, saved with the hardware they were measured on."""

# Before torch: both sides of every comparison run under the thread settings of the runtime.
import millstream_runtime.engine  # noqa: F401
