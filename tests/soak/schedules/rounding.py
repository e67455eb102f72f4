"""Whether rounding alone could have chosen another token: the only excuse for one.

Steps of other sizes add numbers in another order, so logits differ in their last bits, and where two candidates come
that close, either is right. This is decided by computing the token again in float64, COPIES times, each time with all
weights changed by about as much as float32 rounds. If both tokens come up, it is a near-tie. Weights are changed, and
not logits, because rounding may also choose another expert, from where on the logits differ by much more.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.sampling.sampler import SamplingRow, sample
from millstream_runtime.engine.sampling.token_counts import History, TokenCounts
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.registry import load_model, load_model_config
from tests.soak.schedules.engines import ProcessorsOf
from tests.soak.schedules.findings import Difference
from tests.support.tiny_families import logits_of

COPIES = 48
NOISE = 8 * torch.finfo(torch.float32).eps  # relative to a weight; sums of rounding errors are a few of these


class Rounding:
    """Copies of one model in float64, each with other last bits."""

    def __init__(self, folder: Path, processors_of: ProcessorsOf | None = None) -> None:
        """`folder`: of weights that are not packed. `processors_of`: see `Engines`."""
        self._folder, self._processors_of = folder, processors_of
        self._config = load_model_config(folder)
        self._copies: list[Decoder] = []

    def explains(self, difference: Difference, request: Request, answer: list[int]) -> bool:
        """Whether both tokens of a difference come up. `answer`: that of the request alone."""
        token_ids = [*request.prompt_token_ids, *answer[: difference.position]]
        found = {self._token(copy, request, token_ids) for copy in self._all_copies()}
        return {difference.found, difference.expected} <= found

    @torch.inference_mode()
    def _token(self, model: Decoder, request: Request, token_ids: list[int]) -> int:
        logits = logits_of(model, self._config, token_ids, len(token_ids), torch.float64)[-1:]
        params, num_prompt = request.sampling, len(request.prompt_token_ids)
        suppressed: frozenset[int] = frozenset()
        if len(token_ids) - num_prompt < params.min_tokens:
            eos = self._config.eos_token_ids
            suppressed = params.stop_token_ids | (frozenset() if params.ignore_eos else eos)
        history = None
        if params.is_penalised:
            history = History(0, 0, token_ids, num_prompt, params.repetition_penalty != 1.0)
        row = SamplingRow(params, params.seed or 0, len(token_ids), suppressed, history)
        if self._processors_of is not None:
            generated, processors = token_ids[num_prompt:], self._processors_of(request)
            for place in range(len(generated)):  # those that count their calls have had one per token
                for one in processors:
                    one(torch.zeros(logits.shape[1]), generated[:place])
            row = row._replace(generated_ids=generated, processors=processors)
        return int(sample(logits.float(), [row], TokenCounts(1, torch.device("cpu")))[0])

    def _all_copies(self) -> list[Decoder]:
        if not self._copies:
            generator = torch.Generator().manual_seed(0)
            stored = {name: one for path in self._folder.glob("*.safetensors") for name, one in load_file(path).items()}
            self._copies = [self._copy(stored, generator) for _ in range(COPIES)]
        return self._copies

    def _copy(self, stored: dict[str, Tensor], generator: torch.Generator) -> Decoder:
        def changed(weight: Tensor) -> Tensor:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            return weight.double() * (1 + NOISE * noise)

        with tempfile.TemporaryDirectory() as scratch:
            save_file({name: changed(one) for name, one in stored.items()}, Path(scratch) / "model.safetensors")
            return load_model(self._config, Path(scratch), torch.float64, torch.device("cpu"))
