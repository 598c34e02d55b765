"""Calls of an HTTP service: where arguments go, what is tried again, what fails, and that secrets stay secret."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import pickle
import traceback
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfm_async.errors import HttpCallFailed
from dfm_async.model.http import Argument, RequestPayload, RequestPlan
from dfm_async.site.http import HttpCall
from dfm_async.site.http_request import make_request
from tests.federation.openapi.service import TOKEN, Service, body_of, serving


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as found:
        yield found


QUICK = {"retry": {"attempts": 3, "backoff": 0.001, "max_backoff": 2.0}}


async def ask(
    service: Service,
    path: str,
    values: dict[str, Any] | None = None,
    *,
    method: str = "GET",
    options: dict[str, Any] | None = None,
    **plan: Any,
) -> Any:
    request = {"method": method, "base_url": service.url, "path": path, **plan}
    call = HttpCall(operation="web.Ask", request=request, options={**QUICK, **(options or {})})
    try:
        return await call.body(**(values or {}))
    finally:
        await call.aclose()


async def failure(service: Service, path: str, values: dict[str, Any] | None = None, **more: Any) -> HttpCallFailed:
    with pytest.raises(HttpCallFailed) as caught:
        await ask(service, path, values, **more)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value


# where arguments go


async def test_arguments_go_where_the_plan_says(service: Service) -> None:
    found = await ask(
        service,
        "/pets/{id}/toys",
        {
            "id": 7,
            "kind": "ball & chain",
            "tags": ["a", "b"],
            "since": dt.date(2024, 1, 2),
            "trace": "t1",
            "who": "ann",
        },
        arguments=[
            {"argument": "id", "name": "id", "place": "path", "style": "simple", "required": True},
            {"argument": "kind", "name": "toy-kind", "place": "query"},
            {"argument": "tags", "name": "tag", "place": "query", "explode": True},
            {"argument": "since", "name": "since", "place": "query"},
            {"argument": "nothing", "name": "nothing", "place": "query"},
            {"argument": "trace", "name": "X-Trace", "place": "header", "style": "simple"},
            {"argument": "who", "name": "who", "place": "cookie"},
        ],
    )
    assert found["path"] == "/v1/pets/7/toys"
    assert found["query"] == "toy-kind=ball%20%26%20chain&tag=a&tag=b&since=2024-01-02"
    assert found["headers"]["x-trace"] == "t1"
    assert found["headers"]["cookie"] == "who=ann"


@pytest.mark.parametrize(
    ("options", "value", "query"),
    [
        ({"explode": True}, ["a", 1, True, None], "p=a&p=1&p=true"),
        ({"explode": False}, ["a", "b,c", 1], "p=a,b%2Cc,1"),
        ({"explode": False}, "b,c", "p=b%2Cc"),
        ({"style": "pipeDelimited"}, ["a", "b"], "p=a%7Cb"),
        ({"style": "spaceDelimited"}, ["a", "b"], "p=a%20b"),
        ({"style": "deepObject", "explode": True}, {"a": 1, "b": "x"}, "p[a]=1&p[b]=x"),
        ({"explode": True}, {"a": 1, "b": "x"}, "a=1&b=x"),
        ({"explode": False}, {"a,b": 1, "c": "x=y"}, "p=a%2Cb,1,c,x%3Dy"),
        ({"json": True}, {"a": [1]}, "p=%7B%22a%22%3A%5B1%5D%7D"),
    ],
)
async def test_arrays_and_objects_are_written_as_their_style_says(
    service: Service, options: dict[str, Any], value: Any, query: str
) -> None:
    arguments = [{"argument": "p", "name": "p", "place": "query", **options}]
    assert (await ask(service, "/x", {"p": value}, arguments=arguments))["query"] == query


@pytest.mark.parametrize(
    ("options", "value", "path"),
    [
        ({}, ["a", "b,c", "d/e"], "a,b%2Cc,d%2Fe"),
        ({}, {"a": 1, "b": "x,y"}, "a,1,b,x%2Cy"),
        ({"explode": True}, {"a": 1, "b": "x=y"}, "a=1,b=x%3Dy"),
        ({"json": True}, [1, 2], "%5B1%2C2%5D"),
    ],
)
def test_parts_of_a_path_are_separated_by_commas(options: dict[str, Any], value: Any, path: str) -> None:
    argument = Argument(argument="p", name="p", place="path", style="simple", required=True, **options)
    plan = RequestPlan(method="GET", base_url="http://localhost", path="/x/{p}", arguments=(argument,))
    assert make_request(plan, {"p": value}).path == f"/x/{path}"


async def test_a_body_is_put_together_from_arguments(service: Service) -> None:
    payload = {"properties": {"name": "name", "day": "birth-day", "left_out": "x"}}
    found = await ask(
        service, "/pets", {"name": "Rex", "day": dt.date(2024, 1, 2), "left_out": None}, method="POST", payload=payload
    )
    assert body_of(found) == {"name": "Rex", "birth-day": "2024-01-02"}
    assert found["headers"]["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("kind", "value", "body"),
    [
        ("json", [1, {"a": None}], '[1,{"a":null}]'),
        ("text", "grüße", "grüße".encode().decode("latin-1")),
        ("bytes", b"\x00\xff", "\x00\xff"),
        ("form", {"a": "1 2", "b": ["x", "y"]}, "a=1%202&b=x&b=y"),
    ],
)
async def test_a_body_can_be_one_argument(service: Service, kind: str, value: Any, body: str) -> None:
    payload = {"kind": kind, "content_type": "x/y", "argument": "body"}
    found = await ask(service, "/pets", {"body": value}, method="PUT", payload=payload)
    assert found["body"] == body
    assert found["headers"]["content-type"] == "x/y"


@given(st.text(max_size=20))
def test_no_value_of_a_path_leads_to_another_path(text: str) -> None:
    argument = Argument(argument="id", name="id", place="path", style="simple", required=True)
    plan = RequestPlan(method="GET", base_url="http://h/v1", path="/pets/{id}/toys", arguments=(argument,))
    try:
        path = make_request(plan, {"id": text}).path
    except ValueError:
        assert text in ("", ".", "..") or any("\ud800" <= char <= "\udfff" for char in text)
    else:
        assert path == f"/v1/pets/{quote(text, safe='')}/toys"
        assert path.count("/") == 4


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        *(("path", value, "'p'") for value in ("..", ".", "", None)),
        *(("header", value, "header") for value in ("a\r\nX-Evil: 1", "a\0")),
    ],
)
async def test_a_path_cannot_be_left_and_a_header_not_be_smuggled(
    service: Service, place: str, value: Any, reason: str
) -> None:
    arguments = [{"argument": "p", "name": "p", "place": place, "required": True}]
    path = "/pets/{p}" if place == "path" else "/x"
    assert reason in (await failure(service, path, {"p": value}, arguments=arguments)).reason
    assert service.seen == []


def test_a_body_without_a_form_in_json_is_refused() -> None:
    plan = RequestPlan(method="POST", base_url="http://h", path="/", payload=RequestPayload(argument="body"))
    with pytest.raises(ValueError, match="JSON"):
        make_request(plan, {"body": object()})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "get"}, "capital"),
        ({"base_url": "ftp://h"}, "http"),
        ({"base_url": "http://u:hunter2@h"}, "credentials"),
        ({"base_url": "http://h?x=1"}, "query"),
        ({"path": "x"}, "begin with"),
        ({"path": "/{id}"}, "only among the arguments: id"),
        ({"arguments": [{"argument": "a", "name": "a b", "place": "header"}]}, "header"),
        ({"arguments": [{"argument": "a", "name": "Transfer-Encoding", "place": "header"}]}, "cannot be an argument"),
        ({"arguments": [{"argument": "a", "name": "host", "place": "header"}]}, "cannot be an argument"),
        ({"arguments": [{"argument": "a"}]}, "name"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_wrong_plan_is_refused_before_any_call(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        HttpCall(operation="web.Ask", request={"method": "GET", "base_url": "http://h", "path": "/", **plan})
    assert "hunter2" not in str(caught.value)


def test_wrong_options_are_refused_before_any_call() -> None:
    request = {"method": "GET", "base_url": "http://h", "path": "/"}
    for options in ({"timeout": 0}, {"max_bytes": 0}, {"connections": 0}, {"retry": {"attempts": 0}}, {"retries": 1}):
        with pytest.raises(ValueError, match=r"web\.Ask"):
            HttpCall(operation="web.Ask", request=request, options=options)


# answers


async def test_answers_become_values(service: Service) -> None:
    assert await ask(service, "/text") == "grüße"
    assert await ask(service, "/nothing") is None
    assert await ask(service, "/flaky") == {"tries": 3}
    assert await ask(service, "/marked") == {"a": 1}
    assert len(await ask(service, "/huge", options={"max_bytes": 10_000_000})) == 10_000_000


async def test_wrong_json_is_reported_with_its_value(service: Service) -> None:
    error = await failure(service, "/wrong")
    assert (error.status, error.answer) == (200, "<html>no JSON</html>")
    assert "JSON" in str(error)


async def packed(service: Service, how: str) -> Any:
    arguments = [{"argument": "how", "name": "how", "place": "query"}]
    return await ask(service, "/packed", {"how": how}, arguments=arguments, options={"max_bytes": 1000})


@pytest.mark.parametrize("how", ["once", "in pieces"])
async def test_packed_answers_are_unpacked(service: Service, how: str) -> None:
    assert await packed(service, how) == "some text " * 10
    assert await packed(service, "empty") is None


@pytest.mark.parametrize(
    ("how", "reason"),
    [("twice", "'gzip, gzip', although only gzip was offered"), ("cut", "too early"), ("not at all", "unpacked")],
)
async def test_answers_that_cannot_be_unpacked_fail(service: Service, how: str, reason: str) -> None:
    with pytest.raises(HttpCallFailed, match=reason):
        await packed(service, how)


@pytest.mark.parametrize("path", ["/huge", "/bomb"])
async def test_an_answer_that_is_too_large_is_not_read_to_its_end(service: Service, path: str) -> None:
    error = await failure(service, path, options={"max_bytes": 100_000})
    assert "max_bytes=100000" in str(error)
    assert len(service.seen) == 1


async def test_redirects_are_not_followed(service: Service) -> None:
    error = await failure(service, "/elsewhere")
    assert error.status == 307
    assert "redirects" in str(error)


async def test_an_error_names_operation_method_path_status_and_response(service: Service) -> None:
    service.statuses = [(404, {})]
    error = await failure(service, "/flaky", method="POST")
    assert str(error) == 'web.Ask (POST /flaky): 404 Not Found; the service responded: {"detail":"status 404"}'
    assert (error.operation, error.method, error.path, error.status) == ("web.Ask", "POST", "/flaky", 404)


async def test_cookies_of_one_answer_are_not_sent_with_the_next_request(service: Service) -> None:
    request = {"method": "GET", "base_url": service.url, "path": "/cookies"}
    call = HttpCall(operation="web.Ask", request=request)
    assert await call.body() == {}
    assert await call.body() == {}
    await call.aclose()


# trying again


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_temporary_failure_is_retried_until_the_last_attempt(service: Service, status: int) -> None:
    service.statuses = [(status, {}), (status, {})]
    assert await ask(service, "/flaky") == {"tries": 3}
    service.seen.clear()
    service.statuses = [(status, {})] * 5
    assert (await failure(service, "/flaky")).status == status
    assert len(service.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 501])
async def test_a_permanent_failure_is_not_retried(service: Service, status: int) -> None:
    service.statuses = [(status, {})] * 2
    assert (await failure(service, "/flaky")).status == status
    assert len(service.seen) == 1


async def test_post_is_tried_again_only_if_asked_for(service: Service) -> None:
    service.statuses = [(503, {})]
    assert (await failure(service, "/flaky", method="POST")).status == 503
    service.statuses = [(503, {})]
    assert await ask(service, "/flaky", method="POST", options={"retry_unsafe": True}) == {"tries": 3}


async def test_the_pause_is_the_one_that_the_service_names(service: Service) -> None:
    service.statuses = [(429, {"Retry-After": "1"})]
    loop = asyncio.get_running_loop()
    began = loop.time()
    await ask(service, "/flaky")
    assert loop.time() - began >= 1


@pytest.mark.parametrize("text", ["3600", "Fri, 01 Jan 2100 00:00:00 GMT"])
async def test_a_pause_that_is_too_long_is_not_waited_for(service: Service, text: str) -> None:
    service.statuses = [(429, {"Retry-After": text})] * 2
    error = await failure(service, "/flaky")
    assert error.status == 429
    assert error.retry_after >= 3600
    assert len(service.seen) == 1


@pytest.mark.parametrize("text", ["", "soon", "-5", "Fri, 01 Jan 1999 00:00:00 GMT"])
async def test_a_pause_that_makes_no_sense_is_none(service: Service, text: str) -> None:
    service.statuses = [(429, {"Retry-After": text})]
    assert await ask(service, "/flaky") == {"tries": 2}


@pytest.mark.parametrize("path", ["/slow", "/drips"])
async def test_a_service_that_is_too_slow_is_not_waited_for(service: Service, path: str) -> None:
    error = await failure(service, path, options={"timeout": 0.25, "retry": {"attempts": 2, "backoff": 0}})
    assert error.reason == "no answer within 0.25 s"
    assert error.status is None
    assert len(service.seen) == 2


async def test_a_service_that_is_not_there_cannot_be_reached(service: Service) -> None:
    gone = Service("http://127.0.0.1:1/v1")
    error = await failure(gone, "/x", method="POST")
    assert "cannot be reached" in str(error)
    assert isinstance(error.__cause__, Exception)


async def test_a_service_that_cannot_prove_who_it_is_cannot_be_reached(service: Service) -> None:
    pretending = Service(service.url.replace("http:", "https:"))
    error = await failure(pretending, "/x", options={"retry": {"attempts": 1}})
    assert "cannot be reached" in str(error)
    assert "SSL" in str(error)
    assert service.seen == []


async def test_a_limited_number_of_requests_is_in_flight_and_others_wait(service: Service) -> None:
    request = {"method": "GET", "base_url": service.url, "path": "/slow"}
    call = HttpCall(operation="web.Ask", request=request, options={"connections": 1, "timeout": 30})
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(call.body()) for _ in range(5)]
        await service.asked.wait()
        assert len(service.seen) == 1
        service.go_on.set()
    assert [done.result() for done in calls] == ["late"] * 5
    await call.aclose()


async def test_a_call_that_is_cancelled_ends_at_once(service: Service) -> None:
    task = asyncio.create_task(ask(service, "/slow"))
    await service.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# secrets

WAYS = [
    ({"kind": "bearer"}, TOKEN),
    ({"kind": "basic"}, "ann:pass"),
    ({"kind": "header", "name": "X-Key"}, TOKEN),
    ({"kind": "query", "name": "key"}, TOKEN),
    ({"kind": "cookie", "name": "key"}, TOKEN),
]


@pytest.mark.parametrize(("way", "secret"), WAYS, ids=lambda part: part["kind"] if isinstance(part, dict) else "")
async def test_a_secret_gets_to_the_service_and_nowhere_else(
    service: Service, way: dict[str, Any], secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    credentials = [{"argument": "token", **way}]
    arguments = [{"argument": "a", "name": "a", "place": "query"}]
    found = await ask(service, "/denied", {"token": secret, "a": 1}, credentials=credentials, arguments=arguments)
    assert found == "welcome"
    assert (await failure(service, "/denied", {"token": "a:wrong"}, credentials=credentials)).status == 401
    for path in ("/flaky", "/wrong", "/bomb"):
        service.statuses = [(404, {})]
        error = await failure(service, path, {"token": secret}, credentials=credentials, options={"max_bytes": 1000})
        shown = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
        assert secret not in shown
    gone = Service("http://127.0.0.1:1/v1")
    error = await failure(gone, "/x", {"token": secret}, credentials=credentials, options={"retry": {"attempts": 1}})
    assert secret not in "".join(traceback.format_exception(error))
    logged = "\n".join(
        record.getMessage() for record in caplog.records if record.name != "uvicorn.access"
    )  # not theirs
    assert secret not in logged
    assert "HTTP Request: GET" in logged  # that is what would have had it


@pytest.mark.parametrize("secret", ["hunter2\r\nX: y", "", None, 5, "hünter2"])
async def test_a_secret_that_cannot_be_sent_is_not_shown(service: Service, secret: Any) -> None:
    error = await failure(service, "/x", {"token": secret}, credentials=[{"argument": "token", "kind": "bearer"}])
    assert "secret 'token'" in str(error)
    assert "nter2" not in "".join(traceback.format_exception(error))
    assert service.seen == []
