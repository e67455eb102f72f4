"""The condition APIKeysInvalid: some API keys of the Secret cannot be used, and the model serves with the others. Pure.

The operator has no right on the Secret: the runtime reports the problem in /ready, by line and without a key. Until the
next report the condition stays as it was.
"""

from __future__ import annotations

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.observation import Observation


def api_keys_invalid(observation: Observation) -> Condition | None:
    """Return the condition while the last report names a problem."""
    auth = observation.owner.spec.auth
    if auth is None or auth.api_keys_secret_ref is None:
        return None
    problem = observation.answer.keys_problem if observation.answer is not None else None
    if problem is None:
        before = conditions.find(observation.previous.get("conditions", ()), conditions.API_KEYS_INVALID)
        message = before.get("message", "")
    else:
        secret = auth.api_keys_secret_ref
        message = problem and (
            f"spec.auth.apiKeysSecretRef, key {secret.key} of the Secret {secret.name}: {problem}. Requests with a key "
            "that cannot be used get HTTP 401. Correct the Secret; nothing restarts."
        )
    return Condition(conditions.API_KEYS_INVALID, True, Reason.API_KEYS_INVALID, message) if message else None
