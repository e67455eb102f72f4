"""Where the runtime finds the weights, below the model root. Pure; `rendering/model_source.py` puts them there.

    local                    chat                       the folder of the image
    persistentVolumeClaim    persistentVolumeClaim/chat the folder of the volume
    huggingFace, image       huggingFace                an emptyDir: one model, one folder
    … with model.cache       huggingFace/org--name-0123456789ab
    the draft model          draft/…                    the same, in a volume of its own or in the same cache
    … once it is tuned       tuned/draft-0123456789     in the cache, named by what it is made from

A cache outlives the pods, and a complete folder never changes: so each revision has its own folder in it.
"""

from __future__ import annotations

import re

from millstream_operator.api.model import ModelSource
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.planning.requires import source_kind

DRAFT_FOLDER = "draft"
TUNED_FOLDER = "tuned"
BASE_FOLDER = "base"
REVISION_LENGTH = 12  # of a commit or digest: enough to distinguish the revisions of one model


def model_path(spec: LLMDeploymentSpec, revision: str | None) -> str:
    """Return the path. `revision`: what the source was resolved to; where not known, the spec's revision is used."""
    return _path(spec.model.source, revision, cached=spec.model.cache is not None)


def draft_path(spec: LLMDeploymentSpec, source: ModelSource, revision: str | None) -> str:
    """Return the path of the draft model, as `model_path` does."""
    path = _path(source, revision, cached=spec.model.cache is not None)
    return path if source.local is not None else f"{DRAFT_FOLDER}/{path}"


def tuned_path(key: str) -> str:
    """Return the path of a draft that the cluster tuned. `key`: of the tuning (`rendering/tuning_job.py`)."""
    return f"{TUNED_FOLDER}/draft-{key}"


def base_path(spec: LLMDeploymentSpec, source: ModelSource) -> str:
    """Return the path of the model that the quality gate compares with, as `model_path` does."""
    path = _path(source, None, cached=spec.model.cache is not None)
    return path if source.local is not None else f"{BASE_FOLDER}/{path}"


def _path(source: ModelSource, revision: str | None, *, cached: bool) -> str:
    if source.local is not None:
        return source.local.path.rstrip("/") or "/"
    if (claim := source.persistent_volume_claim) is not None and claim.path is not None:
        return f"{source_kind(source)}/{claim.path.strip('/')}"
    if not cached or source.persistent_volume_claim is not None:
        return source_kind(source)
    return f"{source_kind(source)}/{_cache_folder(source, revision)}"


def _cache_folder(source: ModelSource, revision: str | None) -> str:
    if source.hugging_face is not None:
        name, asked = source.hugging_face.repository, source.hugging_face.revision or "main"
    else:
        assert source.image is not None  # noqa: S101 - nothing else is downloaded
        name, _, digest = source.image.reference.partition("@")
        name, _, tag = name.rpartition("/")[2].partition(":")
        asked = digest or tag or "latest"
    version = (revision or asked).removeprefix("sha256:")[:REVISION_LENGTH]
    return re.sub(r"[^A-Za-z0-9._-]", "--", f"{name}-{version}")
