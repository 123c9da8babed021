import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sscd_vec.encoder import Encoder, EncoderConfig, SSCDModel, build_model
from sscd_vec.encoder import encoder as encoder_module
from sscd_vec.encoder.backends import Backend, BackendName, open_backend
from sscd_vec.encoder.heatmap import match_heatmap, paint_heatmap


class Colours(nn.Module):
    """A trunk whose map is the image, averaged over 8×8 cells: places keep their colour."""

    out_channels = 3

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(images, 8)


def colour_model() -> SSCDModel:
    config = EncoderConfig(
        trunk="resnet18", dim=3, size=64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    )
    head = nn.Linear(3, 3)
    nn.init.eye_(head.weight)
    nn.init.zeros_(head.bias)
    return SSCDModel(Colours(), head, config)


def test_the_matching_part_lights_up() -> None:
    image = np.zeros((64, 128, 3), np.uint8)
    image[:, :64, 0] = 255  # red on the left, blue on the right
    image[:, 64:, 2] = 255
    red = np.zeros((64, 64, 3), np.uint8)
    red[:, :, 0] = 255
    heat = match_heatmap(colour_model(), image, red)
    assert heat.shape == (64, 128) and heat.dtype == np.float32
    np.testing.assert_allclose(heat[:, :56], 1, atol=1e-4)
    np.testing.assert_allclose(heat[:, 72:], 0, atol=1e-4)


def test_every_place_is_a_descriptor_of_its_own() -> None:
    torch.manual_seed(0)
    encoder = Encoder(build_model(EncoderConfig(trunk="resnet18", dim=16, size=32)), device="cpu")
    generator = np.random.default_rng(0)
    a = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    b = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    # ResNet's map of 32×32 is one place: the heatmap is flat and equals the descriptors' cosine.
    heat = encoder.heatmap(a, b)
    wanted = float((encoder.encode(a) * encoder.encode(b)).sum())
    np.testing.assert_allclose(heat, wanted, atol=1e-5)


@pytest.mark.parametrize("changes", [{"features": "trunk"}, {"head": "mlp"}, {"trunk": "vit_b_32"}])
def test_other_models(changes: dict[str, Any]) -> None:
    config = EncoderConfig(trunk="resnet18", dim=8, size=64).replace(**changes)
    image = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    heat = Encoder(build_model(config), device="cpu").heatmap(image, image)
    assert heat.shape == (70, 90) and np.abs(heat).max() <= 1 + 1e-5


def test_the_network_is_prepared_once_and_again_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    encoder = Encoder(build_model(EncoderConfig(trunk="resnet18", dim=8, size=64)), device="cpu")
    a, b = np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    opened: list[SSCDModel] = []

    def counted(name: BackendName, model: SSCDModel, *rest: Any) -> Backend:  # noqa: ANN401
        opened.append(model)
        return open_backend(name, model, *rest)

    monkeypatch.setattr(encoder_module, "open_backend", counted)
    first = encoder.heatmap(a, b)
    np.testing.assert_array_equal(encoder.heatmap(a, b), first)
    encoder.encode([a, b])
    assert len(opened) == 1  # the heatmap and the descriptors share it
    with torch.no_grad():
        for parameter in encoder.model.head.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert np.abs(encoder.heatmap(a, b) - first).max() > 1e-3
    assert len(opened) == 2


def test_heatmap_lies_over_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (120, 80), "red").save(buffer, "JPEG", exif=exif)
    encoder = Encoder(colour_model(), device="cpu")
    assert encoder.heatmap(buffer.getvalue(), buffer.getvalue()).shape == (120, 80)


def test_painting() -> None:
    gray = np.full((10, 20, 3), 128, np.uint8)
    heat = np.tile(np.linspace(-1, 1, 20, dtype=np.float32), (10, 1))
    painted = paint_heatmap(gray, heat, strength=1.0)
    assert painted.size == (20, 10) and painted.mode == "RGB"
    left, right = painted.getpixel((0, 5)), painted.getpixel((19, 5))
    assert left == (24, 32, 140) and right == (250, 230, 36)  # blue, yellow
    assert np.array_equal(np.array(paint_heatmap(gray, heat, strength=0.0)), gray)
    with pytest.raises(ValueError, match="heatmap is"):
        paint_heatmap(gray, heat[:, :5])
