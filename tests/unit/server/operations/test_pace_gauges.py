"""What bounds the prompts of a step, in `/metrics` and `/ready`."""

from __future__ import annotations

from millstream_runtime.boot import BootLedger
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.request import PromptPace
from millstream_runtime.server.openai.response_schemas import Readiness
from millstream_runtime.server.operations.pace_gauges import pace_gauges
from millstream_runtime.server.operations.readiness import ready_body

PACE = PromptPace(
    target_itl_seconds=0.05,
    longest_step_seconds=0.258,
    chunk_tokens=63,
    decode_step_seconds=0.086,
    prompt_tokens_per_second=370.4,
)


def test_each_gauge_has_its_figure() -> None:
    samples = {one.name: one.value for family in pace_gauges({"engine": "0"}, PACE) for one in family.samples}
    assert samples == {
        "millstream_prompt_step_limit_seconds": 0.258,
        "millstream_prompt_chunk_limit_tokens": 63,
        "millstream_decode_step_seconds": 0.086,
        "millstream_prompt_tokens_per_second": 370.4,
    }


def test_ready_says_the_same_and_nothing_where_time_bounds_no_prompts() -> None:
    config = RuntimeConfig(model="m", served_model_name="m")

    def body(pace: PromptPace | None) -> dict[str, object]:
        boot = BootLedger().snapshot()
        return ready_body(config, boot, topology=None, memory=None, prompt_pace=pace, now_seconds=0.0)

    assert [*pace_gauges({}, None)] == []
    assert "prompt_pace" not in body(None)
    paced = body(PACE)
    assert paced["prompt_pace"] == {
        "target_itl_milliseconds": 50,
        "step_limit_milliseconds": 258.0,
        "chunk_limit_tokens": 63,
        "decode_step_milliseconds": 86.0,
        "prompt_tokens_per_second": 370,
    }
    Readiness.model_validate(paced)
