import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from speed import model_speed
from speed.measure import Timing
from sscd_vec.encoder import Encoder, EncoderConfig, build_model


def test_the_smaller_model_is_measured_against_both_ways(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(config: EncoderConfig | None = None) -> Encoder:
        return Encoder(build_model(EncoderConfig(trunk="resnet18", size=32)).eval())

    monkeypatch.setattr(model_speed, "build_model", lambda config: tiny().model)
    monkeypatch.setattr(Encoder, "from_pretrained", tiny)

    def timed(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
        for run in candidates.values():
            run()
        seconds = {"paper": 6.0, "resnet50": 3.0, "shipped": 1.5}
        return {name: Timing(name, (seconds[name],) * rounds) for name in candidates}

    monkeypatch.setattr(model_speed, "interleaved", timed)
    model_speed.main(
        [str(photo_folder), "--images", "3", "--rounds", "1", "--results", str(tmp_path)]
    )
    figures = json.loads((tmp_path / "model_speed.json").read_text())["figures"]
    assert figures["photos"] == 3
    assert figures["over_resnet50_by_our_encoder"] == 2
    assert figures["over_resnet50_the_papers_way"] == 4
