"""How settings are given, checked and kept."""

from pathlib import Path

import pytest

from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight import flags
from rmq_pipeline.flight.flags import Flags
from rmq_pipeline.settings import Settings


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flags.VARIABLE)


def test_nothing_said_leaves_the_homes_own() -> None:
    assert flags.given() is None


def test_pairs_are_numbers_and_lists() -> None:
    said = flags.given(
        pairs=["seal_after_ms = 60_000", "delay_levels_ms=1000,5000", "reserve_bytes=default"]
    )

    assert said == {
        "seal_after_ms": 60_000,
        "delay_levels_ms": [1000, 5000],
        "reserve_bytes": flags.DEFAULT,
    }
    assert flags.given(pairs=["delay_levels_ms=[7]"]) == {"delay_levels_ms": [7]}
    assert flags.given(pairs=["history_retention_ms=none"]) == {"history_retention_ms": None}


def test_a_file_stands_for_all_settings_and_pairs_go_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rmq.toml"
    file.write_text("seal_after_ms = 5\nreserve_bytes = 9\n")

    said = flags.given(file, ["reserve_bytes=8"])
    monkeypatch.setenv(flags.VARIABLE, str(file))
    by_environment = flags.given()

    assert said is not None
    assert by_environment is not None
    assert said.keys() == Settings.model_fields.keys()
    kept = {name: value for name, value in said.items() if value != flags.DEFAULT}
    assert kept == {"seal_after_ms": 5, "reserve_bytes": 8}
    assert by_environment["reserve_bytes"] == 9


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        ("seal_after_ms=soon", "Setting seal_after_ms is 'soon': input should be a valid integer"),
        ("reserve_bytes=-1", "Setting reserve_bytes is -1: input should be greater than or equal"),
        ("delay_levels_ms=1000,0", r"Setting delay_levels_ms\.1 is 0: "),
        ("seal_after=1", "There is no setting seal_after. The settings are log_file_bytes, "),
        ("seal_after_ms", "given as name=value, not 'seal_after_ms'"),
    ],
)
def test_a_wrong_setting_is_named(pair: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        flags.given(pairs=[pair])


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rmq.toml"
    file.write_text("reserve_bytes: 1")

    with pytest.raises(RequestError, match=r"rmq\.toml is not valid TOML: "):
        flags.given(file)


def test_a_home_keeps_what_was_given_until_it_is_released(tmp_path: Path) -> None:
    first = Flags.remembered(tmp_path, upkeep="none", settings={"seal_after_ms": 5})
    first.keep(tmp_path)
    Flags.remembered(tmp_path, settings={"reserve_bytes": 8}).keep(tmp_path)

    both = Flags.remembered(tmp_path)
    one = Flags.remembered(tmp_path, settings={"seal_after_ms": flags.DEFAULT})

    assert both == Flags(upkeep="none", settings={"seal_after_ms": 5, "reserve_bytes": 8})
    assert one.settings == {"reserve_bytes": 8}
    assert flags.checked(one.settings) == Settings(reserve_bytes=8)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://rmq:secret@127.0.0.1/log",
        "postgresql://rmq:sec#secret@127.0.0.1/log",
        "postgresql://rmq:sec?secret@127.0.0.1/log",
        "postgresql://rmq:sec/secret@127.0.0.1/log",
        "postgresql://127.0.0.1/log?password=secret",
        "postgresql://127.0.0.1/log?pass%77ord=secret",
        "postgresql://127.0.0.1/log#?password=secret",
        "postgresql://127.0.0.1/log?user=a&sslpassword=secret",
    ],
)
def test_a_password_of_the_logs_database_is_refused_and_not_shown(address: str) -> None:
    for ask in (
        lambda: flags.checked({"log_store": address}),
        lambda: flags.given(pairs=[f"log_store={address}"]),
    ):
        with pytest.raises(RequestError, match="PGPASSWORD") as refused:
            ask()

        assert "secret" not in str(refused.value)
        assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "address",
    ["", "host=127.0.0.1", "gs://bucket/log", "http://[x"],
)
def test_an_address_of_something_else_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="postgresql://"):
        flags.checked({"log_store": address})


def test_an_address_of_several_hosts_is_taken_whole() -> None:
    address = "postgresql://db1:5432,db2/rmq?target_session_attrs=read-write"

    assert flags.given(pairs=[f"log_store={address}"]) == {"log_store": address}
