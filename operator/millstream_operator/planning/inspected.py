"""The results of inspections, and facts with them applied. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.planning.facts import Facts

SHAPE_FIELD = "model.source"  # the field of Facts.unknown for a shape that is not known


@dataclass(frozen=True, slots=True)
class Inspected:
    """The model and its draft, from their own files; None: not inspected. `tuned_draft`: what became of the draft."""

    model: InspectedModel | None = None
    draft: InspectedModel | None = None
    tuned_draft: str | None = None  # key of the tuning whose draft replaces it

    def over(self, facts: Facts) -> Facts:
        """Return `facts` with the inspected values in place of assumed ones."""
        if self.draft is not None:
            facts = replace(
                facts,
                draft_shape=self.draft.shape,
                draft_is_inspected=True,
                draft_revision=self.draft.revision,
                draft_checkpoint_bytes=self.draft.checkpoint_bytes,
                tuned_draft=self.tuned_draft,
            )
        if self.model is None:
            return facts
        return replace(
            facts,
            shape=self.model.shape,
            model_revision=self.model.revision,
            checkpoint_bytes=self.model.checkpoint_bytes,
            unknown=tuple(reason for reason in facts.unknown if reason.field != SHAPE_FIELD),
        )
