import dataclasses
import math

import pytest

from gyre.gateway.limits import GatewayLimits


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GatewayLimits)])
@pytest.mark.parametrize("value", [-1, 0, math.nan])
def test_limits_must_be_positive(field, value):
    if (field, value) == ("engine_retries", 0):
        assert GatewayLimits(engine_retries=0).engine_retries == 0
        return
    with pytest.raises(ValueError, match=f"{field} must be positive, got {value}"):
        GatewayLimits(**{field: value})
