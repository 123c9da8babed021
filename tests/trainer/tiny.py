"""A trunk small enough to train in seconds: four convolutions, stride 8."""

import pytest
from torch import nn

from sscd_vec.encoder import model as encoder_model
from sscd_vec.encoder.trunks import build_trunk

NAME = "tiny"


class TinyTrunk(nn.Sequential):
    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for wide_in, wide_out, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 128, 1)):
            layers += [
                nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(wide_out),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)
        self.out_channels = 128


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``build_model`` know the trunk ``"tiny"``."""
    known = build_trunk

    def build(name: str, *, zero_init_residual: bool = False) -> nn.Module:
        return TinyTrunk() if name == NAME else known(name, zero_init_residual=zero_init_residual)

    monkeypatch.setattr(encoder_model, "build_trunk", build)
