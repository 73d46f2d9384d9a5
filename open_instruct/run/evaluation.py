"""Evaluations within a run: when they are due, and how their results are collected before the engines get new weights. Beside
them what a run does while it waits: engines that were replaced get weights."""

import logging

from open_instruct.run.wiring import Run

logger = logging.getLogger(__name__)

CONTROL_S = 60.0
"""Deadline of a call that only asks or tells something."""


def evaluation_is_due(run: Run) -> bool:
    every, step = run.args.local_eval_every, run.progress.training_step
    return run.evaluates and every > 0 and (step % every == 0 or step == run.args.num_training_steps)


def evaluation_is_missing(run: Run, *, was_under_way: bool) -> bool:
    """Whether the version that the run goes on from is still to be evaluated, because its evaluation was cut off or has not
    begun.

    If `metrics.jsonl` has the evaluation already, the run takes the accuracy from that file.
    """
    if not run.evaluates or not (was_under_way or evaluation_is_due(run)):
        return False
    accuracy = run.log.accuracy_at(run.progress.training_step)
    if accuracy is not None:
        run.progress.eval_accuracy_after = accuracy
    return accuracy is None


def start_evaluation(run: Run) -> None:
    """Issue the evaluation prompts. The engines keep their weights until `maybe_evaluate` has the results."""
    version = run.progress.training_step
    run.components.wait(
        run.components.manager.controller.start_evaluation.remote(version),
        what="the start of an evaluation",
        timeout_s=CONTROL_S,
    )
    run.evaluation_of = version


def give_weights_to_newcomers(run: Run) -> None:
    """Let replacements begin to serve. If all engines have a newer version after that, the controller is told."""
    version = run.synchronizer.give_weights_to_newcomers()
    if version is not None:
        told = run.components.manager.controller.set_version.remote(version)
        run.components.wait(told, what="the controller", timeout_s=CONTROL_S)


def maybe_evaluate(run: Run) -> bool:
    """Collect the evaluation in flight, if any. Called before the engines get new weights, so that it measures one version.

    A signal ends the wait, because an evaluation may take longer (30 minutes) than the time that a scheduler gives. The resumed
    run begins with an evaluation of the weights of its checkpoint.
    """
    if run.evaluation_of is None:
        return False
    with run.timer("waiting_for_evaluation"):
        try:
            run.components.wait(
                run.components.manager.async_eval(run.evaluation_of),
                what=f"the evaluation of version {run.evaluation_of}",
                timeout_s=run.args.eval_timeout_s + 10,
                limit="eval_timeout_s",
                interruptible=True,
                on_poll=lambda: keep_it_going(run),
            )
        except NobodyServes:
            logger.error(
                "the evaluation of version %d is lost: its prompts are left without an engine that has those weights",
                run.evaluation_of,
            )
            given_up = run.components.manager.controller.give_up_evaluation.remote()
            run.components.wait(
                given_up, what="the end of the evaluation", timeout_s=CONTROL_S
            )  # before the next begins
            run.evaluation_of = None
            return False
    metrics = run.components.wait(
        run.components.manager.controller.take_evaluation.remote(), what="the evaluation's metrics", timeout_s=CONTROL_S
    )
    if "eval/pass_at_1" not in metrics:
        logger.error("the evaluation of version %d measured nothing: no verifier scored a prompt", run.evaluation_of)
        run.evaluation_of = None
        return True
    accuracy = metrics["eval/pass_at_1"]
    if run.evaluation_of == 0:
        run.progress.eval_accuracy_before = accuracy
    run.progress.eval_accuracy_after = accuracy
    run.log.evaluation(run.evaluation_of, metrics)
    run.evaluation_of = None
    return True


class NobodyServes(Exception):
    """An evaluation cannot end: those that have its prompts will have other weights than those that are evaluated."""


def keep_it_going(run: Run) -> None:
    """While the learners have the weights that are evaluated, as after the last step, replacements of engines get them too.
    Otherwise raises `NobodyServes` once no engine is left with these weights, or one has prompts of the evaluation and has
    discarded the weights in its sleep."""
    supervisor = run.components.supervisor
    if run.progress.training_step == run.evaluation_of:
        give_weights_to_newcomers(run)
    elif not supervisor.serving or supervisor.needs_weights_to_evaluate:
        raise NobodyServes
