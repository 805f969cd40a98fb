"""The routes. Everything a handler needs comes from one ``ServerState``; there is no module-level state."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from outrider.server.auth import ApiKeyMiddleware
from outrider.server.completions import create_chat_completion, create_completion
from outrider.server.errors import install_error_handlers
from outrider.server.responses import Json
from outrider.server.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    # No generated documentation: its pages load scripts from elsewhere, and this server answers in JSON alone.
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    if state.config.api_key:
        app.add_middleware(ApiKeyMiddleware, api_key=state.config.api_key)
    _add_generation(app, state)
    _add_models(app, state, created=int(time.time()))
    _add_operations(app, state)
    return app


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await create_completion(state, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(state, request)


def _add_models(app: FastAPI, state: ServerState, *, created: int) -> None:
    model: Json = {
        "id": state.model_name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": state.engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> JSONResponse:
        state.check_model(model_id)
        return JSONResponse(model)


def _add_operations(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        state.check_ready()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)
