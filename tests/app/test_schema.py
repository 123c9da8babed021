"""The server against its own description: no server error, nothing undocumented."""

import io
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.transport.serialization import Binary

from sscd_vec.app.engine import Engine
from sscd_vec.app.server import create_app
from sscd_vec.cli.pictures import draw
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


def _encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    draw(3).resize((64, 48)).save(buffer, kind)
    return buffer.getvalue()


# What is no image is refused early; only real ones reach the bank.
IMAGES = st.sampled_from([_encoded("PNG"), _encoded("JPEG")])
schemathesis.openapi.format("binary", (IMAGES | IMAGES | st.binary()).map(Binary))


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_every_answer_is_described(engine: Engine, mode: schemathesis.GenerationMode) -> None:
    with Running(engine) as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
        found: list[Any] = list(schema.get_all_operations())
        operations = [each.ok() for each in found]
        assert len(operations) == 12
        for operation in operations:
            try:
                statuses = _ask_many(operation, mode)
                if mode.is_positive and operation.path in ("/search", "/add"):
                    assert 200 in statuses
            except hypothesis.errors.Unsatisfiable:  # nothing about /health can be wrong
                assert mode.is_negative and operation.path in (
                    "/health",
                    "/info",
                    "/metrics",
                    "/decisions",
                )


def test_every_route_is_described_but_the_pages(engine: Engine) -> None:
    app: Any = create_app(engine)
    paths = {route.path for route in app.app.routes}
    described = set(app.app.openapi()["paths"])
    assert described < paths and len(described) == 12
    assert paths - described == {"/", "/docs", "/static/{name}", "/openapi.json"}


def _ask_many(
    operation: schemathesis.APIOperation[Any, Any, Any, Any], mode: schemathesis.GenerationMode
) -> set[int]:
    statuses: set[int] = set()

    @hypothesis.seed(27)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case[Any]) -> None:
        statuses.add(case.call_and_validate(checks=PROMISED).status_code)

    ask()
    return statuses
