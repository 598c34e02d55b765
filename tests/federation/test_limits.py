"""Limits of operations and capacities of sites, as they are declared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dfm_async import Federation, Operation, Program, Site
from dfm_async.errors import FederationError
from dfm_async.model.call_limits import CallLimits, SiteCapacity

OPENAPI = {
    "openapi": "3.1.0",
    "info": {"title": "Pets", "version": "1"},
    "servers": [{"url": "http://127.0.0.1:1"}],
    "paths": {
        "/pets/{id}": {
            "get": {
                "operationId": "getPet",
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
                "responses": {"200": {"description": "a pet"}},
            }
        }
    },
}


@pytest.fixture
def site() -> Site:
    return Federation("limits").site("lab", workers=4, gpus=2, memory="64GiB")


def openapi_at(site: Site, **options: Any) -> tuple[Operation[..., Any], ...]:
    federation = site.federation
    assert isinstance(federation, Federation)
    return federation.add_openapi(OPENAPI, site=site, **options)


def act(customer: str, x: int = 1) -> int:
    return x


class Act:
    def body(self, customer: str, x: int = 1) -> int:
        return x


def test_a_site_declares_what_it_has(site: Site) -> None:
    assert site.capacity == SiteCapacity(cpus=4, memory=64 << 30, gpus=2)
    assert Federation("f").site("plain").capacity == SiteCapacity()
    with pytest.raises(ValueError, match="gpus must be a whole number, 0 or more, not -1"):
        Federation("f").site("bad", gpus=-1)
    with pytest.raises(ValueError, match="memory must be a number of bytes"):
        Federation("f").site("bad", memory="lots")


def test_every_way_to_declare_an_operation_takes_limits(site: Site) -> None:
    options: Any = {"limit": 4, "rate": "10/s", "key": "customer", "cpus": 2, "memory": "8GiB"}
    expected = CallLimits(limit=4, rate="10/s", key="customer", cpus=2, memory=8 << 30)
    function = site.operation(act, **options)
    site.operation(Act, name="Class", **options)
    site.operation(act, name="program", program=Program(argv=["true"]), **options)
    other = site.federation.site("other", workers=2)

    @other.implements(function, **options)
    def implemented(customer: str, x: int = 1) -> int:
        return x

    site.adapt(function, Act, provider="p", **options)
    for name in ("act", "Class", "program"):
        assert site.adapters[name, None].limits == expected
    assert other.adapters["act", None].limits == site.adapters["act", "p"].limits == expected
    (pet,) = openapi_at(site, rate="10/s", key="id")
    assert site.adapters[pet.name, None].limits == CallLimits(rate="10/s", key="id")


def test_limits_of_a_service_are_checked_before_anything_is_added(site: Site) -> None:
    for options, problem in (({"rate": "10/s", "key": "name"}, "no parameter 'name'"), ({"rate": "often"}, "'10/s'")):
        with pytest.raises(ValueError, match=problem):
            openapi_at(site, **options)
        assert not site.federation.operations


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0}, "limit must be a whole number, 1 or more, not 0"),
        ({"rate": "10"}, "rate must be a number of calls per second, minute or hour, such as '10/s'"),
        ({"limit": 1, "key": "client"}, r"key='client' is not a parameter of operation 'act' \(it has: customer, x\)"),
        ({"key": "customer"}, "has no effect without limit= or rate="),
        ({"gpus": 3}, "operation 'act' of site 'lab' needs gpus=3, and the site has 2. Ask for fewer, or state"),
        ({"cpus": 5}, "needs cpus=5, and the site has 4. Ask for fewer, or give the site more workers"),
        ({"memory": "65GiB"}, "needs memory=65GiB, and the site has 64GiB. Ask for less"),
    ],
)
def test_wrong_limits_are_refused_at_declaration(site: Site, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        site.operation(act, **options)
    assert not site.adapters


def test_code_that_stays_in_one_process_cannot_have_gpus(site: Site) -> None:
    def generator(x: int) -> Iterator[int]:
        yield x

    with pytest.raises(TypeError, match="because it is a generator"):
        site.operation(generator, gpus=1)
    with pytest.raises(TypeError, match="because it is a class"):
        site.operation(Act, gpus=1)
    with pytest.raises(TypeError, match="gpus=1 and spread=False"):
        site.operation(act, gpus=1, spread=False)
    with pytest.raises(TypeError, match="because it is an external program: set CUDA_VISIBLE_DEVICES"):
        site.operation(act, program=Program(argv=["true"]), gpus=1)


def test_operations_show_their_limits(site: Site) -> None:
    site.operation(act, limit=4, memory="1GiB")
    federation = site.federation
    assert isinstance(federation, Federation)
    assert "limit 4, memory 1GiB" in federation._repr_html_()


def federation_file(folder: Path, adapter: str, site: str = "") -> Path:
    path = folder / "federation.dfm.yaml"
    base = Federation("file", api_version="1.0.0")
    lab = base.site("lab", workers=4, gpus=2, memory="64GiB")
    lab.operation(Act, limit=99)
    text = base.to_yaml()
    (before,) = [line.removesuffix("limit: 99") for line in text.splitlines() if line.endswith("limit: 99")]
    text = text.replace("limit: 99", adapter.replace("\n", "\n" + before))
    path.write_text(text.replace("gpus: 2", site or "gpus: 2"))
    return path


def test_files_have_limits_and_capacities(tmp_path: Path) -> None:
    path = federation_file(tmp_path, "limit: 4\nrate: 10/s\nkey: customer\nmemory: 8GiB")
    found = Federation.from_yaml(path).sites["lab"]
    assert found.capacity == SiteCapacity(cpus=4, memory=64 << 30, gpus=2)
    assert found.adapters["Act", None].limits == CallLimits(limit=4, rate="10/s", key="customer", memory=8 << 30)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("limit: 0", "limit must be a whole number, 1 or more, not 0"),
        ("rate: 10", "rate must be a number of calls"),
        ("key: customer", "has no effect without limit= or rate="),
        ("limit: 1\nkey: custommer", "the operation has no parameter 'custommer'; did you mean 'customer'"),
        ("memory: lots", "memory must be a number of bytes"),
        ("cpus: 5", "needs cpus=5, and the site has 4"),
        ("gpus: 1", "because it is a class"),
    ],
)
def test_wrong_limits_in_files_are_reported(tmp_path: Path, adapter: str, problem: str) -> None:
    with pytest.raises(FederationError) as failed:
        Federation.from_yaml(federation_file(tmp_path, adapter))
    assert problem in str(failed.value)
    assert ":" in str(failed.value.problems[0])


def test_a_wrong_capacity_in_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="gpus must not be negative"):
        Federation.from_yaml(federation_file(tmp_path, "limit: 1", site="gpus: -1"))
