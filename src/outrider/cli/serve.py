"""``outrider serve``: an OpenAI-compatible HTTP server over one engine."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.engine_options import with_engine_options
from outrider.cli.json_output import print_json_line, spec_json
from outrider.config import EngineArgs
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.launch import join_group, make_engine
from outrider.server.config import ServerConfig
from outrider.server.runner import ServerReport, bind, run_server

_DEFAULTS = ServerConfig()


@with_engine_options
def serve_command(
    engine_args: EngineArgs,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 lets the system choose.")] = _DEFAULTS.port,
    api_key: Annotated[
        str, typer.Option(help="Key that clients must send as a bearer token; none by default.")
    ] = _DEFAULTS.api_key,
    served_model_name: Annotated[
        str, typer.Option(help="The model's id in the API; by default its name on this command line.")
    ] = _DEFAULTS.served_model_name,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest request body; more is a 413.")
    ] = _DEFAULTS.max_body_bytes,
    max_prompts: Annotated[
        int, typer.Option(help="Sequences of one request at most, prompts times n; more prompts are a 413.")
    ] = _DEFAULTS.max_prompts,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that requests in flight may take to finish after SIGTERM.")
    ] = _DEFAULTS.drain_timeout_s,
    log_interval: Annotated[
        float, typer.Option(help="Seconds between the lines on throughput and drafting.")
    ] = _DEFAULTS.log_interval_s,
    disable_frontend_multiprocessing: Annotated[
        bool,
        typer.Option(
            "--disable-frontend-multiprocessing",
            help="Run a single rank's engine in the server's own process: one interpreter for HTTP and steps.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line of counters.")] = False,
) -> None:
    """Serve a model over HTTP: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        max_body_bytes=max_body_bytes,
        max_prompts=max_prompts,
        drain_timeout_s=drain_timeout,
        log_interval_s=log_interval,
    )
    join_group(engine_args)
    with bind(config) as bound:
        core = make_engine(engine_args, own_process=not disable_frontend_multiprocessing)
        engine = AsyncEngine(core, model_name=engine_args.model)
        report = run_server(engine, config, bound=bound)
    if json:
        print_json_line(report_json(report))
    if report.engine_died:
        raise typer.Exit(1)


def report_json(report: ServerReport) -> dict[str, object]:
    stats = report.stats
    return {
        "uptime_s": report.uptime_s,
        "drained": report.drained,
        "engine_died": report.engine_died,
        "requests_finished": dict(stats.requests_finished),
        "prompt_tokens": stats.prompt_tokens_total,
        "generation_tokens": stats.generation_tokens_total,
        "preemptions": stats.preemptions_total,
        "prefix_cache": {"queries": stats.prefix_cache_queries, "hits": stats.prefix_cache_hits},
        "steps": stats.steps_total,
        "undrafted_tokens": stats.undrafted_tokens_total,
        "spec": spec_json(stats.spec),
    }
