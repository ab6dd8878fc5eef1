"""The rights that each verb of the table endpoint needs."""

from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from tests.access import consumer_rights
from tests.access.conftest import messages

CLUSTER = "cluster:DefaultCluster"
WINDOW = {"owner": "me", "duration_ms": 60_000}
PLACE = {"group": "billing", "topic": "orders"}

#: verb -> arguments, and the rights that it needs, each of them.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "create_topic": ({"name": "new"}, ["topic:new create"]),
    "ensure_topic": ({"name": "ensured"}, ["topic:ensured create"]),
    "alter_topic": ({"name": "none"}, ["topic:none update"]),
    "delete_topic": ({"name": "none"}, ["topic:none delete"]),
    "list_topics": ({}, [f"{CLUSTER} list"]),
    "describe_topic": ({"name": "orders"}, ["topic:orders get"]),
    "create_group": ({"name": "new"}, ["group:new create"]),
    "ensure_group": ({"name": "ensured"}, ["group:ensured create"]),
    "alter_group": ({"name": "none"}, ["group:none update"]),
    "delete_group": ({"name": "none"}, ["group:none delete"]),
    "list_groups": ({}, [f"{CLUSTER} list"]),
    "describe_group": ({"name": "billing"}, ["group:billing get"]),
    "subscribe": (PLACE, ["topic:orders sub", "group:billing sub"]),
    "send": ({"topic": "orders", "messages": messages()}, ["topic:orders pub"]),
    "recall": (
        {"topic": "orders", "handles": pa.table({"recall_handle": ["x"]})},
        ["topic:orders pub"],
    ),
    "send_half": (
        {"topic": "pays", "messages": messages(), "producer_group": "p"},
        ["topic:pays pub"],
    ),
    "end_transactions": ({"resolutions": "a half message"}, ["topic:pays pub"]),
    "fetch_checks": ({"topics": ["pays"]}, ["topic:pays pub"]),
    "keep_checks": ({"holder": "h", "checks": "a half message"}, ["topic:pays pub"]),
    "check_transactions": ({}, [f"{CLUSTER} update"]),
    "receive": ({**PLACE, "ack": "a delivery"}, ["topic:orders sub", "group:billing sub"]),
    "sync_lite_subscription": (
        {**PLACE, "client_id": "c", "action": "clear"},
        ["topic:orders sub", "group:billing sub"],
    ),
    "lite_subscriptions": (PLACE, ["topic:orders sub", "group:billing sub"]),
    "ack": ({"receipts": "a delivery"}, ["topic:orders sub", "group:billing sub"]),
    "change_invisible_duration": (
        {"receipts": "a delivery", "duration_ms": 60_000},
        ["topic:orders sub", "group:billing sub"],
    ),
    "forward_to_dead_letter_queue": (
        {"receipts": "a delivery"},
        ["topic:orders sub", "group:billing sub"],
    ),
    "settle": (
        {"group": "billing", "outcomes": "a delivery", "publish": {"pays": messages()}},
        ["topic:orders sub", "group:billing sub", "topic:pays pub"],
    ),
    "unpark": ({"group": "billing"}, ["group:billing update"]),
    "redrive": (
        {
            "group": "billing",
            "redrive_id": "r",
            "dead_letters": schema.DEAD_LETTER.empty_table(),
        },
        ["group:billing update"],
    ),
    "seen_before": (
        {"group": "billing", "keys": pa.table({"idempotency_key": ["k"]})},
        ["group:billing sub"],
    ),
    "read": ({"topic": "orders", "queue_id": 0, "offset": 0, "limit": 1}, ["topic:orders sub"]),
    "find": ({"topic": "orders", "key": "k"}, ["topic:orders sub"]),
    "lag": ({"group": "billing"}, ["group:billing get"]),
    "offset_at": ({"topic": "orders", "queue_id": 0, "at_ms": 0}, ["topic:orders get"]),
    "reset_offset": ({**PLACE, "to_latest": True}, ["group:billing update"]),
    "update_offsets": (
        {**PLACE, "offsets": {0: 0}},
        ["topic:orders sub", "group:billing sub"],
    ),
    "keyed_state": (PLACE, ["group:billing sub"]),
    "keyed_state_history": ({**PLACE, "places": messages()}, ["group:billing sub"]),
    "sink_files": ({"group": "billing"}, ["group:billing get"]),
    "replace_sink_files": (
        {
            "group": "billing",
            "replacement_id": "r",
            "add": schema.SINK_FILE.empty_table(),
            "remove": [],
        },
        ["group:billing update"],
    ),
    "sql": ({"query": "SELECT 1 AS one"}, [f"{CLUSTER} get"]),
    "due": ({}, [f"{CLUSTER} get"]),
    "status": ({}, [f"{CLUSTER} get"]),
    "metrics": ({}, [f"{CLUSTER} get"]),
    "archive": ({}, [f"{CLUSTER} get"]),
    "open_window": ({"name": "consumer/billing", **WINDOW}, ["group:billing sub"]),
    "renew_window": (
        {"name": "consumer/billing", "epoch": 99, "duration_ms": 1_000},
        ["group:billing sub"],
    ),
    "close_window": ({"name": "upkeep/seal", "epoch": 99}, [f"{CLUSTER} update"]),
    "deliver_scheduled": ({}, [f"{CLUSTER} update"]),
    "revive": ({}, [f"{CLUSTER} update"]),
    "seal": ({}, [f"{CLUSTER} update"]),
    "compact": ({}, [f"{CLUSTER} update"]),
    "plan_compaction": ({}, [f"{CLUSTER} update"]),
    "replace_segments": ({"removed": ["x"], "added": "y"}, [f"{CLUSTER} update"]),
    "expire": ({}, [f"{CLUSTER} update"]),
    "copy_state": ({}, [f"{CLUSTER} update"]),
    "promote": ({}, [f"{CLUSTER} update"]),
    **consumer_rights.CASES,
}
SUPER: dict[str, dict[str, Any]] = {
    "create_user": {"name": "bob"},
    "alter_user": {"name": "ann", "type": "super"},
    "delete_user": {"name": "bob"},
    "list_users": {},
    "put_policy": {"user": "ann", "resource": "*", "actions": ["all"]},
    "delete_policy": {"user": "ann", "resource": "*"},
    "list_policies": {},
    "explain_access": {"user": "ann", "resource": "topic:orders", "action": "pub"},
}
