"""LLMDeployments as they lie in clusters today, and what today's operator makes of each.

    records/deployments/NAME.json:  deployment, facts, podDefaults -> Stored -> made

Every input is in the files, the GPU catalogue and the runtime's capabilities too, so that neither a new price nor a new
capability changes what is made.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.catalog.draft_head import read_head
from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.inventory.node_kinds import Inventory, inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.companions import Autoscaler, CompanionDefaults, autoscaler, monitors
from millstream_operator.rendering.inspect_job import Subject, inspect_job
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, controller_revision, render_revision
from millstream_operator.rendering.revision_marks import Marks
from millstream_runtime.config import Capabilities
from millstream_runtime.config_files import dump_fields

Manifest = dict[str, Any]
RECORDS = Path(__file__).parent / "records"
DEPLOYMENTS = RECORDS / "deployments"
IMAGE = "registry.example.com/millstream-runtime:1.0"
COMPANIONS = CompanionDefaults("http://prometheus.monitoring:9090", {"release": "prometheus"})
SERVED = ("ScaledObject", "PodMonitor", "PrometheusRule")
# Only the name is compared: the alerts are sentences for people, and a change of them reaches no pod.
NAMED_ONLY = ("PrometheusRule",)
# Of a plan, what is not written for people to read.
WORDS = ("summary", "preferred", "reasons", "rejected", "fixes")
SOURCES = frozenset({"local", "huggingFace", "image", "persistentVolumeClaim"})
# What the runtime could do when the records were written, and what a later one might.
CAPABILITIES = {
    "today": Capabilities(
        model_families=frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"}),
        sources=SOURCES,
        quantization_methods=frozenset({"None"}),
        cpu_quantization_methods=frozenset({"None"}),
        online_quantization_methods=frozenset(),
        kv_cache_methods=frozenset({"None"}),
        speculation_methods=frozenset({"Disabled"}),
        max_tensor_parallel_size=8,
        max_pipeline_parallel_size=1,
    ),
    "later": Capabilities(
        model_families=frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"}),
        sources=SOURCES,
        quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8"}),
        cpu_quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8"}),
        online_quantization_methods=frozenset({"FP8", "INT8"}),
        kv_cache_methods=frozenset({"None", "FP8", "INT8"}),
        speculation_methods=frozenset({"Disabled", "NGram", "DraftModel"}),
        max_tensor_parallel_size=8,
        max_pipeline_parallel_size=4,
    ),
}
CAPABILITIES["drafts"] = replace(
    CAPABILITIES["today"], cpu_speculation_methods=frozenset({"Disabled", "NGram", "DraftModel"})
)
CAPABILITIES["heads"] = replace(
    CAPABILITIES["today"], cpu_speculation_methods=frozenset({"Disabled", "NGram", "DraftModel", "EAGLE", "Medusa"})
)


@dataclass(frozen=True)
class Stored:
    """One file of records/deployments."""

    name: str

    @property
    def path(self) -> Path:
        return DEPLOYMENTS / f"{self.name}.json"

    @property
    def rendered_path(self) -> Path:
        return RECORDS / "rendered" / f"{self.name}.json"

    @property
    def rendered(self) -> Manifest:
        """What the operator of now renders of a new plan, where it may differ from what older ones stored."""
        found: Manifest = read(self.rendered_path)
        return found

    @property
    def content(self) -> Manifest:
        found: Manifest = read(self.path)
        return found

    @property
    def owner(self) -> LLMDeployment:
        return parse(self.content["deployment"])

    @property
    def facts(self) -> Facts:
        facts = self.content["facts"]
        capabilities = CAPABILITIES[facts["capabilities"]]
        return Facts(
            shape=_shape(facts.get("config")),
            draft_shape=_head(facts["draftHead"]) if "draftHead" in facts else _shape(facts.get("draftConfig")),
            inventory=_inventory(facts.get("free")),
            capacity=_inventory(facts.get("capacity")),
            draft_is_inspected=facts.get("draftInspected", False),
            tuned_draft=facts.get("tunedDraft"),
            model_revision=facts.get("modelRevision"),
            checkpoint_bytes=facts.get("checkpointBytes"),
            catalog=catalog(),
            runtime=capabilities,
            choosable=capabilities,
        )

    @property
    def revision(self) -> Manifest:
        """The ControllerRevision that was written."""
        found: Manifest = self.content["made"]["controllerRevision"]
        return found

    def decide(self, facts: Facts) -> Plan | Infeasible:
        return decide(self.owner, PlanDefaults(IMAGE), facts)

    def render(self, plan: Plan) -> Revision:
        defaults = PodDefaults.model_validate_json(json.dumps(self.content.get("podDefaults", {})))
        return render_revision(self.owner, plan, defaults)

    def make(self) -> Manifest:
        """What the code of now makes, in the form of `made`."""
        plan = self.decide(self.facts)
        assert isinstance(plan, Plan), f"{self.name}: {plan.message}"
        assert not plan.requires, f"{self.name} would be refused: {plan.requires}"
        revision = self.render(plan)
        return _fields(self.owner, plan, revision, _rendered(self.owner, revision))


def _fields(owner: LLMDeployment, plan: Plan, revision: Revision, rendered: Sequence[Manifest]) -> Manifest:
    texts = {name: text for one in rendered for name, text in (one.get("data") or {}).items() if _is_config_map(one)}
    marks = Marks(answered=True, strategy=AppliedStrategy.AVAILABILITY)
    return {
        "digest": revision.digest,
        "inputHash": revision.input_hash,
        "configHash": revision.config_hash,
        "boot.json": _sha256(texts["boot.json"]),
        "live.json": _sha256(_without_later_fields(texts["live.json"])),
        "revisionName": revision.name,
        "factsHash": plan.facts_hash,
        "plan": {key: value for key, value in revision.plan.items() if key not in WORDS and key != "factsHash"},
        "objectNames": [_name(one) for one in rendered],
        "objects": {_name(one): _sha256(_json(one)) for one in rendered if one["kind"] not in NAMED_ONLY},
        "controllerRevision": json.loads(_json(controller_revision(owner, revision, 1, marks))),
    }


def _without_later_fields(live: str) -> str:
    """As the older operator wrote it. A pod of its runtime ignores what it does not know, and restarts for nothing."""
    return dump_fields({name: value for name, value in json.loads(live).items() if name != "target_itl_milliseconds"})


def _rendered(owner: LLMDeployment, revision: Revision) -> list[Manifest]:
    model = owner.spec.model
    subject = Subject(model.source, model.config_map_ref)
    scaled = autoscaler(owner, SERVED, COMPANIONS)
    return [
        *objects(owner, revision),
        inspect_job(owner, subject, IMAGE, PodDefaults()),
        *([scaled.manifest] if isinstance(scaled, Autoscaler) else []),
        *monitors(owner, SERVED, COMPANIONS),
    ]


def _is_config_map(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == "ConfigMap")


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _json(content: object) -> str:
    return json.dumps(content, sort_keys=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shape(config: Manifest | None) -> ModelShape | None:
    return read_shape(config) if config is not None else None


def _head(answer: Manifest) -> ModelShape:
    return read_head({"draft_head": answer}, "EAGLE")


def _inventory(islands: Sequence[str] | None) -> Inventory | None:
    return inventory_of([parse_island(catalog(), text) for text in islands]) if islands is not None else None


@functools.cache
def catalog() -> GpuCatalog:
    parts = [GpuPart.model_validate(entry) for entry in read(RECORDS / "gpus.json")]
    return GpuCatalog({part.name: part for part in parts})


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


STORED = {path.stem: Stored(path.stem) for path in sorted(DEPLOYMENTS.glob("*.json"))}
