"""A workload that flips is one entry in the journal each way, and idle minutes between are no write.

Twenty minutes: `make e2e-long`. A state lasts ten minutes at least (`probing/drafting_history.py`), and they are the
idle ones here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.client_pod import Traffic, traffic
from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import llmd, read, wait_ready
from e2e.durations import Durations
from e2e.release import Release

NAME = "flips"
IDLE_SECONDS, LOOK_SECONDS = 600.0, 10.0
# Pods are asked about once a minute: so long after the last token, all that came of it is in the status.
SETTLED_SECONDS = 150.0
STATE_SECONDS = 600.0  # until a state is seen: sums that halve in two minutes, asked once a minute, on two noisy cores

_CLIENT = """
import json, os, sys, time, urllib.request
def ask(messages, **more):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, **more}).encode()
    request = urllib.request.Request(os.environ["URL"], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
question = {"role": "user", "content": "What is a KV cache?"}
def again_and_again(once):
    while True:
        try:
            once()
            print("ok", flush=True)
        except Exception as error:
            print(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}", flush=True)
        time.sleep(0.2)
"""
# The answer stands in the prompt, so n-grams guess all of it.
ASKS_AGAIN = f"""{_CLIENT}
said = {{"role": "assistant", "content": ask([question], max_tokens=96, temperature=0)}}
again_and_again(lambda: ask([question, said, question], max_tokens=96, temperature=0))
"""
# 32 tokens at random: each pair has come before, so n-grams guess, and next to nothing of it stands.
AT_RANDOM = f"""{_CLIENT}
bias = {{str(token): 100 for token in range(300, 332)}}
again_and_again(lambda: ask([question], logit_bias=bias, temperature=2, max_tokens=512, ignore_eos=True))
"""


def state(deployment: Object) -> str | None:
    found: str | None = (deployment["status"].get("speculation") or {}).get("state")
    return found


def changes(deployment: Object) -> list[str]:
    """What the journal says of drafting, oldest first."""
    decisions = reversed(deployment["status"].get("decisions") or [])
    return [one["message"] for one in decisions if one["type"] == "SpeculationChanged"]


@contextmanager
def requests(cluster: Cluster, namespace: str, image: str, script: str) -> Iterator[Traffic]:
    """Send requests for the length of the block, one after another, and none behind it."""
    with traffic(cluster, namespace, NAME, image, script) as found:
        yield found
        assert not found.lost(), found.lost()[:5]
    cluster.kubectl("delete", "pod", "client", "-n", namespace, "--wait=true")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_flip_of_the_workload_is_one_entry_each_way_and_ten_idle_minutes_are_no_write(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    def wait_for(wanted: str) -> Object:
        return eventually(
            lambda: read(cluster, namespace, NAME),
            lambda found: state(found) == wanted,
            what=wanted,
            timeout_seconds=STATE_SECONDS,
        )

    cluster.apply(namespace, llmd(NAME, speculation={"method": "NGram"}))
    wait_ready(cluster, namespace, NAME)
    with requests(cluster, namespace, release.operator_image, ASKS_AGAIN):
        first = wait_for("Drafting")
    assert changes(first) == [], "the plan says so already"

    with requests(cluster, namespace, release.operator_image, AT_RANDOM), durations.measure("flip -> NotDrafting"):
        stopped = wait_for("NotDrafting")
    (entry,) = changes(stopped)
    assert "drafts in few decodes now, since a check costs more than it gains" in entry

    time.sleep(SETTLED_SECONDS)
    settled = read(cluster, namespace, NAME)
    began = time.monotonic()
    while (idle := time.monotonic() - began) < IDLE_SECONDS:
        time.sleep(LOOK_SECONDS)
        now = read(cluster, namespace, NAME)
        version, before = now["metadata"]["resourceVersion"], settled["metadata"]["resourceVersion"]
        assert version == before, f"a write after {idle:.0f} idle seconds: {now['status']}, before: {settled['status']}"
    assert (state(settled), changes(settled)) == ("NotDrafting", [entry])

    with requests(cluster, namespace, release.operator_image, ASKS_AGAIN), durations.measure("flip -> Drafting"):
        drafting = wait_for("Drafting")
    assert len(changes(drafting)) == 2
    assert "drafts again in most decodes" in changes(drafting)[1]
    cluster.kubectl("delete", "llmd", NAME, "-n", namespace, "--wait=true")
