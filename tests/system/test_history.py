from torch import nn

from lowrank_cnn.method.converting import convert
from lowrank_cnn.system.provenance import notes


def test_the_report_prints_as_a_table():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    assert str(notes(convert(net, "lr-join")).conversion).splitlines() == [
        "layer  filters  now                     weights  now",
        "0      3x3,8    3x1,4 + 1x3,4 -> 1x1,8      224  144",
        "",
        "left  layer   why",
        "1     Conv2d  its kernel is 1x1",
    ]
