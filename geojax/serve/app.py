# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface: routes, and errors of one shape.

Invariant: whatever a client sends, the answer is an answer or an error in OpenAI's shape, and an
error of status 5xx is the server's fault, but for 504 where a request gave itself too little time.
"""

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from geojax.config import ConfigError
from geojax.serve.errors import ApiError, invalid
from geojax.serve.exchange import Exchange
from geojax.serve.guard import Guard
from geojax.serve.page import HEADERS, PAGE
from geojax.serve.protocol import ChatRequest, CompletionRequest
from geojax.serve.service import Service
from geojax.serve.stream import EventStream, unless_gone
from geojax.serve.tenants import Tenants


def make_app(
    service: Service, tenants: Tenants, stuck_seconds: float, local: bool = False
) -> FastAPI:
    """`stuck_seconds`: /health fails where a call of the engine takes longer; `local`: requests
    must name this machine as their host."""
    limits, metrics, loop = service.limits, service.metrics, service.loop
    app = FastAPI(
        title="geojax serve",
        version="1",
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False},
    )
    app.add_middleware(Guard, tenants=tenants, limits=limits, metrics=metrics, local=local)
    began = int(time.time())

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        metrics.on_refused(error.status)
        return _told(error)

    @app.exception_handler(ConfigError)
    async def refuse_config(request: Request, error: ConfigError) -> Response:
        return await refuse(request, ApiError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, invalid(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        found = ApiError(error.status_code, error.detail)
        metrics.on_refused(found.status)
        return JSONResponse(found.body, found.status, error.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return await refuse(request, ApiError(500, "an error of the server's; see its log"))

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request):
        return await _respond(request, await service.open(body, request.state.tenant))

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request):
        return await _respond(request, await service.open(body, request.state.tenant))

    async def _respond(request: Request, exchange: Exchange) -> Response:
        if exchange.body.stream:
            return EventStream(exchange.events(), limits.stall_seconds, exchange.close)
        try:
            found = await unless_gone(exchange.whole(), request.receive)
        except ApiError as error:
            return _told(error)
        finally:
            exchange.close()
        return JSONResponse(found) if found else Response(status_code=499)

    def _model() -> dict[str, Any]:
        model = {"id": service.name, "object": "model", "created": began, "owned_by": "geojax"}
        config, mask = service.prompts.model.config, service.prompts.model.mask_id
        model |= {"max_model_len": config.context or None}
        return model | {"vocab_size": config.vocab_size, "mask_id": mask}

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model()]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return _model()

    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        if not loop.alive:
            raise ApiError(503, "the engine has stopped", "engine_dead")
        if loop.state != "warming" and loop.stuck_for() > stuck_seconds:
            raise ApiError(503, f"a call of the engine takes over {stuck_seconds} s", "stuck")
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Response:
        content = {"state": loop.state, "warm_up": loop.warmed}
        return JSONResponse(content, 200 if loop.state == "ready" and loop.alive else 503)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(PAGE, headers=HEADERS, media_type="text/html; charset=utf-8")

    return app


def _told(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "A request that cannot be answered."},
    "5XX": {"description": "The server cannot answer now."},
}
