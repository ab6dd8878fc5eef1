"""The resource ``spark``: dagster-pyspark's, or without the extra ``spark`` one that says so.

A project without Spark has the same assets. Their runs that need a session fail with the remedy,
and ``spark_consumer`` requests no window.
"""

from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

from rmq_pipeline.extras import MissingExtraError

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
else:
    try:
        from dagster_pyspark import LazyPySparkResource
    except ModuleNotFoundError:

        class LazyPySparkResource(dg.ConfigurableResource):
            """Stands in for the resource of dagster-pyspark, which is not installed."""

            spark_config: dict[str, Any] = {}  # noqa: RUF012 - as in the other one

            @property
            def spark_session(self) -> NoReturn:
                """Say what to install.

                Raises:
                    MissingExtraError: always.
                """
                raise MissingExtraError("spark", "pyspark")


__all__ = ["LazyPySparkResource"]
