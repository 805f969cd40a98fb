"""``outrider explain``: the step plan for given loads, as every rank would compute it. Nothing is loaded or run.

Built on ``plan_step`` and nothing else: what is printed is what ranks with these rows run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.batch.step_plan import PassPlan, PassWidths, RankRow, StepPlan, plan_step
from outrider.batch.tiers import capture_sizes, describe_tier
from outrider.cli.json_output import print_json_line
from outrider.errors import ConfigError

_MOST = 1 << 16  # of what sizes a list or a pass here; an engine of more would not be captured either


def explain_command(
    requests: Annotated[str, typer.Option(help="Decoding requests of each data-parallel rank, e.g. 1,3,0,2.")],
    num_speculative_tokens: Annotated[int, typer.Option(help="Tokens proposed per round; 0: no drafter.")] = 7,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that a rank holds at most.")] = 64,
    prefill_tokens: Annotated[
        str, typer.Option(help="Prompt tokens that each rank prefills in the step, one request's, e.g. 0,128,0,0.")
    ] = "",
    enforce_eager: Annotated[bool, typer.Option(help="As if no tiers were captured.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
) -> None:
    """Print what every rank runs in a step: per pass the counts, the tier, and why that tier."""
    rows, widths = _read(
        requests=requests,
        prefill_tokens=prefill_tokens,
        num_speculative_tokens=num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        enforce_eager=enforce_eager,
    )
    tiers = () if enforce_eager else capture_sizes(max_num_seqs)
    plan = plan_step(rows, tiers=tiers, widths=widths)
    render(plan, rows, tiers=tiers, console=Console())
    if json:
        print_json_line(
            {"tiers": list(tiers), "passes": {str(pass_plan.kind): _to_json(pass_plan) for pass_plan in plan.passes}}
        )


def render(plan: StepPlan, rows: Sequence[RankRow], *, tiers: Sequence[int], console: Console) -> None:
    """The tables for people: one a pass, one line a rank."""
    console.print(f"tiers: {', '.join(map(str, tiers)) or 'none'}", soft_wrap=True)
    if not plan.passes:
        console.print("no rank has work: the step has no pass")
    for pass_plan in plan.passes:
        table = Table(
            *("rank", "requests", "tokens", "non-padded", "padded", "LM-head rows"),
            title=f"{pass_plan.kind}: width {pass_plan.width}, padding {pass_plan.padding_mode}",
            title_justify="left",
        )
        columns = _to_json(pass_plan)
        names = ("requests", "tokens", "non_padded_tokens", "padded_tokens", "lm_head_rows")
        for rank in range(len(rows)):
            table.add_row(str(rank), *(str(columns[name][rank]) for name in names))
        console.print(table)
        console.print(describe_tier(pass_plan, rows, tiers=tiers), soft_wrap=True)


def _to_json(plan: PassPlan) -> dict[str, Any]:
    tokens = [count.value for count in plan.tokens]
    return {
        "width": plan.width,
        "requests": [count.value for count in plan.requests],
        "tokens": tokens,
        "non_padded_tokens": tokens,
        "padded_tokens": [count.value for count in plan.padded_tokens],
        "lm_head_rows": list(plan.logit_rows),
        "tier": plan.tier,
        "padding": str(plan.padding_mode),
    }


def _read(
    *, requests: str, prefill_tokens: str, num_speculative_tokens: int, max_num_seqs: int, enforce_eager: bool
) -> tuple[list[RankRow], PassWidths]:
    """The rows that ranks with these loads would gather. Raises ConfigError, naming the option."""
    for name, value, least in (
        ("max_num_seqs", max_num_seqs, 1),
        ("num_speculative_tokens", num_speculative_tokens, 0),
    ):
        if not least <= value <= _MOST:
            raise ConfigError(f"{name}={value} must lie in {least}..{_MOST}")
    counts = _counts("requests", requests)
    prefills = _counts("prefill_tokens", prefill_tokens) if prefill_tokens else [0] * len(counts)
    if len(prefills) != len(counts):
        raise ConfigError(
            f"prefill_tokens={prefill_tokens} is of {len(prefills)} ranks and requests={requests} of {len(counts)}"
        )
    for rank, (count, prefill) in enumerate(zip(counts, prefills, strict=True)):
        seats = count + bool(prefill)
        if seats > max_num_seqs:
            being = f"{count} decoding" + (" and 1 that prefills" if prefill else "")
            raise ConfigError(f"requests: rank {rank} has {being}, which exceeds max_num_seqs={max_num_seqs}")
    widths = PassWidths(draft=num_speculative_tokens, verify=1 + num_speculative_tokens)
    return [
        RankRow(
            prefill_requests=int(prefill > 0),
            prefill_tokens=prefill,
            prefill_logit_rows=int(prefill > 0),
            draft_requests=count if widths.draft else 0,
            verify_requests=count,
            verify_tokens=count * widths.verify,
            graph_capable=int(not enforce_eager),
        )
        for count, prefill in zip(counts, prefills, strict=True)
    ], widths


def _counts(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) <= 9 for part in parts):
        raise ConfigError(f"{name}={text!r} must be one number a rank, of 1 to 9 digits, separated by commas")
    return [int(part) for part in parts]
