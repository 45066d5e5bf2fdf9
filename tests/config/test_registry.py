import pytest

from jaxtrain.config import ConfigError, Registry


def test_values_are_found_by_name_and_unknown_names_are_refused_with_the_nearest():
    rules: Registry[int] = Registry("optimizer.name")
    assert rules.register("adamw")(3) == 3
    assert rules["adamw"] == 3 and list(rules) == ["adamw"] and "adamw" in rules
    with pytest.raises(ConfigError, match=r"optimizer.name is 'adamx', .*did you mean adamw"):
        rules["adamx"]
    with pytest.raises(ConfigError, match="already registered"):
        rules.register("adamw")
    rules.unregister("adamw")
    assert len(rules) == 0
