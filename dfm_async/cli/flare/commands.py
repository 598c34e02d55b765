"""The commands of ``dfm-async flare`` and their options. What they do is imported when they run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dfm_async.cli.options import CompatOption, FederationArgument, JsonOption

__all__ = ["flare"]

flare = typer.Typer(
    help="Federations on NVIDIA FLARE.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_FOLDER = Path(".dfm-flare")


class Scheme(StrEnum):
    """How participants talk."""

    GRPC = "grpc"
    TCP = "tcp"


class DeploymentKind(StrEnum):
    """What runs the containers."""

    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


FolderOption = Annotated[Path, typer.Option(metavar="DIR", help="Where the federation runs, and keeps its kits.")]
HomesiteOption = Annotated[str, typer.Option(metavar="NAME", help="The site of the applications.")]
KitArgument = Annotated[Path, typer.Argument(metavar="KIT", help="The folder of a startup kit.", show_default=False)]


@flare.command(short_help="Make the startup kits of a federation.")
def provision(
    federation: FederationArgument,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the kits go; by default a folder with the federation's name."),
    ] = None,
    server: Annotated[
        str, typer.Option(metavar="HOST", help="The host name by which sites and users reach the server.")
    ] = "localhost",
    port: Annotated[int, typer.Option(metavar="PORT", help="Where the server listens for sites.")] = 8002,
    admin_port: Annotated[int, typer.Option(metavar="PORT", help="Where it listens for users.")] = 8003,
    user: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EMAIL[=ROLE]",
            help="Who may use it: lead (the default), member, org_admin or project_admin. Repeatable.",
            show_default=False,
        ),
    ] = None,
    homesite: HomesiteOption = "home",
    org: Annotated[str, typer.Option(metavar="NAME", help="The organisation of all others.")] = "dfm",
    org_of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ORG", help="The organisation of a site, a user, or 'server'. Repeatable.", show_default=False
        ),
    ] = None,
    scheme: Annotated[Scheme, typer.Option(help="How participants talk.")] = Scheme.GRPC,
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE", help="Users may bring code to this site; '*' means all. Repeatable.", show_default=False
        ),
    ] = None,
    compat: CompatOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the startup kits of a federation: one for the server, for each site and for each user.

    In a folder with earlier kits, certificates stay as they are, and new sites and users get theirs.
    """
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.provisioning import Wanted, provision_kits

        wanted = Wanted(
            federation=federation,
            out=out,
            server=server,
            port=port,
            admin_port=admin_port,
            users=tuple(user or ()),
            homesite=homesite,
            org=org,
            orgs=tuple(org_of or ()),
            scheme=scheme.value,
            allow_code=tuple(allow_code or ()),
            compat=compat,
        )
    run_async(lambda: provision_kits(wanted, as_json=as_json))


@flare.command(short_help="Run the server or the client of a kit here.")
def start(kit: KitArgument) -> None:
    """Run the server or the client of a startup kit, until it is ended: in a shell, a service or a container."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.sites import start_site
    run_async(lambda: start_site(kit))


@flare.command(short_help="Tell whether what 'start' runs is connected.")
def probe(kit: KitArgument) -> None:
    """Tell whether the server or the client of a kit works, on this machine: for the probes of containers.

    A server has to answer with its certificate; a client has to have a connection to its server.
    """
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.probing import probe_site
    run_async(lambda: probe_site(kit))


@flare.command(short_help="Check a startup kit, and what its site needs.")
def doctor(
    kit: KitArgument,
    offline: Annotated[bool, typer.Option("--offline", help="Leave the server alone.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a startup kit and what its site needs, where the site runs, and say what to do."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.sites import examine_kit
    run_async(lambda: examine_kit(kit, offline=offline, as_json=as_json))


@flare.command(short_help="Start a federation on this machine.")
def up(
    federation: Annotated[
        str | None,
        typer.Argument(
            metavar="FEDERATION",
            help="A federation file (.yaml), package.module:name, or file.py[:name]; by default an example.",
            show_default=False,
        ),
    ] = None,
    folder: FolderOption = _FOLDER,
    homesite: HomesiteOption = "home",
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Applications may bring code, to all sites.")] = (
        False
    ),
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, and end it with Ctrl-C.")] = False,
    kits: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where startup kits are kept, if not in DIR.", show_default=False)
    ] = None,
    compat: CompatOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a real federation on this machine, on loopback only: a FLARE server, and a client for each site."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.local import Start, start_federation

        wanted = Start(
            federation=federation,
            folder=folder,
            homesite=homesite,
            allow_code=allow_code,
            kits=kits,
            compat=compat,
            as_json=as_json,
        )
    run_async(lambda: start_federation(wanted, foreground=foreground))


@flare.command(short_help="Show the federation on this machine.")
def status(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """Show the server and the clients of the federation on this machine, and what they carry."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.local import show_status
    run_async(lambda: show_status(folder, as_json=as_json))


@flare.command(short_help="End the federation on this machine.")
def down(folder: FolderOption = _FOLDER, as_json: JsonOption = False) -> None:
    """End the federation on this machine, and wait until nothing of it is left."""
    from dfm_async.cli.program import plain_errors, run_async

    with plain_errors():
        from dfm_async.cli.flare.local import end_federation
    run_async(lambda: end_federation(folder, as_json=as_json))


@flare.command(short_help="Write container files for startup kits.")
def deploy(
    kits: Annotated[
        Path, typer.Argument(metavar="KITS", help="The folder that 'provision' has written.", show_default=False)
    ],
    image: Annotated[str, typer.Option(metavar="NAME", help="The image of all participants.")] = "dfm-async-site",
    kind: Annotated[DeploymentKind, typer.Option(help="What runs the containers.")] = DeploymentKind.COMPOSE,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files go.")] = Path("deploy"),
    package: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REQUIREMENT",
            help="What pip installs in the image, besides dfm-async: the package of your adapters. Repeatable.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="The namespace in Kubernetes.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """Write a Dockerfile, and a compose file or manifests for Kubernetes. Keys stay out of the image."""
    from dfm_async.cli.program import plain_errors

    with plain_errors():
        from dfm_async.cli.flare.containers import write_files

        write_files(
            kits,
            out,
            image=image,
            kind=kind.value,
            packages=tuple(package or ()),
            namespace=namespace,
            as_json=as_json,
        )
