"""`hf_quant_config.json`: where ModelOpt says how weights are stored, in a format that this version does not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure

MODELOPT_NAME = "hf_quant_config.json"
MODELOPT_LIMIT_BYTES = 1 << 20  # the file lists modules


def refuse_modelopt(values: Mapping[str, Any], where: str) -> None:
    """Refuse weights that `hf_quant_config.json` says are quantized, while config.json says nothing of it.

    Args:
        where: the file, for messages.

    Raises:
        RuntimeFailure: UnsupportedByRuntime, naming the file and the format.
    """
    section = values.get("quantization")
    found = section.get("quant_algo") if isinstance(section, Mapping) else None
    if found:
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{where}: quantization.quant_algo {str(found)[:60]!r} of ModelOpt is not supported by this runtime, which "
            "reads quantization_config of config.json; take the checkpoint of 16 bits, or one in FP8, AWQ or GPTQ as "
            "transformers or llm-compressor write it.",
        )
