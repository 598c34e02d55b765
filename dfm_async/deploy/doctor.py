"""Diagnoses a startup kit where its site runs: what is missing or wrong, and how to fix it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dfm_async.deploy.certificates import ENDS_SOON, Certificate, signed_by
from dfm_async.deploy.kit import OURS, Kit, greet
from dfm_async.deploy.project import INSTALL, run_python
from dfm_async.errors import DeploymentError, DfmError
from dfm_async.federation.federation import Federation
from dfm_async.model.findings import Finding
from dfm_async.model.flare import FEDERATION_FOLDER, SETTINGS_FILE, SiteSettings
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.node import HUB
from dfm_async.targets.flare.site_code import read_settings
from dfm_async.version import __version__

_NVFLARE: Final = (2, 9)
"""The version of nvflare that the target is written for."""
_TIMEOUT: Final = 10.0
_DEFAULT_STORE: Final = Path("/tmp/nvflare")  # noqa: S108 - what FLARE itself takes
_IMPORTS: Final = 60.0
_SILENT: Final = 90.0
"""The number of seconds without a heartbeat after which a client is missing: it sends one every thirty seconds."""
_ASK: Final = "request a new kit from the administrator of the federation"


async def diagnose(kit: Kit, *, offline: bool = False) -> AsyncIterator[Finding]:
    """Yield findings about the kit of a server, a client or a user; ``offline``: without connecting to the server."""
    kind = kit.kind
    yield Finding("kit", "ok", f"{kit.folder}, of a {kind}")
    yield _nvflare()
    yield Finding("dfm_async", "ok", f"{__version__}; all participants need the same")
    whole = True
    for finding in [*_files(kit), *_certificates(kit)]:
        whole = whole and finding.state != "bad"
        yield finding
    settings, first = _settings(kit)
    federation, more = _federation(kit, settings)
    for finding in [*first, *more]:
        yield finding
    if kind != "user" and settings is not None:
        for check in (_components, _code, _audit):
            for finding in check(kit, settings):
                yield finding
        for finding in await _imports(kit, settings):
            yield finding
    if kind == "server":
        for finding in [*_commands(kit), *_store(kit)]:
            yield finding
    if not offline and whole:
        async for finding in _network(kit, federation):
            yield finding


def _nvflare() -> Finding:
    try:
        version = metadata.version("nvflare")
    except metadata.PackageNotFoundError:
        return Finding("nvflare", "bad", f"it is not installed in {sys.prefix}", INSTALL)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    wanted = ".".join(map(str, _NVFLARE))
    if numbers != _NVFLARE:
        return Finding("nvflare", "bad", f"{version}; needed is {wanted}", f"{INSTALL} --upgrade")
    return Finding("nvflare", "ok", version)


# the content of the kit


def _files(kit: Kit) -> Iterator[Finding]:
    needed = [kit.certificate_file, kit.key_file, kit.authority_file, kit.local]
    missing = [str(path.relative_to(kit.folder)) for path in needed if not path.exists()]
    if missing:
        yield Finding("files", "bad", f"missing: {', '.join(missing)}", f"copy the whole kit, or {_ASK}")
    else:
        yield Finding("files", "ok", "startup and local are present")
    if kit.key_file.exists() and stat.S_IMODE(kit.key_file.stat().st_mode) & 0o007:
        yield Finding(
            "private key", "warn", f"others on this machine can read {kit.key_file.name}", f"chmod 600 {kit.key_file}"
        )
    if not os.access(kit.folder, os.W_OK):
        text = f"{kit.folder} cannot be written to"
        yield Finding("workspace", "bad", text, "FLARE keeps its logs and jobs there: give it to the user who runs it")


def _certificates(kit: Kit) -> Iterator[Finding]:
    for name, path in (("certificate", kit.certificate_file), ("federation's", kit.authority_file)):
        if not path.exists():
            continue
        try:
            found = Certificate.read(path)
        except (ImportError, OSError, ValueError) as error:
            yield Finding(name, "bad", f"{path}: {error}", _ASK)
            return  # further problems would have the same cause
        yield _valid(name, found)
    try:
        if kit.certificate_file.exists() and not signed_by(kit.certificate_file, kit.authority_file):
            yield Finding("signature", "bad", "the certificate is not one of this federation", _ASK)
    except (ImportError, OSError, ValueError):
        return  # reported above
    if not _key_fits(kit):
        yield Finding("private key", "bad", "it does not belong to the certificate", _ASK)


def _valid(name: str, found: Certificate) -> Finding:
    left = found.left()
    text = f"{found.name}{f' of {found.org}' if found.org else ''}, valid until {found.ends:%Y-%m-%d}"
    if left.total_seconds() < 0:
        return Finding(name, "bad", f"{text}: it has expired", f"{_ASK}: 'provision' renews it")
    if left < ENDS_SOON:
        return Finding(name, "warn", f"{text}: {left.days} days are left", f"{_ASK}: 'provision' renews it")
    return Finding(name, "ok", text)


def _key_fits(kit: Kit) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(kit.certificate_file, kit.key_file)
    except ssl.SSLError:
        return False
    except OSError:
        return True  # that it is missing is reported already
    return True


def _settings(kit: Kit) -> tuple[SiteSettings | None, list[Finding]]:
    name, path = "settings", kit.local / SETTINGS_FILE
    if not path.is_file():
        if kit.kind == "user":
            return None, []
        text = f"local/{SETTINGS_FILE} is missing: this site offers nothing"
        return None, [Finding(name, "bad", text, "dfm-async flare provision writes it; see 'Deploying sites'")]
    try:
        found = read_settings(kit.local, kit.name)
    except DfmError as error:
        return None, [Finding(name, "bad", str(error), f"correct {path}")]
    if kit.broken:  # the participant is not known
        return found, []
    wanted = HUB if kit.kind == "server" else kit.name
    if kit.kind != "user" and found.site != wanted:
        text = f"they belong to site {found.site!r}, but the kit to {wanted!r}"
        return found, [Finding(name, "bad", text, f"write 'site: {wanted}' into {path}")]
    return found, [Finding(name, "ok", f"local/{SETTINGS_FILE}, site {found.site!r}")]


def _federation(kit: Kit, settings: SiteSettings | None) -> tuple[Federation | None, list[Finding]]:
    name = "federation"
    if settings is None:
        return None, []
    if settings.federation is None:
        if settings.allow_code:
            return None, [Finding(name, "ok", "none is installed: users bring their code")]
        text = "none is installed, and users may not bring code: this site offers nothing"
        return None, [Finding(name, "bad", text, "name its file in the settings: federation: ...")]
    try:
        found = Federation.from_yaml(kit.local / settings.federation, compat=settings.compat)
    except (DfmError, OSError) as error:
        advice = f"install its files in local/{FEDERATION_FOLDER}, and name them"
        return None, [Finding(name, "bad", str(error), advice)]
    site = found.sites.get(settings.site)
    if kit.kind == "user":
        return found, [Finding(name, "ok", f"{found.name!r} has {', '.join(found.sites)}")]
    if site is not None:
        count = len(site.adapters)
        text = f"{found.name!r} has site {settings.site!r}, which offers {count} operation{'s' * (count != 1)}"
        return found, [Finding(name, "ok", text)]
    if settings.site in (settings.homesite, HUB):
        text = f"{found.name!r}; site {settings.site!r} offers no operation, and runs what needs none"
        return found, [Finding(name, "ok", text)]
    text = f"{found.name!r} has no site {settings.site!r}, but: {', '.join(found.sites)}"
    return found, [Finding(name, "bad", text, "correct the settings, or install a newer federation file")]


async def _imports(kit: Kit, settings: SiteSettings) -> list[Finding]:
    """Import adapters and authorizer as the site would, in a process of its own."""
    try:
        async with asyncio.timeout(_IMPORTS):
            command = ("-m", "dfm_async.deploy.import_check", str(kit.folder))
            code, output, errors = await run_python(*command, cwd=kit.folder)
    except TimeoutError:
        text = f"importing them takes longer than {_IMPORTS:g} s"
        return [Finding("adapters", "bad", text, "check what their modules do when they are imported")]
    try:
        found: dict[str, dict[str, str]] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        text = errors.strip().rpartition("\n")[2] or f"exit code {code}"
        advice = "" if settings.federation is None else "the findings above may be the reason"
        return [Finding("adapters", "bad", f"they could not be checked: {text}", advice)]
    findings = [
        Finding("adapters", "bad", f"{what}: {problem}", "install their package here (pip), or set PYTHONPATH")
        for what, problem in found["adapters"].items()
    ]
    if not findings and settings.federation is not None:
        findings.append(Finding("adapters", "ok", "all of this site can be imported"))
    findings += [
        Finding("authorizer", "bad", problem, "correct 'authorizer' in the settings, or install its package")
        for problem in found["authorizer"].values()
    ]
    if not found["authorizer"]:
        named = settings.authorizer
        text = "none: what FLARE allows is allowed" if named is None else f"{named.path} is loaded"
        findings.append(Finding("authorizer", "ok", text))
    return findings


# the configuration of FLARE


def _read(read: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return read()
    except (OSError, ValueError) as error:
        return str(error)


def _components(kit: Kit, settings: SiteSettings) -> Iterator[Finding]:
    del settings
    resources = _read(kit.resources)
    if isinstance(resources, str):
        yield Finding("components", "bad", f"local/resources.json: {resources}", _ASK)
    elif missing := [path for path in OURS if path not in resources.get("class_allow_list", OURS)]:
        text = f"local/resources.json does not allow {' and '.join(missing)}"
        yield Finding("components", "bad", text, f"add {', '.join(map(json.dumps, missing))} to its class_allow_list")
    else:
        yield Finding("components", "ok", "FLARE may build ours")


def _code(kit: Kit, settings: SiteSettings) -> Iterator[Finding]:
    policy = _read(kit.policy)
    if isinstance(policy, str):
        yield Finding("policy", "bad", f"local/authorization.json: {policy}", _ASK)
        return
    rights = policy.get("permissions", {})
    allowed = [role for role, granted in rights.items() if _may(granted, "byoc")]
    if settings.allow_code and not allowed:
        text = "the settings allow code (allow_code), but FLARE's policy allows code to no role (byoc)"
        yield Finding("code", "warn", text, 'set "byoc" in local/authorization.json, or allow_code: false')
    elif not settings.allow_code and allowed:
        text = f"FLARE's policy lets {', '.join(allowed)} bring code (byoc), and the settings do not"
        advice = 'nothing of theirs runs here; set "byoc": "none" in local/authorization.json so that FLARE refuses it'
        yield Finding("code", "warn", text, advice)
    else:
        text = f"{', '.join(allowed)} may bring it, and run it as this site's own" if allowed else "none may come"
        yield Finding("code", "ok", text)


def _may(granted: Any, right: str) -> bool:
    if isinstance(granted, dict):
        return bool(granted.get(right, "none") != "none")
    return bool(granted) and granted != "none"


def _audit(kit: Kit, settings: SiteSettings) -> Iterator[Finding]:
    if settings.audit is None:
        yield Finding("audit log", "warn", "none is kept", "remove 'audit: null' from the settings")
        return
    path = kit.folder / settings.audit
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        text = f"{path}: {error.strerror}: what cannot be recorded is refused"
        yield Finding("audit log", "bad", text, "give the file to the user who runs the site, or name another")
    else:
        yield Finding("audit log", "ok", str(path))


def _commands(kit: Kit) -> Iterator[Finding]:
    policy = _read(kit.policy)
    if isinstance(policy, str):
        return  # reported already
    lead = policy.get("permissions", {}).get("lead")
    if _may(lead, "app_command"):
        yield Finding("commands", "ok", "leads may send commands to their jobs")
    else:
        text = "leads may not send commands to their jobs (app_command): no session can begin"
        yield Finding("commands", "bad", text, 'add "app_command": "n:submitter" to "lead" in local/authorization.json')


def _store(kit: Kit) -> Iterator[Finding]:
    resources = _read(kit.resources)
    if isinstance(resources, str):
        return  # reported already
    jobs: dict[str, Any] = next(
        (part for part in resources.get("components", ()) if part.get("id") == "job_manager"), {}
    )
    named = str(jobs.get("args", {}).get("uri_root", ""))
    unset = [name for name in re.findall(r"\{\$(\w+)\}", named) if name not in os.environ]
    if unset:
        yield Finding("job store", "bad", f"{named}: {', '.join(unset)} is not set", f"set it, or change {named!r}")
        return
    path = Path(re.sub(r"\{\$(\w+)\}", lambda found: os.environ[found[1]], named))
    there = next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))
    if not os.access(there, os.W_OK):
        yield Finding("job store", "bad", f"{path} cannot be written to", "change uri_root in local/resources.json")
    elif str(path).startswith("/tmp/"):  # noqa: S108 - checked, not used
        shared = ", and other federations of this machine use it" if path.is_relative_to(_DEFAULT_STORE) else ""
        text = f"{path}: it may be emptied{shared}"
        yield Finding("job store", "warn", text, "change uri_root in local/resources.json")
    else:
        yield Finding("job store", "ok", str(path))


# the server, from here


async def _network(kit: Kit, federation: Federation | None) -> AsyncIterator[Finding]:
    try:
        host, port = kit.server_address()
    except (DeploymentError, KeyError, IndexError, ValueError) as error:
        yield Finding("server", "bad", f"its address is not in the kit: {error}", _ASK)
        return
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"{host} cannot be resolved: {error.strerror}"
        yield Finding("server", "bad", text, "check DNS, or add it to /etc/hosts")
        return
    yield Finding("server", "ok", f"{host} is {', '.join(dict.fromkeys(str(found[4][0]) for found in addresses))}")
    finding = await _greeted(kit, host, port)
    yield finding
    if finding.state == "ok" and kit.kind == "user":
        async for found in _connected(kit, federation):
            yield found


async def _greeted(kit: Kit, host: str, port: int) -> Finding:
    name = "connection"
    where = f"{host} port {port}"
    try:
        version = await greet(kit, host, port, timeout=_TIMEOUT)
    except ssl.SSLCertVerificationError as error:
        advice = "this is the server of another federation, or a proxy; or the kit belongs to another federation"
        return Finding(name, "bad", f"{where} has a certificate of another authority: {error.verify_message}", advice)
    except ssl.SSLError as error:
        return Finding(name, "bad", f"{where} does not use TLS as FLARE does: {error.reason}", "is it the right port?")
    except TimeoutError:
        return Finding(name, "bad", f"{where} does not answer within {_TIMEOUT:g} s", "does a firewall drop it?")
    except OSError as error:
        text = f"{where}: {os.strerror(error.errno) if error.errno else error}"
        if kit.kind == "server":
            return Finding(name, "warn", text, "dfm-async flare start KIT starts it")
        return Finding(name, "bad", text, "does the server run, and does its firewall let this port in?")
    return Finding(name, "ok", f"{where} answers with {version}, and a certificate of this federation")


async def _connected(kit: Kit, federation: Federation | None) -> AsyncIterator[Finding]:
    user = str(kit.start_file()["admin"].get("username", kit.name))
    admin = Admin(kit.folder, user)
    try:
        await admin.open(_TIMEOUT)
        last_seen = await admin.last_seen()
    except DfmError as error:
        yield Finding("login", "bad", f"{user}: {error}", "is the kit this user's, and are the clocks right?")
        return
    finally:
        await admin.close()
    yield Finding("login", "ok", f"{user}, by the kit's certificate")
    sites = {name for name in (federation.sites if federation is not None else ()) if name != HUB}
    # FLARE lists a client for ten minutes after its last heartbeat. Clocks of servers may be wrong: they are not used.
    latest = max(last_seen.values(), default=0.0)
    silent = sorted(name for name, when in last_seen.items() if latest - when > _SILENT)
    missing = sorted(sites - last_seen.keys())
    text = f"connected: {', '.join(sorted(last_seen.keys() - set(silent))) or 'none'}"
    text += f"; silent for more than {_SILENT:g} s: {', '.join(silent)}" if silent else ""
    text += f"; missing: {', '.join(missing)}" if missing else ""
    if missing or silent:
        advice = f"'dfm-async flare doctor' at {', '.join([*missing, *silent])} reports why"
        yield Finding("sites", "bad" if missing else "warn", text, advice)
    else:
        yield Finding("sites", "ok", text)
