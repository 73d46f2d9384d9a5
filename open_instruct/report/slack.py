"""Tells a Slack channel that a run has failed (`--send_slack_alerts`)."""

import json
import logging
import os
import urllib.request

from open_instruct.system.masking import without_secrets

logger = logging.getLogger(__name__)

ADDRESS = "SLACK_WEBHOOK"
"""Variable of the environment that holds the address of the channel's webhook."""
PATIENCE_S = 10.0
MOST_CHARACTERS = 3000
"""Slack shows no more."""


def tell_slack(text: str) -> None:
    """Send a message. Whatever goes wrong is logged and nothing else: a failed run must still end in order."""
    address = os.environ.get(ADDRESS)
    if not address:
        logger.warning("nobody is told over Slack: the environment has no %s", ADDRESS)
        return
    body = json.dumps({"text": without_secrets(text)[:MOST_CHARACTERS]}).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
    except (OSError, ValueError) as error:
        logger.warning("Slack could not be told: %s", type(error).__name__)  # the address is a secret
