"""What `helm test` runs, in the operator's image: is the API served, and is the operator alive?

Standard library only and no import of ours, so that a broken operator cannot break what finds it broken.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_SECONDS = 10


def api_server(path: str) -> dict:
    """GET from the API server as this pod's service account."""
    address = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}{path}"
    token = (ACCOUNT / "token").read_text()
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=trust) as answer:  # noqa: S310 - https above
        return json.load(answer)


def main() -> None:
    """Print one line a check; leave with a sentence when one fails."""
    namespace, selector = os.environ["OPERATOR_NAMESPACE"], os.environ["OPERATOR_SELECTOR"]
    try:
        listed = api_server(f"/apis/millstream.dev/v1alpha1/namespaces/{namespace}/llmdeployments")
    except urllib.error.HTTPError as error:
        sys.exit(f"The API server does not serve LLMDeployments ({error.code}): crds.enabled=false, and no CRD?")
    print(f"{listed['apiVersion']} {listed['kind']} is served")

    pods = api_server(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
    addresses = [pod["status"]["podIP"] for pod in pods if pod["status"].get("phase") == "Running"]
    if not addresses:
        sys.exit(f"No operator pod runs in {namespace} ({selector}).")
    for address in addresses:
        host = f"[{address}]" if ":" in address else address
        try:
            with urllib.request.urlopen(f"http://{host}:8080/healthz", timeout=TIMEOUT_SECONDS) as answer:
                print(f"operator at {address} is healthy: {answer.read(200).decode(errors='replace')}")
        except OSError as error:
            sys.exit(f"The operator at {address} does not answer /healthz: {error}")


main()
