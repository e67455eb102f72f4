"""One process of the operator against a `FakeCluster`: its index and its reconciler, and a test that calls each turn.

The watches are replaced by whole listings before each turn, which is what the real operator's resync does.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS
from millstream_operator.facts.calibration_store import CalibrationStore
from millstream_operator.facts.cluster_facts import ClusterFacts, Shapes, shape_from_catalogue
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.facts.gpu_watch import closed_nodes
from millstream_operator.facts.restored_status import EnqueueAfter
from millstream_operator.inventory.node_pools import NodePool as DeclaredPool
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, NODE, POD, WATCHED
from millstream_operator.kube.optional_kinds import OptionalKinds
from millstream_operator.kube.pod_access import PodUnreachable
from millstream_operator.leadership.ownership import Release
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.probing.drafting_reports import DraftingReports
from millstream_operator.probing.pod_reports import PodReports
from millstream_operator.probing.probe_key import ProbeKeys
from millstream_operator.probing.service_probe import NO_HEADERS, ServiceBusy, ServiceUnreachable
from millstream_operator.probing.step_reports import StepReports
from millstream_operator.queue.work_queue import RetryLater
from millstream_operator.reconciling.defaults import Defaults
from millstream_operator.reconciling.reconciler import Reconciler
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.surroundings import Surroundings
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault
from tests.support.known_models import known_config
from tests.support.llmdeployments import NAMESPACE, manifest

Manifest = dict[str, Any]
IMAGE = "registry.example.com/runtime:1"
NOW = "2025-01-01T00:00:00Z"
PATIENCE_TURNS = 40
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def answer_of(revision: str | None = COMMIT, file_bytes: int = 1 << 20, **config: object) -> str:
    """What `millstream inspect` leaves as termination message, of a small Llama by default."""
    fields = {**CONFIG, **config}
    shape = {"version": 1, "revision": revision, "quantization_config": fields.pop("quantization_config", None)}
    return json.dumps(shape | {"config": fields, "weights": {"file_bytes": file_bytes}})


TINY_LLAMA = answer_of()


def judged(verdict: str = "passed", failures: Sequence[str] = ()) -> str:
    """What `millstream quality` leaves as termination message: of two slices, the second with these failures."""
    figures: Manifest = {
        "documents": 30,
        "tokens": 2000,
        "mean_kl": 0.004,
        "p99_kl": 0.1,
        "top1_agreement_percent": 98.6,
    }
    figures |= {"flip_percent": 0.5, "perplexity_ratio": 1.002, "failures": []}
    slices = [{"slice": "chat", **figures}, {"slice": "code", **figures, "failures": [*failures]}]
    return json.dumps({"version": 1, "event": "judged", "verdict": verdict, "slices": slices, "slices_left_out": 0})


QUANTIZED = json.dumps({"version": 1, "event": "quantized", "method": "awq", "weights_bytes": 123456})


def tuned(verdict: str = "better", reasons: Sequence[str] = ()) -> str:
    """What `millstream tune-draft` leaves as termination message."""
    figures = {"answers": 40, "before_percent": 12.9, "after_percent": 74.3, "gain_points": 61.4}
    answer = {"version": 1, "event": "tuned", "verdict": verdict, "reasons": [*reasons]}
    return json.dumps(answer | {"slices": [{"slice": "code", **figures}], "slices_left_out": 0})


PREPARED = {"quantize": QUANTIZED, "quality": judged(), "tune-draft": tuned()}


def answer_to(job: Manifest) -> str:
    """What the inspection of a well-known repository would say; of any other model, that it is a small Llama. What
    quantizes succeeds, what judges says that the model passed, and a draft that is tuned is better."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    if container["args"][0] in PREPARED:
        return PREPARED[container["args"][0]]
    names = [word.partition("=")[2] for word in container["args"] if word.startswith("--hugging-face=")]
    config = known_config(names[0]) if names else None
    return TINY_LLAMA if config is None else answer_of(**config)


class FakeModel:
    """A fake of the model behind the Service: it answers with what the Deployment runs, by default."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.unreachable = ""
        self.is_busy = False  # its queue is full
        self.key: str | None = None  # the API key that it asks for
        self.ready: Manifest = {}  # over what /ready would answer
        self.completion: Manifest = {"choices": [{"text": "!"}], "usage": {"completion_tokens": 1}}
        self.questions: list[tuple[str, Manifest | None]] = []

    async def get(self, owner: LLMDeployment, path: str, timeout_seconds: float) -> Manifest:
        self._asked(path, None)
        labels = self.cluster.the(DEPLOYMENT, owner.name)["spec"]["template"]["metadata"]["labels"]
        return self.running(labels, owner.served_name)

    def running(self, labels: Mapping[str, str], default_name: str = "demo") -> Manifest:
        """What a pod with these labels answers to `/ready`."""
        running = next(
            record["data"]
            for record in self.cluster.all(CONTROLLER_REVISION)
            if record["metadata"]["labels"][REVISION_LABEL] == labels[REVISION_LABEL]
        )
        served_name = running.get("boot", {}).get("served_model_name", default_name)
        return {"config_hash": running["configHash"], "model": served_name} | self.ready

    async def post(
        self,
        owner: LLMDeployment,
        path: str,
        body: Mapping[str, Any],
        timeout_seconds: float,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Manifest:
        self._asked(path, dict(body))
        if self.is_busy:
            raise ServiceBusy(f"{path} answered HTTP 429")
        if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
            raise ServiceUnreachable(f"{path} answered HTTP 401")
        return self.completion

    def _asked(self, path: str, body: Manifest | None) -> None:
        self.questions.append((path, body))
        if self.unreachable:
            raise ServiceUnreachable(self.unreachable)


class FakePods:
    """A fake of the pods' own addresses: each pod's `/ready` by its name, and who was asked."""

    def __init__(self, model: FakeModel) -> None:
        """A ready pod without a report of its own answers what the model behind the Service would."""
        self.model = model
        self.reports: dict[str, Manifest] = {}
        self.expositions: dict[str, str] = {}  # of /metrics, by the pod's name
        self.asked: list[str] = []

    async def ready(self, pod: Mapping[str, Any], timeout_seconds: float) -> Manifest:
        name = pod["metadata"]["name"]
        self.asked.append(name)
        if name in self.reports:
            return self.reports[name]
        if any((one["type"], one["status"]) == ("Ready", "True") for one in pod["status"].get("conditions") or ()):
            return {"phase": "Ready"} | self.model.running(pod["metadata"]["labels"])
        raise PodUnreachable("connection refused")

    async def metrics(self, pod: Mapping[str, Any], timeout_seconds: float) -> str:
        name = pod["metadata"]["name"]
        if name not in self.expositions:
            raise PodUnreachable("connection refused")
        return self.expositions[name]


class FakeOperator:
    """A process. Make another one to restart it."""

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        fault: Fault | None = None,
        image: str = IMAGE,
        pods: PodDefaults | None = None,
        model: FakeModel | None = None,
        shapes: Shapes = shape_from_catalogue,
        companions: CompanionDefaults | None = None,
        later: EnqueueAfter | None = None,
        keys: ProbeKeys | None = None,
        surroundings: Callable[[], Surroundings] = Surroundings,
        node_pools: Sequence[DeclaredPool] = (),
        recheck_seconds: float = RECHECK_SECONDS,
        release: Release | None = None,
    ) -> None:
        self.cluster, self.model = cluster, model or FakeModel(cluster)
        self.client = FakeClusterClient(cluster, fault)
        self.index = Index(on_change=lambda kind, manifest: self.facts.changed(kind, manifest))
        self.now, self.busy = NOW, False
        self.pods, self.woken, self.seconds = FakePods(self.model), list[OwnerKey](), 0.0
        self.reports = PodReports(self.pods, self.woken.append, lambda: self.seconds)
        self.drafting = DraftingReports(self.pods, self.woken.append, lambda: self.seconds)
        self.step_reports = StepReports(self.pods, self.woken.append, lambda: self.seconds)
        defaults = Defaults(PlanDefaults(image), pods or PodDefaults(), companions or CompanionDefaults())
        self.facts = ClusterFacts(self.index, defaults.pods, shapes=shapes, node_pools=node_pools)
        self.facts.problem = None
        self.looker = FakeClusterClient(cluster)  # of its own: what it asks is the resync's, as the listings are
        self.optional = OptionalKinds(self.index)
        self.calibration = self._new_calibration()
        self.reconciler = Reconciler(
            self.client,
            self.index,
            self.model,
            defaults,
            self.optional,
            now=lambda: self.now,
            reports=self.reports,
            drafting=self.drafting,
            step_reports=self.step_reports,
            facts=self.facts,
            room=self.facts.room,
            later=later,
            busy=lambda: self.busy,
            keys=keys,
            clock=lambda: self.seconds,
            surroundings=surroundings,
            calibration=self.calibration,
            recheck_seconds=recheck_seconds,
            release=release,
        )
        self.retries: list[RetryLater] = []

    def _new_calibration(self) -> CalibrationStore:
        return CalibrationStore(
            self.client,
            "millstream-system",
            "millstream-calibration",
            use=self.facts.use_calibration,
            catalog=lambda: self.facts.catalog,
            clock=lambda: self.seconds,
        )

    async def turn(self, name: str = "demo") -> None:
        """See the world, then reconcile once. A RetryLater is kept in `retries`."""
        for kind in WATCHED:
            listed = [one for one in self.cluster.all(kind) if kind is LLM_DEPLOYMENT or _is_labelled(one)]
            self.index.replace(kind, listed, self.cluster.version)
        nodes = self.cluster.all(NODE)
        self.facts.replace_nodes(filter(None, map(read_node, nodes)), closed_nodes(nodes))
        self.facts.replace_pods(filter(None, map(read_pod, self.cluster.all(POD))))
        self.facts.advance()
        await self.optional.discover(self.looker)
        try:
            await self.reconciler.reconcile(OwnerKey(NAMESPACE, name))
        except RetryLater as later:
            self.retries.append(later)

    async def ask_pods(self, after_seconds: float = 1.0) -> None:
        """Let time pass, then ask the pods that are due. `woken` gets the keys whose status may change."""
        self.seconds += after_seconds
        now = datetime.datetime.fromisoformat(self.now) + datetime.timedelta(seconds=after_seconds)
        self.now = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        await self.reports.poll_due()
        await self.drafting.poll_due()
        await self.step_reports.poll_due()

    async def inspect(self) -> None:
        """One turn, and one more when the model was inspected."""
        await self.turn()
        self.cluster.run_jobs(answer_to)
        await self.turn()

    async def settle(
        self, name: str = "demo", *, roll_out: bool = True, inspected: str | None = None, code: int = 0
    ) -> None:
        """Turn, with the other controllers acting in between, until nothing changes and nothing is to be retried."""
        for _ in range(PATIENCE_TURNS):
            before, retries = self.cluster.version, len(self.retries)
            await self.turn(name)
            if roll_out:
                self.cluster.roll_out()
            self.cluster.run_jobs(answer_to if inspected is None else inspected, code)
            self.cluster.collect_garbage()
            if self.cluster.version == before and len(self.retries) == retries:
                return
        raise AssertionError(f"does not settle: {self.client.written[-10:]}, {self.retries[-3:]}")

    @property
    def writes(self) -> list[tuple[str, str]]:
        """(verb, kind) of every write but Events, in order."""
        return [
            (request.verb, request.kind if request.subresource is None else f"{request.kind}/{request.subresource}")
            for request in self.client.written
            if request.kind != "Event"
        ]

    def status(self, name: str = "demo") -> Manifest:
        """The stored status."""
        found: Manifest = self.cluster.the(LLM_DEPLOYMENT, name)["status"]
        return found

    def owner(self, name: str = "demo") -> LLMDeployment:
        return parse({k: v for k, v in self.cluster.the(LLM_DEPLOYMENT, name).items() if k != "status"})

    def condition(self, kind: str, name: str = "demo") -> Manifest:
        """A condition of the stored status, or an empty one."""
        conditions = self.cluster.the(LLM_DEPLOYMENT, name)["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})


def world(stored: Manifest | None = None) -> FakeCluster:
    cluster = FakeCluster()
    cluster.put(stored or manifest())
    return cluster


async def served(stored: Manifest | None = None, **options: Any) -> FakeOperator:
    """An operator whose one LLMDeployment is Ready and settled, with its counters at zero."""
    operator = FakeOperator(world(stored), **options)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    operator.client.requests.clear()
    return operator


def respec(cluster: FakeCluster, **spec: Any) -> None:
    """The user edits the spec; a None takes the field out."""

    def change(live: Manifest) -> None:
        for field, value in spec.items():
            if value is None:
                live["spec"].pop(field, None)
            else:
                live["spec"][field] = value

    cluster.edit(LLM_DEPLOYMENT, "demo", change)


def _is_labelled(manifest: Manifest) -> bool:
    return "millstream.dev/deployment" in manifest["metadata"].get("labels", {})
