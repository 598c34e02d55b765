"""Sessions and jobs with the methods that DFM's have, on a blocking session."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self

from dfm_async.errors import DfmError, SessionClosed
from dfm_async.federation.federation import Federation
from dfm_async.language.pipeline import Pipeline
from dfm_async.model.events import Failure, FrameCompleted, Result
from dfm_async.model.flare import FlareOptions
from dfm_async.model.options import LocalOptions
from dfm_async.model.status import JobStatus
from dfm_async.planning.plan import Plan
from dfm_async.site.compat import STATUS_PLACE_NAME, ErrorInfo, ErrorToken, Frame, StopToken
from dfm_async.sync.job import Job
from dfm_async.sync.session import Session

_log = logging.getLogger("dfm_async.compat")

FEDERATIONS: Final[dict[str, Federation]] = {}
"""The federations that applications of this process use, by their packages."""

DfmCallback = Callable[[str, str | None, Frame, str, Any], Any]
"""``(from_site, node, frame, place, data)``, where data may be a token."""


def configure_session_logging(*_: Any, **__: Any) -> logging.Logger:
    """Return the logger of sessions. Its level and handlers are those that the application sets."""
    return _log


class DfmSession:
    """A session as applications for DFM use it.

    Args:
        federation_name: the package of the federation.
        homesite: the site that the application is.
        target: "local" or "flare".
        logger: gets errors that no callback receives.
        callback_dispatcher: must be None: callbacks run in a thread of each job.
        kwargs: with "local": ``max_concurrent_jobs``; with "flare": ``user``, and ``admin_package``, the startup kit.
            The other folders that DFM needs have no effect.
    """

    def __init__(
        self,
        federation_name: str,
        homesite: str,
        target: Literal["flare", "local"] = "flare",
        logger: logging.Logger | None = None,
        callback_dispatcher: None = None,
        **kwargs: Any,
    ) -> None:
        if federation_name not in FEDERATIONS:
            raise ValueError(f"federation {federation_name!r} is not installed: call dfm_async.compat.install(path)")
        if callback_dispatcher is not None:
            raise TypeError("callbacks run in a thread of each job: leave callback_dispatcher= out")
        options = _flare_options(**kwargs) if target == "flare" else _local_options(**kwargs)
        self._session = Session(FEDERATIONS[federation_name], homesite, target, options)
        self._logger = logger or _log
        self._deliveries: set[_CallbackDelivery] = set()

    def connect(self, debug: bool = False) -> None:
        """Start the sites, or connect to them."""
        self._session.connect()

    def close(self, debug: bool = False) -> None:
        """End running jobs, and everything else. Callbacks that run are waited for."""
        self._session.close()
        for delivery in self._deliveries:
            delivery.wait(None)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(
        self,
        pipeline: Pipeline,
        restrict_to_sites: Literal["homesite"] | list[str] | None = None,
        debug: bool = False,
    ) -> Plan:
        """Check a pipeline, and return its plan."""
        return self._session.prepare(pipeline, restrict_to_sites)

    def execute(
        self,
        pipeline: Plan,
        input_params: dict[str, Any] | list[dict[str, Any]] | None = {},  # noqa: B006 - never changed
        autostop: bool = True,
        default_callback: DfmCallback | None = None,
        place_callbacks: Mapping[str, DfmCallback] | None = None,
        debug: bool = False,
        options: Any = None,
        force_modgen: bool = False,
    ) -> DfmJob:
        """Start a job. Callbacks get its results, and the tokens that DFM sends for errors and ends."""
        job = self._session.execute(pipeline, input_params, autostop)
        return self._delivered(job, default_callback, place_callbacks)

    def reattach(
        self,
        job_id: str,
        default_callback: DfmCallback | None = None,
        place_callbacks: Mapping[str, DfmCallback] | None = None,
    ) -> DfmJob:
        """Find a job again. Callbacks get everything from its beginning."""
        if place_callbacks is not None and default_callback is None:
            raise ValueError("place_callbacks need a default_callback")
        job = self._session.reattach(job_id)
        if default_callback is None or not job.was_found:
            return DfmJob(job, None)
        return self._delivered(job, default_callback, place_callbacks)

    def _delivered(self, job: Job, default: DfmCallback | None, places: Mapping[str, DfmCallback] | None) -> DfmJob:
        delivery = _CallbackDelivery(job, self._session.homesite, default, dict(places or {}), self._logger)
        self._deliveries = {other for other in self._deliveries if not other.wait(0)} | {delivery}
        return DfmJob(job, delivery)


class DfmJob:
    """A job as applications for DFM use it."""

    def __init__(self, job: Job, delivery: _CallbackDelivery | None) -> None:
        self._job = job
        self._delivery = delivery

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._job.job_id

    @property
    def was_found(self) -> bool:
        """Whether the session knows the job."""
        return self._job.was_found

    def get_status(self) -> JobStatus:
        """Return the status. As in DFM, a job whose operations failed is finished."""
        status = self._job.status
        return JobStatus.FINISHED if status is JobStatus.FAILED else status

    def wait_until_finished(self, timeout: float | None = None) -> bool:
        """Wait for the end, and for its callbacks; return False after the timeout."""
        if self._delivery is None:
            return self._job.wait_until_finished(timeout)
        return self._delivery.wait(timeout)

    def cancel(self) -> None:
        """Stop the job."""
        self._job.cancel()

    def detach(self) -> None:
        """End the callbacks. The job goes on."""
        if self._delivery is not None:
            self._delivery.stop()

    def send_input_params(self, input_params: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Add parameter sets to a job that is still open."""
        self._job.send_input_params(input_params)

    def send_stop_frame(self) -> None:
        """Declare that no further parameter set will come."""
        self._job.send_stop_frame()


class _CallbackDelivery:
    """Calls the callbacks of a job, in a thread: with its results, and with tokens as DFM sends them."""

    def __init__(
        self,
        job: Job,
        homesite: str,
        default: DfmCallback | None,
        places: dict[str, DfmCallback],
        logger: logging.Logger,
    ) -> None:
        self._job_id = job.job_id
        self._events = job.events()
        self._homesite = homesite
        self._default = default
        self._places = places
        self._logger = logger
        self._thread = threading.Thread(target=self._run, name="dfm-callbacks", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; return whether it is reached. A callback does not wait for itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Call no further callback."""
        self._default, self._places = None, {}
        self._events.close()
        self.wait(None)

    def _run(self) -> None:
        failed: set[int] = set()
        try:
            for event in self._events:
                if isinstance(event, Result):
                    self._send(event.site, event.node, Frame(event.frame), event.place, event.value)
                elif isinstance(event, Failure):
                    failed.add(event.frame[0] if event.frame else 0)
                    self._report(event)
                elif isinstance(event, FrameCompleted) and event.frame[0] not in failed:
                    self._send(self._homesite, None, Frame(event.frame), STATUS_PLACE_NAME, StopToken())
        except SessionClosed:
            return
        except DfmError as error:  # its log is lost or damaged
            self._logger.error("the results of job %s cannot be read: %s", self._job_id, error)  # noqa: TRY400
        self._send(self._homesite, None, Frame.stop_frame(), STATUS_PLACE_NAME, StopToken())

    def _report(self, failure: Failure) -> None:
        place, error = failure.place or STATUS_PLACE_NAME, failure.error
        if failure.place is None and self._callback(place) is None:
            self._logger.error("job %s: %s", self._job_id, error)
        name = error.type_name.rpartition(".")[2]
        token = ErrorToken([ErrorInfo(name, error.message, error.remote_traceback)])
        self._send(failure.site, failure.node, Frame(failure.frame), place, token)

    def _callback(self, place: str) -> DfmCallback | None:
        return self._places.get(place, self._default)

    def _send(self, site: str, node: str | None, frame: Frame, place: str, data: Any) -> None:
        callback = self._callback(place)
        if callback is not None:
            try:
                callback(site, node, frame, place, data)
            except Exception:
                self._logger.exception("a callback of job %s raised", self._job_id)


def _local_options(max_concurrent_jobs: int | None = None) -> LocalOptions:
    return LocalOptions(max_concurrent_jobs=max_concurrent_jobs)


def _flare_options(
    user: str | None = None,
    admin_package: str | os.PathLike[str] | None = None,
    flare_workspace: object = None,
    job_workspace: object = None,
) -> FlareOptions:
    if user is None or admin_package is None:
        raise TypeError("a session on FLARE needs user=, and admin_package=, the folder of the user's startup kit")
    return FlareOptions(startup_kit=admin_package, user=user)
