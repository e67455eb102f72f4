"""Schedules in which every engine speculates: each kind of drafter in turn, in all the circumstances of the others."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.soak.schedules.draft_kinds import DRAFT_MODELS, GIVE_NAN, HEADS, MEDUSA_HEADS, DraftKind
from tests.soak.schedules.schedule import Schedule, Settings, draw_actions, draw_settings
from tests.soak.schedules.tiny_models import DAMAGED, MODELS, TinyModel

TWO_RANKS_SHARE = 0.2  # of the schedules whose drafter and model allow it
SMALL_POOL_SHARE = 0.4  # more than in other schedules: few requests are preempted where steps give several tokens
FLIPS_SHARE, DECIDES_SHARE = 0.4, 0.3  # the rest checks all drafts
CORRECTED_SHARE, DISTRIBUTION_SHARE = 0.7, 0.3
TREE_SIZES = (1, 3, 8, 20, 40, 64)  # nodes
TREE_RANKS = (2, 5, 60)  # below which those of a node's children are
TREE_LEVELS = 3  # as many as there are heads
KNOWS_NOTHING = {DraftKind.ANOTHER_MODEL, DraftKind.EAGLE_1, DraftKind.EAGLE_3, DraftKind.MEDUSA} | GIVE_NAN


def draw_speculating(seed: int, number: int) -> Schedule:
    """Return schedule `number` of a run with `seed`."""
    rng = random.Random(f"{seed}/{number}/speculation")
    kind = [*DraftKind][number % len(DraftKind)]
    models = DAMAGED if kind is DraftKind.NAN_EMBEDDING else MODELS
    name = rng.choice([*models])
    while not _may_draft(kind, models[name]):
        name = rng.choice([*models])
    settings = _speculating(rng, draw_settings(rng, name, models[name]), kind, models[name])
    if kind in MEDUSA_HEADS and number // len(DraftKind) % 2:
        trees = random.Random(f"{seed}/{number}/tree")  # of its own, so that older schedules are what they were
        # FlashAttention takes no mask, and heads are served on a CPU alone, which has none of it.
        settings = replace(settings, draft_tree=draw_tree(trees), reads_in_place=False)
    return Schedule(number, rng.getrandbits(32), settings, draw_actions(rng, settings))


def _may_draft(kind: DraftKind, model: TinyModel) -> bool:
    """A head larger than its model is refused, and packed weights cannot be quantized again."""
    if kind is DraftKind.QUANTIZED:
        return model.packed is None and not model.has_experts
    return kind not in HEADS or model.packed is None


def draw_tree(rng: random.Random, ranks: tuple[int, ...] = TREE_RANKS) -> str:
    """Return a tree of up to the most nodes that a step may check, in any order. `ranks`: see `TREE_RANKS`."""
    num_nodes, nodes = rng.choice(TREE_SIZES), list[tuple[int, ...]]()
    while len(nodes) < num_nodes:
        parent = rng.choice([(), *(one for one in nodes if len(one) < TREE_LEVELS)])
        child = (*parent, rng.randrange(rng.choice(ranks)))
        if child not in nodes:
            nodes.append(child)
    rng.shuffle(nodes)
    return str(nodes)


def _speculating(rng: random.Random, drawn: Settings, kind: DraftKind, model: TinyModel) -> Settings:
    execution = "plain" if drawn.execution == "on two ranks" else drawn.execution
    is_whole = kind in HEADS or kind is DraftKind.NAN_EMBEDDING  # known to one rank alone
    if not is_whole and model.can_split and rng.random() < TWO_RANKS_SHARE and model.packed is None:
        execution = "on two ranks"
    governor = rng.random()
    return replace(
        drawn,
        execution=execution,
        reads_in_place=drawn.reads_in_place and execution != "on two ranks",
        spare_blocks=rng.randint(0, 2) if rng.random() < SMALL_POOL_SHARE else drawn.spare_blocks,
        max_draft_tokens=rng.choice((1, 2, 3, 4, 5, 8, 16)),
        drafts=kind,
        governor_flips=governor < FLIPS_SHARE,
        governor_decides=FLIPS_SHARE <= governor < FLIPS_SHARE + DECIDES_SHARE,
        corrects_drafts=kind in KNOWS_NOTHING and rng.random() < CORRECTED_SHARE,
        accepts_by_distribution=kind in DRAFT_MODELS and rng.random() < DISTRIBUTION_SHARE,
    )
