"""Several tokens of one step at the server: one message, one interval between tokens, and no text behind a stop."""

from __future__ import annotations

from pathlib import Path

from millstream_runtime.config import GovernorMode, LiveConfig, RuntimeConfig, SpeculationMethod
from millstream_runtime.config_files import dump
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine_process.loop import EngineLike, OnPhase
from tests.support.chat_streams import CHAT, chat_body
from tests.support.drafters import EachAlone
from tests.support.server_thread import serving, wait_for


class Remembers:
    """Proposes what the same prompt was answered with before."""

    def __init__(self) -> None:
        self._answered: dict[tuple[int, ...], Sequence] = {}

    def make_engine(self, config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
        return Engine(config, on_phase, drafter=EachAlone(self._guess))

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        before = self._answered.setdefault(tuple(sequence.request.prompt_token_ids), sequence)
        known = len(sequence.token_ids)
        return [] if before is sequence else before.token_ids[known : known + most]


def test_tokens_of_one_step_are_one_interval_and_end_at_a_stop_string(tiny_model: Path) -> None:
    with serving(tiny_model, make_engine=Remembers().make_engine, speculation_governor=GovernorMode.DISABLED) as server:
        server.wait_ready()
        first = server.post(CHAT, chat_body(max_tokens=21)).json()
        intervals = server.metric("vllm:inter_token_latency_seconds_count", model_name="tiny")
        assert intervals == 20
        second = server.post(CHAT, chat_body(max_tokens=21)).json()
        assert second["choices"] == first["choices"]
        assert second["usage"]["completion_tokens"] == 21
        # The first token is alone, then 4 drafts and one more per step.
        assert server.metric("vllm:inter_token_latency_seconds_count", model_name="tiny") == intervals + 4
        assert server.metric("vllm:generation_tokens_total", model_name="tiny") == 42
        for name, value in {"drafts": 4, "draft_tokens": 16, "accepted_tokens": 16}.items():
            assert server.metric(f"vllm:spec_decode_num_{name}_total", model_name="tiny") == value
        for position in range(4):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            assert server.metric(name, model_name="tiny", position=str(position)) == 4
        skipped = "millstream_spec_decode_skipped_total"
        assert server.metric(skipped, model_name="tiny", reason="no_proposal") == 19
        assert server.metric(skipped, model_name="tiny", reason="overlapped") == 0
        text = first["choices"][0]["message"]["content"]
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        stopped = server.post(CHAT, chat_body(max_tokens=21, stop=[stop])).json()
        assert stopped["choices"][0]["message"]["content"] == text[: text.index(stop)]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] < 21


def test_without_speculation_there_is_no_metric_of_it(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        assert "spec_decode" not in server.get("/metrics").text


def test_the_flag_switches_n_grams_on(tiny_model: Path) -> None:
    with serving(tiny_model, speculation_method=SpeculationMethod.N_GRAM, max_draft_tokens=2) as server:
        server.wait_ready()
        server.post(CHAT, chat_body(max_tokens=3))
        assert 'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"}' in (
            server.get("/metrics").text
        )


def test_the_governor_is_seen_and_its_mode_changes_while_it_serves(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "live.json"

    def write(mode: GovernorMode) -> None:
        file.write_text(dump(LiveConfig(speculation_governor=mode)))

    write(GovernorMode.OBSERVE)
    with serving(
        tiny_model, live_config=file, speculation_method=SpeculationMethod.N_GRAM, max_draft_tokens=3
    ) as server:
        server.wait_ready()
        server.post(CHAT, chat_body(max_tokens=30))
        assert server.metric("millstream_spec_decode_governor", model_name="tiny", mode="Observe") == 1
        name = "millstream_spec_decode_tokens_total"
        tokens = sum(server.metric(name, model_name="tiny", length=str(length)) for length in range(4))
        assert tokens == 29, "all but the first, which came with the prompt"
        assert server.metric("millstream_spec_decode_seconds_total", model_name="tiny", length="0") > 0
        assert server.metric("millstream_spec_decode_exploration_seconds_total", model_name="tiny") == 0
        assert server.metric("millstream_spec_decode_reading_seconds_total", model_name="tiny") == 0
        speculation = server.get("/ready").json()["speculation"]
        counters = {"checks": "drafts", "draftTokens": "draft_tokens", "acceptedTokens": "accepted_tokens"}
        skipped = {
            reason: server.metric("millstream_spec_decode_skipped_total", model_name="tiny", reason=reason)
            for reason in ("no_proposal", "at_limit", "no_gain")
        }
        assert speculation == {
            "method": "NGram",
            "maxDraftTokens": 3,
            "governor": "Observe",
            "draftLength": speculation["draftLength"],
            "skipped": {reason: count for reason, count in skipped.items() if count},
            **{
                name: server.metric(f"vllm:spec_decode_num_{metric}_total", model_name="tiny")
                for name, metric in counters.items()
            },
        }
        assert sum(speculation["skipped"].values()) + speculation["checks"] > 0
        write(GovernorMode.DISABLED)
        server.reload_live_config()
        wait_for(lambda: "governor" not in server.get("/ready").json()["speculation"], "the mode of the file")
        assert "millstream_spec_decode_governor" not in server.get("/metrics").text
        assert "no_gain" in server.get("/metrics").text
