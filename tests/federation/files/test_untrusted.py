"""Federation files that nobody vouches for: ``packages=`` limits what they can name, read and reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dfm_async import Federation
from dfm_async.errors import FederationError
from tests.federation.files.rig import written

HTTP = """\
operations: {pets.List: {parameters: {}, returns: string}}
sites:
  a:
    interface:
      "#/operations/pets.List":
        adapter:
          path: dfm_async.site.http.HttpCall
          args: {operation: pets.List, request: {method: GET, base_url: 'http://127.0.0.1:9', path: /}}
"""


def vault(text: str) -> str:
    return f"sites: {{a: {{secrets_vault: {text}}}}}"


def cache(text: str) -> str:
    return f"sites: {{a: {{cache_config: {text}}}}}"


REFUSED = {
    "an HTTP service": (HTTP, "dfm_async.site.http"),
    "a vault of the whole environment": (vault("{path: environment, args: {prefix: ''}}"), "dfm_async.site.vaults"),
    "a default vault with arguments": (vault("{args: {prefix: ''}}"), "dfm_async.site.vaults"),
    "a vault of a file": (vault("{path: file, args: {path: /root/.netrc.json}}"), "dfm_async.site.vaults"),
    "the keyring": (vault("{path: keyring, args: {service: login}}"), "dfm_async.site.vaults"),
    "a vault by its class": (vault("{path: dfm_async.site.vaults.FileVault, args: {path: /x}}"), "dfm_async.site"),
    "a cache elsewhere": (cache("{protocol: file, base_path: /root/.ssh}"), "fsspec"),
    "a cache on another machine": (cache("{protocol: sftp, base_path: x}"), "fsspec"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_untrusted_file_reaches_only_what_packages_names(tmp_path: Path, case: str) -> None:
    text, package = REFUSED[case]
    path = written(tmp_path, text)
    with pytest.raises(FederationError, match="packages="):
        Federation.from_yaml(path, packages=())
    with pytest.raises(FederationError, match="packages="):
        Federation.from_yaml(path, packages=("weatherlib", "dfm_async.site.nothing"))
    assert Federation.from_yaml(path, packages=(package,)).packages == (package,)
    assert Federation.from_yaml(path).packages is None


@pytest.mark.parametrize(
    "text", [vault("{path: environment}"), cache("{protocol: memory, base_path: /x}"), "sites: {}"]
)
def test_untrusted_file_may_use_what_is_harmless(tmp_path: Path, text: str) -> None:
    Federation.from_yaml(written(tmp_path, text), packages=())


@pytest.mark.parametrize("kind", ["absolute", "relative", "link", "current folder"])
def test_untrusted_file_cannot_read_outside_its_folder(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, secret = tmp_path / "federation", tmp_path / "secret.yaml"
    folder.mkdir()
    secret.write_text("TOP-SECRET: 1")
    monkeypatch.chdir(tmp_path)
    name = {"absolute": str(secret), "relative": "../secret.yaml", "link": "link.yaml"}.get(kind, "secret.yaml")
    os.symlink(secret, folder / "link.yaml")
    path = written(folder, f"sites: {{a: {{$ref: '{name}'}}}}")
    with pytest.raises(FederationError) as caught:
        Federation.from_yaml(path, packages=())
    assert "TOP-SECRET" not in str(caught.value)
    with pytest.raises(FederationError, match="TOP-SECRET"):  # the file is read where it is trusted
        Federation.from_yaml(path)


def test_untrusted_file_reads_files_below_its_folder(tmp_path: Path) -> None:
    path = written(tmp_path, "sites: {a: {$ref: 'parts/a.yaml'}}", parts_a="info: {description: here}")
    assert Federation.from_yaml(path, packages=()).sites["a"].info == {"description": "here"}
