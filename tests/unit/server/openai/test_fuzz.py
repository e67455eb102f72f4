"""The API fuzzed from its own OpenAPI document: whatever a client sends, the answer is never a 5xx.

schemathesis draws requests that fit the schema and requests that do not. The examples are few and the same each time,
so that this stays quick; `MILLSTREAM_FUZZ_EXAMPLES=2000 pytest tests/unit/server/openai/test_fuzz.py` looks further.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.support.server_thread import ServerThread, serving, wait_for

pytestmark = pytest.mark.deep

EXAMPLES = int(os.environ.get("MILLSTREAM_FUZZ_EXAMPLES", "12"))
GENERATIONS = {"/v1/chat/completions", "/v1/completions"}
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def short_server(tiny_model: Path) -> Iterator[ServerThread]:
    """A context so small that no answer is long."""
    with serving(tiny_model, max_model_len=48) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_is_answered_with_a_5xx(short_server: ServerThread, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{short_server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert {operation.path for operation in operations} >= GENERATIONS
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing there that could be wrong: a path takes any string

        @FUZZ
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: Any) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400 and answer.content:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        fuzz()
    assert short_server.get("/ready").status_code == 200
    admission = short_server.server.service.admission
    wait_for(lambda: admission.in_flight == 0, "every place to be free")
    wait_for(
        lambda: short_server.metric("vllm:kv_cache_usage_perc", model_name="tiny") == 0.0, "every block to be free"
    )
