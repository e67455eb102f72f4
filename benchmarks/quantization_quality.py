"""What each way to quantize costs in quality, by slice: the demo model, made by `millstream quantize` and judged by its
own held-out documents.

    python -m benchmarks.quantization_quality
    python -m benchmarks.quantization_quality --only awq gptq

Calibration data are training documents of the model, so none of the judged ones (`hack/training/corpus`). Three parts:

methods         every method, calibrated on prose, code and chat together
domains         AWQ and GPTQ calibrated on one slice alone: judged on that slice (own) and on the others (foreign)
outliers        RTN, AWQ and GPTQ on the same model with the outlier channels of large models transplanted
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.kv_cache_formats import RESULT as KV_CACHE_RESULT
from benchmarks.quantization_plot import svg
from benchmarks.quantization_tables import goals, tables
from hack.training.corpus.documents import SLICES, CorpusDocument, read_corpus
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.gguf.gguf_model import read_gguf_folder
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quality.documents import TokenizedDocument, read_documents, tokenize
from millstream_runtime.quality.scored_model import ScoredModel, Slab
from millstream_runtime.quality.slice_figures import SliceFigures, by_slice
from millstream_runtime.quality.token_scores import score
from millstream_runtime.quantize.make import make
from millstream_runtime.quantize.output.safetensors_file import tensors_of
from millstream_runtime.quantize.settings import Method, QuantizeSettings
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.outlier_transplant import transplant_outliers

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/quantization_quality.json"
PICTURE = ROOT / "docs/pictures/quantization.svg"
SEQUENCES, SEQUENCE_TOKENS, SEED = 128, 256, 0  # the model was trained on rows of 256 tokens
DOCUMENTS_PER_SLICE = 400
MAX_TOKENS = 2048
MIXED = "all"
FIGURES = ("perplexity_ratio", "mean_kl", "p99_kl", "top1_agreement_percent")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to quantize. `more`: further fields of `QuantizeSettings`."""

    name: str
    method: Method
    group_size: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("RTN g128", Method.RTN, 128),
    Variant("RTN g64", Method.RTN, 64),
    Variant("AWQ g128", Method.AWQ, 128),
    Variant("AWQ g64", Method.AWQ, 64),
    Variant("GPTQ g128", Method.GPTQ, 128),
    Variant("GPTQ g64", Method.GPTQ, 64),
    Variant("NF4", Method.NF4),
    Variant("GGUF Q4_K", Method.GGUF, more={"gguf_type": "Q4_K"}),
    Variant("GGUF Q8_0", Method.GGUF, more={"gguf_type": "Q8_0"}),
    Variant("FP8", Method.FP8),
    Variant("INT8", Method.INT8),
)
DOMAIN_VARIANTS = tuple(one for one in VARIANTS if one.name in ("AWQ g128", "GPTQ g128"))
OUTLIER_VARIANTS = tuple(one for one in VARIANTS if one.name in ("RTN g128", "AWQ g128", "GPTQ g128"))


class Judge:
    """The base model's logits on the held-out documents, computed once."""

    def __init__(self, folder: Path, documents: Sequence[TokenizedDocument]) -> None:
        base = loaded(folder)
        self._documents = documents
        self._slabs = {
            one.line: [
                Slab(slab.first, slab.logits.clone()) for slab in base.logits(one.token_ids, one.num_prompt_tokens)
            ]
            for one in documents
        }

    def figures(self, folder: Path) -> list[SliceFigures]:
        """Of a candidate, by slice."""
        candidate = loaded(folder)
        return by_slice([score(_Known(self._slabs[one.line]), candidate, one) for one in self._documents])


@dataclass(frozen=True, slots=True)
class _Known:
    """Logits that were computed before, in place of the model."""

    slabs: list[Slab]

    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[Slab]:
        return iter(self.slabs)


def loaded(folder: Path) -> ScoredModel:
    return ScoredModel(
        RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, max_model_len=MAX_TOKENS)
    )


def judged_documents(model: Path, data: Path) -> list[TokenizedDocument]:
    return tokenize(
        read_documents(data), Tokenizer.from_folder(model), load_model_config(model).eos_token_ids, MAX_TOKENS
    )


def write_calibration(folder: Path) -> dict[str, Path]:
    """A file of training documents per slice, and one of all."""
    training = read_corpus().training
    choose = random.Random(SEED)
    by_name: dict[str, list[CorpusDocument]] = {}
    for name in SLICES:
        of_slice = [one for one in training if one.slice == name]
        by_name[name] = choose.sample(of_slice, min(DOCUMENTS_PER_SLICE, len(of_slice)))
    by_name[MIXED] = [one for of_slice in by_name.values() for one in of_slice]
    paths = {}
    for name, documents in by_name.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(f"{json.dumps(_line(one))}\n" for one in documents), encoding="utf-8")
    return paths


def _line(document: CorpusDocument) -> dict[str, Any]:
    if isinstance(document.content, str):
        return {"text": document.content, "slice": document.slice}
    messages = [{"role": one.role, "content": one.content} for one in document.content]
    return {"messages": messages, "slice": document.slice}


def made(variant: Variant, model: Path, calibration: Path, held_out: Path, out: Path) -> float:
    """Quantize; returns how long it took, in seconds."""
    settings = QuantizeSettings(
        model=model, out=out, method=variant.method, group_size=variant.group_size, calibration=calibration,
        held_out=held_out, sequence_tokens=SEQUENCE_TOKENS, max_sequences=SEQUENCES, seed=SEED, device="cpu",
        with_quality=False, **variant.more,
    )  # fmt: skip
    begin = time.monotonic()
    make(settings, lambda sentence: print(f"  {sentence}"), lambda stage, done, total: None)
    return time.monotonic() - begin


def bytes_ratio(base: Path, folder: Path) -> float:
    """Bytes of the quantized layers, scales included, by what they take in 16 bits."""
    plain = {
        name: one
        for path in base.glob("*.safetensors")
        for name, one in tensors_of(path).items()
        if name.startswith("model.layers.") and len(one.shape) == 2
    }
    elements = sum(one.shape[0] * one.shape[1] for one in plain.values())
    gguf = read_gguf_folder(folder)
    if gguf is not None:
        return sum(gguf.tensors[name].tensor.num_bytes for name in plain) / (2 * elements)
    modules = tuple(f"{name.removesuffix('.weight')}." for name in plain)
    stored = {name: one for path in folder.glob("*.safetensors") for name, one in tensors_of(path).items()}
    return sum(one.num_bytes for name, one in stored.items() if name.startswith(modules)) / (2 * elements)


def row(figures: Sequence[SliceFigures]) -> dict[str, dict[str, float]]:
    """By slice."""
    return {
        one.slice: {name: round(getattr(one, name).value, 6) for name in FIGURES}
        | {"ratio_low": round(one.perplexity_ratio.low, 6), "ratio_high": round(one.perplexity_ratio.high, 6)}
        for one in figures
    }


def with_outliers(model: Path, folder: Path) -> Path:
    """The model with transplanted outlier channels, in float32: the same function."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    weights = transplant_outliers(load_file(model / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Benchmark:
    """One run. `work`: a folder for calibration files and checkpoints."""

    def __init__(self, model: Path, held_out: Path, work: Path) -> None:
        self._model, self._held_out, self._work = model, held_out, work
        self._documents = judged_documents(model, held_out)
        self._calibration = write_calibration(work)
        self._judge = Judge(model, self._documents)
        self._count = 0

    def methods(self, variants: Sequence[Variant]) -> dict[str, Any]:
        found = {}
        for one in variants:
            folder, seconds = self._make(one, self._model, MIXED)
            by_name = row(self._judge.figures(folder))
            found[one.name] = {
                "bytes_ratio": round(bytes_ratio(self._model, folder), 4),
                "seconds": round(seconds, 1),
                "slices": by_name,
            }
            show(one.name, by_name)
        return found

    def domains(self, variants: Sequence[Variant]) -> dict[str, Any]:
        """Mean KL by calibration, then by judged slice."""
        found: dict[str, Any] = {}
        for one in variants:
            for name in SLICES:
                figures = row(self._judge.figures(self._make(one, self._model, name)[0]))
                found.setdefault(one.name, {})[name] = {judged: of["mean_kl"] for judged, of in figures.items()}
                show(f"{one.name}, calibrated on {name}", figures)
        return found

    def outliers(self, variants: Sequence[Variant]) -> dict[str, Any]:
        """Mean KL over all tokens of the slices, and its ratio to RTN's."""
        model = with_outliers(self._model, self._work / "outliers")
        judge = Judge(model, self._documents)
        found = {}
        for one in variants:
            figures = judge.figures(self._make(one, model, MIXED)[0])
            found[one.name] = statistics.mean(figure.mean_kl.value for figure in figures)
            print(f"{one.name}, transplanted outliers: mean KL {found[one.name]:.5f}", flush=True)
        return {name: round(value, 6) for name, value in found.items()}

    def _make(self, variant: Variant, model: Path, calibration: str) -> tuple[Path, float]:
        self._count += 1
        out = self._work / f"made-{self._count}"
        return out, made(variant, model, self._calibration[calibration], self._held_out, out)


def show(name: str, by_name: dict[str, dict[str, float]]) -> None:
    cells = [f"{key} {one['perplexity_ratio']:.4f} KL {one['mean_kl']:.5f}" for key, one in by_name.items()]
    print(f"{name}: " + ", ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/demo-chat")
    parser.add_argument("--held-out", type=Path, default=ROOT / "models/held_out.jsonl")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these methods alone; saves nothing")
    given = parser.parse_args()
    wanted = [one for one in VARIANTS if given.only is None or one.method.value in given.only]
    with tempfile.TemporaryDirectory() as work:
        benchmark = Benchmark(given.model, given.held_out, Path(work))
        found: dict[str, Any] = {
            "what": "quality by method and slice, of a model quantized by `millstream quantize`",
            "machine": machine.describe(),
            "model": given.model.name,
            "calibration": f"{SEQUENCES} sequences of {SEQUENCE_TOKENS} tokens, seed {SEED}",
            "methods": benchmark.methods(wanted),
        }
        if given.only is not None:
            return
        found["domains"] = benchmark.domains(DOMAIN_VARIANTS)
        found["outliers"] = benchmark.outliers(OUTLIER_VARIANTS)
    found["goals"] = goals(found)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(svg(found), encoding="utf-8")
    print(tables(found, json.loads(KV_CACHE_RESULT.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
