"""The Dockerfile subset means what it means to `docker build`, and refuses the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.images.dockerfile import Copy, parse
from hack.images.errors import ImageError

ROOT = Path(__file__).resolve().parents[3]

SMALL = """
ARG BASE
ARG PYTHON_VERSION=3.11
FROM ${BASE}
# a comment
LABEL title="two words" \\
      other=one
COPY interpreter/ /lib/python${PYTHON_VERSION}/
COPY app/ /app/
ENV PATH=/bin HOME=/home
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "millstream"]
"""


def test_reads_every_instruction_of_the_subset() -> None:
    recipe = parse(SMALL, {"BASE": "registry/base:1"}, name="Dockerfile")
    assert recipe.base == "registry/base:1"
    assert recipe.arguments["PYTHON_VERSION"] == "3.11"
    assert recipe.labels == {"title": "two words", "other": "one"}
    assert recipe.copies == [Copy("interpreter", "/lib/python3.11"), Copy("app", "/app")]
    assert recipe.env == {"PATH": "/bin", "HOME": "/home"}
    assert (recipe.user, recipe.ports) == ("65532:65532", ["8000/tcp"])
    assert recipe.entrypoint == ["python3", "-m", "millstream"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("RUN apt-get update", "line 14: RUN is outside the subset"),
        ("HEALTHCHECK CMD true", "line 14: HEALTHCHECK is outside the subset"),
        ("COPY file.txt /app/", "COPY takes one folder and one absolute target"),
        ("COPY --chown=1 app/ /app/", "COPY takes one folder and one absolute target"),
        ("ENV HOME /tmp", "'HOME' is not KEY=value"),
        ("ENV HOME=$NOWHERE", r"\$NOWHERE has no value"),
        ("ENTRYPOINT python3 -m millstream", "JSON list"),
        ("FROM other", "a second FROM"),
    ],
)
def test_refuses_what_it_would_not_do(line: str, complaint: str) -> None:
    with pytest.raises(ImageError, match=complaint):
        parse(f"{SMALL}{line}\n", {"BASE": "b"}, name="Dockerfile")


def test_a_base_that_nobody_gave_is_named() -> None:
    with pytest.raises(ImageError, match=r"\$BASE has no value"):
        parse(SMALL, {}, name="Dockerfile")


@pytest.mark.parametrize("image", ["operator", "runtime"])
def test_our_images_start_without_a_shell_as_nobody(image: str) -> None:
    path = ROOT / "hack" / "images" / image / "Dockerfile"
    recipe = parse(path.read_text(), {"BASE": "b"}, name=str(path))
    assert recipe.user == "65532:65532"
    assert recipe.entrypoint[:5] == ["python3", "-I", "-B", "-u", "-m"]
    assert recipe.copies[-1] == Copy("app", "/app"), "our own code changes most often, so it is the last layer"


@pytest.mark.parametrize("image", ["operator", "runtime"])
def test_our_images_decide_alone_what_python_and_openssl_load(image: str) -> None:
    path = ROOT / "hack" / "images" / image / "Dockerfile"
    recipe = parse(path.read_text(), {"BASE": "b"}, name=str(path))
    assert recipe.env["OPENSSL_CONF"] == "/dev/null"
    assert not {"PYTHONPATH", "PYTHONHOME"} & recipe.env.keys(), "an isolated interpreter reads none"
    version = recipe.arguments["PYTHON_VERSION"]
    targets = {copy.target for copy in recipe.copies if copy.source == "interpreter"}
    assert targets == {f"/usr/local/lib/python{version}/{kind}-packages" for kind in ("site", "dist")}
    text = (ROOT / "hack" / "images" / "interpreter" / "millstream.pth").read_text()
    folders = [copy.target for copy in recipe.copies if copy.source == "app" or copy.source.startswith("dependencies/")]
    assert all(f'"{folder}"' in text for folder in folders)


def test_the_drivers_libraries_are_found_where_gke_mounts_them() -> None:
    """So no LLMDeployment has to say it, and none may."""
    path = ROOT / "hack" / "images" / "runtime" / "Dockerfile"
    recipe = parse(path.read_text(), {"BASE": "b"}, name=str(path))
    assert recipe.env["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
