"""The flags of `millstream serve`: one per field of RuntimeConfig, `--max-num-seqs` for `max_num_seqs`.

No flag has a default here. What was not given stays out, so that the config's own default holds, or that of a file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from typing import TypeVar

from millstream_runtime.config import (
    AcceptanceRule,
    Device,
    DType,
    GovernorMode,
    KVCacheDType,
    LogLevel,
    RuntimeConfig,
    SpeculationMethod,
    WeightFormat,
)
from millstream_runtime.errors import InvalidConfigError

Value = TypeVar("Value", bound=StrEnum)
_PREFIXES = "KMGT"
_DRAFT_FIELDS = ("speculation_method", "draft_model", "max_draft_tokens", "draft_tree", "speculation_acceptance")
_QUANTITY = re.compile("([0-9]{1,15}) ?([kKMGT])(i?)B?", re.ASCII)  # 4Gi, as Kubernetes writes it, 4GiB or 4 GB


def from_namespace(namespace: argparse.Namespace) -> RuntimeConfig:
    """A config from parsed flags; a flag that was not given keeps its default.

    Raises:
        InvalidConfigError: no model, or a value out of its range.
    """
    given = {
        field.name: getattr(namespace, field.name)
        for field in fields(RuntimeConfig)
        if getattr(namespace, field.name, None) is not None
    }
    if "model" not in given:
        raise InvalidConfigError("--model is required: a folder with config.json and safetensors weights.")
    given.setdefault("served_model_name", given["model"].rstrip("/").rsplit("/", 1)[-1] or "model")
    return RuntimeConfig(**given)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to `parser`."""
    for add_flags in (_add_model_flags, _add_batch_flags, _add_memory_flags, _add_speculation_flags, _add_server_flags):
        add_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--model", metavar="DIR", help="model folder: config.json, *.safetensors, tokenizer.json; or *.gguf")
    flag("--served-model-name", metavar="NAME", help="name in /v1/models and in requests (default: the folder's name)")
    _one_of(parser, "--device", Device, "auto takes CUDA where there is one (default: auto)")
    dtype = (
        "of weights, and on a CPU of the KV cache; auto: the checkpoint's, but float32 on a CPU with AVX-512, unless "
    )
    dtype += "the checkpoint is bfloat16 and the CPU has AVX512_BF16 or AMX"
    _one_of(parser, "--dtype", DType, dtype)
    quantization = "refuse a checkpoint of another format; FP8 rounds one of 16 bits while it loads (default: take any)"
    _one_of(parser, "--quantization", WeightFormat, quantization)
    _integer(parser, "--tensor-parallel-size", "GPUs, or on a CPU processes, that share every layer (default: 1)")
    _integer(parser, "--max-model-len", "tokens of prompt and answer together (default: what the model allows)")
    planned = "end the boot where memory holds no request of so many tokens (default: serve what it holds)"
    _integer(parser, "--planned-model-len", planned)


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    _integer(parser, "--max-num-batched-tokens", "tokens one step may compute (default: 2048)")
    _integer(parser, "--max-num-seqs", "requests one step may hold (default: 64)")
    _integer(
        parser,
        "--target-itl-milliseconds",
        "how long a step with prompts may last beside running answers (default: 50 on a CPU, no bound on a GPU)",
    )
    _switch(parser, "--enforce-eager", "no CUDA graphs (default: false)", bare=True)


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    _integer(parser, "--block-size-tokens", "tokens in one KV block (default: 16)")
    _integer(parser, "--gpu-memory-utilization-percent", "share of GPU memory to use (default: 90)")
    flag = parser.add_argument
    pool = "size of the KV pool on a CPU (default: a share of the container's memory)"
    flag("--kv-cache-memory-bytes", type=_to_bytes, metavar="N", help=pool)
    _one_of(parser, "--kv-cache-dtype", KVCacheDType, "how keys and values are stored; auto: as the model computes")
    _switch(parser, "--enable-prefix-caching", "share KV blocks (default: true)")
    _switch(
        parser,
        "--enable-hybrid-kv-cache-manager",
        "free KV blocks behind the windows of models that mix them with full layers (default: on a CPU, where that "
        "saves memory)",
        bare=True,
    )


def _add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    _one_of(
        parser,
        "--speculation-method",
        SpeculationMethod,
        "what proposes tokens for steps to check (default: Disabled)",
    )
    _integer(
        parser, "--max-draft-tokens", "tokens proposed at a time, 1 to 16 (default: 4; of a draft model or head 5)"
    )
    _one_of(
        parser,
        "--speculation-governor",
        GovernorMode,
        "whether measured gains choose how many are checked; Observe: they are only reported (default: Enforce)",
    )
    parser.add_argument("--draft-model", metavar="DIR", help="folder of the model, or the heads, that propose tokens")
    _one_of(
        parser,
        "--speculation-acceptance",
        AcceptanceRule,
        "which proposed tokens stand: those that the target draws, or by rejection sampling (default: Identity)",
    )
    parser.add_argument(
        "--draft-tree",
        metavar="TREE",
        help="tree of the tokens that EAGLE or Medusa heads propose, such as '[(0,), (1,), (0, 0)]', as vLLM's "
        "speculative_token_tree; in place of --max-draft-tokens (default: the likeliest token of each place)",
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--api-keys-file", metavar="FILE", help="one API key a line, read again when it changes (default: no keys)")
    origins = "of web pages that may ask from a browser (CORS), such as https://chat.example.com, or * (default: none)"
    flag("--allowed-origins", type=_to_list, metavar="ORIGIN[,ORIGIN]", help=origins)
    _integer(parser, "--heartbeat-interval-seconds", "idle time between warm-up heartbeats, 0 = off (default: 30)")
    _one_of(parser, "--log-level", LogLevel, "default: $MILLSTREAM_LOG_LEVEL, else info")
    _integer(parser, "--drain-timeout-seconds", "how long SIGTERM waits for running requests (default: 600)")
    host = "address to listen on (default: 127.0.0.1 with a folder or a manifest, else every address, IPv4 and IPv6)"
    flag("--host", help=host)
    _integer(parser, "--port", "port to listen on (default: 8000)")


def _integer(parser: argparse.ArgumentParser, name: str, help_text: str) -> None:
    parser.add_argument(name, type=_to_integer, metavar="N", help=help_text)


def _one_of(parser: argparse.ArgumentParser, name: str, values: type[Value], help_text: str) -> None:
    parser.add_argument(name, type=_to_one_of(values), metavar="|".join(values), help=help_text)


def _switch(parser: argparse.ArgumentParser, name: str, help_text: str, *, bare: bool = False) -> None:
    """`bare`: the flag without a value means true."""
    if bare:
        parser.add_argument(name, type=_to_switch, metavar="true|false", nargs="?", const=True, help=help_text)
    else:
        parser.add_argument(name, type=_to_switch, metavar="true|false", help=help_text)


# argparse shows the message of an ArgumentTypeError as it is.
def _to_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _to_bytes(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        quantity = _QUANTITY.fullmatch(text)
    means = ""
    if quantity is not None:
        number, prefix, binary = quantity.groups()
        base = 1024 if binary else 1000
        means = f"; {text} is {int(number) * base ** (_PREFIXES.index(prefix.upper()) + 1)}"
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes{means}")


def _to_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _to_one_of(values: type[Value]) -> Callable[[str], Value]:
    def convert(text: str) -> Value:
        if text not in [*values]:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(values)}")
        return values(text)

    return convert


def _to_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def draft_flags(config: RuntimeConfig) -> str:
    """Return the flags that ask for drafts, in words: what a refusal says to leave out.

    One of them alone cannot go: a draft model without its method is refused, as is a method without its model.
    """
    defaults = {field.name: field.default for field in fields(RuntimeConfig)}
    given = [f"--{name.replace('_', '-')}" for name in _DRAFT_FIELDS if getattr(config, name) != defaults[name]]
    return " and ".join(filter(None, (", ".join(given[:-1]), given[-1]))) if given else ""
