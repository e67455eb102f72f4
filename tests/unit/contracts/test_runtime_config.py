"""The contract between operator and runtime survives the trip through a pod's args."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.config import (
    AcceptanceRule,
    Device,
    DType,
    GovernorMode,
    KVCacheDType,
    LogLevel,
    RuntimeConfig,
    SpeculationMethod,
    WeightFormat,
)
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from tests.support.runtime_args import from_args, to_args

speculation = (
    st.fixed_dictionaries(
        {"speculation_method": st.sampled_from([SpeculationMethod.DISABLED, SpeculationMethod.N_GRAM])}
    )
    | st.fixed_dictionaries(
        {
            "speculation_method": st.just(SpeculationMethod.DRAFT_MODEL),
            "draft_model": st.from_regex(r"/models/draft/[a-z]{1,9}", fullmatch=True),
            "speculation_acceptance": st.sampled_from(AcceptanceRule),
        }
    )
    | st.fixed_dictionaries(
        {
            "speculation_method": st.just(SpeculationMethod.MEDUSA),
            "draft_model": st.just("/models/heads"),
            "draft_tree": st.sampled_from([None, "[(0,)]", "[(0,), (1,), (0, 0)]"]),
        }
    )
)
configs = st.builds(
    lambda drafts, **settings: RuntimeConfig(**settings, **drafts),
    drafts=speculation,
    model=st.from_regex(r"/models/[a-z][a-z0-9-]{0,20}", fullmatch=True),
    served_model_name=st.from_regex(r"[a-z][a-z0-9./-]{0,40}", fullmatch=True),
    device=st.sampled_from(Device),
    dtype=st.sampled_from(DType),
    quantization=st.none() | st.sampled_from(WeightFormat),
    tensor_parallel_size=st.sampled_from([1, 2, 8]),
    max_model_len=st.none() | st.integers(1, 1 << 20),
    planned_model_len=st.none() | st.integers(1, 1 << 20),
    max_num_batched_tokens=st.integers(4096, 65536),
    max_num_seqs=st.integers(1, 4096),
    target_itl_milliseconds=st.none() | st.integers(1, 60_000),
    enable_hybrid_kv_cache_manager=st.none() | st.booleans(),
    kv_cache_dtype=st.sampled_from(KVCacheDType),
    speculation_governor=st.sampled_from(GovernorMode),
    allowed_origins=st.sampled_from([(), ("*",), ("https://a.example", "http://[::1]:3000")]),
    kv_cache_memory_bytes=st.none() | st.integers(1 << 20, 1 << 40),
    heartbeat_interval_seconds=st.integers(0, 86_400),
    log_level=st.none() | st.sampled_from(LogLevel),
    port=st.integers(0, 65_535),
)


@given(configs)
def test_args_round_trip_to_an_equal_config_with_an_equal_hash(config: RuntimeConfig) -> None:
    parsed = from_args(to_args(config))
    assert parsed == config
    assert parsed.config_hash() == config.config_hash()


@given(configs, configs)
def test_different_configs_have_different_hashes(one: RuntimeConfig, other: RuntimeConfig) -> None:
    assert (one.boot == other.boot) == (one.config_hash() == other.config_hash())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--model"),
        (["--model=/m", "--max-num-seqs=-3"], "--max-num-seqs is -3"),
        (
            ["--model=/m", "--max-num-seqs=64", "--max-num-batched-tokens=32"],
            "--max-num-batched-tokens is 32",
        ),
        (["--model=/m", "--tensor-parallel-size=9"], "--tensor-parallel-size is 9; it must be between 1 and 8"),
        (["--model=/m", "--port=70000"], "--port is 70000"),
        (["--model=/m", "--target-itl-milliseconds=0"], "--target-itl-milliseconds is 0"),
        (["--model=/m", "--speculation-method=NGram", "--max-draft-tokens=17"], "--max-draft-tokens is 17"),
        (["--model=/m", "--speculation-method=NGram", "--max-draft-tokens=0"], "--max-draft-tokens is 0"),
        (["--model=/m", "--speculation-governor=On"], "'On' is not one of Enforce, Observe, Disabled"),
        (["--model=/m", "--speculation-method=ngram"], "'ngram' is not one of Disabled, NGram"),
        (["--model=/m", "--max-draft-tokens=3"], "set --speculation-method too"),
        (["--model=/m", "--speculation-acceptance=exact"], "'exact' is not one of Identity, Distribution"),
        (["--model=/m", "--port=http"], "--port: 'http' is not an integer"),
        (["--model=/m", "--kv-cache-memory-bytes=4Gi"], "'4Gi' is not a number of bytes; 4Gi is 4294967296"),
        (["--model=/m", "--kv-cache-memory-bytes=4 GB"], "'4 GB' is not a number of bytes; 4 GB is 4000000000"),
        (["--model=/m", "--kv-cache-memory-bytes=much"], "'much' is not a number of bytes (see"),
        (["--model=/m", "--kv-cache-dtype=fp4"], "--kv-cache-dtype: 'fp4' is not one of auto, fp8, int8"),
        (["--model=/m", "--dtype=int3"], "--dtype: 'int3' is not one of auto, float32, float16, bfloat16"),
        (["--model=/m", "--max-num-sequences=3"], "--max-num-sequences"),
    ],
)
def test_bad_flags_give_one_sentence_that_names_the_flag(args: list[str], named: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        from_args(args)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    """Names of files and of tensors may hold line ends, and bytes that are no UTF-8."""
    failure = RuntimeFailure(FailureReason.CHECKPOINT_INVALID, "Tensor a\nb of m\udcff\x1b[31m is missing; é stays.")
    assert str(failure) == failure.message == r"Tensor a\nb of m\udcff\x1b[31m is missing; é stays."
    assert json.loads(failure.termination_message())["message"] == failure.message


def test_a_termination_message_never_exceeds_what_the_kubelet_keeps() -> None:
    failure = RuntimeFailure(FailureReason.CHECKPOINT_INVALID, "Ä" * 10_000)
    assert len(failure.termination_message().encode()) <= 4096
