"""Networks in which no bias, mean or variance is a zero or a one that would hide a mistake."""

from torch import nn


def shaken(model: nn.Module) -> nn.Module:
    """Give every bias, mean and variance a value of its own."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
        elif getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
    return model
