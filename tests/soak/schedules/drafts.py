"""The drafters of schedules: those of the runtime with random weights, whose drafts are corrected now and then, and
some that mean harm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from millstream_runtime.config import AcceptanceRule, GovernorMode, SpeculationMethod
from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.drafter import Drafter
from tests.soak.schedules.draft_kinds import DRAFT_MODELS, EAGLE_HEADS, GIVE_NAN, HEADS, DraftKind
from tests.soak.schedules.schedule import CONTEXT_TOKENS, Settings
from tests.soak.schedules.tiny_models import DAMAGED_TOKEN, VOCABULARY
from tests.support.drafters import EachAlone, OftenRight, always, always_wrong
from tests.support.eagle3_heads import write_eagle3_head
from tests.support.eagle_heads import head_config, random_head, save_head
from tests.support.family_cases import dense
from tests.support.medusa_heads import write_medusa_heads
from tests.support.quantized_checkpoints import gptq, quantized
from tests.support.tiny_families import write_family
from tests.support.tree_drafters import OftenOnTheTree

Answers = Mapping[tuple[int, ...], list[int]]  # by prompt
BEYOND = (VOCABULARY, VOCABULARY + 1, 1 << 31, 1 << 70, -1, -VOCABULARY)
CORRECTED_SHARE, NAN_SHARE = 0.5, 0.15  # of proposals, and of passes
EAGLE_3_VOCABULARY = 30  # a head's own; its tokens are every third one, and the last ones
GPTQ_8_BITS = {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True}  # any sizes
SMALL = {"hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def draft_config(settings: Settings, folder: Path) -> dict[str, Any]:
    """What an engine's config says about drafts; `folder`: of the target. Writes the draft model or head next to it."""
    if settings.max_draft_tokens is None:
        return {}
    config = {
        "speculation_method": SpeculationMethod.N_GRAM,  # its place is taken by those that know answers
        "speculation_governor": GovernorMode.DISABLED,  # what is proposed is checked, whatever it costs
        "max_draft_tokens": settings.max_draft_tokens,
    }
    kind = settings.drafts
    if kind in DRAFT_MODELS:
        config["speculation_method"] = SpeculationMethod.DRAFT_MODEL
        config["draft_model"] = str(_draft_model(kind, folder))
        if settings.accepts_by_distribution:
            config["speculation_acceptance"] = AcceptanceRule.DISTRIBUTION
    elif kind in EAGLE_HEADS:
        config["speculation_method"] = SpeculationMethod.EAGLE
        config["draft_model"] = str(_eagle_3(folder) if "EAGLE-3" in kind else _eagle_1(folder))
    elif kind in HEADS:
        config["speculation_method"] = SpeculationMethod.MEDUSA
        config["draft_model"] = str(_medusa(folder))
    if settings.draft_tree is not None:
        del config["max_draft_tokens"]  # which the tree says
        config["draft_tree"] = settings.draft_tree
    return config


def drafter_without_weights(settings: Settings, answers: Answers, seed: int) -> Drafter | None:
    """The drafter that takes the place of the runtime's; None where the runtime's own drafts."""
    if settings.max_draft_tokens is None:
        return None
    rng = random.Random(seed)
    match settings.drafts:
        case DraftKind.OFTEN_RIGHT:
            return OftenRight(answers, VOCABULARY, seed)
        case DraftKind.ALWAYS_WRONG:
            return always_wrong(answers, VOCABULARY)
        case DraftKind.ALWAYS_THE_SAME:
            return always(rng.randrange(VOCABULARY))
        case DraftKind.BEYOND_THE_VOCABULARY:
            return _often_right_up_to(answers, rng, lambda: rng.choice(BEYOND))
        case DraftKind.NAN_EMBEDDING:
            return _often_right_up_to(answers, rng, lambda: DAMAGED_TOKEN)
        case _:
            return None


def _often_right_up_to(answers: Answers, rng: random.Random, bad: Callable[[], int]) -> EachAlone:
    """Knows the answers, and puts one bad token into most of its proposals."""

    def guess(sequence: Sequence, most: int) -> list[int]:
        done = sequence.num_generated_tokens
        drafts = answers.get(tuple(sequence.request.prompt_token_ids), [])[done : done + rng.randint(0, most)]
        if rng.random() < 0.7:
            drafts.insert(rng.randint(0, len(drafts)), bad())
        return drafts

    return EachAlone(guess)


def make_unreliable(engine: Engine, settings: Settings, answers: Answers, seed: int) -> None:
    """Have a draft model or heads with weights of an engine be right at times, or give NaN, as its settings say."""
    if engine._drafting is None:
        return
    drafter, rng, kind = engine._drafting._drafter, random.Random(seed), settings.drafts
    if kind in GIVE_NAN:
        _give_nan(drafter, rng)
    if settings.corrects_drafts:
        tree = None if settings.draft_tree is None else DraftTree.parse(settings.draft_tree)
        _correct(drafter, _right_chain(answers) if tree is None else _right_branch(answers, tree, seed), rng)


def _give_nan(drafter: Any, rng: random.Random) -> None:
    """Some passes of the draft model or the heads give NaN."""
    forward = drafter._forward
    name = next(one for one in ("residual", "forward", "target_states") if hasattr(forward, one))
    compute = getattr(forward, name)

    def compute_or_fail(*args: Any) -> Tensor:
        found: Tensor = compute(*args)
        return found * float("nan") if rng.random() < NAN_SHARE else found

    setattr(forward, name, compute_or_fail)


Correction = Callable[[Sequence, list[int]], list[int]]  # of the drafts of a request


def _correct(drafter: Any, correction: Correction, rng: random.Random) -> None:
    """Random weights know nothing: so that drafts stand, some proposals are replaced by what comes."""
    propose = drafter.propose

    def proposed(wanted: Mapping[Sequence, int]) -> dict[Sequence, Any]:
        found = dict(propose(wanted))
        for sequence, drafts in found.items():
            if isinstance(drafts, list) and rng.random() < CORRECTED_SHARE:
                found[sequence] = correction(sequence, drafts)
        return found

    drafter.propose = proposed


def _draft_model(kind: DraftKind, target: Path) -> Path:
    match kind:
        case DraftKind.ITSELF:
            return target
        case DraftKind.QUANTIZED:
            return _in_8_bits(target)
        case _:
            return _another_model(target.parent)


def _in_8_bits(target: Path) -> Path:
    folder = target.with_name(f"{target.name}-in-8-bits")
    if not (folder / "config.json").exists():
        quantized(target, folder, GPTQ_8_BITS, gptq(8, -1, symmetric=True))
    return folder


def _right_chain(answers: Answers) -> Correction:
    """What comes, as far as it is known."""

    def corrected(sequence: Sequence, drafts: list[int]) -> list[int]:
        done = sequence.num_generated_tokens
        right = answers.get(tuple(sequence.request.prompt_token_ids), [])[done : done + len(drafts)]
        return [*right, *drafts[len(right) :]]

    return corrected


def _right_branch(answers: Answers, tree: DraftTree, seed: int) -> Correction:
    """What comes, on one branch of the tree; see `OftenOnTheTree`."""
    knows = OftenOnTheTree(answers, VOCABULARY, seed, tree)

    def corrected(sequence: Sequence, drafts: list[int]) -> list[int]:
        return [*knows.propose({sequence: len(drafts)})[sequence]]

    return corrected


def _another_model(root: Path) -> Path:
    folder = root / "another-draft-model"
    if not (folder / "config.json").exists():
        layers = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT_TOKENS}
        write_family(folder, seed=7, **dense("llama", **SMALL, **layers))
    return folder


def _eagle_1(target: Path) -> Path:
    folder = target.with_name(f"{target.name}-eagle-1")
    if not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True)
        heads = _head_sizes(target)
        save_head(folder, head_config(target, **heads), random_head(target, **heads))
    return folder


def _eagle_3(target: Path) -> Path:
    folder = target.with_name(f"{target.name}-eagle-3")
    if not (folder / "config.json").exists():
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": EAGLE_3_VOCABULARY}
        write_eagle3_head(folder, target, **_head_sizes(target), **layers)
    return folder


def _medusa(target: Path) -> Path:
    folder = target.with_name(f"{target.name}-medusa")
    if not (folder / "config.json").exists():
        write_medusa_heads(folder, _hidden_size(target), VOCABULARY)
    return folder


def _head_sizes(target: Path) -> dict[str, int]:
    """Numbers of heads that divide the hidden size into even parts, which RoPE needs; the rest is small, since a head
    larger than its model is refused."""
    heads = 6 if _hidden_size(target) % 12 == 0 else 4
    return {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "intermediate_size": 16}


def _hidden_size(target: Path) -> int:
    size: int = json.loads((target / "config.json").read_text())["hidden_size"]
    return size
