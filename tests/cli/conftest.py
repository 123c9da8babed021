"""A small model folder with a calibrated normalizer, and a folder of drawn photos with copies."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sscd_vec.bank.views import crops
from sscd_vec.cli.pictures import EDITS, draw
from sscd_vec.encoder import Encoder, EncoderConfig, build_model
from sscd_vec.normalize import Normalizer


def small(seed: int) -> Image.Image:
    image = draw(seed)
    image.thumbnail((200, 200))
    return image


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ResNet-18 at 96 pixels: the commands do not care how good it is."""
    folder = tmp_path_factory.mktemp("model")
    config = EncoderConfig(trunk="resnet18", features="trunk", size=96, size_mode="square")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        encoder = Encoder(build_model(config).eval(), device="cpu")
    encoder.save_pretrained(folder)
    background = encoder.encode([small(seed) for seed in range(1000, 1060)])
    held_out = [small(seed) for seed in range(2000, 2024)]
    descriptors = encoder.encode(held_out)
    normalizer = Normalizer.fit(background, eps="oas", encoder=encoder)
    for kind in ("search", "symmetric"):
        normalizer = normalizer.calibrate(
            descriptors, false_match_rate=1e-3, per="comparison", kind=kind, force=True
        )
    views = [crops(np.asarray(image), 2) for image in held_out[:12]]
    normalizer = normalizer.calibrate(
        encoder.encode([view for image in views for view in image]),
        descriptors[12:],
        false_match_rate=1e-3,
        per="comparison",
        kind="tiled",
        query_groups=np.repeat(np.arange(12), len(views[0])),
        force=True,
    )
    normalizer.save(folder / "normalizer.safetensors")
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten photos; 2, 5 and 7 have a resaved copy, 5 a captioned one too."""
    folder = tmp_path_factory.mktemp("drawn")
    for seed in range(10):
        small(seed).save(folder / f"photo-{seed}.jpg", quality=92)
    for seed in (2, 5, 7):
        small(seed).save(folder / f"copy-{seed}.jpg", quality=40)
    captioned = EDITS["captioned"](small(5), np.random.default_rng(0))
    captioned.save(folder / "captioned-5.jpg", quality=80)
    return folder
