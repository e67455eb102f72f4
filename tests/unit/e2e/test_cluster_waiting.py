"""The end-to-end tests wait for what comes later, on a busy machine much later, instead of failing at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import cluster as cluster_module
from e2e.cluster import Cluster
from e2e.optional_crds import FILES

# kubectl as the API server answers it: nothing yet, a CRD without conditions yet, one that is established.
KUBECTL = """#!/bin/sh
count=$(cat "$0.count" 2>/dev/null || echo 0); echo $((count + 1)) > "$0.count"
[ "$1" = get ] || { echo "error: .status.conditions accessor error: <nil> is of the type <nil>" >&2; exit 1; }
case $count in
  0) ;;
  1) echo '{"status": null}' ;;
  2) echo '{"status": {"conditions": null}}' ;;
  3) echo '{"status": {"conditions": [{"type": "Established", "status": "False"}]}}' ;;
  *) echo '{"status": {"conditions": [{"type": "Established", "status": "True"}]}}' ;;
esac
"""


class Clock:
    """In place of the module `time`: only sleep takes time, so that a limit is a number of looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(cluster_module, "time", Clock())
    for tool, text in {"kubectl": KUBECTL, "helm": "#!/bin/sh\n"}.items():
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "kubeconfig").write_text("")
    return Cluster(tmp_path / "kubeconfig", tmp_path)


def test_a_crd_without_conditions_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    name = next(iter(FILES))
    cluster.wait_condition("crd", name, "Established")
    assert (tmp_path / "kubectl.count").read_text().strip() == "5"


def test_what_never_comes_says_what_was_seen_last(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"crd/x Ready.*last seen: .*Established"):
        cluster.wait_condition("crd", "x", "Ready", timeout_seconds=2)


def test_no_end_to_end_test_calls_kubectl_wait_but_those_about_it() -> None:
    """test_status shows that a user's `kubectl wait` works on an LLMDeployment."""
    folder = Path(__file__).resolve().parents[3] / "e2e"
    callers = {path.name for path in folder.glob("*.py") if 'kubectl("wait"' in path.read_text(encoding="utf-8")}
    assert callers == {"test_status.py"}
