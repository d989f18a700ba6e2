from torch import nn

from lowrank_cnn.models import create_model
from lowrank_cnn.report.network_figures import area, effective_field


def test_the_field_of_a_single_filter_is_its_shape():
    conv = nn.Conv2d(3, 64, (3, 1), padding=(1, 0))
    field = effective_field(conv)
    rows, columns = field.nonzero(as_tuple=True)
    assert set(columns.tolist()) == {80}
    assert rows.tolist() == [79, 80, 81]
    assert area(field) == 3


def test_low_rank_networks_see_less():
    dense, low = (effective_field(create_model(name)) for name in ("nin", "nin-c3-lr"))
    assert area(low) < area(dense)
