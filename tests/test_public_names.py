"""``import rmq_pipeline as rmq``: a dozen names, each loaded when it is used."""

import subprocess
import sys

import pytest

import rmq_pipeline as rmq


@pytest.mark.parametrize("name", rmq.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(rmq, name).__doc__
    assert name in dir(rmq)


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        _ = rmq.Consumer
    assert set(rmq.__all__) == {*rmq._MODULES, "errors", "schema"}


def test_a_client_loads_neither_dagster_nor_spark_nor_duckdb() -> None:
    code = (
        "import sys, rmq_pipeline as rmq; rmq.Client, rmq.PushConsumer, rmq.errors;"
        "print(sorted({'dagster', 'pyspark', 'duckdb', 'typer'} & set(sys.modules)))"
    )

    loaded = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert loaded.strip() == "[]"
