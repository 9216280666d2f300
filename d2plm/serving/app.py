"""The HTTP service: MLflow's protocol (`/invocations`, `/ping`, `/health`, `/version`) in FastAPI.

Requests are checked in one thread and computed in another (`Schedule`), so that pings do not wait.
Bodies are read by hand instead of as parameters of the endpoint, because FastAPI reads bodies of
any size and parses them in the event loop.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anyio import fail_after
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from d2plm import __version__
from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.serving.schedule import BusyError, Schedule
from d2plm.serving.service import Service, parse_request

JSON = "application/json"
CONTENT_TYPES = (JSON, f"{JSON};charset=utf-8")
BYTES_PER_RESIDUE, MIN_BYTES = 16, 2**20  # limits on a request's body
# MLflow's codes; all other statuses have that of a bad request.
CODES = {400: "INVALID_PARAMETER_VALUE", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL_ERROR"}
MAX_MESSAGE = 500  # characters, since a message may quote the request


def application(service: Service, timeout: float) -> FastAPI:
    """Make the application that answers requests with `service`.

    Args:
        service: its limit on residues also limits the bytes of a request.
        timeout: seconds for a request after its body has been read, including the wait for others;
            and for reading the body.
    """
    app = FastAPI(title="D2PLM", version=__version__, openapi_url=None)
    max_bytes = max(BYTES_PER_RESIDUE * service.max_residues, MIN_BYTES)
    schedule, checking = Schedule(timeout), ThreadPoolExecutor(1)

    @app.get("/ping")
    @app.get("/health")
    async def ping() -> None:
        """Answer as soon as the model is loaded."""

    @app.get("/version")
    async def version() -> str:
        return __version__

    @app.post("/invocations")
    async def invocations(request: Request) -> JSONResponse:
        with fail_after(timeout):
            body = await _read(request, max_bytes)
        work = await asyncio.wrap_future(checking.submit(lambda: service.work(parse_request(body))))
        job = schedule.accept(work)
        answer: asyncio.Future[Any] = asyncio.wrap_future(job)
        gone: asyncio.Future[Any] = asyncio.create_task(_hang_up(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return JSONResponse({"predictions": answer.result()})
        finally:
            schedule.drop(job)
            gone.cancel()
            answer.cancel()

    bug = "this is a bug in D2PLM; the server's log has the details"

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> JSONResponse:
        return _refusal(error.status_code, error.detail)

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> JSONResponse:
        return _refusal(429, str(error), {"Retry-After": str(error.retry_after)})

    for kind, status, message in (
        (ConfigError, 400, None),
        (DataError, 400, None),
        (ModelError, 500, None),
        (ClientDisconnect, 400, "the request ended early"),
        (TimeoutError, 408, f"the request was not received within {timeout:g} seconds"),
        (Exception, 500, bug),
    ):
        app.add_exception_handler(
            kind, lambda _, error, s=status, m=message: _refusal(s, m or str(error))
        )
    return app


async def _read(request: Request, max_bytes: int) -> bytearray:
    """Read the body of a request, and keep at most `max_bytes` + 1 of it."""
    if request.headers.get("content-type", "").replace(" ", "").lower() not in CONTENT_TYPES:
        raise HTTPException(415, f"Content-Type: must be {JSON}, in UTF-8")
    body = bytearray()
    async for chunk in request.stream():  # to the end, because clients send all before reading
        body += chunk[: max_bytes + 1 - len(body)]
    if len(body) > max_bytes:
        message = f"the request is longer than {max_bytes:,} bytes; send fewer rows"
        raise HTTPException(413, message)
    return body


async def _hang_up(request: Request) -> None:
    """Wait until the client closes the connection; the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"
    code = CODES.get(status, "BAD_REQUEST")
    return JSONResponse({"error_code": code, "message": shown}, status, headers)
