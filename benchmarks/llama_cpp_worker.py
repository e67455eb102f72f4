"""llama.cpp behind a pipe: `llama_cpp_worker.py MODEL.gguf THREADS SEQUENCES TOKENS_A_SEQUENCE`.

One JSON line in, `{"prompts": [[id]], "new_tokens": [n]}`; one out, `{"seconds": s, "answers": [[id]]}`. The first line
out says that the model is loaded. A process of its own: it runs in the peers' environment, with its own OpenMP and
none of our settings for it. All sequences are decoded in one batch by the C API that llama.cpp's own server uses; the
Python around a step is some microseconds a sequence.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp

F32 = 0  # ggml_type: the KV cache at the precision of everybody else's


class Worker:
    """One model, one context with room for `num_sequences` of `tokens_each`."""

    def __init__(self, path: str, threads: int, num_sequences: int, tokens_each: int) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * tokens_each
        params.n_batch = params.n_ubatch = max(512, num_sequences * 64)
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F32
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._greedy = llama_cpp.llama_sampler_init_greedy()
        self._batch: Any = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def answer(self, prompts: list[list[int]], new_tokens: list[int]) -> tuple[float, list[list[int]]]:
        """Seconds and greedy answers of exactly `new_tokens` ids."""
        llama_cpp.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        answers: list[list[int]] = [[] for _ in prompts]
        entering = [(seq, at, id_) for seq, prompt in enumerate(prompts) for at, id_ in enumerate(prompt)]
        running = list(range(len(prompts)))
        while running:
            sampled = self._decode(entering, {seq: len(prompts[seq]) + len(answers[seq]) - 1 for seq in running})
            for seq, id_ in sampled.items():
                answers[seq].append(id_)
                if len(answers[seq]) == new_tokens[seq]:
                    running.remove(seq)
                    llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
            entering = [(seq, len(prompts[seq]) + len(answers[seq]) - 1, answers[seq][-1]) for seq in running]
        return time.perf_counter() - start, answers

    def _decode(self, entering: list[tuple[int, int, int]], last: dict[int, int]) -> dict[int, int]:
        """One step over (sequence, position, id); samples where a sequence's last position is computed."""
        batch, samples = self._batch, {}
        batch.n_tokens = len(entering)
        for row, (seq, position, id_) in enumerate(entering):
            batch.token[row], batch.pos[row] = id_, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
            batch.logits[row] = position == last[seq]
            if position == last[seq]:
                samples[seq] = row
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        return {seq: llama_cpp.llama_sampler_sample(self._greedy, self._context, row) for seq, row in samples.items()}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _SILENT(_level: int, _text: bytes, _data: object) -> None:  # noqa: N802 - a constant for C
    """llama.cpp talks a lot while it loads."""


def main() -> None:
    path, threads, num_sequences, tokens_each = sys.argv[1], *map(int, sys.argv[2:5])
    worker = Worker(path, threads, num_sequences, tokens_each)
    system = llama_cpp.llama_print_system_info().decode()
    print(json.dumps({"version": llama_cpp.__version__, "system": system}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds, answers = worker.answer(request["prompts"], request["new_tokens"])
        print(json.dumps({"seconds": seconds, "answers": answers}), flush=True)


if __name__ == "__main__":
    main()
