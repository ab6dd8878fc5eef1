"""GraphQL client of a Dagster webserver: readiness, runs, launches, terminations."""

import json
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

#: Name of the repository that Dagster creates for the definitions of a code location.
REPOSITORY: Final = "__repository__"
#: Statuses of unfinished runs.
UNFINISHED: Final = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")

_READY: Final = """{
  workspaceOrError { ... on Workspace { locationEntries {
    loadStatus
    locationOrLoadError { __typename ... on PythonError { message } }
  } } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy lastHeartbeatTime } } }
}"""
_RUNS: Final = """query ($filter: RunsFilter, $limit: Int, $cursor: String) {
  runsOrError(filter: $filter, limit: $limit, cursor: $cursor) {
    ... on Runs { results { id runId status jobName } }
  }
}"""
_TERMINATE: Final = """mutation ($ids: [String!]!) {
  terminateRuns(runIds: $ids, terminatePolicy: SAFE_TERMINATE) { __typename }
}"""
_LAUNCH: Final = """mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on PythonError { message }
  }
}"""
_BACKFILL: Final = """mutation ($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}"""
_OF_BACKFILL: Final = """query ($id: String!) { partitionBackfillOrError(backfillId: $id) {
  __typename
  ... on PartitionBackfill { status }
} }"""
_RUNS_OF_BACKFILL: Final = """query ($filter: RunsFilter) { runsOrError(filter: $filter) {
  ... on Runs { results { runId status } }
} }"""
_EVENTS: Final = """query ($key: AssetKeyInput!, $limit: Int) {
  assetOrError(assetKey: $key) { ... on Asset { EVENTS(limit: $limit) {
    partition runId timestamp
    metadataEntries {
      label
      ... on TextMetadataEntry { text }
      ... on IntMetadataEntry { intRepr }
      ... on FloatMetadataEntry { floatValue }
      ... on BoolMetadataEntry { boolValue }
      ... on JsonMetadataEntry { jsonString }
    }
  } } }
}"""
_REEXECUTE: Final = """mutation ($params: ReexecutionParams!) {
  launchRunReexecution(reexecutionParams: $params) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}"""
_ASSET_GROUPS: Final = "{ assetNodes { groupName } }"
_SENSORS: Final = """{ repositoriesOrError { ... on RepositoryConnection { nodes { sensors {
  name
  tags { key value }
  sensorState { status ticks(limit: 2) { status timestamp } }
} } } } }"""
_VALUES: Final = ("text", "floatValue", "boolValue")
_STATUS: Final = """query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"""
_PAGE: Final = 500
#: Statuses of a tick that has done its work.
_SUCCEEDED: Final = ("SUCCESS", "SKIPPED")


@dataclass(frozen=True)
class Readiness:
    """Startup progress of a Dagster instance."""

    #: True if the code location is loaded and all required daemons have sent a heartbeat.
    ready: bool
    #: Why the code location cannot be loaded; empty if it can be, or is still loading.
    load_error: str = ""


class GraphQL:
    """The GraphQL endpoint of a webserver at ``http://host:port``."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self._endpoint = f"{url}/graphql"
        self._timeout_s = timeout_s

    def ask(self, query: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the ``data`` of an answer.

        Raises:
            OSError: no webserver answers.
            ValueError: the answer contains errors.
        """
        body = json.dumps({"query": query, "variables": variables or {}}).encode()
        request = urllib.request.Request(  # noqa: S310 - the address is our own webserver's
            self._endpoint, body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310
                answer = json.load(response)
        except HTTPException as error:  # it ended within its answer
            raise OSError(f"{type(error).__name__} from {self._endpoint}") from error
        if answer.get("errors"):
            raise ValueError(f"GraphQL: {answer['errors'][0]['message']}")
        data: dict[str, Any] = answer["data"]
        return data

    def readiness(self, *, since_s: float) -> Readiness:
        """Return whether sensors tick and runs can start.

        Args:
            since_s: heartbeats before this time (seconds since 1970) belong to an earlier daemon.
        """
        data = self.ask(_READY)
        entries = data["workspaceOrError"].get("locationEntries", [])
        for entry in entries:
            location = entry["locationOrLoadError"] or {}
            if location.get("__typename") == "PythonError":
                return Readiness(ready=False, load_error=location["message"])
        loaded = bool(entries) and all(
            entry["loadStatus"] == "LOADED" and entry["locationOrLoadError"] for entry in entries
        )
        daemons = data["instance"]["daemonHealth"]["allDaemonStatuses"]
        beating = all(
            daemon["healthy"] and (daemon["lastHeartbeatTime"] or 0) >= since_s
            for daemon in daemons
            if daemon["required"]
        )
        return Readiness(ready=loaded and beating)

    def asset_groups(self) -> set[str]:
        """Return the names of the groups that the assets of all code locations have."""
        return {node["groupName"] for node in self.ask(_ASSET_GROUPS)["assetNodes"]}

    def sensors_without_tick(self, tag: str, *, since_s: float) -> list[str]:
        """Return the names of running sensors with a tag of which no tick has succeeded since.

        Args:
            tag: key of the tag.
            since_s: in seconds since 1970.

        Raises:
            OSError: no webserver answers.
            ValueError: the answer contains errors.
        """
        found = self.ask(_SENSORS)["repositoriesOrError"].get("nodes")
        if found is None:
            raise ValueError("GraphQL: the code locations cannot be listed")
        return [
            sensor["name"]
            for repository in found
            for sensor in repository["sensors"]
            if tag in {each["key"] for each in sensor["tags"]}
            and (state := sensor["sensorState"])["status"] == "RUNNING"
            and not any(
                tick["status"] in _SUCCEEDED and tick["timestamp"] >= since_s
                for tick in state["ticks"]
            )
        ]

    def runs(self, *, statuses: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Return all runs, newest first: runId, status, jobName.

        Args:
            statuses: only runs with these statuses; empty for all.
        """
        found: list[dict[str, Any]] = []
        while True:
            data = self.ask(
                _RUNS,
                {
                    "filter": {"statuses": list(statuses)} if statuses else {},
                    "limit": _PAGE,
                    "cursor": found[-1]["runId"] if found else None,
                },
            )
            page = data["runsOrError"]["results"]
            found += page
            if len(page) < _PAGE:
                return found

    def runs_by_status(self) -> dict[str, dict[str, int]]:
        """Return the number of runs by job and status."""
        counts = Counter((run["jobName"], run["status"]) for run in self.runs())
        by_job: dict[str, dict[str, int]] = {}
        for (job, status), count in sorted(counts.items()):
            by_job.setdefault(job, {})[status] = count
        return by_job

    def launch(self, job: str, *, location: str, config: Mapping[str, Any]) -> str:
        """Launch a job as the Launchpad does; return the id of the run.

        Args:
            job: a job of the location's repository.
            location: the code location.
            config: config of the run.

        Raises:
            ValueError: the job does not exist, or the config is invalid.
        """
        selector = {
            "repositoryLocationName": location,
            "repositoryName": REPOSITORY,
            "jobName": job,
        }
        params = {"selector": selector, "runConfigData": dict(config)}
        answer: dict[str, Any] = self.ask(_LAUNCH, {"params": params})["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise ValueError(f"{job} is not launched: {answer}")
        run_id: str = answer["run"]["runId"]
        return run_id

    def reexecute(self, run_id: str, *, strategy: str = "ALL_STEPS") -> str:
        """Re-execute a run as its page does; return the id of the new run.

        Args:
            run_id: id of the run.
            strategy: ALL_STEPS or FROM_FAILURE.

        Raises:
            ValueError: the run cannot be re-executed.
        """
        params = {"parentRunId": run_id, "strategy": strategy}
        answer = self.ask(_REEXECUTE, {"params": params})["launchRunReexecution"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise ValueError(f"Run {run_id} is not executed again: {answer}")
        new: str = answer["run"]["runId"]
        return new

    def launch_backfill(
        self,
        asset: Sequence[str],
        partitions: Sequence[str],
        *,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        title: str = "",
    ) -> str:
        """Launch a backfill of an asset as its dialog does; return the id of the backfill.

        Args:
            asset: path of the asset's key.
            partitions: keys of the partitions.
            config: config of the runs.
            tags: tags of the runs.
            title: shown in the list of backfills.

        Raises:
            ValueError: the asset does not exist, or the config is invalid.
        """
        params = {
            "assetSelection": [{"path": list(asset)}],
            "partitionNames": list(partitions),
            "tags": [{"key": key, "value": value} for key, value in (tags or {}).items()],
            "title": title or None,
            "runConfigData": dict(config or {}),
        }
        answer = self.ask(_BACKFILL, {"params": params})["launchPartitionBackfill"]
        if answer["__typename"] != "LaunchBackfillSuccess":
            raise ValueError(f"{'/'.join(asset)} is not launched: {answer}")
        backfill_id: str = answer["backfillId"]
        return backfill_id

    def backfill(self, backfill_id: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the status of a backfill, and its runs: runId, status."""
        found = self.ask(_OF_BACKFILL, {"id": backfill_id})["partitionBackfillOrError"]
        tag = {"key": "dagster/backfill", "value": backfill_id}
        runs = self.ask(_RUNS_OF_BACKFILL, {"filter": {"tags": [tag]}})["runsOrError"]["results"]
        return found.get("status", ""), runs

    def materializations(self, asset: Sequence[str], *, limit: int = 100) -> list[dict[str, Any]]:
        """Return an asset's last materializations, newest first: partition, runId, metadata."""
        return self._events("assetMaterializations", asset, limit=limit)

    def observations(self, asset: Sequence[str], *, limit: int = 100) -> list[dict[str, Any]]:
        """Return an asset's last observations, in the form of ``materializations``."""
        return self._events("assetObservations", asset, limit=limit)

    def _events(self, kind: str, asset: Sequence[str], *, limit: int) -> list[dict[str, Any]]:
        asked = {"key": {"path": list(asset)}, "limit": limit}
        query = _EVENTS.replace("EVENTS", kind)
        found = self.ask(query, asked)["assetOrError"].get(kind, [])
        return [
            {
                "partition": each["partition"],
                "runId": each["runId"],
                "metadata": {entry["label"]: _value(entry) for entry in each["metadataEntries"]},
            }
            for each in found
        ]

    def status(self, run_id: str) -> str:
        """Return the status of a run; empty if the run does not exist."""
        found: str = self.ask(_STATUS, {"id": run_id})["runOrError"].get("status", "")
        return found

    def terminate(self, run_ids: list[str]) -> None:
        """Terminate runs; their windows are closed, and the runs become canceled."""
        self.ask(_TERMINATE, {"ids": run_ids})


def _value(entry: Mapping[str, Any]) -> Any:
    if entry.get("intRepr") is not None:
        return int(entry["intRepr"])
    if entry.get("jsonString") is not None:
        return json.loads(entry["jsonString"])
    return next((entry[name] for name in _VALUES if entry.get(name) is not None), None)
