"""The spans of one generation, with the attributes of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, Self

from swarm_client.batching.request import Request
from swarm_protocol.telemetry.tracing import TraceSpan, tracing

Phase = Literal["queue", "prompt", "generation"]


def request_attributes(operation: str, model: str, num_tokens: int) -> dict[str, Any]:
    """Return the attributes of a span of work of a model for ``num_tokens`` tokens of input."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "swarm",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": num_tokens,
    }


class GenerationTrace:
    """A context for one generation: a span, and below it one for each phase. Servers' spans are below the first too.

    ``operation`` is ``chat`` or ``text_completion``, as the conventions name them.
    """

    def __init__(self, operation: str, model: str, request: Request) -> None:
        self._name = f"{operation} {model}"
        self._attributes = request_attributes(operation, model, len(request.prompt)) | _settings(request)
        self._num_tokens = 0
        self._reason: str | None = None
        self._open = ExitStack()
        self._phase: TraceSpan | None = None

    def __enter__(self) -> Self:
        self._whole = self._open.enter_context(tracing().span(self._name, self._attributes))
        self.starts("queue")
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        if self._phase is not None:
            self._phase.end()
        found: dict[str, Any] = {"gen_ai.usage.output_tokens": self._num_tokens}
        if self._reason is not None:
            found["gen_ai.response.finish_reasons"] = [self._reason]
        self._whole.set_attributes(found)
        return self._open.__exit__(*exception)

    def starts(self, phase: Phase) -> None:
        """End the present phase, and begin this one."""
        if self._phase is not None:
            self._phase.end()
        self._phase = tracing().begin(phase)

    def token(self) -> None:
        """Count a token. The first one ends the prompt's phase."""
        if not self._num_tokens:
            self.starts("generation")
        self._num_tokens += 1

    def ends(self, reason: str) -> None:
        """Note why the generation ends."""
        self._reason = reason


def _settings(request: Request) -> dict[str, Any]:
    """Return the settings of the request that are numbers; stop strings are the user's text."""
    config = request.config
    found = {"gen_ai.request.max_tokens": config.max_new_tokens, "gen_ai.request.seed": request.seed}
    if config.do_sample:
        found |= {f"gen_ai.request.{name}": getattr(config, name) for name in ("temperature", "top_p")}
        found["gen_ai.request.top_k"] = config.top_k or None  # 0 means all tokens
    return {name: value for name, value in found.items() if value is not None}
