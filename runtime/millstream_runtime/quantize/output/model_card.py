"""README.md of a quantized checkpoint: what it was made from, how, and how it compares with its base. Pure.

No date and no path of the machine, so that the same run gives the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def card(
    name: str, base: str, settings: Mapping[str, object], kept: Sequence[str], report: Mapping[str, Any] | None
) -> str:
    """Return the text. `kept`: modules of 16 bit. `report`: of `millstream quality`, where it was made."""
    lines = [
        f"# {name}",
        "",
        f"`{base}`, quantized with `millstream quantize`. `millstream serve` and other servers that read the format of",
        "its `quantization_config` load it.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in settings.items()),
        "",
        "Embeddings, norms, routers and the output head are as in the base model.",
    ]
    if kept:
        lines += ["", "So are these modules, whose sizes the format cannot hold: " + ", ".join(kept) + "."]
    lines += ["", "## Quality", ""]
    if report is None:
        lines += [
            "It was not compared with its base. Do that before you serve it: `millstream quality BASE THIS --data "
            "held_out.jsonl`.",
        ]
    else:
        lines += _figures(report)
    return "\n".join(lines) + "\n"


def _figures(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Compared with its base on {report['data']['documents']} documents that were held out of calibration: "
        f"**{report['verdict']}** (`quality.json`; 95 % intervals in brackets).",
        "",
        "| slice | tokens | mean KL | p99 KL | top-1 agreement | flips | perplexity ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in report["slices"]:
        figures = one["figures"]
        cells = [
            _interval(figures["mean_kl"], "{:.4g}"),
            _interval(figures["p99_kl"], "{:.3g}"),
            _interval(figures["top1_agreement_percent"], "{:.2f}") + " %",
            _interval(figures["flip_percent"], "{:.2f}") + " %",
            _interval(figures["perplexity_ratio"], "{:.4f}"),
        ]
        lines.append(f"| {figures['slice']} | {figures['num_tokens']} | " + " | ".join(cells) + " |")
    return lines


def _interval(figure: Mapping[str, float], style: str) -> str:
    value, low, high = (style.format(figure[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
