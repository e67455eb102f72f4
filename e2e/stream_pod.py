"""Streams from inside the cluster, several at once and one after the other, each reported by how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster import Cluster, eventually
from e2e.deployments import MODEL
from e2e.script_pod import script_pod

# One line a stream: "ok" when it ended with [DONE] after its last token, or what went wrong. Each opens a connection of
# its own, so that new streams spread over the replicas that are there.
SCRIPT = """
import json, os, threading, time, urllib.request
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is a pod?"}],
                   "max_tokens": 160, "min_tokens": 160, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
lock = threading.Lock()
def tell(text):
    with lock:
        print(text, flush=True)
def stream():
    request = urllib.request.Request(os.environ["URL"], body, {"Content-Type": "application/json"})
    try:
        last, finished = "", False
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    last = line[6:].strip().decode()
                    if last != "[DONE]" and '"error"' in last:
                        return tell("error: " + last[:200])
                    finished = finished or '"finish_reason":"length"' in last.replace(" ", "")
        tell("ok" if last == "[DONE]" and finished else "cut off after: " + last[:200])
    except Exception as error:
        tell(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}")
def again():
    while True:
        stream()
for _ in range(int(os.environ["STREAMS"])):
    threading.Thread(target=again).start()
"""


@dataclass(frozen=True, slots=True)
class Streams:
    cluster: Cluster
    namespace: str

    def ended(self) -> list[str]:
        """One line for each stream that ended so far."""
        return self.cluster.kubectl("logs", "streams", "-n", self.namespace).splitlines()

    def wait_for(self, more: int) -> None:
        """Wait until so many more have ended."""
        seen = len(self.ended())
        eventually(self.ended, lambda now: len(now) >= seen + more, what=f"{more} more streams", timeout_seconds=120)


@contextmanager
def streams(cluster: Cluster, namespace: str, service: str, image: str, *, at_once: int = 4) -> Iterator[Streams]:
    """Keep so many streams open to the Service for the length of the block."""
    env = {"MODEL": MODEL, "URL": f"http://{service}.{namespace}.svc/v1/chat/completions", "STREAMS": str(at_once)}
    cluster.apply(namespace, script_pod("streams", image, SCRIPT, env, memory="48Mi"))
    cluster.wait_condition("pod", "streams", "Ready", "-n", namespace, timeout_seconds=120)
    found = Streams(cluster, namespace)
    found.wait_for(at_once)
    yield found
