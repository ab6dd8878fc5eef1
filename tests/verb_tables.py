"""Every table that a verb takes at the Flight endpoint, with the other arguments of its verb."""

from typing import Any

#: The column of each table that a verb takes, and the verb's other arguments.
TABLES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("send", "messages"): ("body", {"topic": "t"}),
    ("send_half", "messages"): ("body", {"topic": "half", "producer_group": "p"}),
    ("recall", "handles"): ("recall_handle", {"topic": "t"}),
    ("ack", "receipts"): ("receipt_handle", {}),
    ("receive", "ack"): ("receipt_handle", {"group": "g", "topic": "t"}),
    ("release", "receipts"): ("receipt_handle", {}),
    ("change_invisible_duration", "receipts"): ("receipt_handle", {"duration_ms": 1}),
    ("forward_to_dead_letter_queue", "receipts"): ("receipt_handle", {}),
    ("settle", "outcomes"): ("receipt_handle", {"group": "g"}),
    ("settle", "sink_files"): ("path", {"group": "g"}),
    ("settle", "state"): ("message_group", {"group": "g", "topic": "t"}),
    ("settle", "publish/t"): ("body", {"group": "g"}),
    ("unpark", "message_groups"): ("message_group", {"group": "g"}),
    ("redrive", "dead_letters"): ("queue_id", {"group": "g", "redrive_id": "r"}),
    ("seen_before", "keys"): ("idempotency_key", {"group": "g"}),
    ("end_transactions", "resolutions"): ("transaction_id", {}),
    ("keep_checks", "checks"): ("transaction_id", {"holder": "h"}),
    ("keyed_state", "message_groups"): ("message_group", {"group": "g", "topic": "t"}),
    ("keyed_state_history", "places"): ("message_group", {"group": "g", "topic": "t"}),
    ("replace_sink_files", "add"): ("path", {"group": "g", "replacement_id": "r", "remove": []}),
}
#: Columns that a table needs beside the damaged one to get so far.
BESIDE: dict[str, dict[str, Any]] = {
    "outcomes": {"outcome": ["ack"] * 3},
    "dead_letters": {"queue_offset": [0] * 3},
    "resolutions": {"resolution": ["commit"] * 3},
    "places": dict.fromkeys(
        ("queue_id", "queue_offset", "stored_at_ms", "last_queue_id", "last_queue_offset"), [0] * 3
    ),
}
