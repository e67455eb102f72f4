"""A download that fails in an init container: its own words, its exit code, and whose model it was."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.diagnosis.pod_failures import diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from tests.unit.operator.diagnosis.test_diagnosis import pod, report


def fetching(**state: Any) -> dict[str, Any]:
    return pod(initContainerStatuses=[{"name": "fetch-model", **state}])


def test_a_failed_download_is_reported_by_its_own_message() -> None:
    message = report("DownloadUnauthorized", "The token was refused for org/name (HTTP 401).")
    for state in ("state", "lastState"):
        found = diagnose_pod(fetching(**{state: {"terminated": {"exitCode": 1, "message": message}}}))
        assert found is not None
        assert (found.reason, found.message) == (
            Reason.DOWNLOAD_UNAUTHORIZED,
            "The token was refused for org/name (HTTP 401).",
        )


def test_a_download_without_last_words_has_its_exit_code() -> None:
    found = diagnose_pod(fetching(state={"terminated": {"exitCode": 137}}))
    assert found is not None
    assert found.reason is Reason.DOWNLOAD_FAILED
    assert "137" in found.message


@pytest.mark.parametrize(
    ("ended", "reason", "said"),
    [
        (
            {
                "exitCode": 1,
                "message": report("DownloadUnauthorized", "org/small is refused (HTTP 401)."),
            },
            Reason.DOWNLOAD_UNAUTHORIZED,
            "cannot be fetched: org/small is refused (HTTP 401).",
        ),
        ({"exitCode": 3}, Reason.DOWNLOAD_FAILED, "The draft model's download ended with exit code 3."),
        ({"exitCode": 137, "reason": "OOMKilled"}, Reason.OUT_OF_MEMORY, "killed the draft model's download"),
    ],
)
def test_a_draft_model_that_cannot_be_fetched_is_named_with_its_source_and_cause(
    ended: dict[str, Any], reason: Reason, said: str
) -> None:
    """The model's own download is complete; the draft's fails, now or before its last restart."""
    done = {"name": "fetch-model", "state": {"terminated": {"exitCode": 0}}}
    for state in ("state", "lastState"):
        one = pod(initContainerStatuses=[done, {"name": "draft-fetch-model", state: {"terminated": ended}}])
        one["spec"]["initContainers"] = [
            {"name": "fetch-model", "args": ["fetch", "--hugging-face=org/large"]},
            {"name": "draft-fetch-model", "args": ["fetch", "--hugging-face=org/small", "--revision=main"]},
        ]
        found = diagnose_pod(one)
        assert found is not None
        assert found.reason is reason
        assert found.message.startswith("The draft model org/small (speculation.draftModel.source)")
        assert said in found.message


def test_a_missing_token_is_named_before_the_download_starts() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
    found = diagnose_pod(fetching(state={"waiting": waiting}))
    assert found is not None
    assert found.reason is Reason.CONTAINER_CONFIG_INVALID
    assert 'secret "hub" not found' in found.message


def test_a_download_that_runs_or_is_done_has_no_diagnosis() -> None:
    assert diagnose_pod(fetching(state={"running": {}})) is None
    assert diagnose_pod(fetching(state={"terminated": {"exitCode": 0, "message": '{"event":"fetched"}'}})) is None
