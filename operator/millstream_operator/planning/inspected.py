"""What inspections found, laid over what else is known. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.planning.facts import Facts

SHAPE_FIELD = "model.source"  # what Facts.unknown calls a shape that nobody has read


@dataclass(frozen=True, slots=True)
class Inspected:
    """The model and its draft, as their own files say; None: not looked at."""

    model: InspectedModel | None = None
    draft: InspectedModel | None = None

    def over(self, facts: Facts) -> Facts:
        """`facts` with what was read in place of what was assumed."""
        if self.draft is not None:
            facts = replace(facts, draft_shape=self.draft.shape)
        if self.model is None:
            return facts
        return replace(
            facts,
            shape=self.model.shape,
            model_revision=self.model.revision,
            checkpoint_bytes=self.model.checkpoint_bytes,
            unknown=tuple(reason for reason in facts.unknown if reason.field != SHAPE_FIELD),
        )
