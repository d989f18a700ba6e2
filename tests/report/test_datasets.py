import pytest

from lowrank_cnn.data.small_sets import CLASSES
from lowrank_cnn.report.records import data_label, data_name, trained_label


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("CIFAR-10", "CIFAR-10"),
        ("cifar10", "CIFAR-10"),
        ("uoft-cs/cifar10", "CIFAR-10"),
        ("ilsvrc12", "ILSVRC"),
        ("ILSVRC/imagenet-1k", "ILSVRC"),
        ("my set", "my set"),
        ("my/set", "my/set"),
    ],
)
def test_data_sets_have_one_name(name: str, label: str):
    assert data_label(name) == label


def test_a_recipe_of_the_same_name_is_not_said_twice():
    assert trained_label("digits", "digits") == "digits"
    assert trained_label("cifar10", "nin-modern") == "CIFAR-10, nin-modern"


def test_cifar10_is_known_whatever_its_folder_is_called():
    data = {"name": "data", "classes": list(CLASSES), "train": 50_000, "test": 10_000}
    assert data_name(data) == "cifar10"
    assert data_name({**data, "train": 45_000}) == "data"
    assert data_name({**data, "classes": ["cat", "dog"]}) == "data"


@pytest.mark.parametrize(
    ("name", "train", "test", "called"),
    [
        ("cifar10", 50_000, 10_000, "cifar10"),
        ("cifar10", None, None, "cifar10"),
        ("cifar10", 512, 512, "a part of CIFAR-10 (512 + 512 images)"),
        ("cifar10", 50_000, 512, "a part of CIFAR-10 (50,000 + 512 images)"),
        ("imagenet-1k", 1_281_100, 49_990, "imagenet-1k"),
        ("imagenet-1k", 100_000, 50_000, "a part of ILSVRC (100,000 + 50,000 images)"),
        ("mine", 12, 3, "mine"),
    ],
)
def test_a_part_of_a_known_set_is_called_so(name: str, train: int | None, test: int | None, called: str):
    assert data_name({"name": name, "train": train, "test": test}) == called
    assert not called.startswith("a part") or data_label(called) == called
