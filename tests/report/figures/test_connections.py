from lowrank_cnn.report.network_figures import connection_matrix


def test_connections_are_those_of_a_convolution():
    matrix = connection_matrix(1, 3)
    assert matrix.shape == (36, 36)
    assert matrix[7].nonzero().flatten().tolist() == [6, 7, 8]
    assert matrix[7][[6, 7, 8]].tolist() == [1, 2, 3]
    assert int(connection_matrix(3, 3).count_nonzero()) == 256
