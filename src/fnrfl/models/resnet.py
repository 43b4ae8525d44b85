"""ResNet-18 and ResNet-50 for small images (He et al., CVPR 2016): the stem is a 3x3 convolution without max-pool.

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


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """What goes past a block: a strided 1x1 convolution where the shape changes."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
    )


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1  # channels that leave it, for each of its width

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, beside a shortcut; the stride is in the middle."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(channels_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Four stages of blocks; the features are the pooled values that enter `fc`."""

    def __init__(self, channels: int, outputs: int, block: type[Block | Bottleneck], counts: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(block, counts)
        self.fc = nn.Linear(512 * block.expansion, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        # A mean and not AdaptiveAvgPool2d, whose backward torch counts among the non-deterministic ones on a GPU.
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


def _stages(block: type[Block | Bottleneck], counts: tuple[int, ...]) -> list[nn.Sequential]:
    stages, entering = list[nn.Sequential](), 64
    for number, count in enumerate(counts):
        width, blocks = 64 * 2**number, list[nn.Module]()
        for i in range(count):
            blocks.append(block(entering, width, 2 if number and not i else 1))
            entering = width * block.expansion
        stages.append(nn.Sequential(*blocks))
    return stages


def _outputs(name: str, num_classes: int, head: int | None) -> int:
    outputs = num_classes if head is None else head
    if outputs < num_classes:
        raise CompatibilityError(
            f"Model {name} has head = {head} but the data has {num_classes} classes. "
            f"Give head at least {num_classes}, or leave it out."
        )
    return outputs


def resnet18(input_shape: tuple[int, ...], num_classes: int, head: PositiveInt | None = None) -> nn.Module:
    """ResNet-18 with the CIFAR stem and 512 features; `head` may ask for more logits than there are classes.

    `head=1000` is the model whose size fits the paper's printed traffic: 11,681,832 parameters, of which 990 outputs
    never see a label.
    """
    channels, _, _ = image_shape("resnet18", input_shape)
    return ResNet(channels, _outputs("resnet18", num_classes, head), Block, (2, 2, 2, 2))


def resnet50(input_shape: tuple[int, ...], num_classes: int, head: PositiveInt | None = None) -> nn.Module:
    """ResNet-50 with the CIFAR stem and 2,048 features.

    With `head=1000` it is what the released code of the paper builds where the paper says ResNet-18: 25,549,352
    parameters.
    """
    channels, _, _ = image_shape("resnet50", input_shape)
    return ResNet(channels, _outputs("resnet50", num_classes, head), Bottleneck, (3, 4, 6, 3))
