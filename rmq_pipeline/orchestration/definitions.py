"""``definitions``: all that Dagster loads for pipelines and the broker behind them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from rmq_pipeline.orchestration.checker_windows import checker_windows
from rmq_pipeline.orchestration.declarations import refuse_twins
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import resources_of
from rmq_pipeline.orchestration.upkeep import Upkeep


def definitions(
    pipelines: Sequence[Pipeline] = (),
    *,
    resources: Mapping[str, Any] | None = None,
    upkeep: bool = True,
) -> dg.Definitions:
    """Return the Dagster definitions of pipelines and of the broker's background work.

    Merge them with definitions of your own by ``dg.Definitions.merge``.

    Args:
        pipelines: topics, consumers and checkers of this code location.
        resources: resources that replace or add to ``broker``, ``sinks`` and ``spark``. Default:
            those of the deployment that RMQ_DEPLOYMENT names.
        upkeep: False in every code location of a broker but one. Their checkers have windows of
            their own.

    Raises:
        ValueError: pipelines share a name, a consumer group or a sink, two checkers have one topic,
            or two names would be one asset.
    """
    return dg.Definitions.merge(
        deployment(pipelines, resources=resources, upkeep=upkeep),
        *(each.definitions() for each in pipelines),
    )


def deployment(
    pipelines: Sequence[Pipeline],
    *,
    resources: Mapping[str, Any] | None = None,
    upkeep: bool = True,
) -> dg.Definitions:
    """Return what a code location has once: resources, executor, and the background work.

    The arguments are those of ``definitions``.

    Raises:
        ValueError: as ``definitions``.
    """
    _check(pipelines)
    checkers = [checker for each in pipelines for checker in each.checkers]
    return dg.Definitions.merge(
        dg.Definitions(
            resources={**resources_of(), **(resources or {})},
            # A run is one process. The multiprocess executor would add 1.5 s to each run, and its
            # step worker would outlive a killed run.
            executor=dg.in_process_executor,
        ),
        Upkeep(pipelines).definitions() if upkeep else checker_windows(checkers),
    )


def _check(pipelines: Sequence[Pipeline]) -> None:
    """Refuse pipelines that would have one asset, group, sink or checker twice."""
    for each in pipelines:
        if not isinstance(each, Pipeline):
            raise ValueError(  # noqa: TRY004 - as other checks
                f"A pipeline is {each!r}. Give what Pipeline(...) returns."
            )
    consumers = [consumer for each in pipelines for consumer in each.consumers]
    checkers = [checker for each in pipelines for checker in each.checkers]
    groups = [each.group.name for each in consumers]
    groups += [group.name for each in pipelines for group in each.groups]
    sinks = [str(each.spec.sink) for each in consumers if each.spec.sink is not None]
    for what, names in (
        ("are named", [each.name for each in pipelines]),
        ("have the topic", [topic.name for each in pipelines for topic in each.topics]),
        ("have the consumer group", groups),
        ("have the sink", sinks),
        ("have a checker of topic", [each.topic.name for each in checkers]),
    ):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise ValueError(
                f"Two pipelines {what} {twice[0]}. Keep it in one of them, or rename one."
            )
    topics = [topic.name for each in pipelines for topic in each.topics]
    refuse_twins([*topics, *groups], of="these pipelines")
    # Also of topics that are declared elsewhere: a checker has an asset and a job of its own.
    refuse_twins([each.topic.name for each in checkers], of="the checkers of these pipelines")
