"""The chart as helm renders it, with the pinned helm of `python3 -m hack.cluster tools helm`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "millstream"
PREVIOUS = ROOT / "e2e" / "fixtures" / "millstream-0.1.0.tgz"
HELM = ROOT / ".tools" / "bin" / "helm"
IMAGES = ("operator.image=registry/operator:1", "runtime.image=registry/runtime:1")

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of C reads the same, ten times as fast

Document = dict[str, Any]


def have_helm() -> None:
    """Build helm from the pinned sources once; later it is found in a cache."""
    if not HELM.exists():
        subprocess.run([sys.executable, "-m", "hack.cluster", "tools", "helm"], cwd=ROOT, check=True)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Nothing of the user's decides what is rendered.
    environment = os.environ | {"KUBECONFIG": os.devnull}
    return subprocess.run([HELM, *arguments], env=environment, capture_output=True, text=True, check=False)


def render(*values: str, release: str = "millstream", chart: Path = CHART, namespace: str = "system") -> list[Document]:
    """`values`: as `--set` takes them; a list or a word in quotes is JSON."""
    sets = [word for value in (*IMAGES, *values) for word in (_flag_of(value), value)]
    arguments = ("template", release, str(chart), "--namespace", namespace, "--kube-version", "1.34.0", *sets)
    text = _rendered_once(*arguments) if chart in (CHART, PREVIOUS) else _rendered(*arguments)
    return [document for document in yaml.load_all(text, LOADER) if document]


def _rendered(*arguments: str) -> str:
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Charts that no test changes, which many tests render with the same values. Each caller reads documents of its own.
_rendered_once = functools.cache(_rendered)


def _flag_of(value: str) -> str:
    return "--set-json" if "=[" in value or '="' in value else "--set"


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def operator_of(documents: list[Document]) -> Document:
    (deployment,) = of_kind(documents, "Deployment")
    return deployment


def pod_specs(documents: list[Document]) -> Iterator[Document]:
    for document in documents:
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]["spec"]
        if document["kind"] == "Pod":
            yield document["spec"]


def environment(documents: list[Document]) -> dict[str, str]:
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}
