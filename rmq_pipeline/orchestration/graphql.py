"""What we ask a Dagster webserver: is it ready, which runs are there, start one, end them."""

import json
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: The repository that Dagster makes of the definitions of a code location.
REPOSITORY: Final = "__repository__"
#: States of a run that is not over.
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
_MATERIALIZED: Final = """query ($key: AssetKeyInput!, $limit: Int) {
  assetOrError(assetKey: $key) { ... on Asset { assetMaterializations(limit: $limit) {
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
_VALUES: Final = ("text", "floatValue", "boolValue")
_STATUS: Final = """query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"""
_PAGE: Final = 500


@dataclass(frozen=True)
class Readiness:
    """How far a Dagster instance has come up."""

    #: The code location is loaded and the daemons that are needed have sent a heartbeat.
    ready: bool
    #: Why the code location cannot be loaded; empty when it can, or is not yet.
    load_error: str = ""


class GraphQL:
    """The GraphQL door of a webserver at ``http://host:port``."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self._endpoint = f"{url}/graphql"
        self._timeout_s = timeout_s

    def ask(self, query: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
        """The ``data`` of an answer.

        Raises:
            OSError: no webserver answers.
            ValueError: the answer holds errors.
        """
        body = json.dumps({"query": query, "variables": variables or {}}).encode()
        request = urllib.request.Request(  # noqa: S310 - the address is our own webserver's
            self._endpoint, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310
            answer = json.load(response)
        if answer.get("errors"):
            raise ValueError(f"GraphQL: {answer['errors'][0]['message']}")
        data: dict[str, Any] = answer["data"]
        return data

    def readiness(self, *, since_s: float) -> Readiness:
        """Whether sensors tick and runs can start.

        Args:
            since_s: heartbeats before this time (seconds since 1970) are of an earlier daemon.
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

    def runs(self, *, statuses: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """All runs, newest first: runId, status, jobName.

        Args:
            statuses: only these; empty for any.
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
        """Number of runs by job and status."""
        counts = Counter((run["jobName"], run["status"]) for run in self.runs())
        by_job: dict[str, dict[str, int]] = {}
        for (job, status), count in sorted(counts.items()):
            by_job.setdefault(job, {})[status] = count
        return by_job

    def launch(self, job: str, *, location: str, config: Mapping[str, Any]) -> str:
        """Launch a job as its Launchpad does; the id of the run.

        Args:
            job: of the location's repository.
            location: the code location.
            config: of the run.

        Raises:
            ValueError: there is no such job, or the config is wrong.
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

    def launch_backfill(
        self,
        asset: Sequence[str],
        partitions: Sequence[str],
        *,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        title: str = "",
    ) -> str:
        """Launch a backfill of an asset as its dialog does; the id of the backfill.

        Args:
            asset: path of its key.
            partitions: their keys.
            config: of its runs.
            tags: of its runs.
            title: shown in the list of backfills.

        Raises:
            ValueError: there is no such asset, or the config is wrong.
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
        """Status of a backfill, and its runs: runId, status."""
        found = self.ask(_OF_BACKFILL, {"id": backfill_id})["partitionBackfillOrError"]
        tag = {"key": "dagster/backfill", "value": backfill_id}
        runs = self.ask(_RUNS_OF_BACKFILL, {"filter": {"tags": [tag]}})["runsOrError"]["results"]
        return found.get("status", ""), runs

    def materializations(self, asset: Sequence[str], *, limit: int = 100) -> list[dict[str, Any]]:
        """What an asset's last materializations say, newest first: partition, runId, metadata."""
        asked = {"key": {"path": list(asset)}, "limit": limit}
        found = self.ask(_MATERIALIZED, asked)["assetOrError"].get("assetMaterializations", [])
        return [
            {
                "partition": each["partition"],
                "runId": each["runId"],
                "metadata": {entry["label"]: _value(entry) for entry in each["metadataEntries"]},
            }
            for each in found
        ]

    def status(self, run_id: str) -> str:
        """Status of a run; empty when there is no such run."""
        found: str = self.ask(_STATUS, {"id": run_id})["runOrError"].get("status", "")
        return found

    def terminate(self, run_ids: list[str]) -> None:
        """Ask runs to end; a window closes itself and its run becomes canceled."""
        self.ask(_TERMINATE, {"ids": run_ids})


def _value(entry: Mapping[str, Any]) -> Any:
    if entry.get("intRepr") is not None:
        return int(entry["intRepr"])
    if entry.get("jsonString") is not None:
        return json.loads(entry["jsonString"])
    return next((entry[name] for name in _VALUES if entry.get(name) is not None), None)
