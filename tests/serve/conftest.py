# SPDX-License-Identifier: Apache-2.0
"""One model, and one server that answers at once, for all tests that leave it as it was."""

import pytest
from tiny_serve import QuickEngine, running, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def quick(model):
    with running(model, QuickEngine(model)) as live:
        yield live
