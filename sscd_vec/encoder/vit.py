"""A vision transformer as a trunk: patch tokens as a feature map, and the CLS token beside it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer

_IMAGE_SIZE = 224

# name -> (patch, layers, heads, width); s and b/8 are DINO's, the rest torchvision's
VITS = {
    "vit_s_8": (8, 12, 6, 384),
    "vit_s_16": (16, 12, 6, 384),
    "vit_b_8": (8, 12, 12, 768),
    "vit_b_16": (16, 12, 12, 768),
    "vit_b_32": (32, 12, 12, 768),
    "vit_l_16": (16, 24, 16, 1024),
    "vit_l_32": (32, 24, 16, 1024),
    "vit_h_14": (14, 32, 16, 1280),
}


class ViTTrunk(nn.Module):
    """A ViT without its classifier, parts named as torchvision names them.

    Attributes:
        out_channels: Width of a token.
        pooled_dim: Width of CLS ⊕ pooled patches, twice that.
    """

    def __init__(self, name: str) -> None:
        """Build one of ``VITS``."""
        super().__init__()
        patch, layers, heads, width = VITS[name]
        net = VisionTransformer(
            _IMAGE_SIZE, patch, layers, heads, hidden_dim=width, mlp_dim=4 * width, num_classes=1
        )
        self.conv_proj = net.conv_proj
        self.class_token = net.class_token
        self.encoder = net.encoder
        self.out_channels = width
        self.pooled_dim = 2 * width

    def forward(self, images: Tensor) -> Tensor:
        """Return the patch tokens as a feature map ``(n, width, h / patch, w / patch)``."""
        return self.tokens(images)[1]

    def tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the CLS token ``(n, width)`` and the map of the patch tokens.

        Position embeddings are interpolated where the image is not 224×224; pixels beyond the last
        whole patch are left out.
        """
        patches: Tensor = self.conv_proj(images)
        n, width, rows, columns = patches.shape
        x = torch.cat((self.class_token.expand(n, -1, -1), patches.flatten(2).mT), dim=1)
        x = self.encoder.dropout(x + self._positions(rows, columns))
        x = self.encoder.ln(self.encoder.layers(x))
        return x[:, 0], x[:, 1:].mT.reshape(n, width, rows, columns)

    def _positions(self, rows: int, columns: int) -> Tensor:
        positions: Tensor = self.encoder.pos_embedding  # (1, 1 + side², width)
        side = round((positions.shape[1] - 1) ** 0.5)
        if (rows, columns) == (side, side):
            return positions
        grid = positions[:, 1:].mT.reshape(1, -1, side, side)
        grid = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat((positions[:, :1], grid.flatten(2).mT), dim=1)
