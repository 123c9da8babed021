"""An encoder for the demo where no trained model is at hand: random weights, honestly labelled.

A ResNet-18 with weights drawn from a fixed seed still keeps enough of a picture's colours and
textures, pooled by GeM and whitened on other drawn pictures, to recognise a resave or a crop of a
drawn picture. It knows nothing about photographs and is used nowhere but in the demo.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sscd_vec.encoder import Encoder

SEED = 20220
LABEL = "untrained stand-in (random ResNet-18)"


def standin_encoder() -> "Encoder":
    """The same random encoder every time."""
    import torch

    from sscd_vec.encoder import Encoder, EncoderConfig, build_model

    config = EncoderConfig(trunk="resnet18", features="trunk", size=160, size_mode="square")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build_model(config)
    return Encoder(model.eval(), device="cpu")
