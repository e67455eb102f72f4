"""A revision: the pods rendered from one spec, stored so that only a change of the spec changes them.

    Plan, pod template -> Revision -> apps/v1 ControllerRevision -> Revision

An upgrade of the operator changes the default image, pod defaults or the renderer. Without a record it would restart
every pod of every LLMDeployment. So the first rendering of a spec is stored, as StatefulSets and DaemonSets store
theirs, and used until the spec's input hash changes. The newest number is the current one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.plan import Plan
from millstream_operator.rendering.names import REVISION_LABEL, child
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.revision_marks import Marks
from millstream_operator.rendering.runtime_config import boot_config

HASH_LENGTH = 10
# Of `data`; raise it when its keys change their meaning. Format 1 passes the configuration as flags; format 2 has
# `boot`, which becomes a ConfigMap. Both are read: a record of format 1 keeps running as it was rendered.
FORMAT_WITH_FLAGS, FORMAT = 1, 2


@dataclass(frozen=True, slots=True)
class Revision:
    """A pinned rendering. `name` is the ControllerRevision's, `digest` labels its pods."""

    name: str
    digest: str
    input_hash: str
    config_hash: str
    image: str
    plan: dict[str, Any]  # status.plan
    template: dict[str, Any]  # PodTemplateSpec
    boot: dict[str, Any] | None = None  # the fields of a BootConfig; None: format 1
    resolved_revision: str | None = None  # of the model: the commit or image digest that every pod loads
    resolved_draft_revision: str | None = None  # of the draft model
    tuned_draft: str | None = None  # key of the tuning whose draft the pods load; None: the draft as it is

    @property
    def served_name(self) -> str | None:
        """The model's name in requests, as it was pinned; None for format 1, where only the flags hold it."""
        return self.boot["served_model_name"] if self.boot is not None else None

    def data(self) -> dict[str, Any]:
        boot = {"format": FORMAT_WITH_FLAGS} if self.boot is None else {"format": FORMAT, "boot": self.boot}
        pinned = {"resolvedRevision": self.resolved_revision, "resolvedDraftRevision": self.resolved_draft_revision}
        pinned["tunedDraft"] = self.tuned_draft
        return {
            **boot,
            "inputHash": self.input_hash,
            "configHash": self.config_hash,
            "image": self.image,
            "plan": self.plan,
            "template": self.template,
        } | {name: value for name, value in pinned.items() if value is not None}


def render_revision(owner: LLMDeployment, plan: Plan, defaults: PodDefaults) -> Revision:
    """Render the pods of a plan, and name the result after its content.

    The pods are labelled by the digest of the template alone: a spec that says the same in other words (`60s` for
    `1m`), or a plan with other prices, makes a new record and restarts nothing. A record cannot be changed.
    """
    template = pod_template(owner, plan, defaults)
    digest = _digest(template)
    template["metadata"]["labels"][REVISION_LABEL] = digest
    boot = boot_config(plan)
    unnamed = Revision(
        name="",
        digest=digest,
        input_hash=plan.input_hash,
        config_hash=boot.config_hash(),
        image=plan.runtime_image,
        plan=plan.status_plan(),
        template=template,
        # Without what is left to the runtime: a null may not survive the trip through the API server, and the text of
        # an immutable ConfigMap is made of this.
        boot={name: value for name, value in boot.as_dict().items() if value is not None},
        resolved_revision=plan.model_revision,
        resolved_draft_revision=plan.draft.revision if plan.draft is not None else None,
        tuned_draft=plan.draft.tuned if plan.draft is not None else None,
    )
    return replace(unnamed, name=f"{owner.name}-{_digest(unnamed.data())}")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:HASH_LENGTH]


def controller_revision(
    owner: LLMDeployment, revision: Revision, number: int, marks: Marks | None = None
) -> dict[str, Any]:
    """Return the object that stores a revision. `number` grows with every change of the spec."""
    rendered = child(owner, "apps/v1", "ControllerRevision", name=revision.name)
    rendered["metadata"]["labels"][REVISION_LABEL] = revision.digest
    if marks is not None and (annotations := marks.annotations()):
        rendered["metadata"]["annotations"] = annotations
    return rendered | {"revision": number, "data": revision.data()}


def read_revision(stored: dict[str, Any]) -> Revision | None:
    """Read a revision from its object, whose parts it shares; None for an unknown format."""
    data = stored.get("data") or {}
    if data.get("format") not in (FORMAT_WITH_FLAGS, FORMAT):
        return None
    return Revision(
        name=stored["metadata"]["name"],
        digest=stored["metadata"]["labels"][REVISION_LABEL],
        input_hash=data["inputHash"],
        config_hash=data["configHash"],
        image=data["image"],
        plan=data["plan"],
        template=data["template"],
        boot=data.get("boot"),
        resolved_revision=data.get("resolvedRevision"),
        resolved_draft_revision=data.get("resolvedDraftRevision"),
        tuned_draft=data.get("tunedDraft"),
    )
