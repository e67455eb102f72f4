"""One real question to a fresh cluster: does a Service with several endpoints answer, by name, from a pod?

It exercises what a Ready node does not prove: pulling from the local registry, pod addresses, DNS, kube-proxy's
balancing (with a missing iptables library, one endpoint works and several fail silently). Bodies are compared, never
just a connection: a machine's way out may accept any TCP connection.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hack.cluster import kind_cluster
from hack.cluster.errors import ClusterError
from hack.cluster.kind_config import NODE
from hack.cluster.steps import Steps

NAMESPACE = "millstream-smoke"
ANNOTATION = "millstream.dev/network-answered-since"
REPLICAS = 2
ANSWER_SECONDS = 90.0

_SERVER = """
import http.server, os
class Name(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = ("smoke " + os.environ["HOSTNAME"]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", 8080), Name).serve_forever()
"""

# Asks until every replica has answered by name; a wrong body, or silence, is kept as the last problem.
_CLIENT = f"""
import pathlib, time, urllib.request
seen, problem, deadline = set(), "no answer", time.monotonic() + 60
while len(seen) < {REPLICAS} and time.monotonic() < deadline:
    try:
        body = urllib.request.urlopen("http://web.{NAMESPACE}.svc.cluster.local/", timeout=3).read(200).decode()
        if body.startswith("smoke web-"): seen.add(body)
        else: problem = "a wrong body: " + repr(body)
    except OSError as error:
        problem = str(error); time.sleep(0.5)
text = f"{{len(seen)}} of {REPLICAS} endpoints answered, then: {{problem}}"
pathlib.Path("/dev/termination-log").write_text(text)
raise SystemExit(0 if len(seen) == {REPLICAS} else 1)
"""


def objects(image: str) -> list[dict[str, Any]]:
    """The namespace, two servers behind one Service, and the job that asks them.

    A job, not a bare pod: the namespace's service account appears a moment after the namespace, and a job tries again.
    """
    labels = {"app": "web"}
    server = _container("web", image, _SERVER) | {
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    }
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [server], "terminationGracePeriodSeconds": 0}}
    client = {"spec": {"containers": [_container("client", image, _CLIENT)], "restartPolicy": "Never"}}
    servers = {"replicas": REPLICAS, "selector": {"matchLabels": labels}, "template": pod}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        _object("apps/v1", "Deployment", "web", servers),
        _object("v1", "Service", "web", {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]}),
        _object("batch/v1", "Job", "client", {"backoffLimit": 0, "template": client}),
    ]


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def _container(name: str, image: str, program: str) -> dict[str, Any]:
    return {"name": name, "image": image, "command": ["python3", "-c", program]}


def is_answered() -> bool:
    """Whether the question was answered since the node's container last started (the node object remembers)."""
    found = json.loads(kind_cluster.kubectl("get", "node", NODE, "--output=json"))["metadata"].get("annotations", {})
    return bool(found.get(ANNOTATION) == kind_cluster.started_at())


def check(image: str, steps: Steps) -> None:
    """Run the question once and clean up. Raises ClusterError with what the asking pod saw."""
    with steps.step("Cluster: ask a Service with two endpoints"):
        _clean(wait=True)
        try:
            manifest = {"apiVersion": "v1", "kind": "List", "items": objects(image)}
            kind_cluster.kubectl("create", "--filename=-", stdin=json.dumps(manifest))
            _wait_for_answer()
            kind_cluster.kubectl("annotate", "--overwrite", "node", NODE, f"{ANNOTATION}={kind_cluster.started_at()}")
        finally:
            _clean(wait=False)


def _clean(*, wait: bool) -> None:
    kind_cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", f"--wait={str(wait).lower()}")


def _wait_for_answer() -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        for client in _pods("--selector=job-name=client"):
            status = client["status"]
            if status["phase"] == "Succeeded":
                return
            if status["phase"] == "Failed":
                said = status["containerStatuses"][0]["state"].get("terminated", {}).get("message", "nothing")
                raise ClusterError(f"The cluster's network is broken: {said}.")
        time.sleep(0.5)
    waits = ", ".join(waiting_reasons(_pods())) or "no pod was made"
    raise ClusterError(f"The cluster's network check did not finish within {ANSWER_SECONDS:g} s: {waits}.")


def _pods(*query: str) -> list[dict[str, Any]]:
    found = kind_cluster.kubectl("get", "pods", f"--namespace={NAMESPACE}", "--output=json", *query)
    return list(json.loads(found)["items"])


def waiting_reasons(pods: list[dict[str, Any]]) -> list[str]:
    """`web-1: ImagePullBackOff` for each container, in the cluster's own words."""
    return [
        f"{pod['metadata']['name']}: {container.get('state', {}).get('waiting', {}).get('reason', 'no reason given')}"
        for pod in pods
        for container in pod["status"].get("containerStatuses", [{}])
    ]
