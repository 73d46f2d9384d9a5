"""Evaluations within a run: decides when they are due, and collects their results before the engines get new weights. Also gives
weights to replaced engines while a run waits."""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from open_instruct.report.accuracies import Accuracies
from open_instruct.run.wiring import Run

logger = logging.getLogger(__name__)

CONTROL_S = 60.0
"""Deadline of a call that only asks for or sets a value."""
ControlWait = Callable[..., Any]
"""`Components.wait` with a deadline: `(ref, subject=…)`."""


def control_wait(run: Run) -> ControlWait:
    """Waits at most `CONTROL_S` for each call."""
    return functools.partial(run.components.wait, timeout_s=CONTROL_S)


def due_sets(run: Run) -> tuple[str, ...]:
    """The names of the evaluation sets on which the weights of the last training step are evaluated."""
    step, last_step = run.progress.training_step, run.args.num_training_steps
    return tuple(
        evaluation_set.name
        for evaluation_set in run.evaluation_sets
        if evaluation_set.is_due(step, last_step=last_step)
    )


def missing_sets(run: Run, under_way: Collection[str] | None) -> tuple[str, ...]:
    """The sets on which the version that a resumed run starts from must still be evaluated, because their evaluation was cut off
    or has not begun.

    The run takes the accuracies that `metrics.jsonl` already has from that file.

    Args:
        under_way: the sets whose evaluation was under way when the checkpoint was written; None: all.
    """
    names = [evaluation_set.name for evaluation_set in run.evaluation_sets]
    if under_way is not None:
        names = [name for name in names if name in {*due_sets(run), *under_way}]
    if not names:
        return ()
    accuracies = run.log.accuracies_at(run.progress.training_step)
    if accuracies is not None:
        run.progress.take(accuracies)
    if accuracies is not None and accuracies.whole is not None:
        return ()
    return tuple(name for name in names if accuracies is None or name not in accuracies.of_sets)


def evaluate_before_training(run: Run) -> None:
    """With `--eval_on_step_0`: start the evaluation of the initial model."""
    if run.evaluation_sets and run.args.eval_on_step_0 and run.progress.training_step == 0:
        start_evaluation(run, [evaluation_set.name for evaluation_set in run.evaluation_sets])


def start_evaluation(run: Run, sets: Sequence[str]) -> None:
    """Issue the prompts of these evaluation sets. The engines keep their weights until `maybe_evaluate` has the results."""
    version = run.progress.training_step
    run.components.wait(
        run.components.rollouts.controller.start_evaluation.remote(version, sets),
        subject="the start of an evaluation",
        timeout_s=CONTROL_S,
    )
    run.log.journal.event("evaluation_started", version=version, sets=list(sets))
    run.evaluation_of = version
    run.sets_under_way = tuple(sets)


def give_weights_to_replacements(run: Run) -> None:
    """Let replacements begin to serve. If all engines have a newer version after that, pass it to the controller."""
    version = run.synchronizer.give_weights_to_replacements()
    if version is not None:
        ref = run.components.rollouts.controller.set_version.remote(version)
        run.components.wait(ref, subject="the controller", timeout_s=CONTROL_S)


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
                subject=f"the evaluation of version {run.evaluation_of}",
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
                subject="giving up the evaluation",
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
    wait(run.components.rollouts.async_eval(version), subject=f"the evaluation of version {version}, which is complete")
    _take_evaluation(run, version, wait)


def _take_evaluation(run: Run, version: int, wait: ControlWait) -> None:
    """Report the evaluation that has ended."""
    metrics = wait(run.components.rollouts.controller.take_evaluation.remote(), subject="the evaluation's metrics")
    run.evaluation_of = None
    accuracies = Accuracies.of(metrics)
    if accuracies is None:
        logger.error("the evaluation of version %d measured nothing: no verifier scored a prompt", version)
        return
    run.progress.take(accuracies, is_before=version == 0)
    run.log.evaluation(version, metrics)


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
