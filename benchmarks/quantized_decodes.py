"""Decode steps of the whole engine with quantized weights on a CPU, against the same weights in 16 bits.

    python -m benchmarks.quantized_decodes
A Llama of 135 M parameters with random weights is written in bfloat16, as W8A8 (a scale per output, 8-bit activations),
as AWQ with groups of 64, and as W8A16 (a scale per output). Embeddings and head are in 16 bits in all. The engines take
turns; a time is the median of the steps of all rounds, with the threads that the warm-up chose, as the engine serves.
Above 1 is faster than 16 bit.

Beside it stands what binds: the part of a step inside the products of the layers that are quantized. The rest (head,
attention, norms, the step itself) is alike in all formats, so a format cannot be faster than 16 bits' step over its
rest, however fast its products are; `limit_times_as_fast` says how fast that is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import LARGER
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "quantized_decodes.json"
BASE, REQUESTS, GROUP_SIZE, PROMPT_TOKENS = "16 bit", (1, 4, 16, 64), 64, 24
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in an AWQ word
Pack = Callable[[Tensor], dict[str, Tensor]]


def int8(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' int-quantized with a scale per output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def awq(weight: Tensor) -> dict[str, Tensor]:
    """AutoAWQ's packing with zero points."""
    by_group = weight.view(weight.shape[0], -1, GROUP_SIZE)
    low, high = by_group.amin(2).clamp(max=0), by_group.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = ((by_group / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15).flatten(1)
    return {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous().half()}


def words(codes: Tensor) -> Tensor:
    """`[rows, out]` to int32 `[rows, out / 8]`."""
    eights = torch.unflatten(codes.to(torch.int64), 1, (-1, 8))
    joined = sum(eights[:, :, output] << 4 * place for output, place in enumerate(PLACES))
    assert isinstance(joined, Tensor)
    return (joined - ((joined >> 31) << 32)).to(torch.int32)


def compressed(activations: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


ACTIVATIONS = {"type": "int", "num_bits": 8, "dynamic": True, "strategy": "token"}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "INT8 (W8A8)": (compressed(ACTIVATIONS), int8),
    "AWQ g64": ({"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "version": "gemm"}, awq),
    "INT8 (W8A16)": (compressed(None), int8),
}


def write_quantized(plain: Path, folder: Path, settings: dict[str, Any], pack: Pack) -> None:
    """The folder `plain` with its linear layers packed."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        tensors |= {f"{module}.{key}": one.contiguous() for key, one in pack(tensor.float()).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def engine_of(folder: Path) -> Engine:
    config = RuntimeConfig(
        model=str(folder),
        served_model_name=folder.name,
        device=Device.CPU,
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=max(REQUESTS),
        max_model_len=512,
        enable_prefix_caching=False,
    )
    engine = Engine(config, lambda phase, message: None)
    engine.warm_up()
    return engine


def decode_seconds(
    engine: Engine, num_requests: int, num_steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """What `clock` counts in each step in which all requests decode; by default wall time."""
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for number in range(num_requests):
        prompt = [3 + (number * 7 + index) % 500 for index in range(PROMPT_TOKENS)]
        engine.add_request(Request(str(number), prompt, sampling))
    seconds: list[float] = []
    while len(seconds) < num_steps + 2:
        began = clock()
        outputs = engine.step()
        if len(outputs) == num_requests:
            seconds.append(clock() - began)
    for number in range(num_requests):
        engine.abort(str(number))
    engine.step()
    return seconds[2:]


class ProductTime:
    """Seconds inside the products of layers, whatever keeps their weights."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            if self._is_inside:  # `add_to` by `__call__`
                return call(*arguments)
            self._is_inside, began = True, time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._is_inside = False
                self.seconds += time.perf_counter() - began

        return wrapper


@contextlib.contextmanager
def timed_products(engine: Engine) -> Iterator[ProductTime]:
    """Time the products of the layers' projections while the block runs."""
    found = ProductTime()
    with contextlib.ExitStack() as stack:
        for kind in projection_types(engine):
            for name in ("__call__", "add_to"):
                original = getattr(kind, name)
                setattr(kind, name, found.timed(original))
                stack.callback(setattr, kind, name, original)
        yield found


def projection_types(engine: Engine) -> set[type]:
    """The types of all projections of the model's layers."""
    found: set[type] = set()
    waiting: list[Any] = [*engine._runner._forward.model.layers]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, Tensor | str | int | float | type):
            continue
        seen.add(id(one))
        if isinstance(one, list | tuple):
            waiting += one
            continue
        if not type(one).__module__.startswith("millstream_runtime"):
            continue
        if hasattr(type(one), "add_to"):
            found.add(type(one))
            continue
        waiting += vars(one).values() if hasattr(one, "__dict__") else []
        waiting += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return found


def product_milliseconds(engine: Engine, num_requests: int, num_steps: int) -> float:
    """Milliseconds of a step inside the products of the layers."""
    with timed_products(engine) as products:
        return statistics.median(decode_seconds(engine, num_requests, num_steps, lambda: products.seconds)) * 1e3


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="fewer with many requests, at least 2")
    parser.add_argument("--steps", type=int, default=12, help="of each engine in a round")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        plain = write_random_model(Path(work) / "plain", LARGER, torch.bfloat16)
        engines = {BASE: engine_of(plain)}
        for number, (name, (settings, pack)) in enumerate(FORMATS.items()):
            folder = Path(work) / str(number)
            write_quantized(plain, folder, settings, pack)
            engines[name] = engine_of(folder)
        steps = [
            decodes(engines, num_requests, max(2, given.rounds * 4 // max(4, num_requests)), given.steps)
            for num_requests in given.requests
        ]
    memory = {name: engine.memory_use.weights_bytes for name, engine in engines.items()}
    print(f"bytes of weights: {memory}")
    result = {"machine": machine.describe(), "weights_bytes": memory, "decodes": steps}
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"saved {given.output}")


def decodes(engines: dict[str, Engine], num_requests: int, rounds: int, num_steps: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name] += decode_seconds(engine, num_requests, num_steps)
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    ratios = {name: round(medians[BASE] / one, 2) for name, one in medians.items() if name != BASE}
    shown = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in ratios.items())
    print(f"{num_requests:3} requests: 16 bit {medians[BASE]:.1f} ms a step; as fast: {shown}", flush=True)
    products = {name: product_milliseconds(engine, num_requests, num_steps) for name, engine in engines.items()}
    limit = medians[BASE] / max(1e-3, medians[BASE] - products[BASE])
    of_products = {name: round(products[BASE] / one, 2) for name, one in products.items() if name != BASE}
    print(f"{'':13}products: {products[BASE]:.1f} ms of it; as fast: {of_products}; free products: {limit:.2f} x")
    return {
        "requests": num_requests,
        "step_milliseconds": {name: round(one, 2) for name, one in medians.items()},
        "times_as_fast": ratios,
        "product_milliseconds": {name: round(one, 2) for name, one in products.items()},
        "limit_times_as_fast": round(limit, 2),
    }


if __name__ == "__main__":
    main()
