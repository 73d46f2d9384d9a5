"""What a run leaves and says at its very start, before any actor exists."""

import logging

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.run_inputs import RunInputs, names_of_data
from open_instruct.report.run_log import RunLog
from open_instruct.report.slack import ADDRESSES, slack_address
from open_instruct.run.dry_run import workflow_and_cause
from open_instruct.run.earlier_run import set_aside
from open_instruct.run.options_file import command_of, write_options
from open_instruct.run.run_saving import checkpoint_store
from open_instruct.run.wiring import Roles
from open_instruct.storage.output_directory import UnusableDirectory, describe

logger = logging.getLogger(__name__)


def open_log(args: GRPOConfig, inputs: RunInputs, roles: Roles) -> RunLog:
    """Clear away what an interrupted run has left, write the file of options, open the log, and tell what the run reads.

    Raises `UnusableDirectory` if the output directory cannot be written to.
    """
    checkpoint_store(args).remove_partial()
    try:
        note = set_aside(args)
        write_options(args)
        log = RunLog(args, monitor=roles.monitor, component_log_file=roles.component_log_file)
    except OSError as error:
        raise UnusableDirectory(
            f"--output_dir {args.output_dir}: {describe(error)}. Remove it, or give another one."
        ) from error
    logger.info("command: %s", command_of(args) or "none: the options come from another program")
    logger.info("workflow: %s", workflow_and_cause(args))
    if note:
        logger.warning("%s", note)
    if args.send_slack_alerts and not slack_address():
        logger.warning(
            "--send_slack_alerts: nobody will be told, because the environment has no %s", " or ".join(ADDRESSES)
        )
    _tell_data(args, inputs, log)
    return log


def _tell_data(args: GRPOConfig, inputs: RunInputs, log: RunLog) -> None:
    """What the chat template adds, and the rows that were read and left out."""
    logger.info("%s", inputs.template.text)
    for warning in inputs.warnings:
        logger.warning("%s", warning)
    for number, report in enumerate(inputs.reports):  # that of the training data is the first
        name = "evaluation" if number else "training"
        log.data(name, report.num_rows, num_overlong=report.num_overlong, num_excluded=report.num_excluded)
        for warning in report.warnings():
            logger.warning("%s", warning)
    for line in names_of_data(args, inputs):
        logger.info("%s", line)
