"""The tables of `benchmarks.quantization_quality` in Markdown, and which goals are met. Pure."""

from __future__ import annotations

import statistics
from typing import Any

MEAN = "mean"
MOST_RATIO = {"AWQ g128": 1.03, "GPTQ g128": 1.03, "FP8": 1.01, "INT8": 1.005}


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with its value, its limit and whether it is met."""
    methods, outliers = found["methods"], found["outliers"]
    checked: list[tuple[str, float, float]] = []
    for name, limit in MOST_RATIO.items():
        for key, one in methods[name]["slices"].items():
            checked.append((f"{name}: perplexity ratio, {key}", one["perplexity_ratio"], limit))
    rtn = mean_kl(methods["RTN g128"])
    checked += [
        ("GPTQ g128: mean KL by RTN's", mean_kl(methods["GPTQ g128"]) / rtn, 0.8),
        ("AWQ g128: mean KL by RTN's", mean_kl(methods["AWQ g128"]) / rtn, 1.0),
        ("AWQ g128: mean KL by RTN's, transplanted outliers", outliers["AWQ g128"] / outliers["RTN g128"], 0.35),
        ("AWQ g128: bytes by those of 16 bits", methods["AWQ g128"]["bytes_ratio"], 0.27),
        ("GPTQ g128: bytes by those of 16 bits", methods["GPTQ g128"]["bytes_ratio"], 0.27),
    ]
    for name, by_calibration in found["domains"].items():
        for key in by_calibration:  # a mean over slices would hide one that own data make worse
            own_by_foreign = by_calibration[key][key] / foreign_kl(by_calibration, key)
            checked.append((f"{name}: mean KL of own calibration by foreign, {key}", own_by_foreign, 1.0))
    return [
        {"goal": words, "value": round(value, 4), "at_most": limit, "met": value <= limit}
        for words, value, limit in checked
    ]


def mean_kl(method: dict[str, Any]) -> float:
    """Over slices, each counted once."""
    return float(statistics.mean(one["mean_kl"] for one in method["slices"].values()))


def foreign_kl(by_calibration: dict[str, dict[str, float]], judged: str) -> float:
    """On one slice, calibrated on the others: the mean."""
    return float(statistics.mean(of[judged] for name, of in by_calibration.items() if name != judged))


def tables(found: dict[str, Any], kv_cache: dict[str, Any]) -> str:
    """What a run prints: every table, then the goals. `kv_cache`: see `methods_table`."""
    notes = [
        f"{'met   ' if one['met'] else 'MISSED'} {one['goal']}: {one['value']:.4f}, at most {one['at_most']}"
        for one in found["goals"]
    ]
    return "\n\n".join([methods_table(found, kv_cache), domains_table(found), outliers_table(found), "\n".join(notes)])


def methods_table(found: dict[str, Any], kv_cache: dict[str, Any]) -> str:
    """Per method and slice: perplexity ratio, mean KL, p99 KL, top-1 agreement.

    `kv_cache`: the results of `benchmarks.kv_cache_formats`, whose bytes are those of the cache.
    """
    slices = _slices(found)
    rows = [
        [name, f"{one['bytes_ratio']:.3f}", *(_cell(one["slices"][key]) for key in slices)]
        for name, one in found["methods"].items()
    ]
    for name, judged in kv_cache["quality"].items():
        of_slice = {one["slice"]: one for one in judged}
        bytes_ratio = 1 / kv_cache["tokens_relative_to_16_bits"][name]
        rows.append([f"KV {name}", f"{bytes_ratio:.3f}", *(_kv_cell(of_slice[key]) for key in slices)])
    return _table(["method", "bytes", *slices], rows)


def domains_table(found: dict[str, Any]) -> str:
    """Mean KL by what the calibration data were."""
    slices = _slices(found)
    rows = []
    for name, by_calibration in found["domains"].items():
        for key in slices:
            ratio = by_calibration[key][key] / foreign_kl(by_calibration, key)
            cells = [f"{by_calibration[one][key]:.5f}" for one in slices]
            rows.append([name, key, *cells, f"{ratio:.2f} ×"])
    return _table(["method", "judged on", *(f"calibrated on {one}" for one in slices), "own by foreign"], rows)


def outliers_table(found: dict[str, Any]) -> str:
    """Mean KL on the model with transplanted outlier channels."""
    return _table(["method", "mean KL"], [[name, f"{value:.5f}"] for name, value in found["outliers"].items()])


def _slices(found: dict[str, Any]) -> list[str]:
    return list(next(iter(found["methods"].values()))["slices"])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]).replace(" --- ", "---")


def _kv_cell(one: dict[str, Any]) -> str:
    return f"{one['perplexity_ratio']['value']:.4f} · {one['mean_kl']:.4f} · – · {one['top1_agreement_percent']:.1f} %"


def _cell(one: dict[str, float]) -> str:
    return (
        f"{one['perplexity_ratio']:.4f} · {one['mean_kl']:.4f} · {one['p99_kl']:.3f} · "
        f"{one['top1_agreement_percent']:.1f} %"
    )
