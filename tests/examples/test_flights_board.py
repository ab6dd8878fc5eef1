"""The departure board, over the table endpoint of a broker."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from rmq_pipeline.broker import Broker
from rmq_pipeline.examples.flights.board import Board, consumer
from rmq_pipeline.examples.flights.dataset import departures
from rmq_pipeline.examples.flights.pipeline import DEPARTURES
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.conftest import Eventually

FLIGHTS = 300


def test_two_boards_show_each_departure_once_and_in_order(
    home: Path, eventually: Eventually
) -> None:
    sent = departures(1).slice(0, FLIGHTS)
    settings = Settings(reserve_bytes=1024 * 1024)
    shown: list[str] = []
    boards = [Board(shown.append), Board(shown.append)]

    with (
        Broker.open(home, upkeep="none", settings=settings) as broker,
        FlightServer(broker) as server,
        Client(server.address) as client,
        Client(server.address) as other,
        consumer(client, boards[0]) as one,
        consumer(other, boards[1]) as two,
    ):
        eventually(lambda: len(one.owned()) == len(two.owned()) == 4)
        client.send(DEPARTURES.name, sent)
        eventually(lambda: len(shown) >= FLIGHTS, within_s=60)

    expected = defaultdict(list)
    for row in sent.select(["message_group", "body"]).to_pylist():
        flight = json.loads(row["body"])
        expected[row["message_group"]].append(f"{flight['carrier']}{flight['flight']}")
    assert {**boards[0].flights, **boards[1].flights} == expected
    assert all(board.flights for board in boards)
