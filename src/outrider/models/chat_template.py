"""Chat templates of model files: Jinja with the functions and filters that such templates expect, sandboxed.

A template comes with a model and is not to be trusted: it sees immutable messages and no attribute that begins with an
underscore, cannot store one either, and cannot reach the interpreter. What it renders equals transformers' result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_UNUSED_GLOBALS = ("cycler", "joiner", "lipsum")  # of Jinja's own; objects with methods that no chat template needs


class ChatTemplate:
    """A compiled template. Raises jinja2's TemplateError where it cannot be compiled."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token``, ... as the template refers to them."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        for name in _UNUSED_GLOBALS:
            del environment.globals[name]
        environment.globals.update(raise_exception=_raise, strftime_now=_now, namespace=_Namespace)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises whatever the template raises; keys whose value is None are left out."""
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        return self._template.render(
            messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self._special_tokens,
        )


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # no name for self: a template may have an attribute of it
        own, *given = args
        for name in dict(*given, **values):
            _refuse_private(name)
        Namespace.__init__(own, *given, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
