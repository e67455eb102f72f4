"""The draft as a model whose weights can be trained: transformers' code for its family, in float32.

The runtime's own layers work in place, which leaves nothing to compute gradients from. So before anything is trained
both must give the same distributions (`require_equal`). No code and no weights of the folder but its safetensors are
read: config.json chooses among the classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quantize.source_model import SourceModel
from millstream_runtime.tune_draft.target_sequence import TargetSequence

MOST_DIFFERENCE = 0.01  # nats of a log-probability, between transformers' code and what is served


class TrainableDraft:
    """`parameters`: by the names of the checkpoint, in the order of the model."""

    def __init__(self, source: SourceModel, device: torch.device) -> None:
        """Raises RuntimeFailure: transformers has no such model, or names its weights otherwise."""
        self.device = device
        model: Any = _model_of(source.folder).to(device).eval()  # without dropout
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        if self.parameters.keys() != source.tensors.keys():
            strange = sorted(self.parameters.keys() ^ source.tensors.keys())
            raise _unsupported(source.folder, f"transformers keeps {strange[0]} under another name")
        self.load({name: source.load(name) for name in source.tensors})
        self.vocab_size = source.config.vocab_size
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights, by the names of the checkpoint."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    def logits(self, sequences: Sequence[TargetSequence]) -> Tensor:
        """Return those of all positions with a distribution, sequence after sequence: float32 `[positions, vocab]`."""
        longest = max(len(one.token_ids) for one in sequences)
        ids = torch.zeros(len(sequences), longest - 1, dtype=torch.long)
        wanted = torch.zeros(len(sequences), longest - 1, dtype=torch.bool)
        for row, one in enumerate(sequences):  # what is padded stands behind, where causal attention does not look
            ids[row, : len(one.token_ids) - 1] = one.token_ids[:-1]
            wanted[row, one.first - 1 : len(one.token_ids) - 1] = True
        hidden = self._decoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        logits: Tensor = self._head(hidden[wanted.to(self.device)]).float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    @torch.no_grad()
    def require_equal(self, served: ScoredModel, sequence: TargetSequence) -> None:
        """Raises RuntimeFailure: UnsupportedByRuntime, what is trained is not what is served."""
        ours = self.logits([sequence]).log_softmax(-1).cpu()
        slabs = [one.logits for one in served.logits(sequence.token_ids.tolist(), sequence.first)]
        theirs = torch.cat([one.log_softmax(-1).cpu() for one in slabs])
        difference = float((ours.exp() * (ours - theirs)).abs().sum(-1).max())
        if not difference <= MOST_DIFFERENCE:
            raise RuntimeFailure(
                FailureReason.UNSUPPORTED_BY_RUNTIME,
                f"The draft's distributions in transformers are {difference:.3g} nats from those that are served, so "
                "it cannot be tuned.",
            )


def _model_of(folder: Path) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    except (ValueError, OSError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise _unsupported(folder, f"transformers: {str(error).splitlines()[0][:160]}") from None
    return model


def _unsupported(folder: Path, why: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.UNSUPPORTED_BY_RUNTIME, f"{folder} cannot be tuned in this version: {why}.")
