"""A sealed object is read back as it was, and any change to its values is noticed."""

from __future__ import annotations

import json

import pytest

from lowrank_cnn.core.files import BrokenSealError, is_sealed, sealed, unsealed

VALUES = {
    "top1": 0.1 + 0.2,
    "history": [{"loss": None, "epoch": 1}],
    "name": "nin \ud800",
    "by": {2: "a", 10: "b"},
}


def test_values_come_back_whatever_the_order_and_the_spaces():
    stored = json.dumps(sealed(VALUES), indent=3, sort_keys=True)
    back = unsealed(json.loads(stored))
    assert back == json.loads(json.dumps(VALUES))
    assert is_sealed(json.loads(stored))
    assert not is_sealed(back)


@pytest.mark.parametrize("change", [{"top1": 0.4}, {"history": []}, {"new": 1}, {"sha256": "0"}, {"sha256": None}])
def test_changed_values_break_the_seal(change):
    with pytest.raises(BrokenSealError, match="checksum"):
        unsealed(sealed(VALUES) | change)


def test_what_was_never_sealed_is_returned_as_it_is():
    assert unsealed({"top1": 1}) == {"top1": 1}
