"""What may draft in a schedule: names alone, without torch."""

from __future__ import annotations

from enum import StrEnum


class DraftKind(StrEnum):
    """Every drafter of the runtime, one that knows the answers, and those that mean harm."""

    N_GRAMS = "n-grams"
    ITSELF = "draft model, the target itself"
    QUANTIZED = "draft model, the target quantized"
    ANOTHER_MODEL = "draft model, another"
    EAGLE_1 = "EAGLE-1 head"
    EAGLE_3 = "EAGLE-3 head"
    MEDUSA = "Medusa heads"
    OFTEN_RIGHT = "often right"
    ALWAYS_WRONG = "adversary: always wrong"
    ALWAYS_THE_SAME = "adversary: always the same"
    BEYOND_THE_VOCABULARY = "adversary: ids beyond the vocabulary"
    NAN_EMBEDDING = "adversary: a token whose embedding is NaN"
    NAN_MODEL = "adversary: a draft model that gives NaN"
    NAN_EAGLE = "adversary: an EAGLE-1 head that gives NaN"
    NAN_EAGLE_3 = "adversary: an EAGLE-3 head that gives NaN"
    NAN_MEDUSA = "adversary: Medusa heads that give NaN"


DRAFT_MODELS = {DraftKind.ITSELF, DraftKind.QUANTIZED, DraftKind.ANOTHER_MODEL, DraftKind.NAN_MODEL}
EAGLE_HEADS = {DraftKind.EAGLE_1, DraftKind.NAN_EAGLE, DraftKind.EAGLE_3, DraftKind.NAN_EAGLE_3}
MEDUSA_HEADS = {DraftKind.MEDUSA, DraftKind.NAN_MEDUSA}  # whose trees are drawn
HEADS = EAGLE_HEADS | MEDUSA_HEADS  # not served on several ranks
GIVE_NAN = {DraftKind.NAN_MODEL, DraftKind.NAN_EAGLE, DraftKind.NAN_EAGLE_3, DraftKind.NAN_MEDUSA}
