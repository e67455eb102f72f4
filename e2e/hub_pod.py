"""A hub inside the cluster: a local stand-in that serves the runtime image's own demo model by the Hugging Face API.

The real hub is out of reach of a test cluster. The protocol is what `millstream_runtime/sources/hugging_face.py` names:
model info with sizes and digests, then the files, for those who bring the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster import Cluster, Object
from e2e.deployments import MODEL
from e2e.script_pod import script_pod

PORT = 8080
REPOSITORY = "org/demo"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = f"""
import hashlib, http.server, json, os, pathlib
folder = pathlib.Path("/models/{MODEL}")
commit = "{COMMIT}"
def sibling(path):
    content = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\\0" % len(content) + content).hexdigest()
    return {{"rfilename": path.name, "size": len(content), "blobId": blob}}
info = json.dumps({{"id": "{REPOSITORY}", "sha": commit, "siblings": [sibling(p) for p in folder.iterdir()]}}).encode()
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.split("?")[0]
        if self.headers.get("Authorization") != "Bearer " + os.environ["TOKEN"]:
            return self.send_error(401)
        if path in ("/api/models/{REPOSITORY}/revision/main", "/api/models/{REPOSITORY}/revision/" + commit):
            return self.answer(info)
        if path.startswith("/{REPOSITORY}/resolve/" + commit + "/"):
            return self.answer((folder / path.rsplit("/", 1)[1]).read_bytes())
        self.send_error(404)
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", {PORT}), Hub).serve_forever()
"""


@contextmanager
def hub(cluster: Cluster, namespace: str, image: str, token: str) -> Iterator[str]:
    """Run the hub for the length of the block, from the runtime's image; yields its HF_ENDPOINT."""
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
    pod = script_pod("hub", image, SCRIPT, {"TOKEN": token}, memory="64Mi", readinessProbe=probe)
    cluster.apply(namespace, pod)
    cluster.apply(namespace, _service())
    cluster.wait_condition("pod", "hub", "Ready", "-n", namespace, timeout_seconds=120)
    yield f"http://hub.{namespace}.svc:{PORT}"


def _service() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "hub"},
        "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]},
    }
