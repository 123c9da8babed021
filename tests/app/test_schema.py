"""The server against its own description: no server error, nothing undocumented."""

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS, load_all_checks

from sscd_vec.app.engine import Engine
from tests.app.running import Running

load_all_checks()
PROMISED: list[Any] = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "unsupported_method",
        "allow_header_conformance",
    ]
)


EXAMPLES = 10  # of each operation and mode


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_answer_is_described(engine: Engine, mode: schemathesis.GenerationMode) -> None:
    with Running(engine) as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
        found: list[Any] = list(schema.get_all_operations())
        operations = [each.ok() for each in found]
        assert len(operations) == 12
        for operation in operations:
            try:
                _ask_many(operation, mode)
            except hypothesis.errors.Unsatisfiable:  # nothing about /health can be wrong
                assert mode.is_negative and operation.path in (
                    "/health",
                    "/info",
                    "/metrics",
                    "/decisions",
                )


def _ask_many(
    operation: schemathesis.APIOperation[Any, Any, Any, Any], mode: schemathesis.GenerationMode
) -> None:
    @hypothesis.seed(27)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=PROMISED)

    ask()
