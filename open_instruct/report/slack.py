"""Sends a message to a Slack channel when a run has failed (`--send_slack_alerts`)."""

import json
import logging
import os
import urllib.request
from http.client import HTTPException

from open_instruct.system.secret_masking import without_secrets

logger = logging.getLogger(__name__)

ADDRESSES = ("SLACK_WEBHOOK", "SLACK_WEBHOOK_URL")
"""Environment variables that may hold the address of the channel's webhook; open-instruct reads the second variable."""
PATIENCE_S = 10.0
MOST_CHARACTERS = 3000
"""Slack shows no more characters."""


def slack_address() -> str:
    """The address of the webhook; "" if the environment has none."""
    return next(filter(None, map(os.environ.get, ADDRESSES)), "")


def tell_slack(text: str) -> None:
    """Send a message. Errors are only logged, because a failed run must still end in order."""
    address = slack_address()
    if not address:
        return
    body = json.dumps({"text": without_secrets(text)[:MOST_CHARACTERS]}).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
    except (OSError, ValueError, HTTPException) as error:
        logger.warning("Slack could not be told: %s", type(error).__name__)  # the address is a secret
