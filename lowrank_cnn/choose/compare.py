"""`compare`: which cheap version of a network to train and ship, on your images and where it will run.

The dense network, low-rank ones and thinner ones that run in the time of these are timed first. All are then tried
briefly, by the same learning rates, on images held out of training. The best of each kind are trained several
times, each time with other images held out, which decide. The test images are used once, for the figures in the
answer. All results are in one folder. A comparison that was killed continues there.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from lowrank_cnn.choose.answer import Comparison, answer
from lowrank_cnn.choose.candidates import DENSE, Builder, find_design
from lowrank_cnn.choose.choice import Wish
from lowrank_cnn.choose.comparing import Comparing
from lowrank_cnn.choose.design import Advice, design
from lowrank_cnn.choose.frontier import about_runs, open_frontier
from lowrank_cnn.choose.target import Target
from lowrank_cnn.core.errors import LowRankWarning, check_number
from lowrank_cnn.core.files import locked
from lowrank_cnn.core.modules import known_inputs
from lowrank_cnn.core.notes import note
from lowrank_cnn.core.progress import lasting, progress, step
from lowrank_cnn.method.rewrite import copy_with
from lowrank_cnn.method.thin import fresh
from lowrank_cnn.models import create_model, list_pretrained
from lowrank_cnn.models.build import name_of, with_classes
from lowrank_cnn.models.foreign import DEFAULT, build_foreign, is_foreign
from lowrank_cnn.train.distributed import resolve_device
from lowrank_cnn.train.fit import recipe_for
from lowrank_cnn.train.inputs import augmentation, check_classes, check_network, image_size, open_for, trained_on
from lowrank_cnn.train.recipe import Recipe

Model = nn.Module | str | Callable[[], nn.Module]


@overload
def compare(model: Model, data: None = None, **options: Any) -> Advice: ...
@overload
def compare(model: Model, data: Any, **options: Any) -> Comparison: ...
def compare(
    model: Model,
    data: Any = None,
    *,
    out: str | Path = "runs/compare",
    minutes: float | None = None,
    for_: str = "auto",
    at_most: float | None = None,
    at_least: float | None = None,
    schemes: Sequence[str] = (),
    batch: int | None = None,
    recipe: Recipe | str | None = None,
    pretrained: bool | str = False,
    device: str = "auto",
    say: Callable[[str], None] = lasting,
    **settings: Any,
) -> Comparison | Advice:
    """Train dense, thinner and low-rank versions of a network, time each where it will run, and say which to take.

    >>> print(compare("nin", "photos", minutes=20, for_="onnxruntime:int8"))  # doctest: +SKIP

    - `model`: a network, a function that makes one, or a text: one of our names, `timm:resnet18`,
      `torchvision:resnet18` or `mynet.py:make_model`. Every run begins with fresh weights, which a function has to
      give. With `pretrained`, the network's own weights (or those named so) are fine-tuned, and cheaper networks
      are decomposed or pruned from the result, which teaches them.
    - `data`: what `fit` takes: a path, what `open_data` gives, data sets of your own. Without any, times alone
      advise on half of the MACs, as `design` does.
    - `out`: the folder of everything. The same call goes on with a comparison that was killed.
    - `minutes`: the budget; by default what the recipe's epochs take, at most an hour.
    - `for_`: where the network will run: "cpu", "cuda", or an engine with a precision ("onnxruntime:int8",
      "ncnn:fp16"), in which accuracy is measured too.
    - `at_most`, `at_least`: the milliseconds that the network may take for a `batch`, the accuracy that it must
      reach, between 0 and 1. Without them, the fastest within a point of the best is taken.
    - `schemes`: the low-rank designs to compare, in place of those that suit the network.
    - `recipe` and other settings are those of `fit`.
    """
    wish, target = Wish(at_most, at_least), Target.parse(for_, device)
    if minutes is not None:
        check_number("minutes", minutes, above=0)
    if batch is not None:
        check_number("batch", batch, least=1, whole=True)
    for text in schemes:
        find_design(text)  # refused before images are read
    sample = build(model, None, pretrained=pretrained)
    if data is None:
        size: Any = known_inputs(sample, None, "advice without images")
        image = torch.randn(batch or target.batch, *size)
        engine, precision = target.engine or "torch", target.precision or None
        return design(sample.eval(), image.to(target.device), macs=0.5, engine=engine, precision=precision)
    asked = recipe if recipe is not None else "finetune" if pretrained else "modern"
    plan = recipe_for(data, asked, settings)
    images = open_for(sample, data, plan)
    check_classes(images)
    if recipe is None and not pretrained:
        plan = recipe_for(data, asked, settings, images=trained_on(images, plan))
    size = image_size(images.test, augmentation(plan))
    builder = Builder(partial(build, model, len(images.classes), size[0], pretrained), size)
    check_network(builder(DENSE), images, plan)
    place, name = resolve_device(device), model if isinstance(model, str) else name_of(sample)
    network = {"name": name, "base": 1.0, "pretrained": pretrained}
    about = about_runs(plan, images, place, family=name, network=network, target=str(target))
    folder = Path(out)
    with locked(folder), progress("compare"), tempfile.TemporaryDirectory() as scratch:
        found = open_frontier(folder, about, len(images.test))
        if batch is None:
            batch = next((row.timing.batch for row in found.rows if row.timing), target.batch)
        found.check_batch(batch)
        fixed = recipe is not None or "batch_size" in settings
        timing: dict[str, Any] = {"batch": batch, "repeats": 9, "compile": target.gpu, "scratch": Path(scratch)}
        wishes: dict[str, Any] = {"wish": wish, "minutes": minutes, "schemes": schemes, "tell": say}
        how: dict[str, Any] = {"device": place, "pretrained": bool(pretrained), "fixed": fixed}
        comparing = Comparing(found, builder, target, step, data=images, recipe=plan, **timing, **wishes, **how)
        with warnings.catch_warnings(action="ignore", category=LowRankWarning):  # about speed, which is measured
            return answer(comparing, comparing.run())


def build(
    model: Model, classes: int | None, channels: int | None = None, pretrained: bool | str = False
) -> nn.Module:
    """The dense network, for a number of classes where that can be chosen; with fresh weights or trained ones."""
    weights = DEFAULT if pretrained is True else pretrained or None
    if isinstance(model, nn.Module):
        return copy_with(model) if pretrained else fresh(model)
    if not isinstance(model, str):
        return model()
    if is_foreign(model):
        network, size = build_foreign(model, None if ".py:" in model else weights, classes)
        note(network, input_size=size)
        return network
    if weights:
        known = [data for name, data in list_pretrained() if name == model and weights in (data, DEFAULT)]
        network = create_model(model, pretrained=known[0] if known else weights)
        return network if classes is None else with_classes(network, classes)
    shape: dict[str, Any] = {"num_classes": classes, "in_channels": channels}
    return create_model(model, norm="batch", **{key: value for key, value in shape.items() if value is not None})
