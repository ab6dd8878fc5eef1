"""docs/metrics.md lists each metric as it is declared."""

from pathlib import Path

from rmq_pipeline.metrics.declared import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def row(metric: Metric) -> str:
    """The metric's line of the table."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {metric.unit} | {labels} | {metric.help} |"


def test_the_table_is_what_is_declared() -> None:
    lines = PAGE.read_text("utf-8").splitlines()

    found = [line for line in lines if line.startswith(("| `rmq_", "| `rocketmq_"))]

    assert found == [row(metric) for metric in METRICS]


def test_names_and_units_follow_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert metric.name.startswith(("rmq_", "rocketmq_"))
        for unit in ("bytes", "seconds", "milliseconds"):
            if f"_{unit}" in metric.name:
                assert metric.unit == unit, metric.name
