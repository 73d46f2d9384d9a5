"""Which key is sent to which OpenAI-compatible server."""

import os
from collections.abc import Collection

KEY_VARIABLE = "OPENAI_API_KEY"
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own servers read their key from this variable too."""


def key_headers(url: str, api_key_urls: Collection[str]) -> dict[str, str]:
    """The headers of a request to the server at `url`.

    Only the servers in `api_key_urls` get the key of `OPENAI_API_KEY`. Other servers get the key of `VLLM_API_KEY`, if set.
    """
    key = os.environ.get(KEY_VARIABLE if url in api_key_urls else VLLM_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
