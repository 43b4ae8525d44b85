"""VGG-11 without BatchNorm (configuration A of Simonyan and Zisserman, ICLR 2015) with a small classifier."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from fnrfl.models import image_shape

# Output channels of the convolutions of each block; a max-pool that halves the image ends every block.
BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))


class VGG11(nn.Module):
    """VGG-11; the features are the flattened output of its convolutions, 512 values for images of 32x32.

    The five max-pools ask for at least 32x32 pixels; for larger images the first `Linear` widens.
    """

    feature_layer: ClassVar[str] = "features"

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        shrink = 2 ** len(BLOCKS)
        channels, height, width = image_shape("vgg11", input_shape, at_least=shrink)
        layers: list[nn.Module] = []
        for block in BLOCKS:
            for channels_out in block:
                layers += [nn.Conv2d(channels, channels_out, 3, padding=1), nn.ReLU()]
                channels = channels_out
            # Pooled before the ReLU: the same values and gradients for a quarter of its work.
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
