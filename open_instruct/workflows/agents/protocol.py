"""The endpoint's requests and replies: what a program may ask, and how replies are written. Pure.

    POST /inference/v1/generate     token ids in, token ids and log-probs out, in vLLM's format
    POST /v1/chat/completions       messages in, a message out, in OpenAI's format
    GET  /v1/models

Every sampled token may be trained on, so it must be sampled with the run's own settings. A field that would change the sampling
is refused with a message and never ignored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from open_instruct.data_types import Completion, SamplingConfig

LIMIT_REACHED = "limit_reached"
"""Error code for a rollout that has used up its tokens or samples."""
DEEPEST = 64
"""Most nested levels of lists and objects, because templates and parsers walk through them and Python's stack is limited."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "top_logprobs": (0,),
    "stream": (False,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "output_mode": ("tokens",),
    "features": ({},),
    "content_parts": ([],),
}
"""Fields that are accepted only with these values, or as null."""
_NO_EFFECT = {
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    *("routed_experts_prompt_start", "output_kind", "flat_logprobs"),
    *("cache_salt", "priority", "request_id", "user", "metadata", "store", "safety_identifier", "prompt_cache_key"),
    *("stream_options", "service_tier", "session_id"),
}
"""Fields that change neither the tokens nor the form of the reply, so any value is accepted."""


class Refused(Exception):
    """A request that is answered with an error. `str` gives the message."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class OutOfRoom(Refused):
    """The rollout has reached a limit. This is not the program's fault: the rollout ends with the samples that it has."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code=LIMIT_REACHED)


@dataclass(frozen=True)
class Wishes:
    """The sampling fields of a request."""

    max_tokens: int | None = None
    """None: as many as the limits allow."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    keeps_stop: bool = False
    """Whether the reply includes the stop string that ended it (`include_stop_str_in_output`)."""


@dataclass(frozen=True)
class GenerateRequest:
    token_ids: list[int]
    wishes: Wishes
    returns_token_ids: bool = False


@dataclass(frozen=True)
class ChatRequest:
    messages: list[dict[str, Any]]
    wishes: Wishes
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call: bool = True
    returns_token_ids: bool = False
    returns_logprobs: bool = False


# --- requests ---------------------------------------------------------------------------------------------------------


def generate_request(body: Any, sampling: SamplingConfig, *, model: str, vocab_size: int) -> GenerateRequest:
    """Read a request for token ids.

    Raises:
        Refused: the request asks for something that is not possible here; the message says what.
    """
    values = _object(cleaned(body), "the body")
    _check_model(values, model)
    token_ids = values.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or not all(type(token_id) is int for token_id in token_ids):
        raise Refused("token_ids must be a list of whole numbers that is not empty")
    if outliers := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise Refused(f"token_ids holds {outliers[0]}, and the model's tokens are numbered from 0 to {vocab_size - 1}")
    params = _object(values.get("sampling_params") or {}, "sampling_params")
    _refuse_unknown(values, {"model", "token_ids", "sampling_params", "return_token_ids"})
    _refuse_unknown(params, {*_WISHES, "logprobs", "prompt_logprobs"}, "sampling_params.")
    if params.get("logprobs") not in (None, 0, 1, True):
        raise Refused(
            f"logprobs {params['logprobs']!r:.40}: only the log-prob of the sampled token is given. Ask for 1."
        )
    if params.get("prompt_logprobs") is not None:
        raise Refused("prompt_logprobs: log-probs of prompts are not computed. Leave it out.")
    return GenerateRequest(token_ids, _wishes(params, sampling), bool(values.get("return_token_ids")))


def chat_request(body: Any, sampling: SamplingConfig, *, model: str) -> ChatRequest:
    """Read a request for a message. Empty fields of messages are removed.

    Raises:
        Refused: as for `generate_request`.
    """
    values = _object(cleaned(body), "the body")
    _check_model(values, model)
    names = {"model", "messages", "tools", "max_completion_tokens", "logprobs", "return_token_ids"}
    _refuse_unknown(values, {*names, *_WISHES})
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list that is not empty")
    tools = values.get("tools") or []
    if not isinstance(tools, list):
        raise Refused(_WRONG_TOOLS)
    if values.get("max_completion_tokens") is not None:
        values = {**values, "max_tokens": values["max_completion_tokens"]}
    return ChatRequest(
        [_message(message) for message in messages],
        _wishes(values, sampling),
        [_tool(tool) for tool in tools],
        values.get("tool_choice") != "none",
        bool(values.get("return_token_ids")),
        bool(values.get("logprobs")),
    )


_WISHES = {"max_tokens", "stop", "stop_token_ids", "seed", "temperature", "top_p", "include_stop_str_in_output"}
_WRONG_TOOLS = 'tools must be a list of {"type": "function", "function": {"name": …}}'


def _wishes(values: Mapping[str, Any], sampling: SamplingConfig) -> Wishes:
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        value = values.get(name)
        if value is not None and ((number := finite(value)) is None or not math.isclose(number, ours)):
            raise Refused(
                f"{name} {value!r:.40}: what is sampled is trained on, and this run samples with {name} {ours:g}. Leave it out."
            )
    max_tokens, seed, stop = values.get("max_tokens"), values.get("seed"), values.get("stop") or []
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise Refused(f"max_tokens {max_tokens!r:.40}: it must be a whole number from 1")
    if seed is not None and type(seed) is not int:
        raise Refused(f"seed {seed!r:.40}: it must be a whole number")
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(string, str) and string for string in stop):
        raise Refused("stop must be a text, or a list of texts, none of them empty")
    ids = values.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        raise Refused("stop_token_ids must be a list of token ids")
    keeps_stop = values.get("include_stop_str_in_output")
    if keeps_stop is not None and not isinstance(keeps_stop, bool):
        raise Refused(f"include_stop_str_in_output {keeps_stop!r:.40}: it must be true or false")
    return Wishes(max_tokens, tuple(stop), frozenset(ids), seed, bool(keeps_stop))


def _refuse_unknown(values: Mapping[str, Any], names: set[str], where: str = "") -> None:
    for name, value in values.items():
        if name in names or name in _NO_EFFECT or value is None:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise Refused(f"{where}{name}: this endpoint has no such field. Leave it out.")
        if value not in neutral:
            choices = " or ".join(repr(choice) for choice in neutral)
            raise Refused(f"{where}{name} {value!r:.80}: this endpoint can do only {choices}. Leave it out.")


def _message(message: Any) -> dict[str, Any]:
    """A message without its empty fields; several text parts become one text."""
    values = _object(message, "a message")
    if not isinstance(values.get("role"), str) or not values["role"]:
        raise Refused("a message needs a role")
    names = {"role", "content", "name", "tool_calls", "tool_call_id"}
    if unknown := [name for name, value in values.items() if value and name not in names]:
        raise Refused(f"messages: a message with {unknown[0]!r:.40}, which this endpoint does not read. Leave it out.")
    result = {name: values[name] for name in names if values.get(name)}
    for name in ("name", "tool_call_id"):
        if not isinstance(result.get(name, ""), str):
            raise Refused(f"messages: {name} must be a text, got {result[name]!r:.40}")
    result["content"] = _text(values.get("content"))
    if "tool_calls" in result:
        if not isinstance(result["tool_calls"], list):
            raise Refused(f"messages: tool_calls must be a list, got {result['tool_calls']!r:.40}")
        result["tool_calls"] = [_call(call) for call in result["tool_calls"]]
    return result


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    is_text = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
    if not is_text:
        raise Refused("messages: a content that is neither a text nor a list of parts of text")
    return "".join(part["text"] for part in content)


def cleaned(value: Any, levels: int = DEEPEST) -> Any:
    """The JSON value, with every text made valid Unicode.

    Raises:
        Refused: lists and objects are nested more than `levels` deep.
    """
    if isinstance(value, str):
        return _valid(value)
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise Refused(f"lists and objects are nested on more than {DEEPEST} levels")
    if isinstance(value, dict):
        return {_valid(name): cleaned(inner, levels - 1) for name, inner in value.items()}
    if set(map(type, value)) == {int}:  # a long list of token ids
        return value
    return [cleaned(inner, levels - 1) for inner in value]


def _valid(text: str) -> str:
    """The text with halves of surrogate pairs replaced, because JSON can contain them and no tokenizer accepts them."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(call.get("id") or "", str):
        raise Refused("messages: tool_calls must be a list of calls of functions")
    if not isinstance(arguments or "", str | dict):
        raise Refused(f"messages: the arguments of a call must be a text, got {arguments!r:.40}")
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments or "{}"},
    }


def _tool(tool: Any) -> dict[str, Any]:
    """A tool without its null fields."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refused(_WRONG_TOOLS)
    described = _without_null(function)
    if not isinstance(described.get("description", ""), str):
        raise Refused(f"tools: the description of {function['name']:.40} must be a text")
    if "parameters" in described:
        described["parameters"] = _parameters(described["parameters"], function["name"])
    return {**_without_null(tool), "function": described}


def _parameters(parameters: Any, tool: str) -> dict[str, Any]:
    """The parameters of a tool, a JSON schema of an object. Only the parts that parsers of calls read are checked."""
    where = f"tools: the parameters of {tool:.40}"
    if not isinstance(parameters, dict):
        raise Refused(f"{where} must be a JSON schema, got {parameters!r:.40}")
    absent = {name for name in ("properties", "required") if parameters.get(name, ()) is None}
    result = {name: value for name, value in parameters.items() if name not in absent}
    properties, required = result.get("properties", {}), result.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(value, dict) for value in properties.values()):
        raise Refused(f"{where}: properties must be an object of JSON schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise Refused(f"{where}: required must be a list of names")
    return result


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_model(values: Mapping[str, Any], model: str) -> None:
    if values.get("model") not in (None, model):
        message = f"there is no model {values['model']!r:.80}; the model is {model} ($OPEN_INSTRUCT_MODEL)"
        raise Refused(message, status=404, code="model_not_found")


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{name} must be a JSON object, got {value!r:.40}")
    return value


def finite(value: Any) -> float | None:
    """The value as a finite float; None if it is not a number or does not fit."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


# --- replies ----------------------------------------------------------------------------------------------------------


def error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def models_body(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    card = {"id": model, "object": "model", "created": created, "owned_by": "open_instruct"}
    return {"object": "list", "data": [{**card, "root": model, "parent": None, "max_model_len": max_model_len}]}


def generate_body(
    completion: Completion, request: GenerateRequest, *, request_id: str, model: str, created: int
) -> dict[str, Any]:
    """A reply in vLLM's format. Each log-prob names its token as `token_id:N` and, as newer versions of vLLM do, as a number."""
    pairs = zip(completion.token_ids.tolist(), _logprobs(completion), strict=True)
    content = [
        {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in pairs
    ]
    choice = {
        "index": 0,
        "token_ids": completion.token_ids.tolist(),
        "finish_reason": completion.finish_reason,
        "stop_reason": None,
        "logprobs": {"content": content},
        "version_spans": [list(span) for span in completion.version_spans],
    }
    return {
        "request_id": request_id,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": _usage(len(request.token_ids), completion),
        "prompt_logprobs": None,
        "prompt_token_ids": request.token_ids if request.returns_token_ids else None,
        "kv_transfer_params": None,
    }


def chat_body(
    completion: Completion,
    request: ChatRequest,
    message: Mapping[str, Any],
    prompt_ids: Sequence[int],
    spellings: Sequence[str],
    *,
    request_id: str,
    model: str,
    created: int,
) -> dict[str, Any]:
    """A reply in OpenAI's format, with vLLM's `token_ids` and `prompt_token_ids` if the request asked for them.

    Args:
        spellings: the text of each token, for its log-prob.
    """
    reason = (
        "tool_calls" if message.get("tool_calls") and completion.finish_reason == "stop" else completion.finish_reason
    )
    choice: dict[str, Any] = {"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": None}
    if request.returns_logprobs:
        pairs = zip(spellings, _logprobs(completion), strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in pairs
            ]
        }
    choice["version_spans"] = [list(span) for span in completion.version_spans]
    body: dict[str, Any] = {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": _usage(len(prompt_ids), completion),
    }
    if request.returns_token_ids:
        choice["token_ids"] = completion.token_ids.tolist()
        body["prompt_token_ids"] = list(prompt_ids)
    return body


def _logprobs(completion: Completion) -> list[float]:
    return [float(logprob) for logprob in completion.logprobs]


def _usage(num_prompt_tokens: int, completion: Completion) -> dict[str, int]:
    number = len(completion.token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": number,
        "total_tokens": num_prompt_tokens + number,
    }
