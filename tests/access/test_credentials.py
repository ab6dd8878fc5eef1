"""What callers show: right, wrong, and garbled."""

import base64
import hashlib
import hmac
import random
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
def test_nobody_is_anonymous_while_there_are_users(access: Access, anonymous: str | None) -> None:
    with pytest.raises(UnauthorizedError, match="not signed"):
        access.authenticate_mq(anonymous, DATE_TIME)

    access.delete_user("ann")
    assert access.authenticate_mq(anonymous, DATE_TIME) is None
    assert access.authenticate_mq("garbled", None) is None


def test_without_the_time_that_was_signed_it_is_refused(access: Access) -> None:
    with pytest.raises(UnauthorizedError):
        access.authenticate_mq(header(), None)


@pytest.mark.parametrize(
    ("date_time", "fresh"),
    [
        ("20231114T221320Z", True),
        ("20231115T121320Z", True),
        ("20231114T081320Z", True),
        ("20231116T101321Z", False),
        ("20231113T101319Z", False),
        ("20201114T221320Z", False),
        # What is no such time was signed by a client of another kind: it can be as old as it is.
        ("2023-11-14T22:13:20Z", True),
        ("99999999T999999Z", True),
        ("", True),
    ],
)
def test_a_signature_of_another_day_is_refused(access: Access, date_time: str, fresh: bool) -> None:
    signed = header(date_time=date_time)
    if fresh:
        assert access.authenticate_mq(signed, date_time)
    else:
        with pytest.raises(UnauthorizedError, match="clock"):
            access.authenticate_mq(signed, date_time)


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
    with pytest.raises(UnauthorizedError, match="ended"):
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
        with pytest.raises(UnauthorizedError, match="send Basic"):
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
