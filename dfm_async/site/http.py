"""An adapter that calls an HTTP service. Federations name it by its path, or get it from an OpenAPI document."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import email.utils
import functools
import importlib.util
import ssl
import time
import zlib
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from dfm_async.base.redaction import note_secret
from dfm_async.base.text import install_hint
from dfm_async.errors import DfmError, HttpCallFailed
from dfm_async.model.http import HttpOptions, RequestPlan
from dfm_async.site.http_request import HttpRequest, RequestSecrets, make_request, query_text, sign

if TYPE_CHECKING:
    import httpx2
else:
    # Classes of adapters are loaded in threads. So what takes a while is loaded here, and not on the loop at a call.
    with contextlib.suppress(ImportError):
        import httpx2

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})
"""Statuses of failures that may be transient."""
_SIGNATURE: Final = "dfm_async.signature"
_WINDOWS: Final = {"": 0, "identity": 0, "gzip": 16 + zlib.MAX_WBITS}
"""The supported content encodings, and the argument of zlib for each; 0 for data that is not compressed."""
_QUOTED: Final = 200


class _HttpResponse(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class HttpCall:
    """Call an HTTP service: one request for each call, retried if the failure may be transient.

    Built once per job; all its calls share connections, which are closed with it. The plan of the request places the
    arguments. JSON in a response becomes Python values, text a string, anything else bytes; no content is None.

    Secrets are added to requests where these leave the process, and nowhere else: what is logged, raised or traced has
    none.

    Args:
        operation: the name of the operation, for errors.
        request: how requests are made, as ``RequestPlan`` of :mod:`dfm_async.model.http` has it.
        options: timeouts, retries and limits, as :class:`~dfm_async.federation.HttpOptions` has them.

    Raises:
        ValueError: the plan or the options are not what they should be.
        DfmError: httpx2 is not installed.
    """

    def __init__(self, *, operation: str, request: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> None:
        try:
            self._plan = msgspec.convert(request, RequestPlan)
            self._options = msgspec.convert(options or {}, HttpOptions)
        except msgspec.ValidationError as error:
            raise ValueError(f"the configuration of {operation!r} is wrong: {error}") from None
        if importlib.util.find_spec("httpx2") is None:
            raise DfmError(f"operations of HTTP services need httpx2: {install_hint('http')}")
        self._operation = operation
        self._client: httpx2.AsyncClient | None = None
        self._turns = asyncio.Semaphore(self._options.connections)

    async def body(self, **arguments: Any) -> Any:
        """Call the service.

        Raises:
            HttpCallFailed: it cannot be reached, or has not returned a valid response.
        """
        try:
            request, signature = make_request(self._plan, arguments), sign(self._plan, arguments)
        except ValueError as error:
            raise self._failed(str(error)) from error
        for text in signature.written:
            note_secret(text)
        attempt, retry = 1, self._options.retry
        while True:
            try:
                async with self._turns:  # waiting for a connection does not count as the service's time
                    answer = await self._try(request, signature)
                return self._value(answer)
            except _Transient as transient:
                asked = transient.error.retry_after
                if not retry.allows(transient.error, attempt) or asked > retry.max_backoff:
                    raise transient.error from transient.__cause__
                pause = retry.pause(attempt, asked)
            await asyncio.sleep(pause)
            attempt += 1

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _try(self, request: HttpRequest, signature: RequestSecrets) -> _HttpResponse:
        again = self._plan.method in _IDEMPOTENT or self._options.retry_unsafe
        client = await self._connected()
        scope = asyncio.timeout(self._options.timeout)
        try:
            async with scope:
                answer = await self._send(client, request, signature)
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = self._failed(f"no answer within {self._options.timeout:g} s")
            raise (_Transient(late) if again else late) from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:  # nothing was sent
            raise _Transient(self._failed(f"cannot be reached: {_named(error)}")) from error
        except httpx2.TransportError as error:
            broken = self._failed(f"the connection broke: {_named(error)}")
            raise (_Transient(broken) if again else broken) from error
        except zlib.error as error:
            raise self._failed(f"the answer cannot be unpacked: {error}") from error
        if 200 <= answer.status < 300:
            return answer
        reason = answer.reason
        if 300 <= answer.status < 400:
            reason = f"{reason} (redirects are not followed; correct base_url or the path)"
        refused = self._failed(reason, answer)
        if again and answer.status in _TRANSIENT:
            raise _Transient(refused)
        raise refused

    async def _send(self, client: httpx2.AsyncClient, request: HttpRequest, signature: RequestSecrets) -> _HttpResponse:
        built = client.build_request(
            self._plan.method,
            client.base_url.copy_with(raw_path=_target(request.path, request.query)),
            headers=list(request.headers),
            content=request.content,
            extensions={_SIGNATURE: signature},
        )
        response = await client.send(built, stream=True)
        try:
            body = await self._read(response)
        finally:
            await response.aclose()
        return _HttpResponse(response.status_code, response.reason_phrase, response.headers, body)

    async def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Reads the certificates of authorities, if needed, which takes a while.
            secure = self._plan.base_url.startswith("https:")
            verify = await asyncio.to_thread(_authorities) if secure else None
            self._client = self._client or _client(self._plan.base_url, self._options, verify)
        return self._client

    async def _read(self, response: httpx2.Response) -> bytes:
        limit = self._options.max_bytes
        stated = response.headers.get("content-length", "")
        if stated.isdecimal() and (len(stated) > 18 or int(stated) > limit):
            raise self._failed(f"the answer has {stated[:40]} bytes, more than max_bytes={limit}")
        encoding = response.headers.get("content-encoding", "").strip().lower()
        # httpx2 itself would decompress a whole chunk, in all encodings that are named, before its size is known.
        if encoding not in _WINDOWS:
            raise self._failed(f"the answer has the encoding {encoding!r}, although only gzip was offered")
        window = _WINDOWS[encoding]
        unpacker = zlib.decompressobj(window) if window else None
        found = bytearray()
        async for chunk in response.aiter_raw():
            if unpacker is None:
                found += chunk
            while unpacker is not None and chunk and len(found) <= limit:
                if unpacker.eof:  # several compressed parts are one content
                    unpacker = zlib.decompressobj(window)
                found += unpacker.decompress(chunk, limit + 1 - len(found))
                chunk = unpacker.unused_data
            if len(found) > limit:
                raise self._failed(f"the answer has more than max_bytes={limit}")
        if unpacker is not None and found and not unpacker.eof:
            raise self._failed("the answer cannot be unpacked: it ends too early")
        return bytes(found)

    def _value(self, answer: _HttpResponse) -> Any:
        if not answer.body:
            return None
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json" or kind.endswith("+json"):
            try:
                return msgspec.json.decode(answer.body.removeprefix(codecs.BOM_UTF8))  # some services write one
            except (ValueError, RecursionError) as error:
                raise self._failed(f"the response declares JSON, but cannot be parsed: {error}", answer) from error
        if kind.startswith("text/"):
            return answer.body.decode(_charset(answer.headers.get("content-type", "")), "replace")
        return answer.body

    def _failed(self, reason: str, answer: _HttpResponse | None = None) -> HttpCallFailed:
        plan = self._plan
        status, content = (None, "") if answer is None else (answer.status, _quoted(answer.body))
        again = 0.0 if answer is None else _retry_after(answer.headers.get("retry-after", ""))
        return HttpCallFailed(self._operation, plan.method, plan.path, status, reason, content, again)


class _Transient(Exception):
    """A failure that may be transient."""

    def __init__(self, error: HttpCallFailed) -> None:
        super().__init__(error)
        self.error = error


@functools.cache
def _authorities() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # heeds SSL_CERT_FILE and SSL_CERT_DIR


def _client(base_url: str, options: HttpOptions, verify: ssl.SSLContext | None) -> httpx2.AsyncClient:
    class Signing(httpx2.AsyncBaseTransport):
        """Add secrets to requests behind all code that logs, raises or shows them."""

        def __init__(self) -> None:
            self._inner = httpx2.AsyncHTTPTransport(
                verify=verify or False, proxy=options.proxy, limits=httpx2.Limits(max_connections=options.connections)
            )

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            signature: RequestSecrets = request.extensions[_SIGNATURE]
            url, headers = request.url, request.headers.copy()
            if signature.query:
                added = query_text(signature.query).encode()
                url = url.copy_with(raw_path=url.raw_path + (b"&" if url.query else b"?") + added)
            for name, value in signature.headers:
                headers[name] = value
            if signature.cookies:
                before = [headers["cookie"]] if "cookie" in headers else []
                headers["cookie"] = "; ".join(before + [f"{name}={value}" for name, value in signature.cookies])
            signed = httpx2.Request(request.method, url, headers=headers, stream=request.stream)
            signed.extensions = {key: value for key, value in request.extensions.items() if key != _SIGNATURE}
            return await self._inner.handle_async_request(signed)

        async def aclose(self) -> None:
            await self._inner.aclose()

    return httpx2.AsyncClient(
        base_url=base_url,
        transport=Signing(),
        timeout=httpx2.Timeout(options.timeout, connect=min(options.timeout, options.connect_timeout)),
        headers={"accept-encoding": "gzip"},
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # no call gets the cookies of another
        trust_env=False,
    )


def _target(path: str, query: str) -> bytes:
    return f"{path}?{query}".encode() if query else path.encode()


def _quoted(body: bytes) -> str:
    """Return the beginning of a response, for errors."""
    text = " ".join(body[: 4 * _QUOTED].decode("utf-8", "replace").split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def _charset(content_type: str) -> str:
    named = content_type.lower().partition("charset=")[2].partition(";")[0].strip("\"' ")
    try:
        "".encode(named)
    except (LookupError, ValueError):
        return "utf-8"
    return named


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after(text: str) -> float:
    """Return the number of seconds that the service requests to wait: in seconds, or as a date."""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (TypeError, ValueError):
        return 0.0
