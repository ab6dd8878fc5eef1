"""``access.json``: for its owner's eyes, whole at any moment, and there when it was answered."""

import json
import logging
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rmq_pipeline import errors
from rmq_pipeline.access import Access
from rmq_pipeline.access.policy import Policy
from rmq_pipeline.broker import Broker
from rmq_pipeline.settings import Settings

SECRET = "correct-horse-battery"
SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)

#: Gives a user one password after the other, and says which once it is answered.
CHANGING = """
import sys
from pathlib import Path
from rmq_pipeline.access import Access
access = Access.open(Path(sys.argv[1]))
access.create_user("ann", secret="password-0", type="normal")
print(0, flush=True)
number = 0
while True:
    number += 1
    access.alter_user("ann", secret=f"password-{number}")
    print(number, flush=True)
"""


@pytest.fixture
def access(tmp_path: Path) -> Access:
    access = Access.open(tmp_path)
    access.create_user("ann", secret=SECRET, type="normal")
    return access


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def allow(user: str, resource: str) -> Policy:
    return Policy.make(user, resource=resource, effect="allow", actions=["pub"])


def test_a_home_without_the_file_is_open_to_all(tmp_path: Path) -> None:
    assert not Access.open(tmp_path).enabled
    assert list(tmp_path.iterdir()) == []


def test_what_was_changed_is_there_when_the_home_is_opened_again(
    access: Access, tmp_path: Path
) -> None:
    access.put_policy(
        Policy.make(
            "ann",
            resource="topic:shop%*",
            effect="deny",
            actions=["sub", "pub"],
            sources=["10.1.0.0/16"],
            tier="default",
        )
    )
    access.create_user("bob", secret=SECRET, type="super")
    access.alter_user("bob", disabled=True)

    again = Access.open(tmp_path)

    assert again.enabled
    assert again.rules == access.rules
    assert again.rules.version == 4


@pytest.mark.usefixtures("access")
def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    assert mode(tmp_path / "access.json") == 0o600

    (tmp_path / "access.json").chmod(0o644)
    Access.open(tmp_path)

    assert mode(tmp_path / "access.json") == 0o600


@pytest.mark.usefixtures("access")
def test_what_a_killed_process_left_behind_goes(tmp_path: Path) -> None:
    leftover = tmp_path / ".access.json.x1"
    leftover.write_text(SECRET)

    Access.open(tmp_path)

    assert not leftover.exists()


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{}",
        "[]",
        "null",
        f'{{"version": 1, "users": [{{"name": "{SECRET}"',
        f'{{"version": 1, "users": [{{"name": "a b", "secret": "{SECRET}"}}], "policies": []}}',
        f'{{"version": 1, "users": [{{"secret": "{SECRET}", "x": 1}}], "policies": []}}',
        '{"version": 1, "users": [], "policies": [{"user": "ann"}]}',
        '{"version": 1, "users": "ann", "policies": []}',
    ],
)
def test_a_damaged_file_never_means_that_all_is_open(home: Path, damaged: str) -> None:
    home.mkdir()
    (home / "access.json").write_text(damaged)

    with pytest.raises(errors.AccessFileError) as refused:
        Broker.open(home, upkeep="none", settings=SMALL)

    assert SECRET not in str(refused.value)
    (home / "access.json").unlink()
    Broker.open(home, upkeep="none", settings=SMALL).close()


def test_a_change_that_cannot_be_written_is_none(access: Access, tmp_path: Path) -> None:
    before = access.rules
    shutil.rmtree(tmp_path)

    for change in (
        lambda: access.create_user("bob", secret=SECRET, type="normal"),
        lambda: access.alter_user("ann", disabled=True),
        lambda: access.delete_user("ann"),
        lambda: access.put_policy(allow("ann", "topic:a")),
    ):
        with pytest.raises(errors.StorageError):
            change()

    assert access.rules is before
    tmp_path.mkdir()


def test_killed_at_any_moment_the_file_is_whole_and_not_behind(tmp_path: Path) -> None:
    for kill in range(6):
        home = tmp_path / str(kill)
        home.mkdir()
        command = [sys.executable, "-c", CHANGING, str(home)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as changing:
            assert changing.stdout is not None
            # Another number of changes each time, so that it ends in another step.
            for _ in range(1 + 7 * kill):
                changing.stdout.readline()
            changing.kill()
            rest = changing.stdout.read().split("\n")
        # The last line may be cut off.
        answered = max([7 * kill, *(int(line) for line in rest[:-1])])

        found = Access.open(home).rules

        number = int(found.users["ann"].secret.removeprefix("password-"))
        assert number - answered in {0, 1}
        assert found.version == number + 1
        assert [path.name for path in home.iterdir()] == ["access.json"]


def test_changes_at_the_same_time_are_all_there(access: Access, tmp_path: Path) -> None:
    def change(worker: int) -> None:
        for number in range(5):
            name = f"user-{worker}-{number}"
            access.create_user(name, secret=SECRET, type="normal")
            access.put_policy(allow(name, "topic:*"))
            access.put_policy(allow("ann", f"topic:{name}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(8)))

    again = Access.open(tmp_path).rules
    assert again == access.rules
    assert len(again.users) == 41
    assert len(again.policies["ann"]) == 40
    assert again.version == 1 + 8 * 5 * 3


def test_a_name_is_created_once_by_concurrent_callers(access: Access) -> None:
    def create(number: int) -> str | None:
        try:
            return access.create_user("bob", secret=f"password-{number}", type="normal").secret
        except errors.AlreadyExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        made = [secret for secret in pool.map(create, range(32)) if secret]

    assert made == [access.rules.users["bob"].secret]


def test_put_replaces_the_policy_of_the_same_resource_effect_and_tier(access: Access) -> None:
    access.put_policy(allow("ann", "topic:a"))
    replaced = Policy.make("ann", resource="topic:a", effect="allow", actions=["sub"])
    denying = Policy.make("ann", resource="topic:a", effect="deny", actions=["get"])
    for policy in (replaced, denying):
        access.put_policy(policy)

    assert access.rules.policies["ann"] == (replaced, denying)


def test_an_unknown_user_cannot_be_changed(access: Access) -> None:
    for change in (
        lambda: access.alter_user("bob", disabled=True),
        lambda: access.delete_user("bob"),
        lambda: access.put_policy(allow("bob", "topic:a")),
        lambda: access.delete_policies("bob", where=lambda _: True),
    ):
        with pytest.raises(errors.NotFoundError):
            change()


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a,b", "a=b", "a:b", "é", "x" * 65, None])
def test_what_is_no_name_is_refused(access: Access, name: str) -> None:
    with pytest.raises(errors.RequestError):
        access.create_user(name, secret=SECRET, type="normal")


@pytest.mark.parametrize("password", ["", "short", "with space 1", "x" * 129, "pässword1", None])
def test_what_is_no_password_is_refused_and_not_repeated(access: Access, password: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        access.create_user("bob", secret=password, type="normal")

    assert not password or password not in str(refused.value)


def test_the_last_user_stays_while_an_endpoint_listens_beyond_loopback(access: Access) -> None:
    access.create_user("bob", secret=SECRET, type="normal")
    access.is_required = True

    access.delete_user("bob")
    with pytest.raises(errors.InUseError):
        access.delete_user("ann")

    assert access.enabled


def test_secrets_are_in_the_file_and_nowhere_else(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        made = broker.create_user("ann", password=SECRET)
        generated = broker.create_user("bob")["password"]
        renewed = broker.alter_user("bob", renew_password=True)["password"]
        told = [
            made,
            broker.alter_user("ann", disabled=False),
            broker.list_users().to_pylist(),
            broker.list_policies().to_pylist(),
            broker.access.rules.users["ann"],
            broker.sql("SELECT * FROM topics").to_pylist(),
            broker.status(),
        ]

    assert len(generated) == 32
    assert generated != renewed
    assert json.loads((home / "access.json").read_text())["users"][1]["secret"] == renewed
    secrets = [SECRET, generated, renewed]
    files = [path for path in home.rglob("*") if path.is_file() and path.name != "access.json"]
    for secret in secrets:
        assert secret not in repr(told)
        assert secret not in caplog.text
        assert not any(secret.encode() in path.read_bytes() for path in files)
