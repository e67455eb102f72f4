"""Available and ModelReady: does anything serve, and does the wanted configuration answer? Pure.

During a rollout Available stays True while Ready is False: the old replicas serve on.
"""

from __future__ import annotations

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.observation import Observation


def available(observation: Observation) -> Condition:
    """At least one replica serves, of whatever revision.

    A workload that was deleted and made again counts no replica until its controller has seen it, though pods serve.
    """
    some = bool(observation.counts.get("availableReplicas", 0))
    if not some and observation.owner.spec.replicas > 0:
        some = observation.serves(observation.running)
    if not some and observation.owner.spec.replicas == 0:
        return Condition(conditions.AVAILABLE, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing serves.")
    return serves(some)


def serves(some: bool) -> Condition:
    """Available, by the count of available replicas alone."""
    if some:
        return Condition(conditions.AVAILABLE, True, Reason.AVAILABLE, "At least one replica serves.")
    return Condition(conditions.AVAILABLE, False, Reason.NO_REPLICA_AVAILABLE, "No replica serves.")


def model_ready(observation: Observation) -> Condition:
    """Does the model answer through its Service, with the wanted configuration?"""
    if not observation.serves(observation.running) or observation.owner.spec.replicas == 0:
        reason = Reason.SCALED_TO_ZERO if observation.owner.spec.replicas == 0 else Reason.NO_REPLICA_AVAILABLE
        if observation.counts.get("availableReplicas", 0):
            reason = Reason.ROLLING_OUT
        return Condition(conditions.MODEL_READY, False, reason, "The model is asked once all replicas are available.")
    if observation.answer is None:
        return Condition(
            conditions.MODEL_READY, None, Reason.ASKING_MODEL, "The model is being asked through its Service."
        )
    if observation.answer.failure is not None:
        return Condition(
            conditions.MODEL_READY, False, observation.answer.failure.reason, observation.answer.failure.message
        )
    is_wanted = observation.running.digest == observation.revision.digest
    of_the_gate = f" {observation.quality}" if observation.quality and is_wanted else ""
    message = f"The model answered through its Service.{of_the_gate}"
    return Condition(conditions.MODEL_READY, True, Reason.ANSWERING, message)
