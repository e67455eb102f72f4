"""Light traffic from inside the cluster, through the Service as any client sees it.

A forwarded port leads to one pod and dies with it, so it cannot tell whether a rollout loses requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster import Cluster, eventually
from e2e.deployments import MODEL
from e2e.script_pod import script_pod

# Runs in the operator's image: Python, and nothing of ours. One line a request: "ok", or what went wrong.
SCRIPT = """
import json, os, sys, time, urllib.request
body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is a pod?"}],
                   "max_tokens": 24, "temperature": 0}).encode()
request = urllib.request.Request(os.environ["URL"], body, {"Content-Type": "application/json"})
while True:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"]
        print("ok" if content else "empty answer", flush=True)
    except Exception as error:
        print(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}", flush=True)
    time.sleep(0.2)
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that a pod keeps sending."""

    cluster: Cluster
    namespace: str

    def lines(self) -> list[str]:
        """One a request so far."""
        return self.cluster.kubectl("logs", "client", "-n", self.namespace).splitlines()

    def lost(self) -> list[str]:
        """What did not end well."""
        return [line for line in self.lines() if line not in ("ok", "ok stream")]

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests have been answered or lost."""
        seen = len(self.lines())
        eventually(self.lines, lambda now: len(now) >= seen + more, what=f"{more} more requests")


# Open loop: a request begins when it is due, whether the one before has ended or not, and every other one is streamed.
# A rollout that stalls meets more and more of them at once, as it would with real users.
OPEN_LOOP = """
import itertools, json, os, threading, time, urllib.request
interval = float(os.environ["INTERVAL_SECONDS"])
def tell(line):
    os.write(1, (line + "\\n").encode())  # one write: threads must not mix their lines
def ask(stream):
    body = json.dumps({"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is a pod?"}],
                       "max_tokens": 16, "temperature": 0, "stream": stream}).encode()
    request = urllib.request.Request(os.environ["URL"], body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        if stream:
            assert text.rstrip().endswith("data: [DONE]"), "a stream was cut off: " + text[-200:]
        else:
            assert json.loads(text)["choices"][0]["message"]["content"], "an empty answer"
        tell("ok stream" if stream else "ok")
    except Exception as error:
        tell(f"{time.strftime('%H:%M:%S')} stream={stream} {type(error).__name__}: {error}")
begin = time.monotonic()
for number in itertools.count():
    time.sleep(max(0, begin + number * interval - time.monotonic()))
    threading.Thread(target=ask, args=(number % 2 == 1,), daemon=True).start()
"""


@contextmanager
def traffic(cluster: Cluster, namespace: str, service: str, image: str, script: str = SCRIPT) -> Iterator[Traffic]:
    """Send requests to the Service for the length of the block."""
    url = f"http://{service}.{namespace}.svc/v1/chat/completions"
    env = {"MODEL": MODEL, "URL": url, "INTERVAL_SECONDS": "0.4"}
    cluster.apply(namespace, script_pod("client", image, script, env, memory="32Mi"))
    source = Traffic(cluster, namespace)
    cluster.wait_condition("pod", "client", "Ready", "-n", namespace, timeout_seconds=120)
    source.wait_for(3)
    yield source
