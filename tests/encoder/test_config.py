"""EncoderConfig: defaults of the paper, round trips, and what it refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sscd_vec.encoder.config import EncoderConfig


def test_defaults_are_the_paper() -> None:
    config = EncoderConfig()
    assert (config.trunk, config.dim, config.gem_p) == ("resnet50", 512, 3.0)
    assert (config.size, config.size_mode) == (288, "short")
    assert (config.head, config.features) == ("linear", "projected")
    assert config.mean == (0.485, 0.456, 0.406)
    assert config.std == (0.229, 0.224, 0.225)


channel = st.floats(0.01, 1, allow_nan=False)


@given(
    st.builds(
        EncoderConfig,
        trunk=st.sampled_from(["resnet18", "vit_b_16"]),
        dim=st.integers(1, 4096),
        head=st.sampled_from(["linear", "mlp"]),
        features=st.sampled_from(["projected", "trunk"]),
        gem_p=st.floats(0.1, 20),
        size=st.integers(1, 1024),
        size_mode=st.sampled_from(["short", "square", "long"]),
        mean=st.tuples(channel, channel, channel),
        std=st.tuples(channel, channel, channel),
    )
)
def test_survives_json(config: EncoderConfig) -> None:
    assert EncoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_is_frozen_and_hashable() -> None:
    config = EncoderConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 3  # type: ignore[misc]  # what the test is about
    assert hash(config) == hash(EncoderConfig())


def test_lists_become_tuples_and_integers_floats() -> None:
    config = EncoderConfig.from_dict({"mean": [0, 0, 0], "std": [1, 1, 1], "gem_p": 4})
    assert config.mean == (0.0, 0.0, 0.0)
    assert isinstance(config.gem_p, float)
    assert config == EncoderConfig(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), gem_p=4.0)


def test_replace_changes_only_what_it_is_told() -> None:
    changed = EncoderConfig(dim=64).replace(size=224)
    assert changed == EncoderConfig(dim=64, size=224)
    with pytest.raises(ValueError, match="sizes"):
        EncoderConfig().replace(sizes=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trunk", ""),
        ("dim", 0),
        ("dim", 2.5),
        ("dim", True),
        ("size", -1),
        ("head", "conv"),
        ("features", "both"),
        ("size_mode", "crop"),
        ("gem_p", 0.0),
        ("gem_p", float("nan")),
        ("gem_p", float("inf")),
        ("mean", (0.5, 0.5)),
        ("mean", "rgb"),
        ("std", (1.0, 0.0, 1.0)),
        ("std", ("1", "1", "1")),
    ],
)
def test_names_the_field_it_refuses(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        EncoderConfig.from_dict({field: value})


def test_unknown_field_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'backbone'.*known: trunk, dim"):
        EncoderConfig.from_dict({"backbone": "resnet50"})


def test_a_config_needs_no_torch() -> None:
    code = (
        "import sys; from sscd_vec.encoder import EncoderConfig; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
