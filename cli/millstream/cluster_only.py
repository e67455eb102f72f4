"""What an LLMDeployment asks for and a cluster alone has: `millstream serve` refuses it, or says it has no effect."""

from __future__ import annotations

from typing import Any


def only_in_a_cluster(spec: Any) -> str | None:
    """Return what to do instead, where the weights exist only in a pod, or a Job of the operator makes them."""
    sources = {"spec.model.source": spec.model.source}
    if spec.speculation is not None and spec.speculation.draft_model is not None:
        sources["spec.speculation.draftModel.source"] = spec.speculation.draft_model.source
    for field, source in sources.items():
        if (hint := _only_in_a_pod(field, source)) is not None:
            return hint
    if spec.quantization is None or spec.quantization.calibration is None:
        return None
    return (
        "spec.quantization.calibration is used by a Job of the operator; here run `millstream quantize FOLDER --method "
        f"{spec.quantization.method.lower()} --calibration FILE --out OUT`, then `millstream serve OUT`."
    )


def _only_in_a_pod(field: str, source: Any) -> str | None:
    if source.hugging_face is not None:
        return f"{field}.huggingFace {_downloaded(f'--hugging-face {source.hugging_face.repository}')}"
    if source.image is not None:
        return f"{field}.image {_downloaded(f'--image {source.image.reference}')}"
    if source.persistent_volume_claim is not None:
        return f"{field}.persistentVolumeClaim is a volume of a cluster; here give the model's folder instead."
    return None


def _downloaded(source: str) -> str:
    return (
        f"is downloaded in a pod; here run `millstream fetch {source} --into FOLDER`, then `millstream serve FOLDER`."
    )


def without_effect_here(spec: Any) -> str | None:
    """Return a line about the Jobs that only the operator runs, before it serves; None where the spec asks for none."""
    fields, commands = [], []
    if spec.quantization is not None and spec.quantization.quality_gate is not None:
        fields.append("spec.quantization.qualityGate")
        commands.append("`millstream quality`")
    if spec.speculation is not None and spec.speculation.tuning is not None:
        fields.append("spec.speculation.tuning")
        commands.append("`millstream tune-draft`")
    if not fields:
        return None
    verbs = "need the operator and have" if len(fields) > 1 else "needs the operator and has"
    return f"{' and '.join(fields)} {verbs} no effect here; run {' and '.join(commands)} instead."
