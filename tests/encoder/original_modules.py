"""The networks behind the released files, written independently of the library, with their names.

``TorchvisionSSCD`` is torchvision's own ResNet with its average pooling replaced, ``ClassySSCD`` a
bottleneck ResNeXt whose modules are named as Classy Vision names them, ``DinoViT`` a transformer in
DINO's naming. Their ``state_dict()`` is what those files hold.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import ResNet

Module = TypeVar("Module", bound=nn.Module)


class GeM(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        powers = F.avg_pool2d(x.clamp(min=1e-6) ** 3, x.shape[-2:])
        return (powers ** (1 / 3)).flatten(1)


class TorchvisionSSCD(nn.Module):
    def __init__(self, backbone: ResNet) -> None:
        super().__init__()
        self.backbone = backbone
        self.backbone.avgpool = GeM()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.backbone(x))


class ClassyStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self._module = nn.Sequential(convolution, nn.BatchNorm2d(64), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self._module(x), 3, 2, 1)


class ClassyBlock(nn.Module):
    def __init__(self, channels: int, hidden: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.downsample = nn.Sequential()
        if stride != 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))
        self.convolutional_block = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=groups, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, out, 1, bias=False),
        )
        self.bn = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.downsample(x) + self.bn(self.convolutional_block(x)))


class ClassyResNeXt(nn.Module):
    def __init__(self, blocks: tuple[int, ...], groups: int, width: int) -> None:
        super().__init__()
        self.initial_block = ClassyStem()
        self.blocks = nn.Sequential()
        channels = 64
        for stage, count in enumerate(blocks):
            named = nn.Sequential()
            hidden, out = groups * width * 2**stage, 256 * 2**stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                block = ClassyBlock(channels, hidden, out, stride, groups)
                named.add_module(f"block{stage}-{number}", block)
                channels = out
            self.blocks.append(named)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.initial_block(x))
        return features


class ClassySSCD(nn.Module):
    def __init__(self, blocks: tuple[int, ...], groups: int, width: int, dim: int) -> None:
        super().__init__()
        self.backbone = ClassyResNeXt(blocks, groups, width)
        self.embeddings = nn.Sequential(GeM(), nn.Linear(2048, dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.embeddings(self.backbone(x)))


class DinoAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        shape = (n, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / (width // self.heads) ** 0.5).softmax(-1)
        mixed: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(n, tokens, width))
        return mixed


class DinoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = DinoAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))
        return x


class DinoViT(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, patch: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (224 // patch) ** 2, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.Sequential(*(DinoBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """CLS ⊕ GeM (p = 4) of the patches, unit length."""
        patches = self.patch_embed["proj"](x).flatten(2).mT
        tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), patches), 1) + self.pos_embed
        tokens = self.norm(self.blocks(tokens))
        pooled = tokens[:, 1:].clamp(min=1e-6).pow(4).mean(1).pow(0.25)
        return F.normalize(torch.cat((tokens[:, 0], pooled), 1))


def randomized(module: Module, seed: int = 0) -> Module:
    """Give batch norms statistics and scales that no mix-up of them would survive."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight.data, layer.running_var):
                assert tensor is not None
                tensor.uniform_(0.5, 1.5, generator=generator)
            for tensor in (layer.bias.data, layer.running_mean):
                assert tensor is not None
                tensor.normal_(0, 0.2, generator=generator)
    return module.eval()
