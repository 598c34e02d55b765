"""Options of sessions on NVIDIA FLARE, and the settings of a site there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from dfm_async.model.checks import Options, check_number, whole
from dfm_async.model.options import LocalOptions
from dfm_async.model.resources import ClassPath

SETTINGS_FILE = "dfm_async.yaml"
"""The name of a site's settings file, in the folder ``local`` of its startup kit."""
FEDERATION_FOLDER = "federation"
"""The folder of the federation's files, in the same folder."""


class FlareOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a session with a federation that runs on NVIDIA FLARE."""

    startup_kit: str | os.PathLike[str]
    """The folder of the user's startup kit, as provisioned."""
    user: str
    """The user's name, as provisioned."""
    code: Literal["installed", "travels"] = "installed"
    """The source of the code of operations: ``"installed"`` at the sites, or sent by this application (``"travels"``),
    which needs the right to bring code (FLARE's ``byoc``), and sites with ``allow_code``."""
    gateway: Literal["auto", "never"] = "auto"
    """The transport of results: ``"auto"`` uses the homesite's client, if it runs on this machine, otherwise app
    commands; ``"never"`` always uses app commands."""
    linger: float = 60.0
    """The number of seconds for which the federation keeps a host job that no application and no job needs."""
    keep_unread: float = 3600.0
    """The number of seconds for which the federation keeps unread results, and jobs that wait for an absent
    application."""
    delivery_timeout: float = 30.0
    """The number of seconds for which the delivery of a message is retried before its job fails. Between sites, the
    value of the session that started the host job applies."""
    start_timeout: float = 60.0
    """The number of seconds within which the server must answer when a session opens, and a site must be ready when a
    pipeline needs it."""
    on_close: Literal["abort", "detach"] = "abort"
    """What happens to running jobs when the session is closed: they end, or continue without the application."""
    classes: tuple[type, ...] = ()
    """Classes of values that sites may send, in addition to those in the signatures of the federation's operations."""
    local: LocalOptions = LocalOptions()
    """The limits of logs and queues, and grace periods. Each site configures how its workers start."""

    def __post_init__(self) -> None:
        if not isinstance(self.startup_kit, str | os.PathLike):
            raise TypeError(f"startup_kit must be a path, not {self.startup_kit!r}")
        if not isinstance(self.user, str) or not self.user:
            raise ValueError(f"user must be the name of a user, not {self.user!r}")
        if self.code not in ("installed", "travels"):
            raise ValueError(f"code must be 'installed' or 'travels', not {self.code!r}")
        if self.gateway not in ("auto", "never"):
            raise ValueError(f"gateway must be 'auto' or 'never', not {self.gateway!r}")
        if self.on_close not in ("abort", "detach"):
            raise ValueError(f"on_close must be 'abort' or 'detach', not {self.on_close!r}")
        for name in ("delivery_timeout", "start_timeout"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("linger", "keep_unread"):
            check_number(name, getattr(self, name))
        if not all(isinstance(found, type) for found in self.classes):
            raise TypeError(f"classes must be classes, not {self.classes!r}")
        if not isinstance(self.local, LocalOptions):
            raise TypeError(f"local must be LocalOptions, not {self.local!r}")


class SiteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one site, in ``local/dfm_async.yaml`` of its startup kit."""

    site: str
    """The name of this site in the federation."""
    homesite: str = "home"
    """The name of the site of the applications; its client opens a gateway for applications on its machine."""
    federation: str | None = None
    """The path of the installed federation file, relative to the folder of the settings; None if the site has none."""
    compat: bool = False
    """Whether names of nv_dfm_core that the federation's adapters import are provided, if it is not installed."""
    allow_code: bool = False
    """Whether users with the right to bring code may run it here. Only for sites that trust these users like their own
    staff."""
    authorizer: ClassPath | None = None
    """The class that authorizes pipelines, such as ``{path: lab.policy.Authorizer, args: {...}}``; None allows
    everything that FLARE allows."""
    audit: str | None = "audit.jsonl"
    """The path of the audit log, relative to the workspace of the site; None for no audit log."""
    max_message_bytes: int = 256 * 1024 * 1024
    """The maximum size of an incoming message, in bytes."""
    max_job_bytes: int | None = None
    """The maximum number of bytes that one job may send to this site; None means no limit."""
    environment: Mapping[str, str] = {}
    """Further environment variables for the workers."""
    journal: bool | str = False
    """Of the server: whether the jobs of users outlive it, and where they are kept: in a folder of its workspace
    (True), in another folder, relative to the workspace, or in a PostgreSQL database, by its URL."""
    journal_keep_for: float = 7 * 86400.0
    """The number of seconds for which the server keeps jobs in the journal after they have ended."""
    journal_max_bytes: int = 10 * 1024**3
    """The size of the journal of one user, in bytes, at which the server deletes the oldest ended jobs, and then takes
    no further ones. In PostgreSQL, the database decides."""

    def __post_init__(self) -> None:
        if not self.site:
            raise ValueError(f"site must be the name of a site of the federation, not {self.site!r}")
        if self.journal == "":
            raise ValueError("journal must be true, false, a folder or the URL of a PostgreSQL database, not ''")
        check_number("journal_keep_for", self.journal_keep_for)
        for name in ("max_message_bytes", "max_job_bytes", "journal_max_bytes"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value)
