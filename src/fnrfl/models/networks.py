"""The networks that a run can name; each is a plain `nn.Module` whose forward returns logits and nothing else.

Max-pools stand before the ReLU: the same values and gradients for a quarter of its work.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fnrfl.core.errors import CompatibilityError

Norm = Literal["none", "batch"]
# Output channels of the convolutions of each block of VGG-11; a max-pool that halves the image ends every block.
VGG_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def image_shape(model: str, input_shape: tuple[int, ...], at_least: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of the images `model` is to read, refused where the data has none large enough."""
    if len(input_shape) != 3:
        raise CompatibilityError(
            f"Model {model} needs images [channels, height, width] but the data has shape {list(input_shape)}. "
            'Choose model = "mlp", which takes any shape.'
        )
    channels, height, width = input_shape
    if min(height, width) < at_least:
        raise CompatibilityError(
            f"Model {model} needs images of at least {at_least}x{at_least} pixels but the data has {height}x{width}. "
            'Choose model = "cnn" (from 4x4 pixels) or "mlp" (any shape).'
        )
    return channels, height, width


# -- small ones --------------------------------------------------------------------------------------------------------


def simple_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """NIID-Bench's simple-cnn: 5x5 convolutions of 6 and 16 channels, each max-pooled, then 120, 84, classes."""
    channels, height, width = image_shape("simple-cnn", input_shape, at_least=16)
    # Each 5x5 convolution without padding takes 4 pixels from a side, each max-pool halves it.
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def cnn(input_shape: tuple[int, ...], num_classes: int, norm: Norm = "none") -> nn.Sequential:
    """Two 3x3 convolutions of 16 and 32 channels, each max-pooled, then one Linear; `norm=batch` adds BatchNorm."""
    channels, height, width = image_shape("cnn", input_shape, at_least=4)
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((channels, 16), (16, 32)):
        layers.append(nn.Conv2d(channels_in, channels_out, 3, padding=1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(channels_out))
        layers += [nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), num_classes))


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: PositiveInt = 64,
    depth: NonNegativeInt = 1,
    norm: Norm = "none",
) -> nn.Sequential:
    """A perceptron: `depth` hidden layers of `hidden` units, 0 for logistic regression; `norm=batch` adds BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for _ in range(depth):
        layers.append(nn.Linear(width, hidden))
        if norm == "batch":
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(nn.ReLU())
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def logistic(input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Logistic regression: one linear layer."""
    return mlp(input_shape, num_classes, depth=0)


# -- VGG-11 without BatchNorm (configuration A of Simonyan and Zisserman, ICLR 2015), with a small classifier ----------


class VGG11(nn.Module):
    """VGG-11; the features are the flattened output of its convolutions, 512 values for images of 32x32.

    The five max-pools ask for at least 32x32 pixels; for larger images the first `Linear` widens.
    """

    feature_layer: ClassVar[str] = "features"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        shrink = 2 ** len(VGG_BLOCKS)
        channels, height, width = image_shape("vgg11", input_shape, at_least=shrink)
        layers: list[nn.Module] = []
        for block in VGG_BLOCKS:
            for channels_out in block:
                layers += [nn.Conv2d(channels, channels_out, 3, padding=1), nn.ReLU()]
                channels = channels_out
            layers.insert(-1, nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(512 * (height // shrink) * (width // shrink), 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


# -- ResNets for small images (He et al., CVPR 2016): the stem is a 3x3 convolution without max-pool -------------------
# Layers carry torchvision's names, so that its state dicts load everywhere but in the stem and the classifier.


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
