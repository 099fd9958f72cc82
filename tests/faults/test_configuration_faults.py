"""Each random configuration is refused in one line that names field and value, or its model lives."""

import os

import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_configurations import ARRIVALS, built, lives, refusal, sound, spoilt

from modeling_gqa import GQAConfig
from modeling_gqa.configuration_checks import shown

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]
FAULTS_ROUNDS = int(os.environ.get("FAULTS_ROUNDS", "1"))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# Fields that are checked as parts of others, by whose names the message goes.
ALIASES = {"rope_scaling": "rope_", "per_layer_config": "layer"}


@settings(max_examples=20 * FAULTS_ROUNDS, suppress_health_check=SLOW)
@given(sound())
def test_a_sound_configuration_lives(fields):
    lives(built(GQAConfig(**fields)))


@settings(max_examples=40 * FAULTS_ROUNDS, suppress_health_check=SLOW)
@given(spoilt(), st.sampled_from(sorted(ARRIVALS)))
def test_an_odd_value_is_refused_in_one_line_or_lives(drawn, arrival):
    fields, change, name, odd = drawn
    try:
        model = built(ARRIVALS[arrival](fields, change))
    except (ValueError, StrictDataclassError) as error:
        message = refusal(error)
        assert "\n" not in message
        assert ALIASES.get(name, name) in message
        if odd is not None and not isinstance(odd, dict):  # None is called left out, and of a dict a part is named
            assert shown(odd)[:60] in message
        return
    lives(model)
