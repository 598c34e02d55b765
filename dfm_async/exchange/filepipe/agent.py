"""The agent in a job of NVFLARE 2.5 to 2.8, for a program that its ``SubprocessLauncher`` has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dfm_async.exchange.filepipe.config import read_client_config
from dfm_async.exchange.filepipe.models import ModelCodec
from dfm_async.exchange.filepipe.pipe import FilePipe
from dfm_async.exchange.filepipe.queue import Side
from dfm_async.exchange.options import AgentOptions

if TYPE_CHECKING:
    from dfm_async.exchange.agent import FlareAgent

__all__ = ["agent_of_client_api"]

_SILENCE: Final = 0.9
"""A stock executor waits for a fresh sign of life before each task, so it is as if it accepted no more than this."""


def agent_of_client_api(kind: type[FlareAgent], options: AgentOptions | None, **rest: Any) -> FlareAgent:
    """Makes an agent from the configuration that the site has written.

    Raises:
        HandshakeRefused: there is none, or it names another transport than files.
    """
    config = read_client_config()
    if options is None:
        interval = AgentOptions().heartbeat_interval
        silence = config.heartbeat_timeout
        options = AgentOptions(
            heartbeat_timeout=silence if silence == 0 or silence > interval else 2 * interval,
            submit_result_timeout=config.submit_result_timeout,
            launch_once=config.launch_once,
        )

    def connect() -> FilePipe:
        pipe = FilePipe(config.root, Side.ACTIVE, metrics=config.metrics, silence=_SILENCE)
        pipe.start()
        return pipe

    agent = kind(None, options, **{"codec": ModelCodec(), **rest}, pipe=connect)
    agent.site, agent.job = config.site, config.job
    return agent
