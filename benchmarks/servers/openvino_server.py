"""OpenVINO GenAI's continuous batching behind `/v1/completions`.

    python openvino_server.py FOLDER PORT THREADS SEQUENCES CACHE_GIB

openvino-genai has no server, and OpenVINO Model Server is not on PyPI. This one does as little as possible: prompts are
token ids, answers are greedy streams of exactly `max_tokens` tokens. One thread steps the pipeline; after each step the
new tokens of all requests go to the event loop in one call. It runs in the peers' environment, without our packages.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_BODY_BYTES = 1 << 22
MAX_TOKENS = 1 << 16
Deliver = Callable[[list[int]], None]


class Engine:
    """One pipeline, stepped by a thread of its own."""

    def __init__(self, folder: Path, threads: int, sequences: int, cache_gib: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size = sequences, cache_gib
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._waiting: queue.SimpleQueue[tuple[list[int], int, Deliver]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int, deliver: Deliver) -> None:
        """`deliver` gets the token ids of each step, on the engine's thread."""
        self._waiting.put((prompt, max_tokens, deliver))

    def _run(self) -> None:
        running: list[tuple[Any, Deliver]] = []
        number = 0
        while True:
            while not running or not self._waiting.empty():
                prompt, max_tokens, deliver = self._waiting.get()
                running.append((self._add(number, prompt, max_tokens), deliver))
                number += 1
            self._pipeline.step()
            for handle, deliver in running:
                while handle.can_read():
                    for output in handle.read().values():
                        deliver(list(output.generated_ids))
            unfinished = openvino_genai.GenerationStatus.RUNNING
            running = [pair for pair in running if pair[0].get_status() == unfinished]

    def _add(self, number: int, prompt: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        return self._pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


class Server:
    """HTTP/1.1 with one route. Connections are kept; streams are chunked."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").lower().split("\r\n")
                lengths = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")]
                if not lengths or lengths[0] > MAX_BODY_BYTES:
                    raise ValueError("a body with a length is needed")
                await self._answer(json.loads(await reader.readexactly(lengths[0])), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, KeyError, TypeError) as error:
            body = json.dumps({"error": {"message": str(error)}}).encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt, max_tokens = [int(id_) for id_ in body["prompt"]], int(body["max_tokens"])
        if not prompt or not 1 <= max_tokens <= MAX_TOKENS or not body.get("stream"):
            raise ValueError("prompt must be token ids, max_tokens 1 to 65536, and stream true")
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[list[int]]()
        self._engine.submit(prompt, max_tokens, lambda ids: _hand_over(loop, arrived, ids))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count, decoder = 0, DecodeStream(skip_special_tokens=True)
        while count < max_tokens:
            ids = await arrived.get()
            count += len(ids)
            pieces = [decoder.step(self._tokenizer, id_) for id_ in ids]
            if text := "".join(piece for piece in pieces if piece):
                writer.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        writer.write(_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


def _hand_over(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[list[int]], ids: list[int]) -> None:
    loop.call_soon_threadsafe(arrived.put_nowait, ids)


def _event(chunk: dict[str, Any]) -> bytes:
    data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


async def main() -> None:
    folder, port, threads, sequences, cache_gib = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    engine = Engine(folder, threads, sequences, cache_gib)
    server = Server(engine, Tokenizer.from_file(str(folder / "tokenizer.json")))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=1024)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
