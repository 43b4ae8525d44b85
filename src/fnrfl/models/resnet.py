"""ResNet-18 for small images (He et al., CVPR 2016): the stem is a 3x3 convolution of stride 1 without max-pool.

Layers carry torchvision's names, so that its state dicts load everywhere but in the stem and the classifier.
"""

from __future__ import annotations

from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fnrfl.core.errors import CompatibilityError
from fnrfl.models import image_shape


def _conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a strided 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels_out, stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3x3(channels_out, channels_out)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def _stage(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(channels_in, channels_out, stride), Block(channels_out, channels_out, 1))


class ResNet18(nn.Module):
    """ResNet-18 with the CIFAR stem; `head` may ask for more logits than there are classes.

    The features are the 512 pooled values that enter `fc`. `head=1000` is the model whose size fits the
    paper's printed traffic: 11,681,832 parameters, of which 990 outputs never see a label.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, head: PositiveInt | None = None) -> None:
        super().__init__()
        channels, _, _ = image_shape("resnet18", input_shape)
        outputs = num_classes if head is None else head
        if outputs < num_classes:
            raise CompatibilityError(
                f"Model resnet18 has head = {head} but the data has {num_classes} classes. "
                f"Give head at least {num_classes}, or leave it out."
            )
        self.conv1 = _conv3x3(channels, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.fc = nn.Linear(512, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        # A mean and not AdaptiveAvgPool2d, whose backward torch counts among the non-deterministic ones on a GPU.
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits
