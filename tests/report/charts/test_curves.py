from dataclasses import replace

from lowrank_cnn.report.charts import best_measure, curves_spec, training_curves
from lowrank_cnn.report.records import Records
from lowrank_cnn.report.results import gather


def test_curves_keep_their_ends_and_are_not_endless(records: Records):
    found = training_curves(gather(records))
    assert len(found) == 15
    assert (found[0]["epochs"][0], found[0]["epochs"][-1]) == (1, 60)
    long = [replace(run, history=run.history * 30) for run in records.runs[:1]]
    (curve,) = training_curves(gather(Records(long)))
    assert len(curve["train_loss"]) == len(curve["epochs"]) <= 401
    assert curve["epochs"][-1] == 60


def test_runs_watched_on_the_way_show_that_and_others_their_training(records: Records):
    curves = training_curves(gather(records))
    assert best_measure(curves) == "accuracy"
    once = [{**curve, "accuracy": [None] * 59 + [0.5]} for curve in curves]
    assert best_measure(once) == "train_accuracy"


def test_a_figure_has_a_line_per_network_and_a_dot_per_finished_run(records: Records):
    curves = [curve for curve in training_curves(gather(records)) if curve["data"] == "CIFAR-10"]
    spec = curves_spec("nin-paper on CIFAR-10", curves)
    assert {row["group"] for row in spec["datasets"]["curves"]} == {"nin", "nin-c3", "nin-c3-lr"}
    assert len(spec["datasets"]["ends"]) == 9
    begun = [{**curve, "test": None} for curve in curves]
    assert curves_spec("begun", begun)["datasets"]["ends"] == []
