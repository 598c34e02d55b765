"""The commands of ``dfm-async flare`` and their options. What they do is imported when they run."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dfm_async.cli.command_options import (
    FLARE_FOLDER,
    CompatOption,
    FederationArgument,
    FolderOption,
    HomesiteOption,
    JsonOption,
    UpOptions,
    Work,
    command,
    option,
)

flare = typer.Typer(
    help="Federations on NVIDIA FLARE.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Scheme(StrEnum):
    """How participants communicate."""

    GRPC = "grpc"
    TCP = "tcp"


class DeploymentKind(StrEnum):
    """What runs the containers."""

    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


KitArgument = Annotated[Path, typer.Argument(metavar="KIT", help="The folder of a startup kit.", show_default=False)]


@command(flare, "Create the startup kits of a federation.")
def provision(
    federation: FederationArgument,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder for the kits; by default the name of the federation.")
    ] = None,
    server: Annotated[
        str, typer.Option(metavar="HOST", help="The host name by which sites and users reach the server.")
    ] = "localhost",
    port: Annotated[int, typer.Option(metavar="PORT", help="The port for sites.")] = 8002,
    admin_port: Annotated[int, typer.Option(metavar="PORT", help="The port for users.")] = 8003,
    user: Annotated[
        list[str] | None,
        option(
            "A user, with a role: lead (the default), member, org_admin or project_admin. Repeatable.", "EMAIL[=ROLE]"
        ),
    ] = None,
    homesite: HomesiteOption = "home",
    org: Annotated[str, typer.Option(metavar="NAME", help="The organisation of all other participants.")] = "dfm",
    org_of: Annotated[
        list[str] | None, option("The organisation of a site, a user, or 'server'. Repeatable.", "NAME=ORG")
    ] = None,
    scheme: Annotated[Scheme, typer.Option(help="How participants communicate.")] = Scheme.GRPC,
    allow_code: Annotated[
        list[str] | None, option("Users may send code to this site; '*' means all. Repeatable.", "SITE")
    ] = None,
    compat: CompatOption = False,
    as_json: JsonOption = False,
) -> Work:
    """Create the startup kits of a federation: one for the server, for each site and for each user.

    In a folder with earlier kits, existing certificates are kept, and only new sites and users get new ones.
    """
    from dfm_async.cli.flare.provision import parse_organisations, parse_user, provision_kits
    from dfm_async.cli.references import find_federation
    from dfm_async.deploy.federation_kits import project_of

    found, _ = find_federation(federation, compat=compat)
    project = replace(
        project_of(found, server=server, users=map(parse_user, user or ()), homesite=homesite),
        port=port,
        admin_port=admin_port,
        org=org,
        orgs=parse_organisations(org_of or ()),
        scheme=scheme.value,
    )
    return provision_kits(found, project, out, homesite=homesite, allow_code=allow_code or (), as_json=as_json)


@command(flare, "Run the server or the client of a kit here.")
def start(kit: KitArgument) -> Work:
    """Run the server or the client of a startup kit until it is stopped: in a shell, a service or a container."""
    from dfm_async.cli.flare.kits import start_site

    return start_site(kit)


@command(flare, "Check whether a started site is connected.")
def probe(kit: KitArgument) -> Work:
    """Check whether the server or the client of a kit works on this machine, for the probes of containers.

    A server must answer with its certificate; a client must have a connection to its server.
    """
    from dfm_async.cli.flare.kits import probe_site

    return probe_site(kit)


@command(flare, "Check a startup kit and its site.")
def doctor(
    kit: KitArgument,
    offline: Annotated[bool, typer.Option("--offline", help="Do not contact the server.")] = False,
    as_json: JsonOption = False,
) -> Work:
    """Check a startup kit and what its site needs, on the machine of the site, and suggest fixes."""
    from dfm_async.cli.flare.kits import examine_kit

    return examine_kit(kit, offline=offline, as_json=as_json)


@command(flare, "Start a federation on this machine.")
def up(
    options: UpOptions,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C ends the federation.")
    ] = False,
) -> Work:
    """Start a real federation on this machine, on loopback only: a FLARE server, and a client for each site."""
    from dfm_async.cli.flare.local import start_federation

    return start_federation(options, foreground=foreground)


@command(flare, "Show the federation on this machine.")
def status(folder: FolderOption = FLARE_FOLDER, as_json: JsonOption = False) -> Work:
    """Show the server and the clients of the federation on this machine, and their host jobs."""
    from dfm_async.cli.flare.local import show_status

    return show_status(folder, as_json=as_json)


@command(flare, "End the federation on this machine.")
def down(folder: FolderOption = FLARE_FOLDER, as_json: JsonOption = False) -> Work:
    """End the federation on this machine, and wait until nothing of it is left."""
    from dfm_async.cli.flare.local import end_federation

    return end_federation(folder, as_json=as_json)


@command(flare, "Write container files for startup kits.")
def deploy(
    kits: Annotated[Path, typer.Argument(metavar="KITS", help="The folder with the kits.", show_default=False)],
    image: Annotated[str, typer.Option(metavar="NAME", help="The image of all participants.")] = "dfm-async-site",
    kind: Annotated[DeploymentKind, typer.Option(help="The kind of files to write.")] = DeploymentKind.COMPOSE,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the files.")] = Path("deploy"),
    package: Annotated[
        list[str] | None,
        option(
            "What pip installs in the image, besides dfm-async: the package of your adapters. Repeatable.",
            "REQUIREMENT",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="The namespace in Kubernetes.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Write a Dockerfile, and a compose file or manifests for Kubernetes. Keys stay out of the image."""
    from dfm_async.cli.flare.provision import write_files

    write_files(
        kits,
        out,
        image=image,
        kind=kind.value,
        packages=tuple(package or ()),
        namespace=namespace,
        as_json=as_json,
    )
