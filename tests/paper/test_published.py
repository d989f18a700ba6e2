from lowrank_cnn.paper.published import rows


def test_the_crops_of_a_network_are_counted():
    crops = {row.network: (row.crops, row.macs_per_image) for row in rows() if row.crops > 1}
    assert crops == {
        "googlenet-10-crop": (10, 10 * 1591056680),
        "googlenet-144-crop": (144, 144 * 1591056680),
    }
