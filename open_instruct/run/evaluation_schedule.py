"""Evaluations within a run: decides when they are due, and collects their results before the engines get new weights. Also gives
weights to replaced engines while a run waits."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from open_instruct.report.metrics_file import ACCURACY_KEY, EVAL_REWARD_KEY
from open_instruct.run.wiring import Run

logger = logging.getLogger(__name__)

CONTROL_S = 60.0
"""Deadline of a call that only asks for or sets a value."""
ControlWait = Callable[..., Any]
"""`Components.wait` with a deadline: `(ref, what=…)`."""


def control_wait(run: Run) -> ControlWait:
    """Waits at most `CONTROL_S` for each call."""
    return functools.partial(run.components.wait, timeout_s=CONTROL_S)


def evaluation_is_due(run: Run) -> bool:
    every, step = run.args.local_eval_every, run.progress.training_step
    return run.evaluates and every > 0 and (step % every == 0 or step == run.args.num_training_steps)


def evaluation_is_missing(run: Run, *, was_under_way: bool) -> bool:
    """Whether the version that a resumed run starts from must still be evaluated, because its evaluation was cut off or has not
    begun.

    If `metrics.jsonl` already has the evaluation, the run takes the accuracy from that file.
    """
    if not run.evaluates or not (was_under_way or evaluation_is_due(run)):
        return False
    accuracy = run.log.accuracy_at(run.progress.training_step)
    if accuracy is not None:
        run.progress.eval_accuracy_after, run.progress.eval_reward_after = accuracy.share, accuracy.reward
    return accuracy is None


def start_evaluation(run: Run) -> None:
    """Issue the evaluation prompts. The engines keep their weights until `maybe_evaluate` has the results."""
    version = run.progress.training_step
    run.components.wait(
        run.components.rollouts.controller.start_evaluation.remote(version),
        what="the start of an evaluation",
        timeout_s=CONTROL_S,
    )
    run.evaluation_of = version


def give_weights_to_replacements(run: Run) -> None:
    """Let replacements begin to serve. If all engines have a newer version after that, pass it to the controller."""
    version = run.synchronizer.give_weights_to_replacements()
    if version is not None:
        told = run.components.rollouts.controller.set_version.remote(version)
        run.components.wait(told, what="the controller", timeout_s=CONTROL_S)


def maybe_evaluate(run: Run) -> bool:
    """Collect the evaluation in flight, if any. Called before the engines get new weights, so that it measures one version.

    A signal ends the wait, because an evaluation may take longer (30 minutes) than a scheduler allows. The resumed run begins
    with an evaluation of the weights of its checkpoint.
    """
    if run.evaluation_of is None:
        return False
    with run.timer("waiting_for_evaluation"):
        try:
            run.components.wait(
                run.components.rollouts.async_eval(run.evaluation_of),
                what=f"the evaluation of version {run.evaluation_of}",
                timeout_s=run.args.eval_timeout_s + 10,
                limit="eval_timeout_s",
                interruptible=True,
                on_poll=lambda: require_an_engine_with_these_weights(run),
            )
        except NoEngineHasTheWeights:
            logger.error(
                "the evaluation of version %d is lost: its prompts are left without an engine that has those weights",
                run.evaluation_of,
            )
            run.components.wait(  # the next evaluation may begin at once, and only one may exist at a time
                run.components.rollouts.controller.give_up_evaluation.remote(),
                what="giving up the evaluation",
                timeout_s=CONTROL_S,
            )
            run.evaluation_of = None
            return False
    _take_evaluation(run, run.evaluation_of, control_wait(run))
    return True


def take_complete_evaluation(run: Run, wait: ControlWait) -> None:
    """Report the evaluation under way, whose last result has arrived, without waiting for the end of the step."""
    if run.evaluation_of is None:
        return
    version = run.evaluation_of
    wait(run.components.rollouts.async_eval(version), what=f"the evaluation of version {version}, which is complete")
    _take_evaluation(run, version, wait)


def _take_evaluation(run: Run, version: int, wait: ControlWait) -> None:
    """Report the evaluation that has ended."""
    metrics = wait(run.components.rollouts.controller.take_evaluation.remote(), what="the evaluation's metrics")
    if not {ACCURACY_KEY, EVAL_REWARD_KEY} & metrics.keys():
        logger.error("the evaluation of version %d measured nothing: no verifier scored a prompt", version)
        run.evaluation_of = None
        return
    accuracy, reward = metrics.get(ACCURACY_KEY), metrics.get(EVAL_REWARD_KEY)
    if version == 0:
        run.progress.eval_accuracy_before, run.progress.eval_reward_before = accuracy, reward
    run.progress.eval_accuracy_after, run.progress.eval_reward_after = accuracy, reward
    run.log.evaluation(version, metrics)
    run.evaluation_of = None


class NoEngineHasTheWeights(Exception):
    """An evaluation cannot end, because no engine with its prompts has the evaluated weights any more."""


def require_an_engine_with_these_weights(run: Run) -> None:
    """If the learners still have the evaluated weights, as after the last step, give them to replacements of engines.

    Otherwise raises `NoEngineHasTheWeights` once no engine has these weights any more, or an engine that has prompts of the
    evaluation has discarded its weights in its sleep.
    """
    supervisor = run.components.supervisor
    if run.progress.training_step == run.evaluation_of:
        give_weights_to_replacements(run)
    elif not supervisor.serving or supervisor.needs_weights_to_evaluate:
        raise NoEngineHasTheWeights
