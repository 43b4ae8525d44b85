"""The networks a run can name; each is a plain `nn.Module` whose forward returns logits and nothing else."""

from __future__ import annotations

from fnrfl.core.errors import CompatibilityError


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
