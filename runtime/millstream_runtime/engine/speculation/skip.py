"""Reasons for which a decode has no drafts. Each is counted: `millstream_spec_decode_skipped_total{reason}`."""

from __future__ import annotations

from enum import StrEnum


class Skip(StrEnum):
    """Why a decode of a step has no drafts."""

    LOGITS_PROCESSORS = "logits_processors"
    AT_LIMIT = "at_limit"  # one token is left, or the next is the first at other rotary angles
    NO_PROPOSAL = "no_proposal"
    NO_GAIN = "no_gain"  # the governor expects them to cost more than they save
    CROWDED = "crowded"  # requests will soon be refused
    NO_ROOM = "no_room"  # of the token budget or of KV blocks
    NOT_FINITE = "not_finite"  # an earlier check of the request gave NaN
    OUT_OF_MEMORY = "out_of_memory"
    DRAFTER_FAILED = "drafter_failed"
    CATCHING_UP = "catching_up"  # the drafter has not read all known tokens yet
    # Of a draft model alone:
    DRAFT_CONTEXT = "draft_context"  # the request is longer than its context
    DRAFT_VOCABULARY = "draft_vocabulary"  # the request has a token that its embedding lacks
    DRAFT_NOT_FINITE = "draft_not_finite"  # it gave NaN for the request


# A request that the drafter has refused so once has no further drafts.
FOR_GOOD = frozenset({Skip.DRAFT_CONTEXT, Skip.DRAFT_VOCABULARY, Skip.DRAFT_NOT_FINITE})
