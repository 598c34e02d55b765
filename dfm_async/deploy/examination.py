"""Looks at a startup kit where its site runs: what is missing, what is wrong, and what to do about it."""

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
from dfm_async.deploy.kit import OURS, Kit
from dfm_async.deploy.probing import greet
from dfm_async.deploy.provisioning import INSTALL
from dfm_async.errors import DeploymentError, DfmError
from dfm_async.federation.federation import Federation
from dfm_async.model.findings import Finding
from dfm_async.model.flare import FEDERATION_FOLDER, SETTINGS_FILE, SiteSettings
from dfm_async.targets.flare.admin import Admin
from dfm_async.targets.flare.installed import read_settings
from dfm_async.targets.flare.node import HUB
from dfm_async.version import __version__

__all__ = ["examine"]

_NVFLARE: Final = (2, 9)
"""The version of nvflare that the target is written for."""
_PATIENCE: Final = 10.0
_DEFAULT_STORE: Final = Path("/tmp/nvflare")  # noqa: S108 - what FLARE itself takes
_IMPORTS: Final = 60.0
_SILENT: Final = 90.0
"""After so many seconds without a word a client is not there: they say something every thirty."""
_ASK: Final = "ask whoever provisions the federation for a new kit"


async def examine(kit: Kit, *, offline: bool = False) -> AsyncIterator[Finding]:
    """Tells what was found, one thing after the other.

    Args:
        kit: the kit of a server, a client or a user.
        offline: leave the server alone.

    Raises:
        DeploymentError: it is no startup kit.
    """
    kind = kit.kind
    yield Finding("kit", "ok", f"{kit.folder}, of a {kind}")
    yield _nvflare()
    yield Finding("dfm_async", "ok", f"{__version__}; all participants need the same")
    whole = True
    for finding in [*_files(kit), *_certificates(kit)]:
        whole = whole and finding.state != "bad"
        yield finding
    settings, told = _settings(kit)
    federation, more = _federation(kit, settings)
    for finding in [*told, *more]:
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


# what is in the kit


def _files(kit: Kit) -> Iterator[Finding]:
    needed = [kit.certificate_file, kit.key_file, kit.authority_file, kit.local]
    missing = [str(path.relative_to(kit.folder)) for path in needed if not path.exists()]
    if missing:
        yield Finding("files", "bad", f"not there: {', '.join(missing)}", f"copy the whole kit, or {_ASK}")
    else:
        yield Finding("files", "ok", "startup and local are there")
    if kit.key_file.exists() and stat.S_IMODE(kit.key_file.stat().st_mode) & 0o007:
        yield Finding(
            "private key", "warn", f"others on this machine can read {kit.key_file.name}", f"chmod 600 {kit.key_file}"
        )
    if not os.access(kit.folder, os.W_OK):
        told = f"{kit.folder} cannot be written to"
        yield Finding("workspace", "bad", told, "FLARE keeps its logs and jobs there: give it to the user who runs it")


def _certificates(kit: Kit) -> Iterator[Finding]:
    for name, path in (("certificate", kit.certificate_file), ("federation's", kit.authority_file)):
        if not path.exists():
            continue
        try:
            found = Certificate.read(path)
        except (ImportError, OSError, ValueError) as error:
            yield Finding(name, "bad", f"{path}: {error}", _ASK)
            return  # what else could be said of them would be of the same cause
        yield _valid(name, found)
    try:
        if kit.certificate_file.exists() and not signed_by(kit.certificate_file, kit.authority_file):
            yield Finding("signature", "bad", "the certificate is not one of this federation", _ASK)
    except (ImportError, OSError, ValueError):
        return  # told above
    if not _key_fits(kit):
        yield Finding("private key", "bad", "it does not belong to the certificate", _ASK)


def _valid(name: str, found: Certificate) -> Finding:
    left = found.left()
    told = f"{found.name}{f' of {found.org}' if found.org else ''}, valid until {found.ends:%Y-%m-%d}"
    if left.total_seconds() < 0:
        return Finding(name, "bad", f"{told}: it has ended", f"{_ASK}: 'provision' makes it anew")
    if left < ENDS_SOON:
        return Finding(name, "warn", f"{told}: {left.days} days are left", f"{_ASK}: 'provision' makes it anew")
    return Finding(name, "ok", told)


def _key_fits(kit: Kit) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(kit.certificate_file, kit.key_file)
    except ssl.SSLError:
        return False
    except OSError:
        return True  # that it is missing is told already
    return True


def _settings(kit: Kit) -> tuple[SiteSettings | None, list[Finding]]:
    name, path = "settings", kit.local / SETTINGS_FILE
    if not path.is_file():
        if kit.kind == "user":
            return None, []
        told = f"local/{SETTINGS_FILE} is not there: this site offers nothing"
        return None, [Finding(name, "bad", told, "dfm-async flare provision writes it; see 'Deploying sites'")]
    try:
        found = read_settings(kit.local, kit.name)
    except DfmError as error:
        return None, [Finding(name, "bad", str(error), f"correct {path}")]
    if kit.broken:  # whose kit it is cannot be told
        return found, []
    wanted = HUB if kit.kind == "server" else kit.name
    if kit.kind != "user" and found.site != wanted:
        told = f"they are those of site {found.site!r}, and the kit is that of {wanted!r}"
        return found, [Finding(name, "bad", told, f"write 'site: {wanted}' into {path}")]
    return found, [Finding(name, "ok", f"local/{SETTINGS_FILE}, site {found.site!r}")]


def _federation(kit: Kit, settings: SiteSettings | None) -> tuple[Federation | None, list[Finding]]:
    name = "federation"
    if settings is None:
        return None, []
    if settings.federation is None:
        if settings.allow_code:
            return None, [Finding(name, "ok", "none is installed: users bring their code")]
        told = "none is installed, and users may not bring code: this site offers nothing"
        return None, [Finding(name, "bad", told, "name its file in the settings: federation: ...")]
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
        told = f"{found.name!r} has site {settings.site!r}, which offers {count} operation{'s' * (count != 1)}"
        return found, [Finding(name, "ok", told)]
    if settings.site in (settings.homesite, HUB):
        told = f"{found.name!r}; site {settings.site!r} offers no operation, and runs what needs none"
        return found, [Finding(name, "ok", told)]
    told = f"{found.name!r} has no site {settings.site!r}, but: {', '.join(found.sites)}"
    return found, [Finding(name, "bad", told, "correct the settings, or install a newer federation file")]


async def _imports(kit: Kit, settings: SiteSettings) -> list[Finding]:
    """Imports adapters and authorizer as the site would, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dfm_async.deploy.importing", str(kit.folder)),
        cwd=kit.folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_IMPORTS):
            output, errors = await process.communicate()
    except TimeoutError:
        told = f"importing them takes longer than {_IMPORTS:g} s"
        return [Finding("adapters", "bad", told, "look at what their modules do when they are imported")]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found: dict[str, dict[str, str]] = json.loads(output.decode().splitlines()[-1])
    except (ValueError, IndexError):
        told = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        advice = "" if settings.federation is None else "what stands above may be the reason"
        return [Finding("adapters", "bad", f"they could not be looked at: {told}", advice)]
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
        told = "none: what FLARE allows is allowed" if named is None else f"{named.path} is loaded"
        findings.append(Finding("authorizer", "ok", told))
    return findings


# what FLARE is told


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
        told = f"local/resources.json does not allow {' and '.join(missing)}"
        yield Finding("components", "bad", told, f"add {', '.join(map(json.dumps, missing))} to its class_allow_list")
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
        told = "the settings say allow_code, and FLARE's policy lets nobody bring code (byoc)"
        yield Finding("code", "warn", told, 'set "byoc" in local/authorization.json, or allow_code: false')
    elif not settings.allow_code and allowed:
        told = f"FLARE's policy lets {', '.join(allowed)} bring code (byoc), and the settings do not"
        advice = 'nothing of theirs runs here; set "byoc": "none" in local/authorization.json to have FLARE say so'
        yield Finding("code", "warn", told, advice)
    else:
        told = f"{', '.join(allowed)} may bring it, and run it as this site's own" if allowed else "none may come"
        yield Finding("code", "ok", told)


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
        told = f"{path}: {error.strerror}: what cannot be recorded is refused"
        yield Finding("audit log", "bad", told, "give the file to the user who runs the site, or name another")
    else:
        yield Finding("audit log", "ok", str(path))


def _commands(kit: Kit) -> Iterator[Finding]:
    policy = _read(kit.policy)
    if isinstance(policy, str):
        return  # told already
    lead = policy.get("permissions", {}).get("lead")
    if _may(lead, "app_command"):
        yield Finding("commands", "ok", "leads may speak to their jobs")
    else:
        told = "leads may not speak to their jobs (app_command): no session can begin"
        yield Finding("commands", "bad", told, 'add "app_command": "n:submitter" to "lead" in local/authorization.json')


def _store(kit: Kit) -> Iterator[Finding]:
    resources = _read(kit.resources)
    if isinstance(resources, str):
        return  # told already
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
    elif str(path).startswith("/tmp/"):  # noqa: S108 - looked at, not used
        shared = ", and other federations of this machine use it" if path.is_relative_to(_DEFAULT_STORE) else ""
        told = f"{path}: it may be emptied{shared}"
        yield Finding("job store", "warn", told, "change uri_root in local/resources.json")
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
        told = f"{host} is no name that leads anywhere: {error.strerror}"
        yield Finding("server", "bad", told, "look at DNS, or add it to /etc/hosts")
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
        version = await greet(kit, host, port, timeout=_PATIENCE)
    except ssl.SSLCertVerificationError as error:
        advice = "this is the server of another federation, or somebody between; or the kit is of another"
        return Finding(name, "bad", f"{where} shows a certificate of somebody else: {error.verify_message}", advice)
    except ssl.SSLError as error:
        return Finding(
            name, "bad", f"{where} does not speak TLS as FLARE does: {error.reason}", "is it the right port?"
        )
    except TimeoutError:
        return Finding(name, "bad", f"{where} does not answer within {_PATIENCE:g} s", "does a firewall drop it?")
    except OSError as error:
        told = f"{where}: {os.strerror(error.errno) if error.errno else error}"
        if kit.kind == "server":
            return Finding(name, "warn", told, "dfm-async flare start KIT starts it")
        return Finding(name, "bad", told, "does the server run, and does its firewall let this port in?")
    return Finding(name, "ok", f"{where} answers with {version}, and a certificate of this federation")


async def _connected(kit: Kit, federation: Federation | None) -> AsyncIterator[Finding]:
    user = str(kit.start_file()["admin"].get("username", kit.name))
    admin = Admin(kit.folder, user)
    try:
        await admin.open(_PATIENCE)
        heard = await admin.heard()
    except DfmError as error:
        yield Finding("login", "bad", f"{user}: {error}", "is the kit this user's, and are the clocks right?")
        return
    finally:
        await admin.close()
    yield Finding("login", "ok", f"{user}, by the kit's certificate")
    sites = {name for name in (federation.sites if federation is not None else ()) if name != HUB}
    # FLARE lists a client for ten minutes after its last word. Clocks of servers may be wrong, so they are not used.
    latest = max(heard.values(), default=0.0)
    silent = sorted(name for name, when in heard.items() if latest - when > _SILENT)
    missing = sorted(sites - heard.keys())
    told = f"connected: {', '.join(sorted(heard.keys() - set(silent))) or 'none'}"
    told += f"; silent for more than {_SILENT:g} s: {', '.join(silent)}" if silent else ""
    told += f"; missing: {', '.join(missing)}" if missing else ""
    if missing or silent:
        advice = f"'dfm-async flare doctor' at {', '.join([*missing, *silent])} tells why"
        yield Finding("sites", "bad" if missing else "warn", told, advice)
    else:
        yield Finding("sites", "ok", told)
