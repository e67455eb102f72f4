"""What a pod needs of a node, read from a template and from a live pod."""

from __future__ import annotations

from millstream_operator.inventory.pod_needs import read_needs


def test_the_tolerations_that_the_api_server_adds_to_every_pod_are_no_need() -> None:
    """Else a template would need other nodes than its own pod, and nothing could be replaced in place."""
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    added = [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300} for key in keys]
    own = {"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}
    template, pod = {"spec": {"tolerations": [own]}}, {"spec": {"tolerations": [own, *added]}}
    assert read_needs(template) == read_needs(pod)
    assert read_needs(template).at_most(read_needs(pod))
