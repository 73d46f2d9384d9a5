"""Search: over a local index, and over the services that open-instruct's scripts use."""

import asyncio
import json
import math
import os
import re
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from open_instruct.environments.base import ENVIRONMENTS, Schema, ToolEnvironment, ToolError, schema

K1, B = 1.5, 0.75
"""Parameters of BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, section 3.5)."""
PAUSES_S = (1.0, 4.0)
"""Before a service that is busy or cannot be reached is asked again."""
NOT_FOR_THIS = (400, 404, 410, 415, 422, 451)
"""Statuses that speak of what was asked for: a page that is not there, or that the service does not give (451, as Jina says it).
Other errors, such as a wrong key, are not the model's fault."""
_WORD = re.compile(r"\w+", re.UNICODE)


class Index:
    """BM25 over a list of texts, in memory."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        words = [Counter(_words(text)) for text in texts]
        self._lengths = [sum(counts.values()) for counts in words]
        self._mean_length = sum(self._lengths) / max(1, len(texts)) or 1.0
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, counts in enumerate(words):
            for word, count in counts.items():
                self._postings[word].append((number, count))

    def search(self, query: str, num_results: int) -> list[str]:
        """The best texts for a query, best first; of equal ones the first in the index. None without a common word."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            postings = self._postings.get(word, [])
            rarity = math.log(1.0 + (len(self._texts) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1.0 - B + B * self._lengths[number] / self._mean_length
                scores[number] += rarity * count * (K1 + 1.0) / (count + K1 * length)
        numbers = sorted(scores, key=lambda number: (-scores[number], number))[:num_results]
        return [self._texts[number] for number in numbers]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def read_texts(path: str) -> list[str]:
    """The texts of a file: `.jsonl` with `text` or `contents` (and perhaps `title`) in each line, else one text in a line.

    Raises:
        OSError, ValueError: the file cannot be read, or a line has no text.
    """
    with open(path, "rb") as file:  # `str.splitlines` also splits at U+2028 and others, which JSON allows
        lines = [line.decode("utf-8").removesuffix("\n").removesuffix("\r") for line in file]
    if not path.endswith(".jsonl"):
        return [line for line in lines if line.strip()]
    return [_text_of_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def _text_of_line(line: str, number: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from error
    keys = list(row) if isinstance(row, dict) else []
    if not {"text", "contents"} & set(keys):
        content = f"its keys are {', '.join(map(str, keys))}" if keys else f"it is {line:.80}"
        raise ValueError(f"line {number} has neither 'text' nor 'contents'; {content}")
    return "\n".join(str(row[key]) for key in ("title", "text", "contents") if row.get(key))


def _search_schema(name: str, description: str) -> list[Schema]:
    return [schema(name, description, {"query": {"type": "string", "description": "The search query"}})]


@ENVIRONMENTS.register("search")
class Search(ToolEnvironment):
    """Search over a file of texts.

    Args:
        index: path of the file (`read_texts`).
        num_results: texts in an answer.
    """

    is_stateless = True
    _indexes: dict[str, Index] = {}  # noqa: RUF012 - shared by the processes that are forked after `prepare_for`

    @classmethod
    def prepare_for(cls, config: Mapping[str, Any]) -> None:
        cls(**config)

    def __init__(self, index: str, num_results: int = 3) -> None:
        if index not in self._indexes:
            self._indexes[index] = Index(read_texts(index))
        self._index, self._num_results = self._indexes[index], num_results

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str:
        try:
            return "" if read_texts(config["index"]) else f"the index {config['index']} has no texts"
        except (OSError, ValueError) as error:
            return f"the index {config['index']} cannot be read: {error}"

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return _search_schema("search", "Searches a collection of texts.")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = self._index.search(_query(arguments), self._num_results)
        if not texts:
            raise ToolError("Query returned no results.")
        return "\n\n".join(texts)


def _query(arguments: Mapping[str, Any]) -> str:
    query = arguments.get("query")
    if not isinstance(query, str) or not query.strip():
        raise ToolError("Empty query. Please provide a search query.")
    return query


class _Service(ToolEnvironment):
    """A service on the network with a key. What the service itself gets wrong is not the model's fault."""

    is_stateless = True
    key_name = ""
    address = ""

    def __init__(self, num_results: int = 5, timeout: float = 30.0, base_url: str | None = None) -> None:
        self._key = os.environ.get(self.key_name, "")
        self._num_results, self._timeout_s = num_results, timeout
        self._url = base_url or self.address

    @classmethod
    def problem(cls, config: Mapping[str, Any]) -> str:
        return "" if os.environ.get(cls.key_name) else f"set {cls.key_name} in the environment"

    async def _ask(self, method: str, url: str, **request: Any) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        for pause_s in (*PAUSES_S, None):
            try:
                async with (
                    aiohttp.ClientSession(timeout=limit) as session,
                    session.request(method, url, **request) as reply,
                ):
                    if pause_s is None or not (reply.status == 429 or reply.status >= 500):
                        return await _content(reply)
            except aiohttp.ClientConnectionError:
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s or 0.0)
        raise AssertionError("the last attempt returns or raises")


async def _content(reply: Any) -> Any:
    if reply.status in NOT_FOR_THIS:
        raise ToolError(f"HTTP error: {reply.status} {reply.reason}")
    reply.raise_for_status()
    return await reply.json()


@ENVIRONMENTS.register("serper_search")
class SerperSearch(_Service):
    """Google's results through Serper (SERPER_API_KEY)."""

    key_name, address = "SERPER_API_KEY", "https://google.serper.dev/search"

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return _search_schema("serper_search", "Google search via the Serper API")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        headers = {"X-API-KEY": self._key}
        params = {"q": _query(arguments), "num": self._num_results}
        answer = await self._ask("POST", self._url, json=params, headers=headers)
        box = answer.get("answerBox") or {}
        direct = box.get("answer") or box.get("snippet")
        texts = [f"**Direct Answer:** {direct}"] if direct else []
        for result in (answer.get("organic") or [])[: self._num_results]:
            if result.get("snippet"):
                texts.append(f"**{result.get('title', '')}**\n{result['snippet']}\nSource: {result.get('link', '')}")
        if not texts:
            raise ToolError("Query returned no results.")
        return "\n\n".join(texts)


@ENVIRONMENTS.register("s2_search")
class SemanticScholarSearch(_Service):
    """Snippets of papers from Semantic Scholar (S2_API_KEY)."""

    key_name, address = "S2_API_KEY", "https://api.semanticscholar.org/graph/v1/snippet/search"

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return _search_schema("s2_search", "Searches Semantic Scholar for academic papers and citations")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        params = {"query": _query(arguments), "limit": self._num_results}
        answer = await self._ask("GET", self._url, params=params, headers={"x-api-key": self._key})
        texts = [
            paper["snippet"]["text"] for paper in answer.get("data") or [] if (paper.get("snippet") or {}).get("text")
        ]
        if not texts:
            raise ToolError("Query returned no results.")
        return "\n".join(texts)


@ENVIRONMENTS.register("jina_browse")
class JinaBrowse(_Service):
    """Pages of the web as Markdown through Jina's reader (JINA_API_KEY)."""

    key_name, address = "JINA_API_KEY", "https://r.jina.ai"

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        parameters = {"url": {"type": "string", "description": "The URL of the webpage to fetch"}}
        return [
            schema(
                "jina_browse",
                "Fetches and converts webpage content to clean markdown using Jina Reader API",
                parameters,
            )
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        url = arguments.get("url")
        if not isinstance(url, str) or not url.strip():
            raise ToolError("Empty URL. Please provide a URL to fetch.")
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json", "X-Return-Format": "markdown"}
        answer = await self._ask("GET", f"{self._url}/{urllib.parse.quote(url.strip(), safe=':/')}", headers=headers)
        if answer.get("code") != 200:
            raise ToolError(f"Jina API error: {answer.get('message', 'Unknown error')}")
        page = answer.get("data") or {}
        content = str(page.get("content") or "")
        return f"# {page['title']}\n\n{content}" if page.get("title") and content else content
