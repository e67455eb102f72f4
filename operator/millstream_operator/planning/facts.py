"""The facts that a plan is made from, besides the spec: the model's shape, the GPUs, the runtime's capabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from millstream_operator.catalog.gpu import GpuCatalog, load_catalog
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.inventory.unknown_gpus import UnknownGpus
from millstream_operator.planning.calibration import NO_CALIBRATION, Calibration
from millstream_operator.planning.plan import PlanReason
from millstream_runtime.config import CAPABILITIES, Capabilities
from millstream_runtime.model_families import FAMILIES

# Everything that the API can name: to plan what a later runtime could do.
EVERYTHING = Capabilities(
    model_families=frozenset(family.model_type for family in FAMILIES),
    sources=frozenset({"local", "huggingFace", "image", "persistentVolumeClaim"}),
    quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8", "NF4", "RTN", "GGUF"}),
    cpu_quantization_methods=frozenset({"None", "AWQ", "GPTQ", "FP8", "INT8", "NF4", "RTN", "GGUF"}),
    online_quantization_methods=frozenset({"FP8", "INT8", "NF4", "RTN"}),
    kv_cache_methods=frozenset({"None", "FP8", "INT8"}),
    speculation_methods=frozenset({"Disabled", "NGram", "DraftModel", "EAGLE", "Medusa"}),
    max_tensor_parallel_size=64,
    max_pipeline_parallel_size=16,
    kv_layouts=frozenset({"OneTable", "TablePerGroup"}),
    cpu_kv_cache_methods=frozenset({"None", "FP8", "INT8"}),
    cpu_speculation_methods=frozenset({"Disabled", "NGram", "DraftModel", "EAGLE", "Medusa"}),
    rounded_quantization_methods=frozenset({"FP8"}),
)

# What the planner takes of `CAPABILITIES` without being asked. No GPU has measured what drafts gain there.
CHOOSABLE = replace(CAPABILITIES, speculation_methods=frozenset({"Disabled"}))


@dataclass(frozen=True, slots=True)
class Facts:
    """`None`: not known. A plan is then made from the spec alone, and says less.

    `inventory` is what is free for this plan, `capacity` all that there is, free or not (None: there is no more than
    `inventory`). `unknown` says why something is not known, `unknown_gpus` how a person can make the GPUs known;
    `inventory` may then hold what the chart declares (`inventory.nodePools`). `may_grow`: it is a cluster, where nodes
    of a product that the spec names may come later; not a list of machines that a person gave. `choosable` is what the
    planner may choose by itself; what a spec insists on is planned in any case, and compared with `runtime` afterwards.
    """

    shape: ModelShape | None = None
    draft_shape: ModelShape | None = None
    inventory: Inventory | None = None
    capacity: Inventory | None = None
    may_grow: bool = False
    unknown: tuple[PlanReason, ...] = ()
    unknown_gpus: UnknownGpus | None = None
    is_made: bool = False  # the shape is that of the model once the cluster has quantized it (`made_model.as_made`)
    model_revision: str | None = None  # commit or digest that the source was resolved to; None: it has none
    checkpoint_bytes: int | None = None  # of the weights files, as they are downloaded
    draft_is_inspected: bool = False  # its files are fetched only then
    draft_revision: str | None = None  # as those of the model
    draft_checkpoint_bytes: int | None = None
    tuned_draft: str | None = (
        None  # key of the tuning whose draft the pods load (`rendering/tuning_job.py`); None: as it is
    )
    catalog: GpuCatalog = field(default_factory=load_catalog)
    calibration: Calibration = NO_CALIBRATION  # what runtimes measured; no part of the facts' hash
    runtime: Capabilities = CAPABILITIES
    choosable: Capabilities = CHOOSABLE
