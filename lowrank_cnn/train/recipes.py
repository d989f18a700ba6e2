"""The recipes, by name.

The paper's recipes follow its text and, where it is silent, the published solvers of the networks it starts
from. Weight decay acts on weights alone; biases and normalisation are left free, as those solvers did.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from lowrank_cnn.core.errors import check_choice, check_number
from lowrank_cnn.core.numbers import ceil_div
from lowrank_cnn.core.text import counted
from lowrank_cnn.train.recipe import Recipe, changed

MODERN = Recipe(
    name="modern",
    batch_size=128,
    epochs=200,
    lr=0.1,
    nesterov=True,
    schedule="cosine",
    warmup=5.0,
    label_smoothing=0.1,
    ema=0.999,
    pad=4,
    cutout=8,
    norm="batch",
)
TINY_FAST = replace(
    MODERN,
    name="tiny-fast",
    batch_size=512,
    epochs=30,
    lr=0.4,
    warmup=3.0,
    ema=0.998,
    evaluate_every=100,
    pad=0,
    crop=56,
    alternate_mirror=True,
)
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="nin-paper",
            batch_size=128,
            epochs=180,
            lr=0.2,
            weight_decay=1e-4,
            clip_norm=1.0,
            schedule="paper",
            drop_epochs=(135, 162),
            preprocess="whiten",
            crop=30,
        ),
        Recipe(
            name="vgg-paper",
            batch_size=256,
            epochs=90,
            lr=0.01,
            weight_decay=5e-4,
            schedule="paper",
            holdout=0.02,
            patience=4,
            levels=3,
            resize=256,
            crop=224,
        ),
        Recipe(
            name="googlenet-paper",
            batch_size=32,
            epochs=60,
            lr=0.01,
            weight_decay=2e-4,
            schedule="poly",
            power=0.5,
            resize=256,
            crop=224,
        ),
        MODERN,
        replace(
            MODERN,
            name="nin-modern",
            batch_size=512,
            epochs=150,
            lr=0.8,
            crop=32,
            cutout=12,
            pool="average",
            dropout=0.0,
        ),
        Recipe(
            name="cifar10-fast",
            batch_size=1024,
            epochs=12,
            lr=1.5,
            momentum=0.85,
            nesterov=True,
            weight_decay=1.33e-3,
            schedule="triangle",
            warmup=2.4,
            lr_start=0.2,
            lr_end=0.07,
            bias_rate=64.0,
            lookahead=5,
            label_smoothing=0.2,
            evaluate_every=100,
            whiten_first=True,
            crop=32,
            pad=2,
            alternate_mirror=True,
            test_mirror=True,
            test_shift=1,
            norm="batch",
            dropout=0.0,
        ),
        TINY_FAST,
        replace(
            TINY_FAST,
            name="tiny-convnext",
            optimizer="adamw",
            epochs=20,
            lr=0.002,
            nesterov=False,
            weight_decay=0.05,
            warmup=2.0,
        ),
        Recipe(name="nin-init", epochs=10, lr=0.05, schedule="cosine", preprocess="whiten", crop=30),
        Recipe(
            name="digits",
            batch_size=64,
            epochs=6,
            lr=0.1,
            nesterov=True,
            schedule="cosine",
            warmup=1.0,
            crop=28,
            pad=2,
            mirror=False,
            norm="batch",
            dropout=0.0,
        ),
        Recipe(
            name="finetune", batch_size=32, epochs=20, lr=0.01, nesterov=True, schedule="cosine", warmup=1.0, pad=4
        ),
        Recipe(
            name="tiny-vgg", epochs=30, lr=0.02, schedule="paper", drop_epochs=(20, 26), evaluate_every=5, crop=56
        ),
        Recipe(
            name="tiny-googlenet",
            epochs=30,
            lr=0.02,
            weight_decay=2e-4,
            schedule="poly",
            warmup=1.0,
            evaluate_every=5,
            crop=56,
        ),
    )
}


def get_recipe(name: str, /, **overrides: object) -> Recipe:
    """A recipe of the table, with any field overridden by a value or by the text of one (`lr="0.05"`).

    >>> import lowrank_cnn as lr
    >>> recipe = lr.get_recipe("modern", lr=0.05, epochs="30")
    >>> recipe.lr, recipe.epochs
    (0.05, 30)
    """
    check_choice("recipe", name, RECIPES)
    return changed(RECIPES[name], overrides)


SGD_TO_ADAMW = 50
"""The learning rate of SGD over that of AdamW."""
LEAST_BATCH, MOST_BATCH = 16, 128
STEPS_PER_EPOCH, STEPS = 30, 2000
"""The steps that an epoch of few images and a run of them should have."""
MANY_IMAGES = 100_000
"""From here on 30 epochs are enough, as in the recipe `tiny-fast`."""


def defaults_for(images: int, *, batch_size: int | None = None) -> Recipe:
    """The recipe for this many training images if the user names none: `modern`, with other batches and epochs.

    A batch is a power of two, small enough for some thirty steps in an epoch. Small sets get more epochs, until a
    run has some 2,000 steps. The rate falls with the square root of the batch, also with a `batch_size` of the
    user's own. docs/training.md has the measurements.

    >>> recipe = defaults_for(963)
    >>> recipe.batch_size, recipe.epochs, recipe.lr
    (32, 70, 0.05)
    """
    check_number("images", images, least=1, whole=True)
    power = 2 ** (max(1, images // STEPS_PER_EPOCH).bit_length() - 1)
    chosen = min(images, max(LEAST_BATCH, min(MOST_BATCH, power)))
    batch, epochs = batch_size or chosen, ceil_div(STEPS, images // chosen * 10) * 10
    rate = float(f"{0.1 * (batch / MOST_BATCH) ** 0.5:.0e}")
    least = 60 if images < MANY_IMAGES else 30
    return replace(MODERN, batch_size=batch, epochs=min(MODERN.epochs, max(least, epochs)), lr=rate)


def suited(recipe: Recipe, images: int, network: nn.Module, given: Collection[str]) -> Recipe:
    """A recipe with the defaults for this many images, except for the fields that the user has given.

    A network of layer norms without batch norms, as ConvNeXt, hardly learns by SGD: it is trained by AdamW.
    """
    fields = ["batch_size", "epochs", "lr"]
    found = defaults_for(max(1, images), batch_size=recipe.batch_size if "batch_size" in given else None)
    if "optimizer" not in given and has_layer_norms(network):
        rate = float(f"{found.lr / SGD_TO_ADAMW:.1e}")
        found = replace(found, optimizer="adamw", lr=rate, nesterov=False, weight_decay=0.05)
        fields += ["optimizer", "nesterov", "weight_decay"]
    return replace(recipe, **{name: getattr(found, name) for name in fields if name not in given})


def has_layer_norms(network: nn.Module) -> bool:
    """Whether a network normalises by layers and not by batches."""
    layers = list(network.modules())
    by_batches = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers)
    return not by_batches and any(isinstance(layer, nn.LayerNorm | nn.RMSNorm) for layer in layers)


def defaults_in_words(recipe: Recipe, images: int) -> str:
    """The line that is printed before a run whose recipe was chosen from the number of images."""
    steps, more = images // recipe.batch_size * recipe.epochs, ""
    if recipe.batch_size < MOST_BATCH <= images:
        more = f" Batches of {MOST_BATCH} would give {images // MOST_BATCH * recipe.epochs:,}."
    each = f"batches of {recipe.batch_size}, {counted(recipe.epochs, 'epoch')}, rate {recipe.lr:g}"
    each += "" if recipe.optimizer == MODERN.optimizer else f" by {recipe.optimizer}"
    return f"{counted(images, 'image')}: {each}, {counted(steps, 'step')} in all.{more}"
