"""``rmq recall``."""

from typing import Annotated

import typer

from rmq_pipeline.cli.options import AsJson, Flight, Home, Topic, connected
from rmq_pipeline.cli.output import rows_of, show_rows


def recall(
    topic: Topic,
    handles: Annotated[
        list[str],
        typer.Argument(metavar="HANDLE", help="The recall_handle that `rmq send` printed."),
    ],
    *,
    home: Home = None,
    flight: Flight = None,
    as_json: AsJson = False,
) -> None:
    """Recall scheduled messages before their delivery: all of them, or none."""
    import pyarrow as pa

    from rmq_pipeline.schema import RECALL

    with connected(home, flight) as client:
        recalled = rows_of(client.recall(topic, pa.table([handles], schema=RECALL)))
    show_rows(recalled, as_json=as_json, empty="")
