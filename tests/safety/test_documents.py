"""Files, pipelines and values of strangers give errors that say what is wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dfm_async import Federation, PipelineError
from dfm_async.errors import EncodingError, FederationError
from dfm_async.federation.dfm_json import parse_pipeline
from dfm_async.planning.plan import Plan
from dfm_async.wire.codec import Codec
from tests.safety.documents import DFM_PIPELINES, FEDERATIONS, HEAD, LAZY, SERVICES, VALUES


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "federation.dfm.yaml"


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_hostile_federation_is_refused(name: str, file: Path) -> None:
    file.write_text(FEDERATIONS[name])
    with pytest.raises(FederationError) as caught:
        Federation.from_yaml(file)
    assert 0 < len(str(caught.value)) < 100_000
    assert sorted(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("libyaml", [True, False], ids=["libyaml", "pure Python"])
@pytest.mark.parametrize(
    "text",
    [
        HEAD + 'provision: {a: "\\ud800"}\n',
        HEAD + 'provision: {"\\ud800": a}\n',
        '{"info": {"name": "a.b", "version": "1"}, "sites": {"lab": {"info": {"a": "\\udfff"}}}}',
    ],
    ids=["value", "key", "JSON"],
)
def test_half_a_character_is_refused(text: str, libyaml: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not libyaml:
        monkeypatch.delattr("yaml.CSafeLoader", raising=False)
    file.write_text(text)
    with pytest.raises(FederationError, match=r"this is not YAML|unpaired surrogate"):
        Federation.from_yaml(file)


@pytest.mark.parametrize("name", LAZY)
def test_a_federation_is_read_without_its_classes(name: str, file: Path) -> None:
    file.write_text(LAZY[name])
    assert Federation.from_yaml(file).operations["a.B"]


def test_a_file_that_names_a_pipe_does_not_wait_for_it(file: Path) -> None:
    import os

    os.mkfifo(file.parent / "pipe")
    file.write_text(HEAD + "operations: {$ref: ['pipe#/']}\n")
    with pytest.raises(FederationError, match="is not a file"):
        Federation.from_yaml(file)


@pytest.mark.parametrize("name", DFM_PIPELINES)
def test_a_hostile_pipeline_is_refused(name: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_pipeline(DFM_PIPELINES[name], Federation("m"))
    assert 0 < len(str(caught.value)) < 100_000


@pytest.mark.parametrize("name", SERVICES)
def test_a_hostile_service_is_refused_or_gives_names_and_types(name: str) -> None:
    federation = Federation("services")
    site = federation.site("here")
    with contextlib.suppress(FederationError):
        for operation in federation.add_openapi(SERVICES[name], site=site):
            assert all(part.isidentifier() for part in operation.name.split("."))
    assert set(federation.operations) == {name for name, _ in site.adapters}


@pytest.mark.parametrize("name", VALUES)
def test_a_hostile_value_is_refused(name: str) -> None:
    with pytest.raises(EncodingError):
        Codec.for_untrusted().loads(VALUES[name])


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"nets": 3}', "\x00", "[" * 100_000, '{"a": "\\ud800"}'])
def test_invalid_plan_is_refused(text: str) -> None:
    with pytest.raises(PipelineError):
        Plan.from_json(text)
