"""The models of the schedules: every kind of attention, window, position embedding and weight layout, in miniature."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.family_cases import CASES, MIXED_LAYERS, UNEVEN_HEADS, WINDOW, dense
from tests.support.quantized_checkpoints import Packer, awq, gptq, quantized
from tests.support.tiny_families import VOCABULARY, write_family

__all__ = ["DAMAGED", "DAMAGED_TOKEN", "MODELS", "VOCABULARY", "TinyModel", "write_model"]

DAMAGED_TOKEN = VOCABULARY - 1
_WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One model. `packed`: the settings and the packer of its quantized weights."""

    config: dict[str, Any]
    mixes_windows: bool = False  # windowed layers beside full ones: they may have block tables of their own
    has_experts: bool = False  # which rows an expert has is the host's decision: no tape holds it
    has_plain_attention: bool = False  # what FlashAttention reads in place
    can_split: bool = True  # its heads divide by two
    packed: tuple[dict[str, Any], Packer] | None = None


def _case(
    name: str, *, mixes_windows: bool = False, has_experts: bool = False, has_plain_attention: bool = False
) -> TinyModel:
    config, can_split = CASES[name].config, name not in UNEVEN_HEADS
    return TinyModel(config, mixes_windows, has_experts, has_plain_attention, can_split)


MODELS: dict[str, TinyModel] = {
    "llama, grouped queries": _case("llama", has_plain_attention=True),
    "llama, one key head": _case("llama-ratio-5-tied", has_plain_attention=True),
    "llama, YaRN": _case("llama-rope-yarn", has_plain_attention=True),
    "llama, AWQ": TinyModel(dense("llama", **_WIDE), packed=(_AWQ, awq(32))),
    "llama, GPTQ": TinyModel(dense("llama", **_WIDE), packed=(_GPTQ, gptq(4, 32, act_order=True, symmetric=True))),
    "mistral, window 11": _case("mistral"),
    "mistral, window 24": TinyModel(dense("mistral", sliding_window=24)),
    "qwen2, one layer of two windowed": _case("qwen2-windows", mixes_windows=True),
    "qwen2, two layers of three windowed": TinyModel(
        dense("qwen2", use_sliding_window=True, sliding_window=24, **MIXED_LAYERS), mixes_windows=True
    ),
    "qwen3": _case("qwen3", has_plain_attention=True),
    "gemma2": _case("gemma2", mixes_windows=True),
    "gemma3": _case("gemma3", mixes_windows=True),
    "phi4, longrope": _case("phi4-longrope", has_plain_attention=True),
    "phi3, longrope and window": TinyModel(CASES["phi4-longrope"].config | WINDOW),
    "mixtral, window 11": _case("mixtral", has_experts=True),
    "qwen3-moe": _case("qwen3-moe", has_experts=True),
    "deepseek-v2": _case("deepseek-v2", has_experts=True),
    "deepseek-v3": _case("deepseek-v3", has_experts=True),
}

# Their embedding of DAMAGED_TOKEN becomes NaN once they are loaded. See `draft_kinds.DraftKind.NAN_EMBEDDING`.
DAMAGED: dict[str, TinyModel] = {
    "llama, a damaged embedding": _case("llama", has_plain_attention=True),
    "mistral, a damaged embedding": _case("mistral"),
    "deepseek-v3, a damaged embedding": _case("deepseek-v3", has_experts=True),
}


def write_model(name: str, root: Path) -> tuple[Path, Path]:
    """Write a model below `root` unless it is there; return its folder, and one with the same weights unpacked."""
    model, folder = (MODELS | DAMAGED)[name], root / name.replace(", ", "-").replace(" ", "-")
    plain = folder.with_name(f"{folder.name}-plain") if model.packed else folder
    if not (plain / "config.json").exists():
        write_family(plain, **model.config)
        if model.packed is not None:
            quantized(plain, folder, *model.packed)
    return folder, folder.with_name(f"{folder.name}-dense") if model.packed else folder
