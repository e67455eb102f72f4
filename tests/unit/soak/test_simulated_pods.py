"""The configuration of kwok for pods: its own fast Stages, and the answer of an inspection."""

from __future__ import annotations

import json
import re

from millstream_operator.catalog.inspected_model import read_answer
from millstream_operator.diagnosis.container_failures import runtime_report
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON
from tests.soak.simulated_pods import stages

TERMINATION_MESSAGE_LIMIT_BYTES = 4096


def test_the_pod_of_an_inspection_says_what_the_operator_reads() -> None:
    documents = [json.loads(text) for text in stages().split("---\n")]
    assert [one["metadata"]["name"] for one in documents] == ["pod-ready", "pod-fails", "pod-complete", "pod-delete"]
    message = re.search(r"message: {{ `(.*)` \| Quote }}", documents[2]["spec"]["next"]["statusTemplate"])
    assert message is not None
    assert len(message[1].encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES
    assert read_answer(message[1])["architectures"] == ["LlamaForCausalLM"]


def test_a_pod_that_fails_says_what_no_other_try_mends() -> None:
    fails = next(json.loads(text) for text in stages().split("---\n") if '"pod-fails"' in text)
    message = re.search(r"message: {{ `(.*)` \| Quote }}", fails["spec"]["next"]["statusTemplate"])
    assert message is not None
    found = runtime_report(message[1])
    assert found is not None
    assert found.reason in NEEDS_A_PERSON
