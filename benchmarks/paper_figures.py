"""Figures the paper prints, by the name of the released model or the method, µAP in percent.

``tab:results`` (whitened, without and with score normalization), and what the authors' code prints
for the default model.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """µAP of a model on DISC2021, whitened, without and with score normalization."""

    method: str
    dim: int
    micro_ap: float
    micro_ap_normalized: float


DISC_RESULTS = {
    "sscd_imagenet_blur": PaperRow("SSCD, ImageNet, strong blur", 512, 50.4, 64.5),
    "sscd_imagenet_advanced": PaperRow("SSCD, ImageNet, advanced", 512, 55.5, 71.0),
    "sscd_imagenet_mixup": PaperRow("SSCD, ImageNet, adv.+mixup", 512, 56.8, 72.2),
    "sscd_disc_blur": PaperRow("SSCD, DISC, strong blur", 512, 54.8, 63.6),
    "sscd_disc_advanced": PaperRow("SSCD, DISC, advanced", 512, 60.4, 71.1),
    "sscd_disc_mixup": PaperRow("SSCD, DISC, adv.+mixup", 512, 61.5, 72.5),
    "sscd_disc_large": PaperRow("SSCD large, DISC, adv.+mixup", 1024, 63.7, 75.3),
}
BASELINES = (
    PaperRow("Multigrain, ImageNet (supervised)", 2048, 20.5, 41.7),
    PaperRow("DINO ViT-B/16, ImageNet", 1500, 32.2, 53.8),
    PaperRow("SimCLR trunk, ImageNet", 2048, 13.1, 33.9),
)

# Of the authors' code for sscd_disc_mixup at short side 288: (µAP, recall@P90, accuracy@1).
AUTHORS_CODE = {
    ("raw", "none"): (60.94, 37.7, 77.6),
    ("whitened", "none"): (61.43, 38.3, 78.2),
    ("raw", "1.0[0,2]"): (71.80, 62.5, 77.6),
    ("whitened", "1.0[0,2]"): (72.43, 63.1, 78.2),
}
