"""A pod that runs a Python script of the tests in one of our images, under the restricted profile."""

from __future__ import annotations

from typing import Any

from e2e.cluster import Object


def script_pod(name: str, image: str, script: str, env: dict[str, str], *, memory: str, **container: Any) -> Object:
    """`container` adds fields to the container, such as a probe."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "command": ["python3", "-c", script],
                    "env": [{"name": key, "value": value} for key, value in env.items()],
                    "resources": {"requests": {"cpu": "10m", "memory": memory}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    **container,
                }
            ],
        },
    }
