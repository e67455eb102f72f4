"""What keys and values in 8 bits cost and save: perplexity by slice, tokens in the same bytes, time of a decode step.

    python -m benchmarks.kv_cache_formats

The demo model is judged as `millstream quality` judges it, with itself as the base. The time is that of a whole engine
step, by number of requests and tokens of context, each format in turn and the median of all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from millstream_runtime.config import Device, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.kv_formats import kv_token_bytes
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quality.comparison import ComparisonSettings, compare

ROOT = Path(__file__).parents[1]
MODEL, DATA = ROOT / "models" / "demo-chat", ROOT / "models" / "held_out.jsonl"
RESULT = Path(__file__).parent / "results" / "kv_cache_formats.json"
LIMITS = {KVCacheDType.INT8: 1.002, KVCacheDType.FP8: 1.005}  # of the perplexity ratio, by slice
LOADS = ((1, 256), (1, 4096), (8, 256), (8, 2048))  # requests and tokens of context
ROUNDS, STEPS = 3, 24


def config(model: Path, stored: KVCacheDType, **fields: Any) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(model),
        served_model_name=model.name,
        device=Device.CPU,
        kv_cache_dtype=stored,
        enable_prefix_caching=False,
        **fields,
    )


def quality_of(model: Path, stored: KVCacheDType) -> list[dict[str, Any]]:
    """By slice: the base's perplexity, its ratio with its interval, mean KL and agreement of the best tokens."""
    settings = ComparisonSettings(DATA, 2048, 100_000, 0, 0, None, {})
    report = compare(config(model, KVCacheDType.AUTO), config(model, stored), settings, lambda done, of: None)
    rows = []
    for one in report["slices"]:
        figures = one["figures"]
        ratio = figures["perplexity_ratio"]
        rows.append(
            {
                "slice": figures["slice"],
                "tokens": figures["num_tokens"],
                "base_perplexity": round(figures["base_perplexity"], 3),
                "perplexity_ratio": {name: round(value, 5) for name, value in ratio.items()},
                "mean_kl": float(f"{figures['mean_kl']['value']:.3g}"),
                "top1_agreement_percent": round(figures["top1_agreement_percent"]["value"], 2),
                "within_limit": ratio["value"] <= LIMITS[stored],
            }
        )
    return rows


def capacity(model: Path) -> dict[str, Any]:
    """Bytes of a token in all layers, and how many tokens the bytes of one token in 16 bits hold."""
    shape = load_model_config(model)
    of = {method: shape.num_layers * kv_token_bytes(method, *shape.kv_shape, 2) for method in ("None", "FP8", "INT8")}
    return {
        "bytes_per_token": {"16 bits": of["None"], "FP8": of["FP8"], "INT8": of["INT8"]},
        "tokens_relative_to_16_bits": {name: round(of["None"] / of[name], 3) for name in ("FP8", "INT8")},
    }


def step_milliseconds(model: Path) -> list[dict[str, Any]]:
    """Median of a decode step, by load and format."""
    engines = {
        stored: Engine(
            config(model, stored, kv_cache_memory_bytes=256 << 20, max_num_seqs=8, max_model_len=8192),
            lambda phase, message: None,
        )
        for stored in KVCacheDType
    }
    rows = []
    for num_requests, context_tokens in LOADS:
        times: dict[str, list[float]] = {stored.value: [] for stored in engines}
        for _ in range(ROUNDS):
            for stored, engine in engines.items():
                times[stored.value] += decode_seconds(engine, num_requests, context_tokens)
        medians = {name: round(statistics.median(found) * 1000, 3) for name, found in times.items()}
        rows.append({"requests": num_requests, "context_tokens": context_tokens, "milliseconds": medians})
    return rows


def decode_seconds(engine: Engine, num_requests: int, context_tokens: int) -> list[float]:
    """Of STEPS steps in which all requests decode."""
    sampling = SamplingParams(max_tokens=2048, temperature=0.0, ignore_eos=True)
    for number in range(num_requests):
        prompt = [3 + (number * 7 + index) % 500 for index in range(context_tokens)]
        engine.add_request(Request(str(number), prompt, sampling))
    seconds: list[float] = []
    while len(seconds) < STEPS:
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == num_requests:
            seconds.append(time.perf_counter() - began)
    for number in range(num_requests):
        engine.abort(str(number))
    engine.step()
    return seconds[2:]


def table(result: dict[str, Any]) -> str:
    lines = [f"  {'format':<8}{'slice':<10}{'tokens':>8}{'perplexity':>20}{'mean KL':>11}{'top-1 %':>9}"]
    for name, rows in result["quality"].items():
        for row in rows:
            perplexity = f"{row['base_perplexity']:.4g} × {row['perplexity_ratio']['value']:.5f}"
            lines.append(
                f"  {name:<8}{row['slice']:<10}{row['tokens']:>8}{perplexity:>20}{row['mean_kl']:>11.3g}"
                f"{row['top1_agreement_percent']:>9.2f}"
            )
    lines += [f"  {name}: {ratio} × the tokens" for name, ratio in result["tokens_relative_to_16_bits"].items()]
    for row in result.get("decode_step", []):
        lines.append(
            f"  {row['requests']} requests of {row['context_tokens']} tokens: {row['milliseconds']} ms per step"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of another model (default: the demo model)")
    parser.add_argument("--no-time", action="store_true", help="quality and capacity alone")
    parser.add_argument("--json", type=Path, default=RESULT, help="where to save the figures")
    given = parser.parse_args()
    result: dict[str, Any] = {
        "what": "KV cache in 8 bits against the model's float32 on a CPU, on models/held_out.jsonl",
        "model": given.model.name,
        "machine": machine.describe(),
        "quality": {stored.method: quality_of(given.model, stored) for stored in LIMITS},
        **capacity(given.model),
    }
    if not given.no_time:
        result["decode_step"] = step_milliseconds(given.model)
    given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
