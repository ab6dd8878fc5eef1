"""What callers show: right, wrong, and garbled."""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.access import Access, Principal
from rmq_pipeline.access import credentials as shown
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import UnauthorizedError

#: Six hours after the clock of the tests: a client whose local time is not UTC.
DATE_TIME = "20231115T041320Z"
SECRET = "correct-horse"
#: Prints the metadata that the official Python client sends with a call.
OFFICIAL = """
import json, sys
from rocketmq import ClientConfiguration, Credentials
from rocketmq.v5.util import Signature
config = ClientConfiguration("127.0.0.1:1", Credentials("ann", sys.argv[1]))
print(json.dumps(dict(Signature.metadata(config, "client"))))
"""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def access(tmp_path: Path, clock: ManualClock) -> Access:
    access = Access.open(tmp_path, clock=clock)
    access.create_user("ann", secret=SECRET, type="normal")
    return access


def header(
    *, user: str = "ann", secret: str = SECRET, date_time: str = DATE_TIME, upper: bool = False
) -> str:
    """As the official clients make it, by another hand than ours."""
    signature = hmac.new(secret.encode(), date_time.encode(), hashlib.sha1).hexdigest()
    return (
        f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, "
        f"Signature={signature.upper() if upper else signature}"
    )


# --------------------------------------------------------------------------- RocketMQ's signature


@pytest.mark.parametrize("upper", [False, True])
def test_a_right_signature_in_either_case(access: Access, upper: bool) -> None:
    assert access.authenticate_mq(header(upper=upper), DATE_TIME) == Principal("ann")


def test_what_follows_the_user_in_the_credential_does_not_count(access: Access) -> None:
    assert access.authenticate_mq(header(user="ann/region/RocketMQ"), DATE_TIME)


def test_wrong_signatures_are_refused(access: Access) -> None:
    for wrong in (
        header(secret="correct-horsf"),
        header(user="bob"),
        header(date_time="20231115T041321Z"),
        header(user="ann ").replace("Credential=ann ", "Credential=Ann"),
    ):
        with pytest.raises(UnauthorizedError):
            access.authenticate_mq(wrong, DATE_TIME)


def test_every_other_signature_is_wrong(access: Access) -> None:
    right = header()
    signature = right.rpartition("=")[2]
    for place in range(len(signature)):
        other = "0" if signature[place] != "0" else "1"
        forged = right.removesuffix(signature) + signature[:place] + other + signature[place + 1 :]
        with pytest.raises(UnauthorizedError):
            access.authenticate_mq(forged, DATE_TIME)


@pytest.mark.parametrize(
    "garbled",
    [
        "MQv2-HMAC-SHA1",
        "MQv2-HMAC-SHA1 ",
        "MQv2-HMAC-SHA1 Credential=ann",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=zz",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=00",
        "MQv2-HMAC-SHA1 Credential=ann, Signature=" + "00" * 21,
        "MQv2-HMAC-SHA1 Credential==ann, Signature=" + "00" * 20,
        "MQv2-HMAC-SHA256 Credential=ann, Signature=" + "00" * 20,
        "Basic YW5uOmNvcnJlY3QtaG9yc2U=",
        "Credential=ann",
        "," * 4000,
        "x" * 5000,
        "MQv2-HMAC-SHA1 Credential=ann, Signature=" + "é" * 20,
    ],
)
def test_a_garbled_header_is_refused(access: Access, garbled: str) -> None:
    with pytest.raises(UnauthorizedError):
        access.authenticate_mq(garbled, DATE_TIME)


@pytest.mark.parametrize(
    "anonymous",
    [None, "", "MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=ab"],
)
def test_no_caller_is_anonymous_while_there_are_users(
    access: Access, anonymous: str | None
) -> None:
    with pytest.raises(UnauthorizedError, match="not signed"):
        access.authenticate_mq(anonymous, DATE_TIME)

    access.delete_user("ann")
    assert access.authenticate_mq(anonymous, DATE_TIME) is None
    assert access.authenticate_mq("garbled", None) is None


def test_without_the_time_that_was_signed_it_is_refused(access: Access) -> None:
    with pytest.raises(UnauthorizedError):
        access.authenticate_mq(header(), None)


#: The clock of the tests shows 22:13:20 UTC on 14 November 2023.
@pytest.mark.parametrize(
    "date_time",
    [
        "20231114T221320Z",
        "20231114T220820Z",
        "20231114T221820Z",
        # Clocks of Shanghai, Kathmandu, Newfoundland, Kiritimati and Baker Island.
        "20231115T061320Z",
        "20231115T035820Z",
        "20231114T184320Z",
        "20231115T121320Z",
        "20231114T101320Z",
        # Rust says which clock it reads, to the nanosecond.
        "2023-11-14T22:13:20Z",
        "2023-11-15T06:13:20.123456789+08:00",
        "2023-11-14T22:18:19.999999999Z",
    ],
)
def test_a_clock_of_any_time_zone_may_sign(access: Access, date_time: str) -> None:
    assert access.authenticate_mq(header(date_time=date_time), date_time) == Principal("ann")


@pytest.mark.parametrize(
    "date_time",
    [
        "20231114T220819Z",
        "20231114T221821Z",
        "20231114T213320Z",
        # No clock is 2 h 15 min or 7 h 30 min ahead, 15 h ahead, or 13 h behind.
        "20231115T002820Z",
        "20231115T054320Z",
        "20231115T131320Z",
        "20231114T091320Z",
        "20231116T091320Z",
        "20201114T221320Z",
        # Whoever says the offset has it taken at its word.
        "2023-11-15T06:13:20Z",
        "2023-11-14T22:13:20+08:00",
        "2023-11-14T22:18:21Z",
    ],
)
def test_a_signature_of_another_time_is_refused(access: Access, date_time: str) -> None:
    with pytest.raises(UnauthorizedError, match=r"shows 20231114T221320Z.*Set the client's clock"):
        access.authenticate_mq(header(date_time=date_time), date_time)


@pytest.mark.parametrize(
    "date_time",
    [
        "",
        "today",
        "2023-11-14T22:13:20",
        "2023-11-14 22:13:20Z",
        "99999999T999999Z",
        "9999-99-99T22:13:20Z",
        "20231114T221320Z ",
        "2023-11-14T22:13:20+99:00",
        "\u0662\u0660\u0662\u0663\u0661\u0661\u0661\u0664T221320Z",
        "x" * 5000,
    ],
)
def test_a_signature_of_no_time_is_refused(access: Access, date_time: str) -> None:
    with pytest.raises(UnauthorizedError, match="is not a time") as caught:
        access.authenticate_mq(header(date_time=date_time), date_time)
    assert len(str(caught.value)) < 400


def test_a_captured_header_is_good_for_minutes_of_some_hours(
    access: Access, clock: ManualClock
) -> None:
    """The price of local times: 37 of the 40 offsets are another zone's at another time."""
    date_time = "20231114T221320Z"
    captured = header(date_time=date_time)
    accepted = 0
    minutes = 36 * 60
    for _ in range(minutes):
        clock.advance(60_000)
        with contextlib.suppress(UnauthorizedError):
            access.authenticate_mq(captured, date_time)
            accepted += 1

    assert 0 < accepted <= 180


def test_an_operator_may_say_which_local_times_are_signed(
    tmp_path: Path, clock: ManualClock
) -> None:
    access = Access.open(tmp_path, clock=clock, utc_offsets_min=(0, 480))
    access.create_user("ann", secret=SECRET, type="normal")

    for date_time in ("20231114T221320Z", "20231115T061320Z"):
        assert access.authenticate_mq(header(date_time=date_time), date_time)
    for date_time in ("20231114T231320Z", "20231115T051320Z"):
        with pytest.raises(UnauthorizedError, match="Set the client's clock"):
            access.authenticate_mq(header(date_time=date_time), date_time)


@pytest.mark.parametrize("zone", ["CST-8", "UTC0", "NPT-5:45", "HST10"])
def test_the_header_of_the_official_client_is_accepted_in_its_zone(
    tmp_path: Path, zone: str
) -> None:
    access = Access.open(tmp_path)
    access.create_user("ann", secret=SECRET, type="normal")

    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OFFICIAL, SECRET],
        env={**os.environ, "TZ": zone, "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    metadata = json.loads(shown.stdout.splitlines()[-1])

    who = access.authenticate_mq(metadata["authorization"], metadata["x-mq-date-time"])
    assert who == Principal("ann")


PARTS = st.sampled_from(
    ["MQv2-HMAC-SHA1", " ", ",", "=", "Credential", "Signature", "ann", "/", "00" * 20, SECRET, "é"]
)


@given(text=st.one_of(st.text(), st.lists(PARTS).map("".join)), date_time=st.text(max_size=20))
def test_no_header_does_more_than_be_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, date_time: str
) -> None:
    access = Access.open(tmp_path_factory.mktemp("home"))
    access.create_user("ann", secret=SECRET, type="normal")

    attempts: list[Callable[[], object]] = [
        lambda: access.authenticate_mq(text, date_time),
        lambda: access.authenticate(text),
        lambda: access.authenticate(f"Basic {text}"),
        lambda: access.authenticate(f"Bearer {text}"),
    ]
    for authenticate in attempts:
        with pytest.raises(UnauthorizedError) as refused:
            authenticate()
        assert SECRET not in str(refused.value)


def test_changed_bytes_of_a_right_header_are_refused(access: Access) -> None:
    # From one number, so that a failure can be seen again.
    rng = random.Random(20231115)
    right = header()
    for _ in range(2_000):
        place = rng.randrange(len(right))
        changed = right[:place] + chr(rng.randrange(1, 0x250)) + right[place + 1 :]
        try:
            found = access.authenticate_mq(changed, DATE_TIME)
        except UnauthorizedError:
            continue
        # Some of it is not looked at, and hex has two cases.
        assert found == Principal("ann")
        assert changed.partition("Signature=")[2].lower().strip() in right


# ------------------------------------------------------------------------------- Basic and Bearer


def test_a_password(access: Access) -> None:
    assert access.authenticate(shown.basic("ann", SECRET)) == Principal("ann")
    assert access.authenticate(shown.basic("ann", SECRET).replace("Basic", "bAsIc"))


@pytest.mark.parametrize("wrong", ["", "correct-hors", "correct-horse ", "Correct-horse", "é"])
def test_a_wrong_password_is_refused(access: Access, wrong: str) -> None:
    with pytest.raises(UnauthorizedError):
        access.authenticate(shown.basic("ann", wrong))


@pytest.mark.parametrize(
    "garbled",
    [
        None,
        "",
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"ann").decode(),
        "Basic " + base64.b64encode(b"\xff\xfe:x").decode(),
        "Bearer",
        "Bearer ann",
        "Bearer ann:x:00",
        "Bearer ann:-1:00",
        "Bearer ann:99999999999999:zz",
        "Digest ann",
    ],
)
def test_garbled_credentials_are_refused(access: Access, garbled: str | None) -> None:
    with pytest.raises(UnauthorizedError):
        access.authenticate(garbled)


def test_a_token_lasts_for_half_a_day(access: Access, clock: ManualClock) -> None:
    token = "Bearer " + access.token(Principal("ann"))

    assert access.authenticate(token) == Principal("ann")
    clock.advance(12 * 3600 * 1000 - 1)
    assert access.authenticate(token)
    clock.advance(1)
    with pytest.raises(UnauthorizedError, match="expired"):
        access.authenticate(token)


def test_a_token_cannot_be_made_to_last_or_given_away(access: Access) -> None:
    access.create_user("bob", secret="battery-staple", type="super")
    user, until, seal = access.token(Principal("ann")).split(":")

    for forged in (f"{user}:{int(until) + 1}:{seal}", f"bob:{until}:{seal}"):
        with pytest.raises(UnauthorizedError):
            access.authenticate(f"Bearer {forged}")


def test_a_token_does_not_buy_a_token(access: Access) -> None:
    token = "Bearer " + access.token(Principal("ann"))

    assert access.sign_in(shown.basic("ann", SECRET)) == Principal("ann")
    for authorization in (token, None, ""):
        with pytest.raises(UnauthorizedError, match="no user and password"):
            access.sign_in(authorization)


def test_a_token_ends_with_the_password_it_was_bought_with(access: Access) -> None:
    token = "Bearer " + access.token(Principal("ann"))

    access.alter_user("ann", secret="another-horse")

    with pytest.raises(UnauthorizedError):
        access.authenticate(token)


def test_a_disabled_user_is_refused_whatever_it_shows(access: Access) -> None:
    token = "Bearer " + access.token(Principal("ann"))

    access.alter_user("ann", disabled=True)

    for authorization in (token, shown.basic("ann", SECRET)):
        with pytest.raises(UnauthorizedError):
            access.authenticate(authorization)
    with pytest.raises(UnauthorizedError):
        access.authenticate_mq(header(), DATE_TIME)
