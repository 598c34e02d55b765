"""Existing adapter classes run unmodified: what they are built with, what they are called with, and their ends."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, ForEach, JobFailed, LocalOptions, Pipeline, PlaceParam, RetryPolicy, Session, Yield
from dfm_async.federation import ClassPath, Const, ExposedParameter, FromParam, FromProvider, FromSite
from dfm_async.federation.bindings import Binding
from dfm_async.testing import override
from tests.conftest import Connect
from tests.site import adapters
from tests.support.pipelines import pipeline_of

HERE = "tests.site.adapters"


def path(name: str, **args: Any) -> ClassPath:
    return ClassPath(f"{HERE}.{name}", args)


def federation(**options: Any) -> Federation:
    return Federation("minifed", api_version="1.2.0", **options)


def declared(a: int, b: str = "default", c: list[int] | None = None) -> dict[str, Any]: ...  # type: ignore[empty-body]


def of_x(x: int) -> Any: ...


def of_n(n: int) -> list[int]: ...  # type: ignore[empty-body]


def offering(code: Any, declaration: Any = of_x, *, impl: ClassPath | None = None, **adapter: Any) -> Federation:
    """Return a federation with the operation ``op``, which the site ``lab`` offers with an adapter."""
    fed = federation()
    fed.declare("op", declaration)
    fed.site("lab", impl=impl).adapt("op", code, **adapter)
    return fed


def call_of(fed: Federation, *params: str, **args: Any) -> Pipeline:
    return pipeline_of(fed.operations.op, *params, **args)


async def run(session: Session, pipeline: Pipeline, params: Any = None) -> list[Any]:
    job = await session.execute(pipeline, {} if params is None else params)
    return in_order(await job.collect())


def in_order(results: Any) -> list[Any]:
    return [result.value for result in sorted(results, key=lambda result: (result.frame, result.place))]


async def failure(session: Session, pipeline: Pipeline) -> str:
    job = await session.execute(pipeline)
    with pytest.raises(JobFailed) as caught:
        await job
    return str(caught.value.errors[0])


async def inline_failure(fed: Federation) -> str:
    """Return the error of a call of ``op``."""
    async with Session(fed, target="inline") as session:
        return await failure(session, call_of(fed, x=1))


# arguments


async def test_an_adapter_gets_all_parameters_by_name_also_those_that_the_call_leaves_out(connect: Connect) -> None:
    fed = offering(path("Echo"), declared)
    with Pipeline() as pipeline:
        Yield(fed.operations.op(1), place="a")
        Yield(fed.operations.op(0, c=[], b=""), place="b")
    async with connect(fed) as session:
        assert await run(session, pipeline) == [{"a": 1, "b": "default", "c": None}, {"a": 0, "b": "", "c": []}]


@pytest.mark.parametrize("value", [True, False, None, 0, "", [], {"deep": [0]}])
async def test_constants_arrive_as_they_are_also_falsy_ones(value: Any) -> None:
    fed = offering(path("Echo"), bind={"given": Const(value), "also": FromParam("x")})
    async with Session(fed, target="inline") as session:
        assert await run(session, call_of(fed, x=0)) == [{"given": value, "also": 0}]


def exposing(x: int, y: Any = 3) -> Any: ...


@pytest.mark.parametrize("param", ["extra", "y"], ids=["a parameter of the site", "one that the operation has, too"])
async def test_an_exposed_parameter_takes_the_place_of_what_is_bound_unless_it_is_none(
    connect: Connect, param: str
) -> None:
    bound = Const("bound", ExposedParameter(param=param))
    fed = offering(path("Echo"), exposing, bind={"a": FromParam("x"), "b": bound})
    with Pipeline() as pipeline:
        Yield(fed.operations.op(1), place="left out")
        Yield(fed.operations.op(1, **{param: None}), place="none")
        Yield(fed.operations.op(1, **{param: PlaceParam("value")}), place="none by a parameter")
        for value in (0, False, "", "given"):
            Yield(fed.operations.op(1, **{param: value}), place="given", multiuse=True)
    async with connect(fed) as session:
        job = await session.execute(pipeline, {"value": None})
        results = await job.collect()
    for place in ("left out", "none", "none by a parameter"):
        assert [r.value["b"] for r in results if r.place == place] == ["bound"], place
    given = [r.value["b"] for r in results if r.place == "given"]
    assert sorted(map(repr, given)) == sorted(map(repr, (0, False, "", "given")))


async def test_an_adapter_that_changes_a_constant_changes_only_its_own() -> None:
    def greedy(x: int, default: dict[str, int] = {}) -> list[int]: ...  # type: ignore[empty-body] # noqa: B006 - the test

    bind: dict[str, Binding] = {"x": FromParam("x"), "const": Const([]), "default": FromParam("default")}
    fed = offering(path("Greedy", seen=[]), greedy, bind=bind)
    pipeline = call_of(fed, "x")
    async with Session(fed, target="inline") as session:
        assert sorted(await run(session, pipeline, [{"x": 1}, {"x": 2}])) == [[1, 1, 1], [2, 1, 1]]
        assert await run(session, pipeline, [{"x": 1}]) == [[1, 1, 1]]


async def test_an_argument_can_come_from_the_site_object_and_from_a_provider(connect: Connect) -> None:
    bind: dict[str, Binding] = {
        "scale": FromSite("scale"),
        "zero": FromSite("nothing"),
        "label": FromProvider("shelf", "label"),
    }
    fed = federation()
    fed.declare("op", of_x)
    lab = fed.site("lab", impl=path("Lab", scale=3))
    lab.provider("shelf", path("Shelf", label="top"))
    lab.adapt("op", path("Echo"), bind=bind)
    async with connect(fed) as session:
        assert await run(session, call_of(fed, x=1)) == [{"scale": 3, "zero": 0, "label": "top"}]


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("scale", "argument 'scale' of tests.site.adapters.Echo is bound to attribute 'scale', which Site does not"),
        ("__class__.__init__.__globals__", "which bindings may not read"),
    ],
    ids=["missing", "of Python itself"],
)
async def test_a_binding_reads_only_attributes_that_the_site_object_has(attribute: str, expected: str) -> None:
    assert expected in await inline_failure(offering(path("Echo"), bind={"scale": FromSite(attribute)}))


async def test_a_parameter_that_is_declared_as_a_list_gets_one_where_a_stream_comes(connect: Connect) -> None:
    fed = federation()
    fed.declare("numbers", of_n)

    def total(values: list[int] | None = None) -> int: ...  # type: ignore[empty-body]

    fed.declare("total", total)
    lab = fed.site("lab")
    lab.adapt("numbers", path("Numbers"))
    lab.adapt("total", path("Total"))
    fed.site("desk").adapt("total", path("Total"), bind={"values": FromParam("values")})
    with Pipeline() as pipeline:
        Yield(fed.operations.total(fed.operations.numbers(4), site="lab"), place="a")
        Yield(fed.operations.total(fed.operations.numbers(5), site="desk"), place="b")
    async with connect(fed) as session:
        assert await run(session, pipeline) == [6, 10]


# how the code is called


async def test_an_adapter_that_is_not_async_runs_in_a_thread(connect: Connect) -> None:
    bind: dict[str, Binding] = {"x": FromParam("x"), "s": FromSite("scale")}
    fed = offering(path("EchoInThread"), impl=path("Lab", scale=2), is_async=False, bind=bind)
    async with connect(fed) as session:
        found = await run(session, call_of(fed, "x"), [{"x": 1}, {"x": 2}])
    assert found == [{"x": 1, "s": 2, "on_loop": False}, {"x": 2, "s": 2, "on_loop": False}]


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (path("Numbers"), {"is_async": True}),
        (path("NumbersInThread"), {"is_async": False}),
        (path("Generator"), {"is_async": False}),
        (path("AsyncGenerator"), {"is_async": True}),
        (path("Generator"), {"is_async": True}),
        # classes are called as their code shows, also with bindings
        (adapters.Generator, {"bind": {"n": FromParam("n")}}),
        (adapters.AsyncGenerator, {"bind": {"n": FromParam("n")}}),
        (adapters.Numbers, {"bind": {"n": FromParam("n")}}),
    ],
)
async def test_a_result_can_be_an_iterator_of_either_kind(code: Any, options: dict[str, Any]) -> None:
    fed = offering(code, of_n, **options)
    with Pipeline() as pipeline, ForEach(fed.operations.op(3)) as number:
        Yield(number)
    async with Session(fed, target="inline") as session:
        assert await run(session, pipeline) == [0, 1, 2]


async def test_a_body_that_cannot_be_awaited_says_what_to_write() -> None:
    assert "is-async: false" in await inline_failure(offering(path("EchoInThread")))


async def test_a_class_by_its_path_gets_the_context_if_it_names_it() -> None:
    fed = offering(path("Contextual"))
    async with Session(fed, target="inline") as session:
        assert await run(session, call_of(fed, x=3)) == ["op of 3"]


# what adapters are built with


async def test_adapters_know_their_site_their_provider_and_their_job(connect: Connect, tmp_path: Path) -> None:
    fed = offering(path("Placed"), impl=path("Lab", folder=str(tmp_path)))
    fed.sites["lab"].provider("shelf", path("Shelf", label="top"))
    fed.sites["lab"].adapt("op", path("Placed", power=2), provider="shelf")
    with Pipeline() as pipeline:
        first = fed.operations.op(3, provider="shelf")
        Yield(fed.operations.op(4, provider="shelf", after=first), place="a")
        Yield(fed.operations.op(5, after=first, site="lab"), place="b")
    async with connect(fed, homesite="desk") as session:
        job = await session.execute(pipeline)
        found = in_order(await job.collect())
    shared = {"site": "lab", "home": "desk", "federation": "minifed", "version": "1.2.0", "itself": True}
    assert found == [
        {**shared, "value": 16, "job": job.job_id, "provider": "top", "calls": 2},
        {**shared, "value": 5, "job": job.job_id, "provider": None, "calls": 1},
    ]
    # adapters first, for they use the others
    assert (tmp_path / "ends").read_text().split() == ["adapter", "adapter", "provider", "site"]


async def test_adapters_have_a_logger_with_the_job_and_the_site(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fed = offering(path("Logs"))
    pipeline = call_of(fed, x=1)
    async with connect(fed) as session:
        jobs = [await session.execute(pipeline), await session.execute(pipeline)]
        assert [(await job.first()).value for job in jobs] == [True, True]
    about = [
        (record.getMessage(), getattr(record, "job", ""), getattr(record, "site", ""))
        for record in caplog.records
        if record.name.startswith("dfm_async.site.lab")
    ]
    assert sorted(about) == sorted((said, job.job_id, "lab") for said in ("plain 1", "of a part") for job in jobs)


async def test_each_job_has_objects_of_its_own() -> None:
    fed = offering(path("Placed"))
    with Pipeline() as pipeline:
        Yield(fed.operations.op(PlaceParam("x"))["calls"])
    async with Session(fed, target="inline") as session:
        assert sorted(await run(session, pipeline, [{"x": 1}, {"x": 1}])) == [1, 2]
        assert await run(session, pipeline, [{"x": 1}]) == [1]


async def test_calls_at_the_same_time_share_what_is_built_and_what_fails(tmp_path: Path) -> None:
    fed = offering(path("Placed"), impl=path("Lab", folder=str(tmp_path)))
    fed.sites["lab"].provider("shelf", path("Shelf", label="none"))
    pipeline = call_of(fed, "x")
    async with Session(fed, target="inline") as session:
        job = await session.execute(pipeline, [{"x": x} for x in range(100)])
        with pytest.raises(JobFailed) as caught:
            await job
        assert caught.value.count == 100
        assert all("a shelf needs a label" in str(error) for error in caught.value.errors)
        assert (tmp_path / "ends").read_text().split() == ["site"]
    fed.sites["lab"].providers.clear()
    async with Session(fed, target="inline") as session:
        job = await session.execute(pipeline, [{"x": x} for x in range(100)])
        assert len(await job.collect()) == 100
    assert (tmp_path / "ends").read_text().split() == ["site", "adapter", "site"]


async def test_a_class_that_python_defines_gets_the_site_too() -> None:
    fed = federation()
    lab = fed.site("lab", impl=adapters.Lab)

    class Scaled:
        def __init__(self, site: adapters.Lab) -> None:
            self.site = site

        async def body(self, x: int, /) -> int:
            return x * self.site.scale

    lab.operation(Scaled, name="op")
    with Pipeline() as pipeline:
        Yield(fed.operations.op(4))
    async with Session(fed, target="inline") as session:
        assert await run(session, pipeline) == [4]


async def test_cached_files_are_in_the_directory_of_the_site(connect: Connect, tmp_path: Path) -> None:
    from dfm_async.federation import CacheConfig

    def keep(name: str, text: str) -> str: ...  # type: ignore[empty-body]

    fed = federation()
    fed.declare("keep", keep)
    fed.site("lab", cache=CacheConfig(base_path=str(tmp_path))).adapt("keep", path("Files"), is_async=False)
    with Pipeline() as pipeline:
        Yield(fed.operations.keep("a.txt", "hello"))
    async with connect(fed) as session:
        assert await run(session, pipeline) == ["notes/a.txt: hello"]
    assert (tmp_path / "notes" / "a.txt").read_text() == "hello"


async def test_an_adapter_can_send_to_another_job() -> None:
    def send(job: str, value: int) -> None: ...

    fed = federation()
    fed.declare("send", send)
    lab = fed.site("lab")
    lab.adapt("send", path("Sender"))
    with Pipeline() as receiver:
        Yield(PlaceParam("x"))
    with Pipeline() as sender:
        fed.operations.send(PlaceParam("job"), 42)
    async with Session(fed, target="inline") as session:
        other = await session.execute(receiver, [], autostop=False)
        await (await session.execute(sender, {"job": other.job_id}))
        await other.send_stop_frame()
        assert [result.value for result in await other.collect()] == [42]


# what goes wrong


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("tests.site.adapters.Nothing", "is not there: module 'tests.site.adapters' has no 'Nothing'"),
        ("tests.site.nowhere.Echo", "cannot be imported: package 'tests.site' has no module 'nowhere'"),
        ("tests.site.adapters.NoBody", "is not an adapter: it has no body(...)"),
        ("subprocess.Popen", "belongs to the standard library"),
        ("os.path.Thing", "belongs to the standard library"),
        ("tests.site.adapters.Path", "Path, of the standard library"),
        ("dfm_async.session.session.Session", "is a part of dfm_async that is not offered here"),
        ("tests.site.adapters.asyncio", "is not a class, but an object of type module"),
    ],
)
async def test_a_path_that_leads_to_no_adapter_fails_the_job_and_says_why(code: str, expected: str) -> None:
    found = await inline_failure(offering(ClassPath(code)))
    assert f"operation 'op' of site 'lab': class {code!r} {expected}"[:60] in found
    assert expected in found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise RuntimeError('not today')", "its module raised RuntimeError: not today"),
        ("import sys; sys.exit('a script')", "its module raised SystemExit: a script"),
        ("import nowhere_at_all", "its module needs 'nowhere_at_all', which is not installed"),
    ],
)
async def test_a_module_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect: Connect, code: str, expected: str
) -> None:
    (tmp_path / "broken_adapters.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    fed = offering(ClassPath("broken_adapters.Adapter"))
    async with connect(fed) as session:
        found = await failure(session, call_of(fed, x=1))
    assert expected in found
    assert 'broken_adapters.py", line 1, in <module>' in found
    assert "importlib" not in found  # only where the module has failed counts, not how it is loaded
    assert "loading.py" not in found


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ({}, r"that are bound \(nothing\): missing a required argument: 'x'. Write each of them under args"),
        ({"x": FromParam("x"), "z": Const(1)}, r"that are bound \(x, z\): got an unexpected keyword argument 'z'"),
    ],
)
async def test_arguments_that_the_body_lacks_are_reported_with_their_bindings(
    bind: dict[str, Any], expected: str
) -> None:
    class Same:
        async def body(self, x: int) -> int:
            return x

    assert re.search(expected, await inline_failure(offering(Same, bind=bind)))


async def test_a_provider_does_not_take_the_name_of_something_that_sites_have() -> None:
    fed = offering(path("Placed"))
    fed.sites["lab"].provider("cache_storage")
    assert "has an attribute 'cache_storage' already: rename the provider" in await inline_failure(fed)


async def test_only_packages_that_the_federation_allows_are_imported() -> None:
    fed = offering(path("Echo"))
    fed.packages = ("minifed", "tests.sit")
    found = await inline_failure(fed)
    assert "of no package that the federation allows (it allows: minifed, tests.sit)" in found
    fed.packages = ("tests.site",)
    async with Session(fed, target="inline") as session:
        assert await run(session, call_of(fed, x=1)) == [{"x": 1}]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (path("Echo", size=1), "cannot be built with its args: got an unexpected keyword argument 'size'"),
        (path("Broken", size=3), "cannot be built: OSError: no room for 3"),
    ],
)
async def test_a_constructor_that_fails_is_named_with_its_operation_site_and_argument(
    connect: Connect, code: ClassPath, expected: str
) -> None:
    fed = offering(code)
    async with connect(fed) as session:
        found = await failure(session, call_of(fed, x=1))
    assert f"operation 'op' of site 'lab': class {code.path!r} {expected}" in found


@pytest.mark.parametrize(
    ("impl", "expected"),
    [
        (path("Echo"), "the site object of site 'lab': class 'tests.site.adapters.Echo' is not a subclass of"),
        (path("Lab", height=2), "got an unexpected keyword argument 'height'"),
        (path("Shelf"), "is not a subclass of dfm_async.site.Site"),
    ],
)
async def test_a_site_object_that_cannot_be_built_fails_the_job_that_needs_it(impl: ClassPath, expected: str) -> None:
    assert expected in await inline_failure(offering(path("Placed"), impl=impl))


async def test_what_was_built_before_a_constructor_failed_is_closed_all_the_same(tmp_path: Path) -> None:
    fed = offering(path("Placed"), impl=path("Lab", folder=str(tmp_path)))
    fed.sites["lab"].provider("good", path("Shelf"))
    fed.sites["lab"].provider("bad", path("Shelf", label="none"))
    found = await inline_failure(fed)
    assert "provider 'bad' of site 'lab': class 'tests.site.adapters.Shelf' cannot be built: ValueError: a sh" in found
    assert (tmp_path / "ends").read_text().split() == ["provider", "site"]


async def test_nothing_is_imported_before_a_call_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_adapters.py").write_text("class Late:\n    async def body(self, x): return -x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fed = offering(ClassPath("late_adapters.Late"))
    async with Session(fed, target="inline") as session:
        await session.prepare(call_of(fed, x=1))
        assert "late_adapters" not in sys.modules
        assert await run(session, call_of(fed, x=1)) == [-1]
    monkeypatch.delitem(sys.modules, "late_adapters")


async def test_retries_and_deadlines_count_for_adapters_too(connect: Connect) -> None:
    fed = offering(path("Contextual"), retry=RetryPolicy(attempts=3, backoff=0), deadline=10.0)
    async with connect(fed) as session:
        assert await run(session, call_of(fed, x=3)) == ["op of 3"]


async def test_a_fake_needs_neither_the_class_nor_the_site(connect: Connect) -> None:
    fed = offering(ClassPath("nowhere.Adapter"), declared, impl=ClassPath("nowhere.Lab"), bind={"x": FromSite("y")})
    with override(fed, "op", lambda a, b, c: (a, b, c)) as fake:
        async with connect(fed, options=LocalOptions()) as session:
            assert [tuple(found) for found in await run(session, call_of(fed, a=2))] == [(2, "default", None)]
    assert len(fake.calls) == 1
