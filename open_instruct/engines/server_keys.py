"""Which key goes to which OpenAI-compatible server."""

import os
from collections.abc import Collection

KEY_VARIABLE = "OPENAI_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""By which vLLM's own servers are told their key, too."""


def key_headers(url: str, api_key_urls: Collection[str]) -> dict[str, str]:
    """What a request to this server carries: the key of `OPENAI_API_KEY` goes to `api_key_urls` alone.

    Others get `VLLM_API_KEY` where it is set.
    """
    key = os.environ.get(KEY_VARIABLE if url in api_key_urls else VLLM_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
