"""What consumers that share queues ask of the table endpoint, and the rights that this needs."""

from typing import Any

_PLACE = {"topic": "orders", "group": "billing"}
_CONSUMES = ["topic:orders sub", "group:billing sub"]
_QUEUES = {**_PLACE, "queue_ids": [0], "client_id": "c"}

#: Arguments of each verb, and its rights.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "release": ({"receipts": "a delivery"}, _CONSUMES),
    "pull": ({"topic": "orders", "positions": {0: 0}}, ["topic:orders sub"]),
    "commit_offsets": ({**_PLACE, "offsets": {0: [-1, 0]}}, _CONSUMES),
    "committed_offsets": (_PLACE, _CONSUMES),
    "start_offsets": ({**_PLACE, "where": "first"}, _CONSUMES),
    "clone_offsets": (
        {"from_group": "billing", "to_group": "none", "topic": "orders"},
        ["group:billing get", "group:none update"],
    ),
    "heartbeat": (
        {"group": "billing", "client_id": "c", "topics": ["orders"], "details": {}},
        _CONSUMES,
    ),
    "leave": ({"group": "billing", "client_id": "c"}, ["group:billing sub"]),
    "lock_queues": (_QUEUES, _CONSUMES),
    "unlock_queues": (_QUEUES, _CONSUMES),
}
