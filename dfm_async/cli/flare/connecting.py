"""``--flare`` of ``run`` and ``serve``: which federation, and as whom."""

from __future__ import annotations

from pathlib import Path

from dfm_async.cli.exits import BadInput
from dfm_async.deploy.kit import Kit
from dfm_async.errors import DeploymentError
from dfm_async.model.flare import FlareOptions

__all__ = ["flare_options"]


def flare_options(kit: Path | None, user: str | None, *, bring_code: bool) -> FlareOptions | None:
    """Makes the options of a session; None if it stays on this machine.

    Args:
        kit: the user's startup kit.
        user: the user's name; what the kit says, if it is None.
        bring_code: whether the code of operations comes from here.

    Raises:
        BadInput: it is no kit of a user.
    """
    if kit is None:
        if user is not None or bring_code:
            raise BadInput("--user and --bring-code are for --flare KIT")
        return None
    found = Kit(Path.cwd() / kit)
    try:
        kind = found.kind
        known = str(found.start_file().get("admin", {}).get("username", "")) if kind == "user" else ""
    except DeploymentError as error:
        raise BadInput(f"--flare {kit}: {'; '.join(error.problems)}") from error
    if kind != "user":
        raise BadInput(f"--flare {kit}: it is the kit of a {kind}; name the folder of a user's startup kit")
    return FlareOptions(
        startup_kit=str(found.folder),
        user=user or known or found.name,
        code="travels" if bring_code else "installed",
    )
