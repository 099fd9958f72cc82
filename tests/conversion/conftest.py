"""A fixture for tests of the formulas of one layer."""

import pytest

from modeling_gqa.conversion import streams


@pytest.fixture
def one_layer_alone(monkeypatch):
    """Each layer gets the source's states, all tokens count alike, and nothing is fitted unless a test asks for it."""
    monkeypatch.setattr(streams.Streams, "finish", lambda self, index, attention: self.advance_source(index))
    monkeypatch.setattr(streams, "FIRST_SHARE", 0.0)
    monkeypatch.setattr("modeling_gqa.conversion.sequential.FITTED_METHODS", ())
