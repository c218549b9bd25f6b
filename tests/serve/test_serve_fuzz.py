# SPDX-License-Identifier: Apache-2.0
"""Whatever the schema allows, and what it does not: never an error of the server's own."""

import pytest
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.runs
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}"]
PATHS += ["/health", "/ready", "/metrics"]


@pytest.fixture(scope="module")
def schema(quick):
    import schemathesis  # takes seconds

    return schemathesis.openapi.from_url(f"{quick.url}/openapi.json")


def test_the_schema_lists_all_there_is(schema):
    assert set(schema.raw_schema["paths"]) == set(PATHS)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("path", PATHS[:2])
def test_bodies_are_answered_or_refused(schema, quick, path, mode):
    from schemathesis import GenerationMode

    strategy = schema[path]["POST"].as_strategy(generation_mode=GenerationMode(mode))

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def check(case):
        response = case.call(timeout=60)
        timed = isinstance(case.body, dict) and "deadline_seconds" in case.body
        late = response.status_code == 504 and timed  # as it was asked for
        assert response.status_code < 500 or late, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}

    check()
    assert quick.get("/health").status_code == 200
