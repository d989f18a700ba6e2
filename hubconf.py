"""Entry points for `torch.hub`: every network by name, with `-` written as `_`.

torch.hub.load("OWNER/lowrank-cnn", "nin_c3_lr", pretrained="cifar10")
torch.hub.load("OWNER/lowrank-cnn", "from_pretrained", "user/name")
"""

from functools import partial, update_wrapper

from lowrank_cnn import create_model, from_pretrained, list_models

dependencies = ["torch", "safetensors"]

for _name in list_models():
    globals()[_name.replace("-", "_")] = update_wrapper(partial(create_model, _name), create_model)

__all__ = ["create_model", "dependencies", "from_pretrained"]
