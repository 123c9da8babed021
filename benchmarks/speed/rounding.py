"""What the loss loses by half-precision products, on descriptors of a trained model.

Each image is encoded twice: as it is, and mirrored and cropped. Loss and gradient by the Triton
kernels, in the interpreter, are compared with the definition in float64::

    TRITON_INTERPRET=1 python benchmarks speed/rounding images/

Figures go to ``results/kernels_rounding.json``.
"""

import argparse
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from results import write
from sscd_vec import kernels
from sscd_vec.encoder import Encoder
from sscd_vec.files import find_images
from sscd_vec.kernels import objective, reference
from sscd_vec.kernels.launch import interpreted

TAU = 0.05
KEPT = 0.7  # of each side of the second view


def main() -> None:
    """Encode, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("images", help="folder of images")
    parser.add_argument("--count", type=int, default=256, help="images")
    parser.add_argument("--model", help="name or path; the shipped model by default")
    parser.add_argument("--stride", type=int, default=1, help="take every so many images")
    options = parser.parse_args()
    if not interpreted():
        raise SystemExit("the kernels' own rounding is compared: set TRITON_INTERPRET=1")
    paths = [str(file.path) for file in find_images(options.images)]
    z = describe(paths[:: options.stride][: options.count], options.model)
    figures = compare(z)
    for row in figures:
        print(row)
    print("wrote", write("kernels_rounding", figures))


def describe(paths: Sequence[str], model: str | None) -> Tensor:
    """(2n, d) unit descriptors: all first views, then all second ones."""
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(ImageOps.exif_transpose(image).convert("RGB"))
    encoder = Encoder.from_pretrained(model)
    views = [*images, *(_second_view(image) for image in images)]
    return F.normalize(torch.as_tensor(encoder.encode(views)).float())


def compare(z: Tensor) -> list[dict[str, object]]:
    """Relative errors of InfoNCE, of KoLeo and of their gradients, by the dtype of the products."""
    ids = torch.arange(len(z) // 2).repeat(2)
    sources = torch.stack([ids, ids], dim=1)
    wide = z.double()
    true = {
        "InfoNCE": _value_and_gradient(lambda x: reference.info_nce(x, sources, TAU), wide),
        "total": _value_and_gradient(lambda x: reference.sscd_loss(x, sources, TAU).total, wide),
    }
    rows: list[dict[str, object]] = []
    for products in (torch.float32, torch.float16, torch.bfloat16):
        found = {
            "InfoNCE": lambda x: kernels.info_nce(x, sources, TAU, products=products),  # noqa: B023
            "total": lambda x: kernels.sscd_loss(x, sources, TAU, products=products).total,  # noqa: B023
        }
        row: dict[str, object] = {"products": str(products).removeprefix("torch."), "rows": len(z)}
        with patch.object(objective, "runs_on_triton", lambda x: True):
            for name, loss in found.items():
                value, gradient = _value_and_gradient(loss, z)
                true_value, true_gradient = true[name]
                row[f"error of {name}"] = float((value - true_value).abs() / true_value.abs())
                row[f"error of {name}'s gradient"] = _relative(gradient, true_gradient)
        rows.append(row)
    return rows


def _second_view(image: Image.Image) -> Image.Image:
    width, height = image.size
    left, top = int(width * (1 - KEPT) / 2), int(height * (1 - KEPT) / 2)
    return ImageOps.mirror(image.crop((left, top, width - left, height - top)))


def _value_and_gradient(loss: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    value = loss(leaf)
    return value.detach().double(), torch.autograd.grad(value, leaf)[0].double()


def _relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


if __name__ == "__main__":
    main()
