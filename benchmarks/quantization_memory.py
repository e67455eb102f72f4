"""How much memory `millstream quantize` takes for layers of an 8B model, and how long a 70B model would take.

    nice -n 19 python -m benchmarks.quantization_memory
    python -m benchmarks.quantization_memory --hidden 1024 --intermediate 4096 --methods rtn awq gptq --save

Writes a model of random weights with a few layers (hidden 4096, intermediate 14336, 32 heads, 8 for keys and values),
quantizes it in a process of its own and reads the most resident memory above what the imports take. The goal is 1.5
times the largest layer in float32 with the second moments of its inputs. Memory does not depend on how many sequences
calibrate, so few are taken; the hours for 70B follow from the measured rate of arithmetic. Times are processor time
over the number of threads, since the machine may be shared.

Four layers of that shape take about 4 GB of memory and 4 GB of the disk of the temporary folder. With `--save` each
method is written down when it is done, next to those of earlier runs of the same shape.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import machine

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/quantization_memory.json"
DEMO = ROOT / "models/demo-chat"
HEADS, KV_HEADS = 32, 8
SEQUENCES, SEQUENCE_TOKENS = 8, 512
USUAL_TOKENS = 128 * 512  # what `millstream quantize` takes by default
MOST_RATIO = 1.5
SHAPE_70B = {"hidden": 8192, "intermediate": 28672, "layers": 80, "heads": 64}
METHODS = ("rtn", "awq", "gptq", "int8", "fp8", "nf4")
WITH_MOMENTS = ("awq", "gptq")


def write_model(folder: Path, hidden: int, intermediate: int, layers: int) -> None:
    """Random weights in bfloat16, a file per layer, with the demo model's tokenizer."""
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text()) | {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": hidden // HEADS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number in range(-1, layers):
        shapes = (
            module_shapes(hidden, intermediate) if number >= 0 else {"embed_tokens": (config["vocab_size"], hidden)}
        )
        prefix = f"model.layers.{number}." if number >= 0 else "model."
        tensors = {
            f"{prefix}{name}.weight": (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()
            for name, shape in shapes.items()
        }
        for norm in ("input_layernorm", "post_attention_layernorm") if number >= 0 else ("norm",):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        file = f"layer-{number + 1}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def module_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    kv = hidden // HEADS * KV_HEADS
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def layer_bytes(hidden: int, intermediate: int) -> int:
    return 4 * sum(outputs * inputs for outputs, inputs in module_shapes(hidden, intermediate).values())


def moments_bytes(hidden: int, intermediate: int) -> int:
    """Of the inputs of q, k and v, of o, of gate and up, and of down."""
    return 4 * (3 * hidden**2 + intermediate**2)


def write_data(path: Path) -> None:
    choose = random.Random(0)
    words = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    plain = sorted(word for word in words if word.isascii() and word.isalpha())
    rows = [{"text": " ".join(choose.choices(plain, k=1000))} for _ in range(SEQUENCES)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def worker(model: Path, data: Path, out: Path, method: str) -> None:
    """Quantize in this process; prints resident memory and the times at which shares of a layer were done."""
    from millstream.commands import quantize as command
    from millstream_runtime.quantize.make import make

    flags = [f"--method={method}", f"--out={out}", f"--calibration={data}", "--no-quality", "--device=cpu"]
    flags += [f"--max-sequences={SEQUENCES}", f"--sequence-tokens={SEQUENCE_TOKENS}"]
    settings = command._settings(command.command_parser().parse_args([str(model), *flags]))
    torch.ones(256, 256) @ torch.ones(256, 256)  # starts the threads of the products
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    marks: list[tuple[float, float]] = []
    threads = torch.get_num_threads()
    make(settings, lambda words: None, lambda stage, done, total: marks.append((time.process_time() / threads, done)))
    print(json.dumps({"before_bytes": before, "peak_bytes": status_bytes("VmHWM"), "marks": marks}))


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def seconds_by_part(marks: list[list[float]], layers: int) -> dict[str, float]:
    """Of one layer, the mean over layers: the pass that gathers statistics, rounding, the pass that makes outputs."""
    parts = {"statistics": 0.0, "rounding": 0.0, "outputs": 0.0}
    for number in range(layers):
        of_layer = [(at, done - number) for at, done in marks if number <= done <= number + 1]
        begin, end = of_layer[0][0], of_layer[-1][0]
        first = max((at for at, share in of_layer if share <= 0.41), default=begin)
        second = min((at for at, share in of_layer if 0.8 < share < 1), default=end)
        parts["statistics"] += first - begin
        parts["rounding"] += second - first
        parts["outputs"] += end - second
    return {name: round(value / layers, 2) for name, value in parts.items()}


def operations(method: str, hidden: int, intermediate: int, tokens: int) -> dict[str, float]:
    """Of one layer, by part: the two passes go with the tokens, GPTQ's rounding with the cube of the inputs. AWQ looks
    at as many rows of any module, so its search goes with the inputs' square, as other rounding does."""
    weights = layer_bytes(hidden, intermediate) / 4
    inputs = [hidden, hidden, hidden, intermediate]
    moments = sum(one**2 for one in inputs) if method in WITH_MOMENTS else 0
    rounding = weights
    if method == "gptq":
        rounding = sum(outputs * inputs**2 for outputs, inputs in module_shapes(hidden, intermediate).values())
        rounding += sum(one**3 for one in inputs)
    return {
        "statistics": 2 * tokens * (weights + moments),
        "rounding": rounding,
        "outputs": 2 * tokens * weights,
    }


def hours_for_70b(method: str, parts: dict[str, float], hidden: int, intermediate: int) -> float:
    """With the calibration that `millstream quantize` takes by default, on this machine."""
    ours = operations(method, hidden, intermediate, SEQUENCES * SEQUENCE_TOKENS)
    theirs = operations(method, SHAPE_70B["hidden"], SHAPE_70B["intermediate"], USUAL_TOKENS)
    seconds = sum(parts[name] / ours[name] * theirs[name] for name in parts)
    return SHAPE_70B["layers"] * seconds / 3600


def measure(model: Path, data: Path, out: Path, method: str, given: argparse.Namespace) -> dict[str, Any]:
    argv = [sys.executable, "-m", "benchmarks.quantization_memory", "--worker", str(model), str(data), str(out), method]
    found = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    shutil.rmtree(out)
    whole = layer_bytes(given.hidden, given.intermediate)
    whole += moments_bytes(given.hidden, given.intermediate) if method in WITH_MOMENTS else 0
    above = found["peak_bytes"] - found["before_bytes"]
    row: dict[str, Any] = {
        "above_imports_bytes": above,
        "layer_and_moments_bytes": whole,
        "ratio": round(above / whole, 3),
        "met": above <= MOST_RATIO * whole,
    }
    parts = seconds_by_part(found["marks"], given.layers)
    row["seconds_per_layer"] = parts
    row["hours_for_70b"] = round(hours_for_70b(method, parts, given.hidden, given.intermediate), 1)
    return row


def require_disk(folder: Path, hidden: int, intermediate: int, layers: int) -> None:
    """Ends the run: a model in 16 bits, one of at most 8 with room for a layer, and hidden states do not fit there."""
    layer = layer_bytes(hidden, intermediate)
    states = 2 * SEQUENCES * SEQUENCE_TOKENS * hidden * 4
    needed, free = layer * layers // 2 + layer * (layers + 1) // 4 + states + (1 << 30), shutil.disk_usage(folder).free
    if free < needed:
        sys.exit(f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed; set TMPDIR.")


def saved_methods(found: dict[str, Any]) -> dict[str, Any]:
    """The methods of an earlier run of the same shape and data on this machine."""
    if not RESULT.exists():
        return {}
    earlier: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == found[name] for name in ("shape", "calibration_tokens"))
    same = same and earlier["machine"].get("cpu") == found["machine"].get("cpu")
    return dict(earlier["methods"]) if same else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["gptq"])
    parser.add_argument("--worker", nargs=4, metavar=("MODEL", "DATA", "OUT", "METHOD"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/quantization_memory.json")
    given = parser.parse_args()
    if given.worker:
        model, data, out, method = given.worker
        worker(Path(model), Path(data), Path(out), method)
        return
    found: dict[str, Any] = {
        "what": "resident memory of `millstream quantize` above its imports, by the largest layer with its moments",
        "machine": machine.describe(),
        "shape": {"hidden": given.hidden, "intermediate": given.intermediate, "layers": given.layers},
        "calibration_tokens": SEQUENCES * SEQUENCE_TOKENS,
        "methods": {},
    }
    if given.save:
        found["methods"] = saved_methods(found)
    with tempfile.TemporaryDirectory() as work:
        model, data = Path(work, "model"), Path(work, "data.jsonl")
        require_disk(Path(work), given.hidden, given.intermediate, given.layers)
        write_model(model, given.hidden, given.intermediate, given.layers)
        write_data(data)
        for method in given.methods:
            row = found["methods"][method] = measure(model, data, Path(work, "out"), method, given)
            print(f"{method}: {row['above_imports_bytes'] / 1e6:.0f} MB, {row['ratio']:.2f} x; {row}", flush=True)
            if given.save:
                RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
