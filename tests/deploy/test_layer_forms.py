"""One conv in its forms."""

from __future__ import annotations

import torch
from torch import nn

from lowrank_cnn.choose.design import layer_advice, variants_of
from lowrank_cnn.choose.shape_choice import Damage


def test_the_forms_cost_the_same_macs():
    forms = variants_of(nn.Conv2d(8, 24, 3, padding=1, stride=2))
    sizes = {name: sum(p.numel() for p in form.parameters() if p.dim() > 1) for name, form in forms.items()}
    assert sizes["strips"] == sizes["thin"] == sizes["dense"] // 3
    assert forms["thin, rounded up"].out_channels == 16
    assert {form(torch.randn(1, 8, 9, 9)).shape[2:] for form in forms.values()} == {(5, 5)}


def test_the_faster_form_is_advised_and_what_it_loses_counts_more():
    times = {"dense": 1.0, "strips": 0.5, "thin": 0.4}
    assert layer_advice("a", times, None).choice == "thinner"
    assert layer_advice("a", {**times, "strips": 0.3}, None).choice == "low-rank"
    assert layer_advice("a", {**times, "strips": 0.3, "thin, rounded up": 0.2}, None).choice == "thinner"
    harmless = Damage(torch.zeros(4, 2), torch.ones(4), torch.ones(4, 2, 1))
    row = layer_advice("a", times, {"a": harmless})
    assert (row.choice, row.strips_lose, row.thin_loses) == ("low-rank", 0.0, 0.5)
