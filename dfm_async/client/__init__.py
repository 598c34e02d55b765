"""The HTTP client of a web service: submit jobs, follow them, cancel them. Needs the extra ``client``."""

from dfm_async.base.lazy import lazy_imports as _lazy_imports
from dfm_async.base.text import install_hint as _install_hint

try:
    import httpx2 as _httpx2  # noqa: F401 - only to name the extra that is missing
except ImportError as error:
    raise ImportError(f"the client of web services needs an extra: {_install_hint('client')}") from error

with _lazy_imports(__name__):
    from dfm_async.client.client import Client as Client
    from dfm_async.client.client import ServedPipeline as ServedPipeline
    from dfm_async.errors import ServiceError as ServiceError
