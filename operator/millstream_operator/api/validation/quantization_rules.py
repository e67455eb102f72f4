"""What belongs together where a model is quantized in the cluster, or judged before it serves."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.validation.rule import Rule

MADE_IN_THE_CLUSTER = ("RTN", "AWQ", "GPTQ", "INT8", "FP8", "NF4", "GGUF")
_MADE = " || ".join(f"self.method == '{method}'" for method in MADE_IN_THE_CLUSTER)
_CALIBRATED = "has(self.quantization) && has(self.quantization.calibration)"
_TUNED = "has(self.speculation) && has(self.speculation.tuning)"
_DRAFT = "self.speculation.draftModel.source"
_DOWNLOADED = (
    "has(self.model.source.huggingFace) || has(self.model.source.image) || (has(self.speculation) && "
    f"has(self.speculation.draftModel) && (has({_DRAFT}.huggingFace) || has({_DRAFT}.image)))"
)


def one_dataset(path: str) -> Rule:
    return Rule(
        path,
        "has(self.configMapRef) != has(self.persistentVolumeClaim)",
        lambda value: (value.config_map_ref is None) != (value.persistent_volume_claim is None),
        "give exactly one source: configMapRef or persistentVolumeClaim.",
    )


def _is_calibrated(spec: Any) -> bool:
    return spec.quantization is not None and spec.quantization.calibration is not None


def _is_downloaded(spec: Any) -> bool:
    draft = spec.speculation.draft_model if spec.speculation is not None else None
    sources = [spec.model.source, *([draft.source] if draft is not None else [])]
    return any(source.hugging_face is not None or source.image is not None for source in sources)


def is_tuned(spec: Any) -> bool:
    """Whether the cluster tunes the draft of a spec."""
    return spec.speculation is not None and spec.speculation.tuning is not None


QUANTIZATION_RULES: tuple[Rule, ...] = (
    Rule(
        "spec",
        f"!has(self.model.cache) || {_DOWNLOADED} || ({_CALIBRATED}) || ({_TUNED})",
        lambda spec: spec.model.cache is None or _is_downloaded(spec) or _is_calibrated(spec) or is_tuned(spec),
        "model.cache keeps what is downloaded or quantized; it needs the source huggingFace or image, of the model or "
        "of its draft, or quantization.calibration or speculation.tuning.",
    ),
    Rule(
        "spec",
        f"!({_CALIBRATED}) || has(self.model.cache)",
        lambda spec: not _is_calibrated(spec) or spec.model.cache is not None,
        "quantization.calibration needs model.cache: the quantized model is written there. Add model.cache with a size "
        "for the model twice.",
    ),
    Rule(
        "spec.quantization",
        f"!has(self.calibration) || (has(self.method) && ({_MADE}))",
        lambda value: value.calibration is None or value.method in MADE_IN_THE_CLUSTER,
        "calibration needs method RTN, AWQ, GPTQ, INT8, FP8, NF4 or GGUF: these are what the cluster can make.",
    ),
    Rule(
        "spec.quantization",
        "!has(self.qualityGate) || has(self.calibration) != has(self.qualityGate.base)",
        lambda value: value.quality_gate is None or (value.calibration is None) != (value.quality_gate.base is None),
        "qualityGate compares what calibration makes with model.source, or model.source with qualityGate.base: give "
        "one of calibration and qualityGate.base.",
    ),
    Rule(
        "spec.quantization.qualityGate.base.image",
        "!has(self.pullPolicy)",
        lambda value: value.pull_policy is None,
        "the base takes no pullPolicy: its tag is looked up by the Job that judges; give a digest to pin it.",
    ),
    one_dataset("spec.quantization.calibration"),
    one_dataset("spec.quantization.qualityGate.dataset"),
)
