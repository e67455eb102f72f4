"""The two halves as files: what the operator writes the runtime reads, and what it cannot keep it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.config import (
    AcceptanceRule,
    BootConfig,
    Device,
    GovernorMode,
    KVCacheDType,
    LiveConfig,
    LogLevel,
    RuntimeConfig,
    SpeculationMethod,
)
from millstream_runtime.config_files import MAX_FILE_BYTES, dump, parse_boot, parse_live, read_boot
from millstream_runtime.errors import InvalidConfigError

BOOT = BootConfig(model="/models/x", served_model_name="x", device=Device.CPU, max_model_len=512)
LIVE = Path("live.json")


def test_the_boot_half_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "boot.json"
    file.write_text(dump(BOOT))
    assert read_boot(file) == BOOT
    assert read_boot(file).config_hash() == BOOT.config_hash()


@given(
    st.builds(
        LiveConfig,
        heartbeat_interval_seconds=st.integers(0, 86_400),
        log_level=st.sampled_from(LogLevel),
        speculation_governor=st.sampled_from(GovernorMode),
        allowed_origins=st.sampled_from([(), ("*",), ("https://a.example", "http://[::1]:3000")]),
    )
)
def test_the_live_half_survives_its_file(live: LiveConfig) -> None:
    assert parse_live(dump(live), LIVE) == live


def test_the_hash_is_of_the_boot_half_alone() -> None:
    config = RuntimeConfig(model="/models/x", served_model_name="x")
    assert replace(config, heartbeat_interval_seconds=5, log_level=LogLevel.DEBUG).config_hash() == config.config_hash()
    assert replace(config, max_num_seqs=5).config_hash() != config.config_hash()
    assert config.boot.config_hash() == config.config_hash()


def test_a_field_that_older_runtimes_do_not_know_is_in_the_file_and_the_hash_only_where_it_is_set() -> None:
    """Or an upgrade of the operator would restart every pod, with a file that a pinned runtime refuses."""
    assert "target_itl_milliseconds" not in dump(BOOT)
    assert BOOT.config_hash() == "3581a311b3323de7"
    names = ("enable_hybrid_kv_cache_manager", "kv_cache_dtype", "speculation_method", "max_draft_tokens")
    for name in (*names, "speculation_acceptance", "draft_tree", "planned_model_len"):
        assert name not in dump(BOOT)
    for asked in (
        replace(BOOT, target_itl_milliseconds=50),
        replace(BOOT, enable_hybrid_kv_cache_manager=True),
        replace(BOOT, planned_model_len=5000),
        replace(BOOT, kv_cache_dtype=KVCacheDType.INT8),
        replace(BOOT, speculation_method=SpeculationMethod.N_GRAM),
        replace(BOOT, speculation_method=SpeculationMethod.N_GRAM, max_draft_tokens=16),
        replace(
            BOOT,
            speculation_method=SpeculationMethod.DRAFT_MODEL,
            draft_model="/models/draft",
            speculation_acceptance=AcceptanceRule.DISTRIBUTION,
        ),
        replace(
            BOOT,
            speculation_method=SpeculationMethod.MEDUSA,
            draft_model="/models/heads",
            draft_tree="[(0,), (1,), (0, 0)]",
        ),
    ):
        assert parse_boot(dump(asked), Path("boot.json")) == asked
        assert asked.config_hash() != BOOT.config_hash()


BAD_BOOT = {
    "nothing": ("", "Invalid JSON"),
    "a list": ("[]", "should be an object"),
    "another version's field": (dump(BOOT).replace('"port"', '"prot"'), "prot"),
    "a number as text": (dump(BOOT).replace("8000", '"8000"'), "port"),
    "a word that is none": (dump(BOOT).replace('"cpu"', '"tpu"'), "device"),
    "a value out of its range": (dump(BOOT).replace("8000", "80000"), "--port is 80000"),
    "too much": ("x" * (MAX_FILE_BYTES + 1), "larger than"),
}


@pytest.mark.parametrize("name", BAD_BOOT)
def test_a_boot_file_is_understood_whole_or_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    text, words = BAD_BOOT[name]
    file = tmp_path / "boot.json"
    file.write_text(text)
    with pytest.raises(InvalidConfigError, match=words) as caught:
        read_boot(file)
    assert "\n" not in str(caught.value)


def test_a_boot_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match=r"none\.json cannot be read"):
        read_boot(tmp_path / "none.json")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(InvalidConfigError, match="not UTF-8"):
        read_boot(tmp_path / "latin")


def test_a_live_file_of_a_newer_operator_is_taken_for_what_is_known_of_it() -> None:
    assert parse_live('{"heartbeat_interval_seconds": 5, "governor": "eco"}', LIVE) == LiveConfig(
        heartbeat_interval_seconds=5
    )


@pytest.mark.parametrize("text", ["", "null", '{"heartbeat_interval_seconds": -1}', '{"log_level": "Debug"}'])
def test_a_bad_live_file_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        parse_live(text, LIVE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"heartbeat_interval_seconds": -1}', "live.json: --heartbeat-interval-seconds is -1"),
        ('{"log_level": "Debug"}', "live.json: log_level: .*; got 'Debug'"),
        ('{"allowed_origins": ["https://a.example/"]}', "live.json: --allowed-origins has 'https://a.example/'"),
        ('{"probe_key_digests": ["x"]}', "live.json: probe_key_digests must be"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(text: str, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        parse_live(text, LIVE)
